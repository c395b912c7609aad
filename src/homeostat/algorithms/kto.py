"""KTO: Kahneman-Tversky optimisation on single, labelled completions (arXiv:2402.01306).

    x = log pi(y) - log pi_ref(y)
    desirable:    loss = desirable_weight   * (1 - sigmoid(beta * (x - kl)))
    undesirable:  loss = undesirable_weight * (1 - sigmoid(beta * (kl - x)))

averaged over the rows of the update. The baseline `kl` estimates KL(pi || pi_ref): the mean of x
over prompts with the completions of other rows (`run/learning/mismatched.py`), never below 0. It
belongs to the whole update and has no gradient, so it is computed before the update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from homeostat.algorithms.pairs import Params

if TYPE_CHECKING:
    from torch import Tensor


def losses(ratio_B: Tensor, label_B: Tensor, params: Params) -> Tensor:
    """Return the loss of each row."""
    from torch import where

    distance_B = float(params["beta"]) * (ratio_B - float(params["kl"]))
    names = ("desirable_weight", "undesirable_weight")
    # As tensors: of two numbers torch would make fp32.
    weights = (ratio_B.new_full((), float(params[name])) for name in names)
    return where(label_B > 0, *weights) * (1.0 - (label_B * distance_B).sigmoid())


def kto_sums(ratio_B: Tensor, logp_B: Tensor, label_B: Tensor, params: Params) -> dict[str, Tensor]:
    """Return raw sums over the rows, from which the metrics of the update are made.

    A row is correct if its completion is on the right side of the baseline.
    """
    ratio_B, logp_B = ratio_B.detach(), logp_B.detach()
    good_B = (label_B > 0).to(logp_B.dtype)
    right_B = label_B * (ratio_B - float(params["kl"])) > 0
    reward_B = float(params["beta"]) * ratio_B
    return {
        "examples": logp_B.new_full((), len(logp_B)),
        "chosen": good_B.sum(),
        "rejected": (1 - good_B).sum(),
        "correct": right_B.to(logp_B.dtype).sum(),
        "chosen_reward": (good_B * reward_B).sum(),
        "rejected_reward": ((1 - good_B) * reward_B).sum(),
        "chosen_logp": (good_B * logp_B).sum(),
        "rejected_logp": ((1 - good_B) * logp_B).sum(),
    }
