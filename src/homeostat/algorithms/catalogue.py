"""The registry of policy-gradient algorithms, and the advantages of a configured run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from homeostat.algorithms import (
    baselines,
    cispo,
    cpgd,
    dapo,
    dr_grpo,
    ebft,
    gmpo,
    grpo,
    gspo,
    ppo,
    reinforce_pp,
    rloo,
    sapo,
)
from homeostat.algorithms.baselines import RewardBatch
from homeostat.algorithms.terms import Surrogate
from homeostat.arrays import FloatArray64
from homeostat.config.algorithm import AnyAlgorithm, AnyPolicyGradient, PolicyGradientConfig
from homeostat.config.plugins import plugin_named


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The two functions of an algorithm.

    `advantages(config, batch)` runs on the controller, `surrogate(tokens, log_ratio_M, params)` on
    the device.
    """

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
    "ppo": Algorithm(ppo.advantages, ppo.surrogate),
    "cpgd": Algorithm(cpgd.advantages, cpgd.surrogate),
    "sapo": Algorithm(sapo.advantages, sapo.surrogate),
    "gmpo": Algorithm(gmpo.advantages, gmpo.surrogate),
    "ebft": Algorithm(ebft.advantages, ebft.surrogate),
}


def algorithm_of(type: str) -> Algorithm:
    """Return the functions of an algorithm: a built-in one, or a plug-in."""
    if type in ALGORITHMS:
        return ALGORITHMS[type]
    found = plugin_named("algorithm", type)
    return Algorithm(found.advantages or grpo.advantages, found.surrogate or grpo.surrogate)


def policy_gradient(algorithm: AnyAlgorithm) -> AnyPolicyGradient:
    """The algorithm of a run that samples."""
    assert isinstance(algorithm, PolicyGradientConfig), f"{algorithm.type} samples nothing"
    return algorithm


def advantages(config: AnyPolicyGradient, batch: RewardBatch) -> list[FloatArray64]:
    """Return the advantage of every completion token, per sample.

    The algorithm's advantages are whitened and clipped as configured. A sample without a reward has
    advantage 0; the caller does not train it either.
    """
    values_ST = algorithm_of(config.type).advantages(config, batch)
    if config.whiten:
        values_ST = baselines.whitened(values_ST, batch.trained_S & batch.known_S)
    if config.advantage_clip is not None:
        bound = config.advantage_clip
        values_ST = [np.clip(values_T, -bound, bound) for values_T in values_ST]
    return [
        values_T if known else np.zeros_like(values_T)
        for values_T, known in zip(values_ST, batch.known_S, strict=True)
    ]
