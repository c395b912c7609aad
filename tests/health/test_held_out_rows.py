"""Lines about held-out rows are told from those of training, whatever their form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from homeostat.health.readers import RunPlace, open_run, read_text
from homeostat.health.view import RunView, Series

FORMS = [
    ("step {n} train loss {a} lr 1e-4", "Validation | step {n} | loss: {b} | acc: 0.3"),
    (
        "12:07:25 INFO Epoch: {n}, \t Iter: {n}/9, \t Loss: {a}, \t Acc: 28.4, \t lr: 0.001",
        "12:07:28 INFO Epoch: {n}, \t Valid, Loss: {b}, \t Acc: 30.6, \t Best Acc: 30.6",
    ),
    ("[Train] epoch: {n}, loss: {a}", "[Valid] epoch: {n}, loss: {b}"),
    ("Train Epoch: {n} Loss: {a}", "Test set: Average loss: {b}, Accuracy: 900/1000 (90%)"),
    ("TRAIN step={n} loss={a} lr=1e-4", "EVAL step={n} loss={b} ppl=9.1"),
    ("step {n}: loss={a}, lr=1e-4", "step {n} (eval): loss={b}, acc=0.3"),
    (
        "2022-05-15 08:47:23,550 - INFO - joeynmt.training - Epoch   {n}, Step: {n}00, Batch Loss: "
        "{a}, Tokens per Sec: 900, Lr: 0.0003",
        "2022-05-15 08:47:23,622 - INFO - joeynmt.training - Validation result (greedy) at epoch   "
        "{n}, step {n}00: bleu: 0.06, loss: {b}, ppl: 20.1, duration: 3.1s",
    ),
    ("epoch {n} | loss {a} | acc 0.5", "eval  {n} | loss {b} | acc 0.4"),
    ("Epoch {n}/12 - loss: {a} - acc: 0.5", "Epoch {n}/12 - val - loss: {b} - acc: 0.4"),
    ("INFO epoch={n} split=train loss={a}", "INFO epoch={n} split=valid loss={b}"),
    (
        "{{'epoch': {n}, 'phase': 'train', 'loss': {a}}}",
        "{{'epoch': {n}, 'phase': 'val', 'loss': {b}}}",
    ),
    ("train: epoch {n} loss {a} acc 0.1", "valid: epoch {n} loss {b} acc 0.1"),
    ("Epoch {n} training: loss = {a}, acc = 0.3", "Epoch {n} validation: loss = {b}, acc = 0.3"),
    ("iter {n} loss {a}", "iter {n} eval loss {b}"),
    ("Epoch [{n}] train_loss: {a}", "Dev loss: {b} f1: 0.4"),
    ("training step {n}: cross-entropy {a}", "heldout step {n}: cross-entropy {b}"),
    ("Eval step {n} | train loss {a} | val loss {b} | BLEU: 0.0", ""),
]  # fmt: skip


def read(train: str, held_out: str) -> RunView:
    lines = []
    for n in range(1, 13):
        values = {"n": n, "a": f"{3 - 0.1 * n:.3f}", "b": f"{5 + 0.1 * n:.3f}"}
        lines += [line.format(**values) for line in (train, held_out) if line]
    return read_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(("train", "held_out"), FORMS)
def test_either_loss_has_its_own_rows(train: str, held_out: str) -> None:
    metrics = read(train, held_out).metrics
    np.testing.assert_allclose(metrics["train/loss"].values, 3 - 0.1 * np.arange(1, 13))
    np.testing.assert_allclose(metrics["eval/loss"].values, 5 + 0.1 * np.arange(1, 13))


@pytest.mark.parametrize(
    "line",
    [
        "step {n} valid tokens: 512, loss: {a}",
        "step {n}, loss: {a}, best val 2.1",
        "step {n} testing_lr=1e-4 loss={a} lr=1e-4",
        "INFO eval_every=100 step={n} loss={a} lr=1e-4",
    ],
)
def test_other_words_that_are_like_it_do_not_count(line: str) -> None:
    metrics = read(line, "").metrics
    np.testing.assert_allclose(metrics["train/loss"].values, 3 - 0.1 * np.arange(1, 13))
    assert "eval/loss" not in metrics


@pytest.mark.parametrize("every", [20, 5])
def test_losses_of_steps_count_where_an_evaluation_repeats_some(every: int) -> None:
    """nanoGPT prints both: a row of evaluation now and then, and the loss of each step."""
    lines = []
    for n in range(60):
        if n % every == 0:
            lines.append(f"step {n}: train loss {4 - 0.02 * n:.4f}, val loss {5 - 0.02 * n:.4f}")
        lines.append(f"iter {n}: loss {3 - 0.02 * n:.4f}, time 700.12ms, mfu 0.27%")
    metrics = read_text("\n".join(lines) + "\n").metrics
    np.testing.assert_allclose(metrics["train/loss"].values, 3 - 0.02 * np.arange(60))
    np.testing.assert_allclose(metrics["eval/loss"].values, 5 - 0.02 * np.arange(0, 60, every))


def test_a_loss_that_is_a_sum_gives_way_to_the_perplexity_beside_it() -> None:
    view = read(
        "step {n} train loss {a} lr 1e-4", "Validation | step {n} | loss: 6{b}e3 | ppl: 20.0"
    )
    np.testing.assert_allclose(view.metrics["eval/loss"].values, np.log(20.0))


@pytest.mark.parametrize("file", ["metrics.jsonl", "metrics.csv"])
def test_a_column_that_names_the_rows_divides_them(tmp_path: Path, file: str) -> None:
    rows = [
        {"step": n, "split": split, "loss": loss}
        for n in range(1, 31)
        for split, loss in (("train", 3 - 0.05 * n), ("val", 5 + 0.05 * n))
    ]
    if file.endswith("csv"):
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    else:
        lines = [json.dumps(row) for row in rows]
    (tmp_path / file).write_text("\n".join(lines) + "\n")
    metrics = open_run(RunPlace(tmp_path / file), config=None).metrics
    np.testing.assert_allclose(metrics["train/loss"].values, 3 - 0.05 * np.arange(1, 31))
    np.testing.assert_allclose(metrics["eval/loss"].values, 5 + 0.05 * np.arange(1, 31))


def test_a_log_of_evaluations_alone_has_all_of_them() -> None:
    lines = [f"[Valid] epoch {n}, loss: {5 - 0.1 * n:.2f}" for n in range(1, 21)]
    metrics = read_text("\n".join(lines) + "\n").metrics
    np.testing.assert_allclose(metrics["eval/loss"].values, 5 - 0.1 * np.arange(1, 21))


@pytest.mark.parametrize(
    "line",
    [
        "iter {n} nll {a}",
        "Epoche {n} Verlust {a}",
        "\u00c9poque {n} : perte {a}",
        "\u042d\u043f\u043e\u0445\u0430 {n}: \u043f\u043e\u0442\u0435\u0440\u0438 {a}",
        "\u30a8\u30dd\u30c3\u30af {n} \u640d\u5931 {a}",
        "\uc5d0\ud3ed {n}: \uc190\uc2e4 {a}",
        "update={n} xent={a}",
        "step {n} ce {a}",
    ],
)
@pytest.mark.parametrize("count", [40, 12_000])
def test_a_loss_by_another_word_is_read_in_short_and_long_logs(line: str, count: int) -> None:
    """Long logs pass a filter of words first."""
    losses = [round(3 - n * 1e-4, 4) for n in range(1, count + 1)]
    rows = (f"{line.format(n=n, a=a)}\nanother line {n}\n" for n, a in enumerate(losses, start=1))
    assert read_text("".join(rows)).metrics["train/loss"].values.tolist() == losses


@pytest.mark.parametrize(
    "line",
    [
        "Epoch {n}: train loss {a} (val {b})",
        "{n}/20 loss: {a} | val: {b}",
        "epoch {n} [Loss: {a}] [Val: {b}]",
    ],
)
def test_val_alone_beside_a_loss_is_one_if_it_is_as_large(line: str) -> None:
    def metrics_of(values: list[float]) -> Mapping[str, Series]:
        rows = [line.format(n=n, a=3 - 0.2 * n, b=round(b, 3)) for n, b in enumerate(values, 1)]
        return read_text("\n".join(rows) + "\n").metrics

    losses = [3.1 - 0.19 * n for n in range(12)]
    np.testing.assert_allclose(metrics_of(losses)["eval/loss"].values, np.round(losses, 3))
    assert "eval/loss" not in metrics_of([0.4 + 0.04 * n for n in range(12)])
    assert "eval/loss" not in metrics_of([40 + 4.0 * n for n in range(12)])
