"""EBFT: energy-based fine-tuning (arXiv:2603.12248). The energy of a sample is its reward.

    r_j   = energy_j (energy.py) + other rewards
    rloo:        A_j = r_j - b_j
    group_norm:  A_j = (r_j - b_j) / (std(r_group) + 1e-4)
    reinforce:   A_j = r_j
    loss  = rl_coefficient * policy loss + ce_coefficient * cross-entropy of the truth

b_j does not depend on sample j: it is the mean of the others' rewards, except that their
diversity is averaged over the pairs without j. The policy loss is that of RLOO.
"""

from __future__ import annotations

import numpy as np

from homeostat.algorithms import baselines
from homeostat.algorithms.baselines import RewardBatch
from homeostat.algorithms.clip import token_surrogate
from homeostat.arrays import FloatArray64
from homeostat.config.algorithm import PolicyGradientConfig

surrogate = token_surrogate


def advantages(config: PolicyGradientConfig, batch: RewardBatch) -> list[FloatArray64]:
    """Return the advantage of every completion token, per sample."""
    energies, rewards_S = batch.energies, batch.sequence_rewards()
    assert energies is not None, "the energies of a step come before its advantages"
    if energies.estimator == "reinforce":
        return baselines.per_token(rewards_S, batch.lengths_S)
    # The diversity has its own baseline; everything else is compared with the others.
    single_S = rewards_S + energies.diversity_S
    centred_S = baselines.leave_one_out(single_S, batch.group_S)
    centred_S -= energies.diversity_S - energies.diversity_baseline_S
    centred_S = np.where(baselines.signal_S(rewards_S, batch.group_S), centred_S, 0.0)
    scale = "group" if energies.estimator == "group_norm" else "none"
    values_S = baselines.scaled(centred_S, rewards_S, batch.group_S, scale=scale)
    return baselines.per_token(values_S, batch.lengths_S)
