"""The callback by which parts of a trainer report events, without knowing who listens."""

from __future__ import annotations

from typing import Any, Protocol


class EmitEvent(Protocol):
    def __call__(self, kind: str, step: int, **fields: Any) -> None: ...
