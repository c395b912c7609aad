"""Metrics of scripts of one's own: lines of one form, JSON documents, tables with holes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homeostat.health.diagnose import diagnose
from homeostat.health.readers import RunPlace, open_run, read_text
from homeostat.health.readers.files.long_logs import LongLogReader
from homeostat.health.readers.files.text import TextReader
from homeostat.health.readers.lines import script_rows
from homeostat.health.readers.lines.script_rows import ScriptRows
from homeostat.health.registry import RULES
from homeostat.health.view import Kind, RunView

LOSSES = [round(2.0 - 0.1 * i, 3) for i in range(10)]
LOSS_AT = list(enumerate(LOSSES, start=1))
NAN = float("nan")


def in_file(folder: Path, name: str, text: str) -> RunView:
    (folder / name).write_text(text)
    return open_run(RunPlace(folder / name), config=None)


def values(view: RunView, name: str = "train/loss") -> list[float]:
    found = view.series(name)
    return [] if found is None else found.values.tolist()


@pytest.mark.parametrize(
    "form",
    [
        "epoch {i} loss {x}",
        "[{i}/500] loss {x}",
        "[{i:>5}] train loss {x}, val loss {x}, lr 1e-4",
        "Epoch {i} | loss {x} | acc 0.5",
        "step {i}/100 loss {x} lr 1e-4",
        "Step {i}: loss = {x}",
        "Iteration {i} - loss {x}",
        "Epoch {i}: train loss {x} val loss {x}",
        "| epoch {i} | 100/ 200 batches | lr 5.00 | ms/batch 12.3 | loss {x} | ppl 7.2",
        "Train Epoch: {i} [0/60000 (0%)]\tLoss: {x}",
        "2024-01-01 10:00:{i:02},123 INFO trainer: step {i} loss {x} lr 1e-5 grad_norm 0.5",
        "[2024-01-01 10:00:00] [Epoch {i}] loss: {x}",
        "INFO:root:Epoch {i} Training Loss {x}",
        "Epoch {i} finished. Average loss: {x}",
        "step {i} | loss {x} | lr 1e-4 | norm 0.3 | dt 300ms",
        "Loss at step {i}: {x}",
        "Loss (epoch {i}): {x}",
        "Training loss at epoch {i}: {x}",
        "Epoch {i:03d}: loss={x}, val_loss={x}",
        "epoch={i} step=100 loss={x:.3e}",
        "Epoch: {i:02} | Time: 0m 3s\n\tTrain Loss: {x} | Train PPL:   5.1",
        "Epoch: {i:04} cost = {x:.9f}",
        "Epoch {i}, Loss: tensor({x}, device='cuda:0', grad_fn=<NllLossBackward0>)",
        "step {i}: loss=tensor([[{x}]])",
        "[{i}00] train/total_loss: {x} lr: 1.0e-4 eta: 1:00:00",
        "INFO:root:ep {i} tr_loss {x} va_loss {x}",
        "\u7b2c{i}\u8f6e\uff0c\u8bad\u7ec3\u635f\u5931\uff1a{x}\uff0c\u9a8c\u8bc1\u635f\u5931\uff1a{x}",
        "\u2705 Epoch {i} \u2014 Train Loss: {x} \u2014 Val Loss: {x}",
        "[batch={i}0/1000]:\n\t Train time/epoch: 0\n\t Train loss/train/total: {x}",
        "INFO:levanter.tracker:Progress on:train {i}.1kit/10.0kit rate:2.1it/s postfix:loss:{x}",
        "[2020-03-01 10:00:{i:02}] Ep. 1 : Up. {i}00 : Sen. 6,400 : Cost {x} * 9 @ 2 after 9 : ",
        "INFO [step={i}/1000,epoch=0]\n    train/CrossEntropyLoss={x}\n    train/Perplexity=7.2",
        "[2019-02-01 10:00:00,000 INFO] Step {i}/100000; acc:  14.2; ppl: 8.5; xent: {x}; lr: 0.01",
        "time:2024-03-23, 04:31:58, iters:{i}, iters_average_Loss:{x}, iters_average_Log_Odds:0.1",
    ],
)
def test_lines_of_one_form_are_rows(form: str) -> None:
    text = "\n".join(form.format(i=i, x=x) for i, x in enumerate(LOSSES, 1))
    assert values(read_text(text)) == pytest.approx(LOSSES)


@pytest.mark.parametrize(
    "form",
    [
        "Episode {i}\tAverage Score: {x}",
        "Episode: {i}, Total Reward: {x}, Epsilon: 0.9",
        "update {i} mean_reward {x} kl 0.01",
        "global_step={i}, episodic_return=[{x}]",
        "|    ep_rew_mean     | {x}      |",
    ],
)
def test_rewards_of_episodes_are_rows(form: str) -> None:
    text = "\n".join(form.format(i=i, x=x) for i, x in enumerate(LOSSES, 1))
    assert values(read_text(text), "reward") == LOSSES


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("epoch,train_loss,val_loss", "{i},{x},{x}"),
        ("Step, Train Loss, Val Loss, Time", "{i}, {x}, {x}, 12.5"),
        (
            "| Training Loss | Epoch | Step | Validation Loss | Wer  |\n"
            "|:-------------:|:-----:|:----:|:---------------:|:----:|",
            "| {x} | 0.{i} | {i} | {x} | 20.1 |",
        ),
        ("epoch;train_loss;val_loss", "{i};{x};{x}"),
    ],
)
@pytest.mark.parametrize("before", ["", "Training started\n"])
def test_tables_with_a_column_of_steps_are_rows(
    tmp_path: Path, header: str, row: str, before: str
) -> None:
    if before and ";" in header:
        return
    rows = "\n".join(row.format(i=i, x=x) for i, x in enumerate(LOSSES, 1))
    view = in_file(tmp_path, "table.txt", f"{before}{header}\n{rows}\n")
    assert values(view) == values(view, "eval/loss") == LOSSES
    assert view.last_step == 10


def test_a_model_card_may_have_no_training_loss_at_first(tmp_path: Path) -> None:
    view = in_file(
        tmp_path,
        "README.md",
        "| Training Loss | Epoch | Step | Validation Loss |\n|:---:|:---:|:---:|:---:|\n"
        "| No log | 1.0 | 50 | 0.70 |\n| 0.61 | 2.0 | 100 | 0.62 |\n| 0.55 | 3.0 | 150 | 0.60 |\n",
    )
    assert values(view, "eval/loss") == [0.70, 0.62, 0.60]
    assert values(view) == [0.61, 0.55]


@pytest.mark.parametrize(
    "document",
    [
        {f"epoch_{i}": {"train_loss": x, "val_loss": x} for i, x in enumerate(LOSSES, 1)},
        {f"checkpoint-{i}": {"loss": x, "eval_loss": x} for i, x in enumerate(LOSSES, 1)},
        {name: [[i, x] for i, x in enumerate(LOSSES, 1)] for name in ("train_loss", "val_loss")},
    ],
)
def test_documents_by_step_are_read(tmp_path: Path, document: Any) -> None:
    view = in_file(tmp_path, "log.json", json.dumps(document))
    assert values(view) == values(view, "eval/loss") == LOSSES
    assert view.last_step == 10


def test_a_sentence_with_commas_opens_no_table() -> None:
    text = (
        "Epoch, training loss and its mean over a window are shown below\n1, 2.5\n2, 2.4\n3, 2.3\n"
    )
    assert values(read_text(text)) == []


def test_a_cost_is_a_loss_only_if_epochs_are_counted() -> None:
    text = "\n".join(f"step {i} API cost {x} dollars" for i, x in enumerate(LOSSES, 1))
    assert values(read_text(text)) == []


def test_a_table_of_epochs_is_read() -> None:
    rows = [f"{i}      {x:.6f}    {x:.6f}    0.5    00:10" for i, x in enumerate(LOSSES)]
    view = read_text("\n".join(["epoch  train_loss  valid_loss  accuracy  time", *rows]))
    assert values(view) == LOSSES
    assert values(view, "eval/loss") == LOSSES


def test_steps_and_total_are_those_of_the_counter() -> None:
    view = read_text("\n".join(f"[{20 * i}/500] loss {x}" for i, x in enumerate(LOSSES, 1)))
    loss = view.series("train/loss")
    assert loss is not None
    assert loss.steps.tolist() == [20 * i for i in range(1, 11)]
    assert view.total_steps == 500
    assert view.decimals["train/loss"] == 1


def test_a_counter_that_starts_again_is_not_the_step() -> None:
    lines = [f"epoch {e} batch {b} loss 1.{e}{b}" for e in range(3) for b in range(4)]
    loss = read_text("\n".join(lines)).series("train/loss")
    assert loss is not None
    assert len(loss) == 12


def test_a_nan_in_such_a_row_is_found() -> None:
    lines = [f"epoch {i} loss {'nan' if i > 5 else 2.0}" for i in range(1, 12)]
    view = read_text("\n".join(lines))
    assert "nan-loss" in [one.name for one in diagnose(view, RULES).findings]


@pytest.mark.parametrize(
    "lines",
    [
        ["the loss of step 5 was 3.1"] * 9,
        ["a score of 3", "a loss of 2", "return 5"],
        [f"saved best model with score {i}" for i in range(9)],
    ],
)
def test_sentences_are_no_rows(lines: list[str]) -> None:
    assert not read_text("\n".join(lines)).metrics


def test_numbers_of_samples_do_not_replace_the_rows() -> None:
    rows = [f"{{'loss': {x}, 'reward': 0.5, 'step': {i}}}" for i, x in enumerate(LOSSES, 1)]
    samples = [f"sample {i} reward 0.{i % 10}" for i in range(100)]
    lines = [line for row in rows for line in (row, *samples[:10])]
    assert values(read_text("\n".join(lines)), "reward") == [0.5] * 10


def test_long_logs_give_the_same() -> None:
    lines = [f"worker {i} is busy\nepoch {i} loss {1 + i / 7:.3f}" for i in range(8_000)]
    text = "\n".join(lines)
    plain, long = TextReader(), LongLogReader()
    plain.feed(text.splitlines())
    long.feed_bytes(text.encode().split(b"\n"))
    first, second = plain.scripts.series()["loss"], long.scripts.series()["loss"]
    assert np.array_equal(first.values, second.values)
    assert len(first) == 8_000


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_rows, "_MAX_ROWS", 100)
    view = read_text("\n".join(f"epoch {i} loss {1 + i / 7:.3f}" for i in range(1_000)))
    loss = view.series("train/loss")
    assert loss is not None
    assert 50 <= len(loss) <= 101
    assert loss.steps[-1] >= 997


def test_a_line_with_zero_bytes_is_no_row() -> None:
    rows = ScriptRows()
    assert not any(rows.take(f"epoch {i}\0 loss 1.0") for i in range(9))
    assert rows.series() == {}


@pytest.mark.parametrize(
    "document",
    [
        [{"epoch": i, "train_loss": x, "val_loss": x} for i, x in enumerate(LOSSES)],
        {"train_loss": LOSSES, "val_loss": LOSSES},
        {"loss": LOSSES, "val_loss": LOSSES, "lr": [1e-4] * 10},
        {"history": {"train_loss": LOSSES, "val_loss": LOSSES}, "config": {"lr": 1e-4}},
        {"history": [{"step": i, "loss": x} for i, x in enumerate(LOSSES)], "best": 1},
        {"train": {"loss": LOSSES}, "val": {"loss": LOSSES}},
        {str(i): {"train_loss": x} for i, x in enumerate(LOSSES)},
        {"train_losses": LOSSES, "val_losses": LOSSES[:5]},
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_documents_of_any_layout(tmp_path: Path, document: Any, indent: int | None) -> None:
    view = in_file(tmp_path, "metrics.json", json.dumps(document, indent=indent))
    assert values(view) == LOSSES


def test_a_config_is_no_metrics(tmp_path: Path) -> None:
    config = {"betas": [0.9, 0.95, 0.99], "layers": [{"size": 1}, {"size": 2}, {"size": 3}]}
    assert not in_file(tmp_path, "config.json", json.dumps(config)).metrics


def test_an_empty_cell_is_a_nan_where_the_column_was_always_filled(tmp_path: Path) -> None:
    rows = [f"{i},{2.0 if i < 12 else ''},1e-4" for i in range(30)]
    view = in_file(tmp_path, "log.csv", "\n".join(["step,loss,lr", *rows]))
    assert np.isnan(values(view)[12:]).all()
    assert len(values(view)) == 30
    # A column that is filled now and then has no value there, and neither have last rows of others.
    rows = [f"{i},{2.0 if i % 3 else ''},1e-4" for i in range(28)]
    view = in_file(tmp_path, "log.csv", "\n".join(["step,loss,lr", *rows, "28,,1e-4", "29,,1e-4"]))
    assert np.isfinite(values(view)).all()


def test_null_is_a_nan_if_nothing_else_is_null(tmp_path: Path) -> None:
    lost = [{"step": i, "loss": 2.0 if i < 12 else None, "lr": 1e-4} for i in range(30)]
    view = in_file(tmp_path, "a.jsonl", "\n".join(map(json.dumps, lost)))
    assert np.isnan(values(view)[12:]).all()
    assert len(values(view)) == 30
    other = [{"step": i, "loss": 2.0, "reward": None, "eval_loss": None} for i in range(30)]
    other += [{"step": 30, "loss": None, "eval_loss": 1.0, "lr": None}]
    view = in_file(tmp_path, "b.jsonl", "\n".join(map(json.dumps, other)))
    assert view.series("reward") is None
    assert np.isfinite(values(view)).all()


def test_an_epoch_that_begins_again_is_another_run() -> None:
    first = [f"Epoch {i} - Average Loss: {1.5 - 0.1 * i:.4f}" for i in range(8)]
    again = [f"Epoch {i} - Average Loss: {3.9 - 0.1 * i:.4f}" for i in range(6)]
    view = read_text("\n".join([*first, "current task: 1", *again]))
    assert values(view) == pytest.approx([3.9 - 0.1 * i for i in range(6)])


def test_steps_that_begin_again_in_each_epoch_are_one_run() -> None:
    rows = [
        f"| epoch {epoch} | batch {i} of 400 | loss {5 - epoch - 0.01 * i:.2f}"
        for epoch in (1, 2, 3)
        for i in range(0, 400, 100)
    ]
    assert len(values(read_text("\n".join(rows)))) == 12


def test_lines_that_begin_with_evaluation_have_another_loss() -> None:
    rows = [
        f"INFO:root:{word}Epoch {i} - Average Loss: {x - 0.1 * i:.4f}"
        for i in range(6)
        for word, x in (("", 1.5), ("Evaluation ", 1.9))
    ]
    view = read_text("\n".join(rows))
    assert values(view)[0] == 1.5
    assert values(view, "eval/loss")[-1] == pytest.approx(1.4)


def test_a_table_with_an_index_and_names_in_humps(tmp_path: Path) -> None:
    rows = "\n".join(f"{i},{2 - 0.1 * i:.2f},{2.1 - 0.1 * i:.2f}" for i in range(10))
    view = in_file(tmp_path, "history.csv", f",Loss,ValLoss\n{rows}\n")
    assert len(values(view)) == len(values(view, "eval/loss")) == 10
    assert view.metrics["train/loss"].steps[-1] == 9


def test_columns_of_a_document_with_steps_of_their_own(tmp_path: Path) -> None:
    losses = [{"step": 10 * i, "value": x} for i, x in enumerate(LOSSES)]
    rates = [{"step": 20 * i, "value": 1e-4} for i in range(5)]
    text = json.dumps({"metrics": {"loss": losses, "lr": rates}})
    assert values(in_file(tmp_path, "metrics.json", text)) == LOSSES


def test_a_loss_among_the_metrics_of_a_validation(tmp_path: Path) -> None:
    rows = [{"epoch": i, "train_loss": x, "val_metrics": {"loss": x + 1, "f1": 0.5}}
            for i, x in enumerate(LOSSES)]  # fmt: skip
    view = in_file(tmp_path, "log.json", json.dumps({"epochs": rows}))
    assert values(view, "eval/loss")[0] == 3.0


def test_the_name_that_all_use_comes_before_that_of_one_framework(tmp_path: Path) -> None:
    rows = [{"score": 100 + i, "reward": -900 + i, "step": i} for i in range(10)]
    view = in_file(tmp_path, "log.jsonl", "\n".join(map(json.dumps, rows)))
    assert values(view, "reward")[0] == -900


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (("loss", "kl"), Kind.SFT),
        (("loss", "kl", "entropy"), Kind.RL),
        (("loss", "kl", "reward"), Kind.RL),
        (("kl",), Kind.RL),
        (("avg_loss", "epsilon", "win_rate"), Kind.RL),
    ],
)
def test_a_divergence_alone_makes_no_reinforcement_learning(
    tmp_path: Path, names: tuple[str, ...], kind: Kind
) -> None:
    rows = [json.dumps({"step": i, **dict.fromkeys(names, 0.5 + 0.01 * i)}) for i in range(8)]
    assert in_file(tmp_path, "log.jsonl", "\n".join(rows)).kind is kind


def test_a_mark_behind_the_numbers_makes_no_other_form() -> None:
    rows = [
        f"  epoch {i}/6  loss={2.0 - 0.1 * i:.4f} (2s)  val={1.9 - 0.1 * i:.4f}" + mark
        for i, mark in enumerate([" [best]", "", " [best]", " [best]", " [best]", ""], 1)
    ]
    view = read_text("\n".join(rows))
    assert (len(values(view)), view.total_steps) == (6, 6)


@pytest.mark.parametrize(
    "row",
    [
        '[STEP] step={i} action={{"power": 0.7}} reward=0.{i} done=false error=null',
        '{{"step": {i}, "action": 3, "reward": 0.{i}, "done": false}}',
        '{{"episode_id": "a", "observation_delta": "x", "reward": 0.{i}, "terminal": false}}',
    ],
)
def test_steps_within_an_episode_are_no_rows_of_a_run(tmp_path: Path, row: str) -> None:
    text = "\n".join(row.format(i=i) for i in range(1, 40))
    name = "log.jsonl" if row.startswith("{{") else "run.log"
    assert not values(in_file(tmp_path, name, text), "reward")


def test_episodes_are_rows_of_a_run(tmp_path: Path) -> None:
    rows = [json.dumps({"episode": i, "reward": i / 2, "terminated": True}) for i in range(20)]
    assert len(values(in_file(tmp_path, "log.jsonl", "\n".join(rows)), "reward")) == 20


@pytest.mark.parametrize("word", ["critic", "Value", "test", "best", "KL"])
def test_a_sentence_about_another_loss_is_no_row(word: str) -> None:
    rows = [f"epoch {i} {word} loss {x}" for i, x in enumerate(LOSSES)]
    assert not values(read_text("\n".join(rows)))


def test_a_loss_by_any_other_name_is_that_of_training() -> None:
    rows = [f"epoch {i} reconstruction loss {x}" for i, x in enumerate(LOSSES)]
    assert values(read_text("\n".join(rows))) == LOSSES


def test_rows_of_a_script_go_before_pairs_that_lack_a_loss_or_reward() -> None:
    lines = [f"--- Epoch {i} ---\n  train_loss = {x}\n  val_loss   = {x + 1}" for i, x in LOSS_AT]
    view = read_text("\n".join(lines))
    assert values(view) == LOSSES
    assert values(view, "eval/loss") == [round(x + 1, 3) for x in LOSSES]
    lines = [f"Step {i}: mean reward = {x}, kl = 0.01, policy loss = 0.1" for i, x in LOSS_AT]
    assert values(read_text("\n".join(lines)), "reward") == LOSSES


def test_a_count_in_brackets_is_the_step_and_shows_the_total() -> None:
    lines = [f"Epoch:[ 1/ 3], step:[{10 * i:5}/ 1000], loss: {x}, lr: 1e-05" for i, x in LOSS_AT]
    view = read_text("\n".join(lines))
    assert view.metrics["train/loss"].steps.tolist() == [10 * i for i, _ in LOSS_AT]
    assert view.total_steps == 1000


@pytest.mark.parametrize(
    ("file", "metric"),
    [
        ("run-exp1-tag-train_loss.csv", "train/loss"),
        ("run-exp1_validation-tag-epoch_loss.csv", "eval/loss"),
        ("run_1-tag-rewards_mean.csv", "reward"),
        ("loss.csv", "train/loss"),
    ],
)
def test_a_download_of_tensorboard_has_its_metric_in_its_name(
    tmp_path: Path, file: str, metric: str
) -> None:
    rows = [f"1699000000.{i},{10 * i},{x}" for i, x in LOSS_AT]
    view = in_file(tmp_path, file, "\n".join(["Wall time,Step,Value", *rows]))
    assert values(view, metric) == LOSSES
    assert view.metrics[metric].steps.tolist() == [10 * i for i, _ in LOSS_AT]
    assert "time/step" not in view.metrics
