"""Filter advice: never recommend a fix that the run already has.

All rules and all frameworks use this filter. It compares settings by our keys, whatever the
framework calls them. It always keeps a fix whose value is unknown or is not a value ("a half to a
fifth").
"""

from __future__ import annotations

import re
from typing import Any

from homeostat.health.finding import Fix
from homeostat.health.view import RunView

_NUMBER = re.compile(
    r"(?P<number>[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)(?P<bound> or (?:more|less))?"
)
_TRUE = ("true", "on", "yes")
_FALSE = ("false", "off", "no", "none", "null")
# Settings whose recommended value is always a lower or an upper bound.
_AT_LEAST = ("rollout.samples_per_prompt", "engine.max_restarts", "engine.stall_s")
_AT_MOST = ("trainer.updates_per_step", "sync.interval", "trainer.max_grad_norm", "lora.dropout",
            "trainer.empty_cache_interval")  # fmt: skip


def is_followed(fix: Fix, view: RunView) -> bool:
    """Return whether the run already has the recommended setting."""
    if not fix.setting:
        return False
    wanted = fix.value.strip().lower()
    section = [value for key, value in view.settings.items() if key.startswith(f"{fix.setting}.")]
    has = view.settings.get(fix.setting)
    if has is None and fix.setting not in view.settings:
        if section and wanted in _TRUE:
            # A section counts as switched on if the run sets any key in it.
            return any(value is not None for value in section)
        has = view.settings.get(f"{fix.setting}.type")
        return has is not None and str(has).lower() == wanted
    return _is_same(fix.setting, has, wanted)


def _is_same(key: str, has: Any, wanted: str) -> bool:
    text = str(has).strip().lower()
    if wanted in _TRUE or wanted in _FALSE:
        return text in (_TRUE if wanted in _TRUE else _FALSE) or (wanted in _TRUE and text == "1")
    number = _NUMBER.fullmatch(wanted)
    if number is None or text == wanted:
        return text == wanted
    try:
        now, goal = float(text), float(number["number"])
    except ValueError:
        return False
    if number["bound"] == " or more" or key in _AT_LEAST:
        return now >= goal
    if number["bound"] == " or less" or key in _AT_MOST:
        # 0 means "no limit" in the run's settings.
        return 0 < now <= goal or now == goal
    return now == goal
