"""Folders and files for training and for held-out rows are one run, and their losses stay apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from homeostat.health.readers import open_run, runs_at
from homeostat.health.readers.places.run_parts import are_parts
from homeostat.health.readers.places.run_places import runs_of_files


def csv_of(losses: np.ndarray) -> str:
    rows = [f"{n},{loss:.3f}" for n, loss in enumerate(losses.tolist(), start=1)]
    return "\n".join(["epoch,loss", *rows]) + "\n"


FALLS, RISES = 3 - 0.05 * np.arange(1, 31), 2 + 0.05 * np.arange(1, 31)


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ("train.csv", "val.csv"),
        ("train_log.csv", "valid_log.csv"),
        ("train/metrics.csv", "validation/metrics.csv"),
        ("loss_train/metrics.csv", "loss_val/metrics.csv"),
        ("metrics.csv", "eval/metrics.csv"),
    ],
)
def test_either_loss_comes_from_its_own_file(tmp_path: Path, train: str, held_out: str) -> None:
    for name, losses in ((train, FALLS), (held_out, RISES)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(csv_of(losses))
    (run,) = runs_at(tmp_path)
    metrics = open_run(run, config=None).metrics
    np.testing.assert_allclose(metrics["train/loss"].values, FALLS, atol=1e-3)
    np.testing.assert_allclose(metrics["eval/loss"].values, RISES, atol=1e-3)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("train", "validation"), True),
        (("loss_train", "loss_val", "acc_train", "acc_val"), True),
        (("train_lr1e-3", "train_lr1e-4"), False),
        (("train_a", "test_b"), False),
        (("run1", "run2"), False),
        (("train", "out"), False),
        (("train",), False),
        ((), False),
    ],
)
def test_folders_are_parts_if_only_that_word_differs(
    names: tuple[str, ...], expected: bool
) -> None:
    assert are_parts(names) is expected


def test_a_held_out_file_alone_keeps_its_names(tmp_path: Path) -> None:
    (tmp_path / "val.csv").write_text(csv_of(FALLS))
    (run,) = runs_at(tmp_path)
    assert "train/loss" in open_run(run, config=None).metrics


def test_files_that_are_given_one_by_one_are_one_run_as_well(tmp_path: Path) -> None:
    files = [tmp_path / "train.csv", tmp_path / "val.csv", tmp_path / "other.csv"]
    for file, losses in zip(files, (FALLS, RISES, FALLS), strict=True):
        file.write_text(csv_of(losses))
    (run,) = runs_of_files(files[:2])
    assert {"train/loss", "eval/loss"} <= open_run(run, config=None).metrics.keys()
    assert len(runs_of_files(files)) == 3
