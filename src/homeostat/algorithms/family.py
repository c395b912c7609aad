"""The policy-gradient algorithms by their type: what a sample is worth, and the surrogate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from homeostat.algorithms import cispo, dapo, dr_grpo, grpo, gspo, reinforce_pp, rloo
from homeostat.algorithms.terms import Surrogate
from homeostat.types import FloatArray64


@dataclass(frozen=True, slots=True)
class Algorithm:
    """`advantages(config, batch)` on the controller; `surrogate(tokens, log_ratio_M, bounds)` on
    the device."""

    advantages: Callable[..., list[FloatArray64]]
    surrogate: Callable[..., Surrogate]


ALGORITHMS = {
    "grpo": Algorithm(grpo.advantages, grpo.surrogate),
    "dr_grpo": Algorithm(dr_grpo.advantages, dr_grpo.surrogate),
    "dapo": Algorithm(dapo.advantages, dapo.surrogate),
    "gspo": Algorithm(gspo.advantages, gspo.surrogate),
    "cispo": Algorithm(cispo.advantages, cispo.surrogate),
    "rloo": Algorithm(rloo.advantages, rloo.surrogate),
    "reinforce_pp": Algorithm(reinforce_pp.advantages, reinforce_pp.surrogate),
}
