"""Computes the energies of a step's samples, and the rows of reference text for the cross-entropy.

    groups -> rows of samples and of the truth -> pooled hidden states of the feature model
           -> energy of each sample (algorithms/energy.py) -> reward named `energy`

The hidden states are pooled on the rank that computes them (train/reducers.py). A step computes
energies again from the journal's groups, so a resumed run has the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from homeostat.algorithms.energy import Energies, group_energy
from homeostat.arrays import FloatArray, IntArray
from homeostat.columns import TRUTH, aligned
from homeostat.config.ebft import EbftConfig
from homeostat.errors import TrainingHaltedError
from homeostat.models.build import ModelSheet
from homeostat.train.trainer import Trainer
from homeostat.types import (
    Computed,
    Outputs,
    Role,
    RolloutGroup,
    TokenRow,
    TrainBatch,
    UpdateReport,
)

# The name of the energy among the rewards of a sample.
LABEL = "energy"
REDUCER = {
    "last_token": "last_of_row",
    "completion_mean": "mean_of_trained",
    "mean_pooling": "mean_of_row",
    "concat": "concat_of_trained",
}


class RunBatches(Protocol):
    """Runs work on micro-batches of rows, on smaller ones where memory runs out."""

    def __call__(
        self,
        role: Role,
        rows: list[TokenRow],
        work: Callable[[Sequence[TrainBatch]], list[Computed]],
        *,
        step: int,
    ) -> tuple[Sequence[TrainBatch], list[Computed]]: ...


def scored_groups(
    groups: Sequence[RolloutGroup],
    ebft: EbftConfig | None,
    *,
    trainer: Trainer,
    run: RunBatches,
    step: int,
) -> tuple[list[RolloutGroup], Energies | None]:
    """Return the groups with their energies as rewards, and the energies, if the run has any."""
    if ebft is None or not groups:
        return list(groups), None
    outputs = feature_outputs(ebft, trainer.sheet)

    def work(batches: Sequence[TrainBatch]) -> list[Computed]:
        return trainer.forward(Role.FEATURES, batches, outputs)

    batches, found = run(Role.FEATURES, feature_rows(groups), work, step=step)
    energies = step_energies(groups, batches, found, ebft, step=step)
    return with_energies(groups, energies), energies


def feature_outputs(ebft: EbftConfig, sheet: ModelSheet) -> Outputs:
    """Return the outputs that the feature model must compute."""
    layers = ebft.layers(int(sheet.source_config["num_hidden_layers"]))
    return Outputs(hidden=layers, reducer=REDUCER[ebft.embed_method])


def feature_rows(groups: Sequence[RolloutGroup]) -> list[TokenRow]:
    """Return the rows of each group's samples and, after them, of its truth."""
    texts = [(group.prompt.tokens_T, text_T) for group in groups for text_T in _texts(group)]
    return [_row(number, before_T, text_T) for number, (before_T, text_T) in enumerate(texts)]


def _texts(group: RolloutGroup) -> Iterator[IntArray]:
    for sample in group.samples:
        yield sample.completion.tokens_T
    yield _reference(group)


def _reference(group: RolloutGroup) -> IntArray:
    reference_T = group.prompt.reference_T
    assert reference_T is not None, "prompts of this run were prepared with references"
    return reference_T


def _row(number: int, before_T: IntArray, text_T: IntArray) -> TokenRow:
    tokens_T = np.concatenate([before_T, text_T])
    weights_T = np.concatenate([np.zeros(len(before_T)), np.ones(len(text_T))])
    return TokenRow(number, tokens_T, weights_T.astype(np.float32))


def step_energies(
    groups: Sequence[RolloutGroup],
    batches: Sequence[TrainBatch],
    found: Sequence[Computed],
    ebft: EbftConfig,
    *,
    step: int,
) -> Energies:
    """Return the energies of all samples. `found` holds the features of the rows in `batches`."""
    features = _by_row(batches, found)
    if not all(np.isfinite(layer).all() for row in features.values() for layer in row.values()):
        raise TrainingHaltedError(
            f"step {step}: the feature model computed hidden states that are not finite, so no "
            "energy can be computed. Check the files of model.path (and lora.path)."
        )
    energies, first = [], 0
    for group in groups:
        *samples, truth = (features[first + place] for place in range(len(group.samples) + 1))
        first += len(group.samples) + 1
        energies.append(
            group_energy(
                [np.stack([row[layer] for row in samples]).astype(np.float64) for layer in truth],
                [values_D.astype(np.float64) for values_D in truth.values()],
                whitening=ebft.whitening,
            )
        )
    return Energies.of(energies, ebft)


def _by_row(
    batches: Sequence[TrainBatch], found: Sequence[Computed]
) -> dict[int, Mapping[int, FloatArray]]:
    return {
        int(row_id): {layer: values_BD[place] for layer, values_BD in one.hidden.items()}
        for batch, one in zip(batches, found, strict=True)
        for place, row_id in enumerate(batch.row_ids_B)
    }


def with_energies(groups: Sequence[RolloutGroup], energies: Energies) -> list[RolloutGroup]:
    """Return the groups with the energy among the rewards. A failed reward stays a failed one."""
    values = iter(energies.energy_S.tolist())
    found = []
    for group in groups:
        samples = []
        for sample, energy in zip(group.samples, values, strict=False):
            total = None if sample.failed and sample.reward is None else energy
            if total is not None and sample.reward is not None:
                total += sample.reward
            samples.append(replace(sample, rewards={**sample.rewards, LABEL: energy}, reward=total))
        found.append(replace(group, samples=tuple(samples)))
    return found


def truth_rows(
    groups: Sequence[RolloutGroup], energy: EbftConfig | None, *, first_id: int
) -> list[TokenRow]:
    """Return the rows whose cross-entropy is in the loss of an update over these groups.

    There are none without a coefficient. They are the prompts with their references or, of texts
    that are continued, one row for each text: from its first anchor in the update to the end of the
    last continuation.
    """
    if energy is None or energy.ce_coefficient == 0:
        return []
    if not energy.is_strided:
        pairs = [(group.prompt.tokens_T, _reference(group)) for group in groups]
        return [_row(first_id + n, before_T, text_T) for n, (before_T, text_T) in enumerate(pairs)]
    texts: dict[int, list[RolloutGroup]] = {}
    for group in groups:
        texts.setdefault(int(group.prompt.columns["text"]), []).append(group)
    rows = []
    for number, of_text in enumerate(texts.values()):
        of_text.sort(key=lambda group: len(group.prompt.tokens_T))
        begin = len(of_text[0].prompt.tokens_T)
        whole_T = np.concatenate([of_text[-1].prompt.tokens_T, _reference(of_text[-1])])
        rows.append(_row(first_id + number, whole_T[:begin], whole_T[begin:]))
    return rows


def beside(
    rows: Sequence[TokenRow], truth: Sequence[TokenRow], *, weight: float
) -> tuple[list[TokenRow], list[TokenRow]]:
    """Mark the rows of samples and of the truth, whose tokens all get the same weight."""
    both = [*rows, *truth]
    lengths = [len(row) for row in both]
    marks = [np.full(length, n >= len(rows), np.float32) for n, length in enumerate(lengths)]
    columns = aligned([row.columns for row in both], lengths=lengths)
    marked = [
        replace(row, columns={**own, TRUTH: mark_T})
        for row, own, mark_T in zip(both, columns, marks, strict=True)
    ]
    weighted = [
        replace(row, weights_T=(row.weights_T * weight).astype(np.float32))
        for row in marked[len(rows) :]
    ]
    return marked[: len(rows)], weighted


def energy_metrics(energies: Energies | None, reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Return the metrics of a step's energies; nothing if the run has none."""
    if energies is None:
        return {}
    metrics = {
        "ebft/alignment": energies.alignment,
        "ebft/diversity": energies.likeness,
        "ebft/cfm_loss": float(energies.cfm_P.mean()),
        "ebft/spread": energies.spread,
    }
    stats = [report.stats for report in reports if report.stats.get("truth_tokens", 0) > 0]
    if stats:
        tokens = sum(one["truth_tokens"] for one in stats)
        metrics["ebft/ce_loss"] = sum(one["truth_nll"] for one in stats) / tokens
    return metrics
