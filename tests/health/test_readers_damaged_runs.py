"""A run folder with a file that cannot be read: the rest is read, and a note names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from homeostat.health.readers import open_run
from homeostat.health.view import RunView

NUM_STEPS = 12
RUBBISH = bytes(range(256)) * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "completions").mkdir(parents=True)
    config = {"algorithm": {"type": "sft"}, "runs_dir": "runs", "trainer": {"lr": 1e-3}}
    (run / "config.json").write_text(json.dumps(config))
    steps = range(1, NUM_STEPS + 1)
    records = [{"step": n, "time": n, "train/loss": 2 - n / 20} for n in steps]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    shown = [str({"train/loss": 2 - n / 20, "step": n}) for n in steps]
    (run / "console.log").write_text("".join(line + "\n" for line in shown))
    events = [("run_started", 0), ("training", 0), ("run_failed", NUM_STEPS)]
    lines = [json.dumps({"kind": kind, "step": step, "time": 1.0}) for kind, step in events]
    (run / "events.jsonl").write_text("".join(line + "\n" for line in lines))
    (run / "traceback.txt").write_text("RuntimeError: the sky fell\n")
    return run


def rubbish(file: Path) -> None:
    file.write_bytes(RUBBISH)


def folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


def loop(file: Path) -> None:
    """A file that cannot be opened, whoever asks: it is a link to itself."""
    file.unlink()
    file.symlink_to(file)


def broken_line(file: Path) -> None:
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], "{broken\n", *lines[2:]]))


def losses(view: RunView) -> int:
    return len(view.metrics["train/loss"]) if "train/loss" in view.metrics else 0


def notes(view: RunView) -> str:
    return "\n".join(view.facts["reading"].notes)


@pytest.mark.parametrize("damage", [rubbish, folder_instead, loop])
@pytest.mark.parametrize("name", ["metrics.jsonl", "console.log", "events.jsonl", "traceback.txt"])
def test_one_file_that_cannot_be_read_costs_no_other(
    folder: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(folder / name)
    view = open_run(folder)
    assert f"{name}: " in notes(view)
    # The console showed the losses, too.
    assert losses(view) == NUM_STEPS
    assert bool(view.events) == (name != "events.jsonl")
    assert view.log.first("the sky fell") is None if name == "traceback.txt" else True


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_damaged_line_is_passed_over_and_named(folder: Path, name: str) -> None:
    broken_line(folder / name)
    view = open_run(folder)
    assert notes(view) == f"{folder / name}: lines that cannot be read were passed over: 2."
    assert losses(view) == NUM_STEPS - (name == "metrics.jsonl")


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_line_that_is_just_being_written_is_not_damaged(folder: Path, name: str) -> None:
    with (folder / name).open("a") as file:
        file.write('{"step": 13, "ti')
    view = open_run(folder)
    assert (notes(view), losses(view)) == ("", NUM_STEPS)


def test_completions_that_cannot_be_read_are_named(folder: Path) -> None:
    rubbish(folder / "completions" / "step_00000003.parquet")
    view = open_run(folder)
    assert "step_00000003.parquet: not a whole Parquet file" in notes(view)
    assert losses(view) == NUM_STEPS


def test_settings_that_cannot_be_read_are_named(folder: Path) -> None:
    rubbish(folder / "config.json")
    view = open_run(folder)
    assert notes(view) == f"{folder / 'config.json'}: its settings cannot be read."
    assert losses(view) == NUM_STEPS


@pytest.mark.parametrize("name", ["metrics.jsonl", "console.log", "events.jsonl"])
def test_an_empty_file_is_no_damage(folder: Path, name: str) -> None:
    (folder / name).write_text("")
    assert notes(open_run(folder)) == ""
