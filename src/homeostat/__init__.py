"""homeostat: LLM post-training that keeps itself healthy.

Importing this package has no side effects and needs no torch; the heavy parts are imported by
the verbs that use them.
"""

__version__ = "0.1.0"
