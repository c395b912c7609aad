"""A preference algorithm: a hinge in place of DPO's sigmoid.

r      = beta * (log pi(y) - log pi_ref(y))
loss_p = max(0, margin - (r_chosen - r_rejected))

A pair that is told apart by the margin has no gradient any more.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from homeostat import plugins
from homeostat.algorithms.pairs import PairLosses, Pairs


class Hinge(plugins.PreferenceAlgorithm):
    """Pairs are pushed apart until they differ by a margin."""

    beta: ClassVar[float] = 0.2
    margin: float = plugins.key(1.0, gt=0, help="Difference of rewards that is enough.")

    @staticmethod
    def losses(pairs: Pairs, params: Mapping[str, float | str]) -> PairLosses:
        beta, margin = float(params["beta"]), float(params["margin"])
        chosen_P, rejected_P = beta * pairs.chosen.ratio_P, beta * pairs.rejected.ratio_P
        loss_P = torch.relu(margin - (chosen_P - rejected_P))
        return PairLosses(loss_P, chosen_P, rejected_P)
