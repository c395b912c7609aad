"""Refuse names of options that a vendor's engine does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from homeostat.errors import EngineError


def refuse_unknown_options(
    options: Mapping[str, Any], *, known: Iterable[str], vendor: str, noun: str
) -> None:
    """Raise EngineError for an option that is not known, with the nearest name that is."""
    names = sorted(known)
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise EngineError(f"engine.options.{name}: {vendor} has no such {noun}.{hint}")
