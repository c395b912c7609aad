"""Error texts of the family performance."""

from __future__ import annotations

from homeostat.health.texts.trouble import Trouble

TROUBLES: tuple[Trouble, ...] = ()
