"""Settings of models with experts."""

from __future__ import annotations

from typing import Literal

from homeostat.config.base import Settings, key

GroupedKernel = Literal["auto", "grouped", "plain"]


class MoeConfig(Settings):
    """How experts are computed."""

    grouped_kernel: GroupedKernel = key(
        "auto",
        help="How the experts of a layer are multiplied. grouped: all in one kernel. plain: one "
        "after the other, the reference. auto: grouped on a GPU in bf16 or in invariant numerics, "
        "plain elsewhere.",
        resume="warn",
    )
