"""The off-policy sequence mask of DeepSeek-V3.2 (arXiv:2512.02556).

    keep_it = 1[A_it >= 0  or  mean_t(engine_logp_it - trainer_logp_it) <= threshold]

Pushing down a bad answer that the current policy would hardly give any more teaches little and may
destabilise training; a good answer is kept however old it is. As in the paper, the ratio compares
the *engine* with the *current* policy: it includes the engine's rounding, its stale weights and the
updates made since. (Others compare the trainer's old log-probs, which ignores the engine.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from homeostat.algorithms.normalise import row_means

if TYPE_CHECKING:
    from torch import Tensor

    from homeostat.algorithms.terms import PolicyTokens


def off_policy(tokens: PolicyTokens, engine_logp_M: Tensor, threshold: float) -> Tensor:
    """Return True for tokens that are left out."""
    fallen_M = engine_logp_M - tokens.trainer_logp_M.detach()
    mean_B = row_means(fallen_M, tokens.row_of_M, tokens.num_rows)
    return (tokens.advantage_M < 0) & (mean_B > threshold)[tokens.row_of_M]
