"""Names of metrics that no table has are understood by their words, or not at all."""

from __future__ import annotations

import math

import pytest

from homeostat.health.frameworks import ALL
from homeostat.health.readers import read_text
from homeostat.health.readers.values.common_names import METRICS
from homeostat.health.readers.values.metric_words import meaning_of

UNDERSTOOD = {
    "train/loss": ("smoothed train CE", "NLL/token", "trainLossEpoch", "train_cross_entropy_loss",
                   "training bits per byte", "mean loss per token", "loss.train.avg"),
    "eval/loss": ("Dev NLL", "held-out nll", "val/bpb", "eval_avg_cross-entropy", "TestLoss"),
    "train/perplexity": ("ppl", "Train PPL", "training_perplexity"),
    "eval/perplexity": ("Val. PPL", "eval/ppl", "test perplexity"),
    "reward": ("mean_ep_return", "avg rew per episode", "train/total_reward"),
    "eval/reward": ("val reward mean", "test_return"),
    "learning_rate": ("LR", "current learning rate", "lr/actor", "lr-group0"),
    "grad_norm": ("total grad norm (L2)", "gradient_norm/global", "gnorm"),
    "critic/loss": ("Value Loss", "vf_loss", "critic train loss"),
    "eval/score/accuracy": ("val_Acc", "Accuracy/valid", "test top-1 accuracy"),
    "train/accuracy": ("train_acc", "Training Accuracy"),
    "kl": ("kl_div/mean", "KL to ref"),
    "entropy": ("mean token entropy",),
}  # fmt: skip
OTHERS = (
    "value_function_loss", "reward_std", "best acc", "train val loss", "reward loss", "kl loss",
    "entropy_loss", "best val loss", "max reward", "aux_loss", "router entropy", "loss scale",
    "eval kl", "loss_out", "loss_" * 20, "\u635f\u5931", "",
)  # fmt: skip


@pytest.mark.parametrize("ours", UNDERSTOOD)
def test_a_name_is_understood_by_its_words(ours: str) -> None:
    meanings = {name: meaning_of(name) for name in UNDERSTOOD[ours]}
    assert {name: one and one.name for name, one in meanings.items()} == dict.fromkeys(
        meanings, ours
    )


@pytest.mark.parametrize("name", OTHERS)
def test_a_name_with_a_word_of_another_quantity_is_not(name: str) -> None:
    assert meaning_of(name) is None


def test_the_table_has_no_name_that_its_words_explain() -> None:
    elsewhere = {name for table in ALL.values() for name in table.metrics}
    needless = [
        name
        for name, ours in METRICS.items()
        if name not in elsewhere and (one := meaning_of(name)) is not None and one.name == ours
    ]
    assert needless == []


def test_the_plainest_name_counts_and_validation_comes_before_tests() -> None:
    rows = (
        f"step: {n} test_loss: 9.{n} val_loss: 3.{n} ce_loss: 8.{n} loss: 2.{n}\n"
        for n in range(1, 9)
    )
    metrics = read_text("".join(rows)).metrics
    assert metrics["train/loss"].values[0] == 2.1
    assert metrics["eval/loss"].values[0] == 3.1


def test_the_loss_is_the_logarithm_of_a_perplexity_that_is_logged_alone() -> None:
    rows = (f"epoch {n} | train ppl {9 - n}.0 | dev nll 2.{n}\n" for n in range(1, 9))
    metrics = read_text("".join(rows)).metrics
    assert metrics["train/loss"].values[0] == pytest.approx(math.log(8.0))
    assert metrics["eval/loss"].values[0] == 2.1
    below = (f"epoch {n} | ppl 0.{n} | dev nll 2.{n}\n" for n in range(1, 9))
    assert "train/loss" not in read_text("".join(below)).metrics


@pytest.mark.parametrize(
    ("line", "is_loss"),
    [
        ("epoch {n}: train {down} val {up}\n", True),
        ("Epoch [{n}/9] Training: {down} Validation: {up}\n", True),
        ("epoch {n}: train {up} val {down}\n", False),
    ],
)
def test_numbers_that_are_named_by_their_rows_are_losses_if_they_fall(
    line: str, is_loss: bool
) -> None:
    text = "".join(line.format(n=n, down=f"0.{9 - n}", up=f"0.{n}") for n in range(1, 9))
    assert ({"train/loss", "eval/loss"} <= read_text(text).metrics.keys()) is is_loss
