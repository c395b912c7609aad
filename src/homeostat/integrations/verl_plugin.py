"""Add the doctor's logger backend to verl on import: verl imports it, and calls nothing in it.

It is meant for the variable VERL_USE_EXTERNAL_MODULES and for nothing else; see verl.py.
"""

from __future__ import annotations

from homeostat.integrations.verl import install

install()
