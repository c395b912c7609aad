"""Losses of a reward model: Bradley-Terry over pairs, and pointwise over given scores.

    bradley_terry   -log sigmoid(s_c - s_r - margin) + centre * (s_c + s_r)^2
    pointwise       (s - y)^2   or   -y log sigmoid(s) - (1 - y) log sigmoid(-s)

averaged over all pairs (c chosen, r rejected), or rows, of the update. s is the score of a whole
row: what the scalar head gives at its last token. The margin of a pair is a column of the data
(Llama 2, arXiv:2307.09288); the centring term is that of arXiv:2312.09244. In a micro-batch the
rows of a pair are neighbours, the chosen one first; the label of the chosen one is the margin.

Suffixes: `_P` pairs, `_B` rows, `_M` trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from homeostat.algorithms.terms import LossInputs, LossTerms
from homeostat.config.reward_model import BradleyTerryLoss, RewardModelConfig
from homeostat.types import LossSpec, TokenRow

if TYPE_CHECKING:
    from torch import Tensor


def reward_model_spec(
    config: RewardModelConfig, rows: Sequence[TokenRow], *, has_margin: bool
) -> LossSpec:
    """Return the loss of an update over these rows."""
    loss = config.loss
    if isinstance(loss, BradleyTerryLoss):
        params: dict[str, float | str] = {"centre": loss.centre}
        if has_margin:
            params["margin"] = 1.0
        return LossSpec(loss.type, denominator=len(rows) / 2, params=params)
    return LossSpec(loss.type, denominator=float(len(rows)), params={"error": loss.error})


def needed_columns(spec: LossSpec) -> frozenset[str]:
    """Return the columns that the loss cannot do without."""
    reads_label = spec.name == "pointwise" or "margin" in spec.params
    return frozenset({"label"}) if reads_label else frozenset()


def bradley_terry_terms(inputs: LossInputs, spec: LossSpec) -> LossTerms:
    """Compute this micro-batch's share of the loss of an update over pairs."""
    from torch.nn.functional import logsigmoid

    assert inputs.num_rows % 2 == 0, "a pair is never split over micro-batches"
    score_B = _scores(inputs)
    chosen_P, rejected_P = score_B[0::2], score_B[1::2]
    margin_P = _labels(inputs)[0::2] if "margin" in spec.params else 0.0
    loss_P = -logsigmoid(chosen_P - rejected_P - margin_P)
    if centre := float(spec.params["centre"]):
        loss_P = loss_P + centre * (chosen_P + rejected_P).square()
    loss = loss_P.sum() / spec.denominator
    apart_P = (chosen_P - rejected_P).detach()
    sums = {
        "loss": loss.detach(),
        "examples": apart_P.new_full((), len(apart_P)),
        "correct": (apart_P > 0).to(apart_P.dtype).sum(),
        "margin": apart_P.sum(),
        **_score_sums(score_B),
    }
    return LossTerms(loss, loss_P.detach().repeat_interleave(2), sums=sums, maxima={})


def pointwise_terms(inputs: LossInputs, spec: LossSpec) -> LossTerms:
    """Compute this micro-batch's share of the loss of an update over rows with given scores."""
    from torch.nn.functional import binary_cross_entropy_with_logits

    score_B, wanted_B = _scores(inputs), _labels(inputs)
    if spec.params["error"] == "bce":
        loss_B = binary_cross_entropy_with_logits(score_B, wanted_B, reduction="none")
        given_B = score_B.detach().sigmoid()
        right_B = (given_B > 0.5) == (wanted_B > 0.5)
        more = {"correct": right_B.to(given_B.dtype).sum()}
    else:
        loss_B, given_B, more = (score_B - wanted_B).square(), score_B.detach(), {}
    loss = loss_B.sum() / spec.denominator
    sums = {
        "loss": loss.detach(),
        "examples": given_B.new_full((), len(given_B)),
        "error": (given_B - wanted_B).abs().sum(),
        **more,
        **_score_sums(score_B),
    }
    return LossTerms(loss, loss_B.detach(), sums=sums, maxima={})


def reward_model_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an update, or of held-out rows, from the sums of its micro-batches."""
    found = {
        f"reward_model/{metric}": sums[name] / sums["examples"]
        for name, metric in (("correct", "accuracy"), ("margin", "margin"), ("error", "error"))
        if name in sums
    }
    mean = sums["score"] / sums["rows"]
    variance = max(0.0, sums["score_squared"] / sums["rows"] - mean * mean)
    found |= {"reward_model/score_mean": mean, "reward_model/score_std": variance**0.5}
    return found


def _scores(inputs: LossInputs) -> Tensor:
    assert inputs.value_B is not None, "require_head was asked"
    return inputs.value_B


def _labels(inputs: LossInputs) -> Tensor:
    """Return the label of each row, which all of its trained tokens have."""
    label_M = inputs.columns_M["label"].float()
    return label_M.new_zeros(inputs.num_rows).index_copy(0, inputs.row_of_M, label_M)


def _score_sums(score_B: Tensor) -> dict[str, Tensor]:
    score_B = score_B.detach()
    return {
        "rows": score_B.new_full((), len(score_B)),
        "score": score_B.sum(),
        "score_squared": score_B.square().sum(),
    }
