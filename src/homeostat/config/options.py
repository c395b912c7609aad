"""Refuse a vendor's options that homeostat sets itself, or on which its guarantees depend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def refuse_options(
    options: dict[str, Any], *, owned: Mapping[str, str], fixed: Mapping[str, str]
) -> dict[str, Any]:
    """Return the options unchanged. Raises ValueError for one that is not the user's to set.

    `owned` names the config key that controls an option, `fixed` why it cannot be changed.
    """
    for name in options:
        if name in owned:
            raise ValueError(f"{name!r} cannot be set here: set {owned[name]} instead")
        if name in fixed:
            raise ValueError(f"{name!r} cannot be changed: {fixed[name]}")
    return options
