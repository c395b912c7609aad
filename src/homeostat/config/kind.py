"""The kinds of training. Apart from types.py, because config imports no numpy."""

from __future__ import annotations

from enum import StrEnum


class RunKind(StrEnum):
    """The kind of training that an algorithm asks for; each has its loop under `run`."""

    SFT = "sft"
    RL = "rl"
    PREFERENCE = "preference"
    REWARD_MODEL = "reward_model"
