"""The losses by their names: what each needs of a batch and of the forward pass.

    LossSpec.name -> Loss -> columns and outputs that it needs -> checked -> its terms

A trainer computes what the entry names and nothing else, and refuses a batch that lacks a column
before it computes anything. A new loss is one more entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from homeostat.algorithms import preference, reward_model, sft
from homeostat.algorithms.corrections.correct import PARTS
from homeostat.algorithms.normalise import row_means
from homeostat.algorithms.policy import policy_loss
from homeostat.algorithms.terms import LossInputs, LossTerms, PolicyTokens
from homeostat.algorithms.value import value_loss
from homeostat.columns import TRUTH
from homeostat.errors import LossInputError
from homeostat.types import LossSpec, Role, TrainBatch

if TYPE_CHECKING:
    pass


class EntropyNeed(StrEnum):
    """A loss needs nothing of the distribution's entropy, its value, or its gradient too."""

    NONE = "none"
    VALUE = "value"
    GRAD = "grad"


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and what it needs.

    `columns` are all that it can read, in whichever variant; `required` says which of them it
    cannot do without under a given spec, and `entropy` what it needs of the entropy. `of_values`:
    it is a loss of a model with a value head. `rows_per_example` neighbouring rows (a pair) are one
    example: they stay in one micro-batch.
    """

    terms: Callable[[LossInputs, LossSpec], LossTerms]
    columns: frozenset[str]
    required: Callable[[LossSpec], frozenset[str]]
    entropy: Callable[[LossSpec], EntropyNeed]
    of_values: bool = False
    rows_per_example: int = 1


def loss_of(spec: LossSpec) -> Loss:
    if spec.name not in LOSSES:
        known = ", ".join(sorted(LOSSES))
        raise LossInputError(f"there is no loss {spec.name!r}. Known losses: {known}.")
    return LOSSES[spec.name]


def require_columns(spec: LossSpec, batches: Iterable[TrainBatch | None]) -> None:
    """Raise LossInputError where a batch lacks a column that the loss needs."""
    required = loss_of(spec).required(spec)
    for batch in batches:
        missing = [] if batch is None else sorted(required - batch.columns.keys())
        if batch is not None and missing:
            raise LossInputError(
                f"the loss {spec.name!r} needs the column {missing[0]!r}, and a batch of rows "
                f"{batch.row_ids_B[0]} ... has {', '.join(sorted(batch.columns)) or 'none'}: it "
                "must be filled before the update is planned."
            )


def require_head(spec: LossSpec, *, has_value_head: bool, role: Role) -> None:
    """Raise LossInputError where the loss is not one of the role's model."""
    if loss_of(spec).of_values == has_value_head:
        return
    needs, has = ("log-probs", "a value head") if has_value_head else ("values", "no value head")
    raise LossInputError(f"the loss {spec.name!r} is of {needs}, and the {role} has {has}.")


def _sft_terms(inputs: LossInputs, spec: LossSpec) -> LossTerms:
    assert inputs.logp_M is not None, "require_head was asked"
    return sft.sft_loss(inputs.logp_M, inputs.weights_M, inputs.row_of_M, inputs.num_rows, spec)


def _policy_terms(inputs: LossInputs, spec: LossSpec) -> LossTerms:
    assert inputs.logp_M is not None, "require_head was asked"
    assert inputs.entropy_M is not None, "policy losses measure the entropy"
    columns_M = inputs.columns_M
    tokens = PolicyTokens(
        trainer_logp_M=inputs.logp_M,
        entropy_M=inputs.entropy_M,
        weights_M=inputs.weights_M,
        row_of_M=inputs.row_of_M,
        num_rows=inputs.num_rows,
        advantage_M=columns_M["advantage"],
        old_logp_M=columns_M.get("old_logp"),
        ref_logp_M=columns_M.get("ref_logp"),
        engine_logp_M=columns_M.get("engine_logp"),
    )
    return policy_loss(tokens, spec)


def _value_terms(inputs: LossInputs, spec: LossSpec) -> LossTerms:
    assert inputs.value_M is not None, "require_head was asked"
    return value_loss(
        inputs.value_M,
        old_value_M=inputs.columns_M["value"],
        return_M=inputs.columns_M["return"],
        weights_M=inputs.weights_M,
        row_of_M=inputs.row_of_M,
        num_rows=inputs.num_rows,
        spec=spec,
    )


def _truth_terms(inputs: LossInputs, spec: LossSpec) -> LossTerms:
    """Add the weighted cross-entropy of tokens of the truth to the loss of the sampled ones."""
    is_truth_M = inputs.columns_M[TRUTH] > 0
    policy, truth = _policy_terms(inputs.only(~is_truth_M), spec), inputs.only(is_truth_M)
    nll_M = -truth.logp_M
    row_losses_B = row_means(nll_M.detach(), truth.row_of_M, truth.num_rows)
    sums = {"truth_nll": nll_M.detach().sum(), "truth_tokens": is_truth_M.sum().to(nll_M.dtype)}
    return LossTerms(
        loss=policy.loss + (truth.weights_M * nll_M).sum() / spec.denominator,
        row_losses_B=policy.row_losses_B + row_losses_B,
        sums={**policy.sums, **sums},
        maxima=policy.maxima,
    )


def _policy_required(spec: LossSpec) -> frozenset[str]:
    """Without `old_logp` the old policy is the present one, and its ratio exactly 1."""
    names = {"advantage"}
    if "kl_coefficient" in spec.params:
        names.add("ref_logp")
    if any(part in spec.params for part in PARTS):
        names.add("engine_logp")
    return frozenset(names)


def _policy_entropy(spec: LossSpec) -> EntropyNeed:
    bonus = float(spec.params.get("entropy_bonus", 0.0))
    return EntropyNeed.GRAD if bonus > 0 else EntropyNeed.VALUE


LOSSES: dict[str, Loss] = {
    "sft": Loss(
        _sft_terms,
        columns=frozenset(),
        required=lambda spec: frozenset(),
        entropy=lambda spec: EntropyNeed.NONE,
    ),
    "policy": Loss(
        _policy_terms,
        columns=frozenset({"advantage", "old_logp", "ref_logp", "engine_logp"}),
        required=_policy_required,
        entropy=_policy_entropy,
    ),
    "value": Loss(
        _value_terms,
        columns=frozenset({"value", "return"}),
        required=lambda spec: frozenset({"value", "return"}),
        entropy=lambda spec: EntropyNeed.NONE,
        of_values=True,
    ),
    # Rows that were sampled, and rows of the truth beside them.
    "policy_and_truth": Loss(
        _truth_terms,
        columns=frozenset({"advantage", "old_logp", "ref_logp", "engine_logp", TRUTH}),
        required=lambda spec: _policy_required(spec) | {TRUTH},
        entropy=_policy_entropy,
    ),
    "pairs": Loss(
        preference.pair_terms,
        columns=frozenset({"ref_logp"}),
        required=preference.needed_columns,
        entropy=lambda spec: EntropyNeed.NONE,
        rows_per_example=2,
    ),
    "unpaired": Loss(
        preference.kto_terms,
        columns=frozenset({"ref_logp", "label"}),
        required=preference.needed_columns,
        entropy=lambda spec: EntropyNeed.NONE,
    ),
    "bradley_terry": Loss(
        reward_model.bradley_terry_terms,
        columns=frozenset({"label"}),
        required=reward_model.needed_columns,
        entropy=lambda spec: EntropyNeed.NONE,
        of_values=True,
        rows_per_example=2,
    ),
    "pointwise": Loss(
        reward_model.pointwise_terms,
        columns=frozenset({"label"}),
        required=reward_model.needed_columns,
        entropy=lambda spec: EntropyNeed.NONE,
        of_values=True,
    ),
}
