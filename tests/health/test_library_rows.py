"""Rows of Keras, flair, mlx-lm, build-nanogpt, llm.c and of W&B's summary."""

from __future__ import annotations

from math import isnan

import pytest

from homeostat.health.diagnose import diagnose
from homeostat.health.readers import read_text
from homeostat.health.readers.files.long_logs import LongLogReader
from homeostat.health.readers.files.text import TextReader
from homeostat.health.registry import RULES
from homeostat.health.view import RunView

LOSSES = [round(2.0 - 0.1 * i, 4) for i in range(10)]


def values(view: RunView, name: str = "train/loss") -> list[float]:
    found = view.series(name)
    return [] if found is None else found.values.tolist()


def names_of_alarms(text: str) -> set[str]:
    findings = diagnose(read_text(text), RULES).findings
    return {one.name for one in findings if one.level.value != "info"}


@pytest.mark.parametrize(
    "line",
    [
        "100/100 [==============================] - 5s 48ms/step - loss: {x} - val_loss: {x}",
        "100/100 \u2501\u2501\u2501\u2501 5s 48ms/step - accuracy: 0.5 - loss: {x} - val_loss: {x}",
        "100/100 - 5s - loss: {x} - accuracy: 0.5000 - val_loss: {x}",
        "100/100 - 5s - 48ms/step - loss: {x} - val_loss: {x}",
        "100/Unknown - 5s 48ms/step - loss: {x} - val_loss: {x}",
    ],
)
def test_keras_has_one_row_for_each_epoch(line: str) -> None:
    """Within an epoch Keras prints means, which are redrawn."""
    text = "".join(
        f"Epoch {i}/10\n 50/100 [=====>......] - ETA: 2s - loss: 9.0\b\b\b\b{line.format(x=x)}\n"
        for i, x in enumerate(LOSSES, 1)
    )
    view = read_text(text)
    assert values(view) == values(view, "eval/loss") == LOSSES
    assert view.last_step == 10


def test_keras_loss_of_nan_is_found_within_the_first_epoch() -> None:
    text = "Epoch 1/3\n365/5427 [=>....] - ETA: 1:11:28 - loss: nan - output_1_loss: nan\n"
    assert isnan(values(read_text(text))[0])
    assert "vital-sign-not-finite" in names_of_alarms(text)


def flair_epoch(number: int, loss: float, batches: list[float]) -> str:
    return "".join(
        [
            *(
                f"2020-02-03 04:46:20,809 epoch {number} - iter {i}/6 - loss {x} - "
                "samples/sec: 0.55\n"
                for i, x in enumerate(batches, 1)
            ),
            f"2020-02-03 04:45:49,242 EPOCH {number} done: loss {loss} - lr 0.0250\n",
            f"2020-02-03 04:46:11,877 DEV : loss {loss + 0.1:.4f} - score 1.0\n",
        ]
    )


def test_flair_has_one_row_for_each_epoch() -> None:
    """One batch moves the mean since the epoch began; that is no divergence."""
    batches = [0.117, 0.191, 0.140, 4.697, 4.031, 3.534]
    text = "".join(flair_epoch(i, x, batches) for i, x in enumerate(LOSSES, 1))
    view = read_text(text)
    assert values(view) == LOSSES
    assert values(view, "learning_rate") == [0.025] * 10
    assert len(values(view, "eval/loss")) == 10
    assert names_of_alarms(flair_epoch(43, 3.9541, batches)) == set()


def test_flair_loss_of_nan_is_found_within_an_epoch() -> None:
    text = flair_epoch(1, 0.5, [0.5, float("nan"), float("nan")]).splitlines()[:3]
    assert isnan(values(read_text("\n".join(text)))[-1])


def test_single_evaluations_of_mlx_lm_are_read() -> None:
    text = "Iter 1: Val loss 2.480, Val took 0.732s\n" + "".join(
        f"Iter {10 * i}: Train loss {x:.3f}, Learning Rate 1.000e-05, It/sec 1.022, "
        "Tokens/sec 88.083, Trained Tokens 862, Peak mem 6.906 GB\n"
        for i, x in enumerate(LOSSES, 1)
    )
    view = read_text(text)
    assert values(view, "eval/loss") == [2.48]
    assert values(view) == LOSSES


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("{i} train {x}", "{i} val {x}\n{i} hella 0.2913"),
        ("s:{i} trl:{x} lr:0.000600 norm:1.02", "s:{i} tel:{x}\ns:{i} eval:0.2913"),
    ],
)
def test_logs_of_gpt2_from_scratch_are_read(train: str, val: str) -> None:
    rows = [f"{val}\n{train}\n".format(i=10 * i, x=x) for i, x in enumerate(LOSSES)]
    view = read_text("".join(rows))
    assert values(view) == values(view, "eval/loss") == LOSSES
    assert view.last_step == 90


def test_a_summary_of_wandb_is_read_if_the_log_has_no_rows() -> None:
    summary = (
        "wandb: Run history:\nwandb:     loss \u2581\u2588\n"
        "wandb: \nwandb: Run summary:\nwandb: batch_id 127\nwandb:     loss nan\n"
        "wandb:       lr 0.0\nwandb: \nwandb: Synced 6 W&B file(s)\n"
    )
    view = read_text(summary)
    assert isnan(values(view)[0])
    assert values(view, "learning_rate") == [0.0]
    rows = "".join(f"step={i} loss={x} lr=1e-05\n" for i, x in enumerate(LOSSES, 1))
    assert values(read_text(rows + summary)) == LOSSES


def test_the_empty_mean_of_lightning_is_not_nemos_loss() -> None:
    bar = (
        "Epoch 0:   3%|3         | {i}/20101 [2:12:19<76:15:08, 14.05s/it, loss=nan, v_num=, "
        "reduced_train_loss={x}, gradient_norm=1.010, global_step={i}]\n"
    )
    view = read_text("".join(bar.format(i=i, x=x) for i, x in enumerate(LOSSES, 1)))
    assert values(view) == LOSSES


def test_long_logs_have_the_same_rows() -> None:
    """The reader of long logs skips lines by their shape: headers of epochs must not be."""
    noise = "".join(f"worker says hello number {i % 7}\n" for i in range(25_000))
    keras = "".join(
        f"Epoch {i}/10\n100/100 [====] - 5s 48ms/step - loss: {x}\n"
        for i, x in enumerate(LOSSES, 1)
    )
    llm_c = "".join(f"s:{i} trl:{x}\n" for i, x in enumerate(LOSSES, 11))
    text = "Epoch 0/10\n100/100 [====] - 5s 48ms/step - loss: 2.1\n" + noise + keras + llm_c
    plain, fast = TextReader(), LongLogReader()
    plain.feed(text.splitlines())
    fast.feed_bytes([line.encode() for line in text.splitlines()])
    fast.finish()
    mine, theirs = plain.recorder.series()["loss"], fast.recorder.series()["loss"]
    assert mine.values.tolist() == theirs.values.tolist() == [2.1, *LOSSES, *LOSSES]
    assert mine.steps.tolist() == theirs.steps.tolist()
