"""The losses of reward models against a few lines of numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from homeostat.algorithms.losses import LOSSES, loss_of, require_columns
from homeostat.algorithms.reward_model import reward_model_metrics, reward_model_spec
from homeostat.algorithms.terms import LossInputs
from homeostat.config.reward_model import RewardModelConfig
from homeostat.errors import LossInputError
from homeostat.types import LossSpec, TokenRow, TrainBatch

RNG = np.random.default_rng(7)
SCORES = RNG.normal(size=8) * 3
# Rows have 1, 2 ... trained tokens.
ROW_OF = np.repeat(np.arange(8), np.arange(1, 9))


def spec(num_rows: int, *, has_margin: bool = False, **loss: object) -> LossSpec:
    config = RewardModelConfig.model_validate({"type": "reward_model", "loss": loss})
    row = TokenRow(0, np.zeros(3, dtype=np.int64), np.ones(3, dtype=np.float32))
    return reward_model_spec(config, [row] * num_rows, has_margin=has_margin)


def terms(given: LossSpec, scores: np.ndarray, labels: np.ndarray | None) -> tuple[float, dict]:
    """Return loss, gradient and sums of one micro-batch."""
    value_B = torch.tensor(scores, requires_grad=True)
    rows = len(scores)
    row_of_M = torch.from_numpy(ROW_OF[rows > ROW_OF])
    columns = {} if labels is None else {"label": torch.tensor(labels)[row_of_M]}
    inputs = LossInputs(
        logp_M=None,
        entropy_M=None,
        weights_M=torch.ones(len(row_of_M)),
        columns_M=columns,
        row_of_M=row_of_M,
        num_rows=rows,
        value_M=torch.zeros(len(row_of_M)),
        value_B=value_B,
    )
    found = loss_of(given).terms(inputs, given)
    found.loss.backward()
    sums = {name: float(value) for name, value in found.sums.items()}
    assert value_B.grad is not None
    grads = {"grad": value_B.grad.numpy(), "rows": found.row_losses_B.numpy()}
    return float(found.loss.detach()), {"sums": sums, **grads}


@pytest.mark.parametrize("margins", [None, np.array([0.0, 0.5, 2.0, 1.25])])
@pytest.mark.parametrize("centre", [0.0, 0.03])
def test_bradley_terry(centre: float, margins: np.ndarray | None) -> None:
    labels = None if margins is None else np.stack([margins, -margins], axis=1).ravel()
    given = spec(8, has_margin=margins is not None, type="bradley_terry", centre=centre)
    loss, more = terms(given, SCORES, labels)
    chosen, rejected = SCORES[0::2], SCORES[1::2]
    apart = chosen - rejected - (0.0 if margins is None else margins)
    per_pair = np.log1p(np.exp(-apart)) + centre * (chosen + rejected) ** 2
    assert loss == pytest.approx(per_pair.mean(), rel=1e-5)
    assert more["rows"] == pytest.approx(per_pair.repeat(2), rel=1e-5)
    slope = -1 / (1 + np.exp(apart))
    both = 2 * centre * (chosen + rejected)
    wanted = np.stack([slope + both, -slope + both], axis=1).ravel() / 4
    assert more["grad"] == pytest.approx(wanted, rel=1e-5)
    metrics = reward_model_metrics(more["sums"])
    assert metrics["reward_model/accuracy"] == np.mean(chosen > rejected)
    assert metrics["reward_model/margin"] == pytest.approx(np.mean(chosen - rejected))
    assert metrics["reward_model/score_mean"] == pytest.approx(SCORES.mean())
    assert metrics["reward_model/score_std"] == pytest.approx(SCORES.std())


@pytest.mark.parametrize("error", ["mse", "bce"])
def test_pointwise(error: str) -> None:
    labels = RNG.uniform(size=8)
    loss, more = terms(spec(8, type="pointwise", error=error), SCORES, labels)
    given = 1 / (1 + np.exp(-SCORES)) if error == "bce" else SCORES
    if error == "bce":
        per_row = -labels * np.log(given) - (1 - labels) * np.log(1 - given)
        wanted = (given - labels) / 8
    else:
        per_row, wanted = (SCORES - labels) ** 2, 2 * (SCORES - labels) / 8
    assert loss == pytest.approx(per_row.mean(), rel=1e-5)
    assert more["rows"] == pytest.approx(per_row, rel=1e-5)
    assert more["grad"] == pytest.approx(wanted, rel=1e-5)
    metrics = reward_model_metrics(more["sums"])
    assert metrics["reward_model/error"] == pytest.approx(np.abs(given - labels).mean(), rel=1e-5)
    assert ("reward_model/accuracy" in metrics) == (error == "bce")
    if error == "bce":
        assert metrics["reward_model/accuracy"] == np.mean((given > 0.5) == (labels > 0.5))


def test_the_split_into_micro_batches_does_not_matter() -> None:
    given = spec(8, type="bradley_terry", centre=0.01)
    whole, _ = terms(given, SCORES, None)
    parts = [terms(given, SCORES[start:end], None)[0] for start, end in ((0, 2), (2, 8))]
    assert sum(parts) == pytest.approx(whole, rel=1e-6)
    assert LOSSES["bradley_terry"].rows_per_example == 2


def test_a_batch_without_labels_is_refused_where_the_loss_reads_them() -> None:
    row = TokenRow(0, np.zeros(3, dtype=np.int64), np.ones(3, dtype=np.float32))
    batch = TrainBatch.of([row, row])
    require_columns(spec(2, type="bradley_terry"), [batch])
    for given in (
        spec(2, type="pointwise"),
        spec(2, type="bradley_terry", has_margin=True),
    ):
        with pytest.raises(LossInputError, match="label"):
            require_columns(given, [batch])
