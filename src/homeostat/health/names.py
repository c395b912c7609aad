"""Metrics that only other frameworks log, under the names that rules read them by.

What our own runs log is in observe/names.py; a name is in one of the two.
"""

from __future__ import annotations

FOREIGN: dict[str, str] = {
    "reward/max": "Largest reward of a step.",
    "reward/min": "Smallest reward of a step.",
    "advantages/max": "Largest advantage of a step.",
    "advantages/min": "Smallest advantage of a step.",
}
