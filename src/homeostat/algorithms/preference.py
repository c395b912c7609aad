"""The losses of preference training as a trainer calls them, and the metrics that they give.

    rows -> preference_spec (denominators of the update) -> pair_terms | kto_terms of a micro-batch

`PAIRWISE` lists the algorithms over pairs, one file each; a plug-in's loss is over pairs, too, and
kto has rows of its own kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from homeostat.algorithms import dpo, ipo, kto, orpo, pairs, simpo
from homeostat.algorithms.pairs import PairLosses, Pairs, Params, row_sums
from homeostat.algorithms.terms import LossInputs, LossTerms
from homeostat.config.plugins import plugin_named
from homeostat.config.preference import AnyPreference, OrpoConfig, PreferenceConfig
from homeostat.types import LossSpec, TokenRow

if TYPE_CHECKING:
    from torch import Tensor

PAIRWISE: dict[str, Callable[[Pairs, Params], PairLosses]] = {
    "dpo": dpo.losses,
    "ipo": ipo.losses,
    "orpo": orpo.losses,
    "simpo": simpo.losses,
}


def preference_spec(
    config: AnyPreference, shared: PreferenceConfig, rows: Sequence[TokenRow]
) -> LossSpec:
    """Return the loss of an update over these rows. kto's baseline is 0 until it is computed."""
    beta = config.beta if shared.beta is None else shared.beta
    params: dict[str, float | str] = {"algorithm": config.type, "beta": beta}
    if config.needs_reference:
        params["reference"] = 1.0
    params |= config.loss_params
    if not config.paired:
        params["kl"] = 0.0
        return LossSpec("unpaired", denominator=float(len(rows)), params=params)
    if isinstance(config, OrpoConfig):
        params["sft_weight"] = 1.0
    if params.get("sft_weight"):
        params["chosen_tokens"] = pairs.chosen_tokens(rows)
    return LossSpec("pairs", denominator=len(rows) / 2, params=params)


def needed_columns(spec: LossSpec) -> frozenset[str]:
    """Return the columns that the loss cannot do without."""
    names = {"ref_logp"} if "reference" in spec.params else set()
    return frozenset(names | ({"label"} if spec.name == "unpaired" else set()))


def pair_terms(inputs: LossInputs, spec: LossSpec) -> LossTerms:
    """Compute this micro-batch's share of the loss of an update over pairs."""
    assert inputs.num_rows % 2 == 0, "a pair is never split over micro-batches"
    logp_B, ratio_B = _completion_logps(inputs, spec)
    length_B = row_sums(inputs.weights_M, inputs.row_of_M, inputs.num_rows)
    both = pairs.pairs_of(logp_B, length_B, ratio_B)
    found = _losses_of(str(spec.params["algorithm"]))(both, spec.params)
    loss = found.loss_P.sum() / spec.denominator
    weight = float(spec.params.get("sft_weight", 0.0))
    if weight:
        loss = loss - weight * both.chosen.logp_P.sum() / float(spec.params["chosen_tokens"])
    sums = {"loss": loss.detach(), **pairs.pair_sums(both, found)}
    return LossTerms(loss, found.loss_P.detach().repeat_interleave(2), sums=sums, maxima={})


def _losses_of(type: str) -> Callable[[Pairs, Params], PairLosses]:
    """Return the loss of pairs of an algorithm: a built-in one, or a plug-in."""
    return PAIRWISE.get(type) or plugin_named("algorithm", type).losses


def kto_terms(inputs: LossInputs, spec: LossSpec) -> LossTerms:
    """Compute this micro-batch's share of the loss of an update over labelled rows."""
    logp_B, ratio_B = _completion_logps(inputs, spec)
    assert ratio_B is not None, "the loss table asks for the column ref_logp"
    # All tokens of a row have its label, so the sum has its sign.
    label_B = row_sums(inputs.columns_M["label"], inputs.row_of_M, inputs.num_rows).sign()
    loss_B = kto.losses(ratio_B, label_B, spec.params)
    loss = loss_B.sum() / spec.denominator
    sums = {"loss": loss.detach(), **kto.kto_sums(ratio_B, logp_B, label_B, spec.params)}
    return LossTerms(loss, loss_B.detach(), sums=sums, maxima={})


def _completion_logps(inputs: LossInputs, spec: LossSpec) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob of each row's completion, and its log-ratio to the reference."""
    rows = (inputs.row_of_M, inputs.num_rows)
    logp_B = row_sums(inputs.weights_M * inputs.logp_M, *rows)
    if "reference" not in spec.params:
        return logp_B, None
    # Differences of tokens are summed: of two large sums, rounding would be what is left.
    ratio_M = inputs.logp_M - inputs.columns_M["ref_logp"]
    return logp_B, row_sums(inputs.weights_M * ratio_M, *rows)


def preference_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an update, or of held-out rows, from the sums of its micro-batches."""
    found = {"preference/accuracy": sums["correct"] / sums["examples"]}
    for side in ("chosen", "rejected"):
        # An update of labelled rows may have none of one kind.
        if sums[side]:
            found[f"preference/{side}_reward"] = sums[f"{side}_reward"] / sums[side]
            found[f"preference/{side}_logp"] = sums[f"{side}_logp"] / sums[side]
    if sums["chosen"] and sums["rejected"]:
        margin = found["preference/chosen_reward"] - found["preference/rejected_reward"]
        found["preference/margin"] = margin
    return found
