"""An algorithm: GRPO that weights bad samples less, and penalises large changes of the policy.

A_i    = grpo's advantage, times `negative_weight` where it is negative
loss_m = grpo's clipped loss + hold / 2 * (log-ratio of new to old policy)^2
"""

from collections.abc import Mapping
from dataclasses import replace

from homeostat import plugins
from homeostat.algorithms import grpo
from homeostat.algorithms.baselines import RewardBatch
from homeostat.algorithms.terms import PolicyTokens, Surrogate


class TrustGood(plugins.Algorithm):
    """GRPO with less weight on samples that are worse than their group."""

    negative_weight: float = plugins.key(
        0.5, ge=0, le=1, help="Factor of advantages below 0. 1: as in GRPO."
    )
    hold: float = plugins.key(0.1, ge=0, help="Weight of the squared log-ratio in the loss.")

    def advantages(self, batch: RewardBatch) -> list:
        values_ST = grpo.advantages(self, batch)
        return [
            values_T * self.negative_weight if (values_T < 0).any() else values_T
            for values_T in values_ST
        ]

    @staticmethod
    def surrogate(
        tokens: PolicyTokens, log_ratio_M, params: Mapping[str, float | str]
    ) -> Surrogate:
        base = grpo.surrogate(tokens, log_ratio_M, params)
        return replace(base, loss_M=base.loss_M + float(params["hold"]) / 2 * log_ratio_M**2)
