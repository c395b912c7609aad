"""What other frameworks call things: metrics, settings, and the marks they are known by.

A framework's table is one file. Its `settings` are read both ways: a value that a log states under
their name is looked up under ours, and a fix that we know under our key is told under theirs.
"""

from __future__ import annotations

from homeostat.health.frameworks.table import Framework

HOMEOSTAT = Framework(name="homeostat", title="homeostat")
UNKNOWN = Framework(name="unknown", title="an unknown framework")
ALL: dict[str, Framework] = {table.name: table for table in (HOMEOSTAT, UNKNOWN)}
