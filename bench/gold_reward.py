"""The gold reward of bench/reward_model.py: what the toy task really asks for.

A completion is a string of letters. Every `e` is worth something up to the fourth one, and costs
twice as much from there on: 1 at the best, 0 for none and for eight, -1 for twelve.
"""

from __future__ import annotations

from typing import Any

BEST = 4


def gold_of(text: str) -> float:
    """Return the gold score of a completion."""
    found = text.count("e")
    return (found - 2 * max(0, found - BEST)) / BEST


def gold(completions: list[str], **_: Any) -> list[float]:
    """Score completions, as a reward function of homeostat."""
    return [gold_of(text) for text in completions]
