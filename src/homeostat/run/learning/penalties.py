"""The KL penalty in the reward: the amount that it subtracts for each token that the policy
sampled.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from homeostat.columns import dense
from homeostat.run.learning.updates import StepRows


def kl_penalties(
    rows: StepRows, estimator: Callable[..., torch.Tensor], *, coefficient: float
) -> tuple[list[np.ndarray], float | None]:
    """Return the penalty of every token that the policy sampled, per sample, and the mean KL.

    Rows without old log-probs were not scored, and have no penalty. The mean is None if no row was
    scored: a KL of 0 would lower a coefficient that adapts.
    """
    penalty_ST = [np.zeros(int(length)) for length in rows.lengths_S]
    total, count = 0.0, 0
    for index, row in enumerate(rows.rows):
        if "old_logp" not in row.columns:
            continue
        is_trained = row.weights_T > 0
        names = ("old_logp", "ref_logp")
        pair = (torch.from_numpy(dense(row.columns[name])[is_trained]) for name in names)
        estimate_M = estimator(*(logp_M.double() for logp_M in pair)).numpy()
        total += float(estimate_M.sum())
        count += int(row.weights_T.sum())
        # A token may stand in several rows of its sample, and is trained in one of them.
        own_T = penalty_ST[rows.sample_R[index]]
        own_T[rows.policy_places(index)[is_trained]] = coefficient * estimate_M
    return penalty_ST, total / count if count else None
