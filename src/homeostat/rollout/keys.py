"""The key of a group. It identifies the group in the journal and its requests in the engine.

    train/<step>/<round>/<place>             the group
    train/<step>/<round>/<place>/<sample>    the request of one of its samples

The sampling noise is drawn from (seed, request id, position): another key is another sample.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TEXT = re.compile(r"train/(\d+)/(\d+)/(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class GroupKey:
    """The `place`-th group that was drawn in a round of a step. Keys sort by order of drawing."""

    step: int
    round: int
    place: int

    def __str__(self) -> str:
        return f"train/{self.step}/{self.round}/{self.place}"

    @classmethod
    def parse(cls, text: str) -> GroupKey:
        """Parse a key. Raises ValueError if the text is not a key."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no key of a group")
        return cls(*map(int, found.groups()))
