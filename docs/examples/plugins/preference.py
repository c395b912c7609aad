"""A preference algorithm: DPO with a hinge loss instead of the sigmoid.

r      = beta * (log pi(y) - log pi_ref(y))
loss_p = max(0, margin - (r_chosen - r_rejected))

A pair whose rewards differ by the margin or more has no gradient.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from homeostat import plugins
from homeostat.algorithms.pairs import PairLosses, Pairs


class Hinge(plugins.PreferenceAlgorithm):
    """Increase the difference of rewards in each pair until it reaches a margin."""

    beta: ClassVar[float] = 0.2
    margin: float = plugins.key(1.0, gt=0, help="Difference of rewards that is enough.")

    @staticmethod
    def losses(pairs: Pairs, params: Mapping[str, float | str]) -> PairLosses:
        beta, margin = float(params["beta"]), float(params["margin"])
        chosen_P, rejected_P = beta * pairs.chosen.ratio_P, beta * pairs.rejected.ratio_P
        loss_P = torch.relu(margin - (chosen_P - rejected_P))
        return PairLosses(loss_P, chosen_P, rejected_P)
