"""What the rest of the house calls: the losses by name, and the advantages of a configured run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from homeostat.algorithms import baselines
from homeostat.algorithms.baselines import RewardBatch
from homeostat.algorithms.family import ALGORITHMS
from homeostat.algorithms.policy import policy_loss
from homeostat.algorithms.sft import sft_loss
from homeostat.algorithms.terms import LossTerms
from homeostat.config.algorithm import AnyPolicyGradient
from homeostat.types import FloatArray64

# By LossSpec.name: sft_loss(logp_M, weights_M, row_of_M, num_rows, spec) or
# policy_loss(tokens, spec).
LOSSES: dict[str, Callable[..., LossTerms]] = {"sft": sft_loss, "policy": policy_loss}


def advantages(config: AnyPolicyGradient, batch: RewardBatch) -> list[FloatArray64]:
    """Per sample, for every completion token: the algorithm's, then whitened, then clipped.

    0 for a sample without a reward: the caller does not train it either.
    """
    values_ST = ALGORITHMS[config.type].advantages(config, batch)
    if config.whiten:
        values_ST = baselines.whitened(values_ST, batch.trained_S & batch.known_S)
    if config.advantage_clip is not None:
        bound = config.advantage_clip
        values_ST = [np.clip(values_T, -bound, bound) for values_T in values_ST]
    return [
        values_T if known else np.zeros_like(values_T)
        for values_T, known in zip(values_ST, batch.known_S, strict=True)
    ]
