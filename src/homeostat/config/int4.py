"""Settings of training for INT4 weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from homeostat.config.base import Settings, key

# Variables of other trainers: whether weights are rounded to INT4, and in groups of which size.
FLAG_VARIABLE = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG"
GROUP_VARIABLE = "OPEN_TRAINING_INT4_GROUP_SIZE"

GroupSize = Literal[32, 64, 128]
_GROUP_SIZES: dict[str, GroupSize] = {"32": 32, "64": 64, "128": 128}


class Int4Config(Settings):
    """Quantisation-aware training: compute with weights rounded to INT4."""

    group_size: GroupSize = key(
        128,
        help="Number of neighbouring weights of a row that share a scale. Smaller groups are more "
        "accurate and take more memory. The number of inputs of every layer must be a multiple of "
        "it.",
    )
    skip_layers: tuple[str, ...] = key(
        ("lm_head", "embed"),
        share=True,
        help="Layers that are not rounded: words of their names, globs over whole names, or "
        "regular expressions after `re:`. The output matrix and the embedding are never rounded.",
    )
    start_step: int = key(
        1,
        ge=1,
        help="First step with INT4 rounding, counted from 1.",
    )


def int4_of_environment(environment: Mapping[str, str] = os.environ) -> Int4Config | None:
    """Return the settings that the environment asks for; None if it asks for none.

    Raises ValueError for a value that means nothing.
    """
    flag = environment.get(FLAG_VARIABLE, "0")
    if flag not in ("", "0", "1"):
        raise ValueError(f"{FLAG_VARIABLE} is {flag!r:.40}, but must be 0 or 1")
    if flag != "1":
        return None
    size = environment.get(GROUP_VARIABLE, "128")
    if size not in _GROUP_SIZES:
        raise ValueError(f"{GROUP_VARIABLE} is {size!r:.40}, but must be 32, 64 or 128")
    return Int4Config(group_size=_GROUP_SIZES[size])


def environment_line(config: Int4Config | None, environment: Mapping[str, str] = os.environ) -> str:
    """Return a line about the environment's word for the start of a run; empty if it has none."""
    if FLAG_VARIABLE not in environment:
        return ""
    wanted = int4_of_environment(environment)
    word = "followed" if config == wanted else "overridden by the recipe's trainer.int4"
    return f"{FLAG_VARIABLE}={environment[FLAG_VARIABLE]} is {word}"
