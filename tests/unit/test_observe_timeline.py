"""The timeline is Chrome trace JSON with a row per process; the time bar is one whole step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from homeostat.observe import time_bar
from homeostat.observe.console import make_view
from homeostat.observe.timeline import FILE, OLD_FILE, Timeline
from homeostat.observe.transcript import RunLabel


def read(file: Path) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """Return the names of the rows, and the spans."""
    records = json.loads(file.read_text())
    rows = {one["pid"]: one["args"]["name"] for one in records if one["name"] == "process_name"}
    spans = [one for one in records if one["ph"] == "X"]
    assert {one["ph"] for one in records} == {"X", "M"}
    for one in spans:
        assert isinstance(one["ts"], int)
        assert one["dur"] >= 1
        assert one["pid"] in rows
    return rows, spans


def test_spans_of_each_process_are_in_a_row_of_their_own(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    timeline.add("trainer 1", "accumulate", began=10.0, ended=10.5)
    timeline.add("trainer 0", "accumulate", began=10.1, ended=10.4)
    timeline.add("trainer 0", "too short to be seen", began=11.0, ended=11.0001)
    with timeline.phase("train", step=3):
        timeline.add("engine 0", "sample", began=12.0, ended=14.0)
    timeline.close()
    rows, spans = read(tmp_path / FILE)
    # The block took no time that anybody would see.
    found = [(rows[one["pid"]], one["name"], one["dur"]) for one in spans[:3]]
    assert found == [
        ("trainer 1", "accumulate", 500_000),
        ("trainer 0", "accumulate", 300_000),
        ("engine 0", "sample", 2_000_000),
    ]
    assert spans[1]["ts"] - spans[0]["ts"] == pytest.approx(100_000, abs=2)
    assert set(rows.values()) == {"controller", "trainer 0", "trainer 1", "engine 0"}


def test_the_files_of_a_timeline_are_bounded_and_each_is_whole(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, max_bytes=2000)
    for number in range(200):
        timeline.add("engine 0", f"call {number}", began=number, ended=number + 0.5)
    timeline.close()
    assert {file.name for file in tmp_path.iterdir()} == {FILE, OLD_FILE}
    _, old = read(tmp_path / OLD_FILE)
    _, new = read(tmp_path / FILE)
    names = [one["name"] for one in old + new]
    assert names == [f"call {number}" for number in range(200 - len(names), 200)]
    assert all(file.stat().st_size < 2500 for file in tmp_path.iterdir())


def test_a_timeline_of_a_run_before_is_kept_once(tmp_path: Path) -> None:
    for name in ("first", "second"):
        timeline = Timeline(tmp_path)
        timeline.add("engine 0", name, began=0.0, ended=1.0)
        timeline.close()
        timeline.close()
    assert read(tmp_path / OLD_FILE)[1][0]["name"] == "first"
    assert read(tmp_path / FILE)[1][0]["name"] == "second"


def test_a_disk_that_takes_nothing_ends_the_timeline_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("in the way")
    timeline = Timeline(tmp_path / "trace")
    timeline.add("engine 0", "sample", began=0.0, ended=1.0)
    timeline.add("engine 0", "sample", began=1.0, ended=2.0)
    timeline.close()


RL = {
    "time/step": 10.0,
    "time/generate": 5.0,
    "time/reward": 1.0,
    "time/train": 2.5,
    "sync/seconds": 0.5,
    "reward": 0.5,
}


def test_the_parts_of_a_step_are_one_whole() -> None:
    found = {part.name: share for part, share in time_bar.shares(RL)}
    assert found == pytest.approx(
        {"generate": 0.5, "reward": 0.1, "train": 0.25, "publish": 0.05, "other": 0.1}
    )
    for width in (1, 7, 10, 33):
        assert sum(time_bar.widths(time_bar.shares(RL), width)) == width
    assert time_bar.letters(RL, width=20) == "[GGGGGGGGGGRRTTTTTP..]"


def test_training_on_rows_waits_or_trains() -> None:
    found = time_bar.shares({"time/step": 4.0, "time/data_wait": 1.0, "train/loss": 1.0})
    assert [(part.name, share) for part, share in found] == [("train", 0.75), ("wait", 0.25)]
    assert time_bar.shares({"train/loss": 1.0}) == []
    assert time_bar.letters({}) == ""


def test_an_asynchronous_step_shows_what_the_trainer_waited() -> None:
    waits = {**RL, "time/wait_groups": 6.0}
    found = {part.name: share for part, share in time_bar.shares(waits)}
    assert found == pytest.approx({"train": 0.25, "publish": 0.05, "wait": 0.6, "other": 0.1})


def test_parts_that_overlap_fill_the_bar_and_no_more() -> None:
    found = time_bar.shares({"time/step": 4.0, "time/generate": 4.0, "time/train": 4.0})
    assert [(part.name, share) for part, share in found] == [("generate", 0.5), ("train", 0.5)]


@pytest.mark.parametrize("choice", ["live", "plain"])
def test_a_terminal_shows_where_the_time_goes(choice: Any) -> None:
    console = Console(width=110, height=40, record=True, force_terminal=choice == "live")
    with console.capture() as captured:
        view = make_view(choice, console, label=RunLabel("run", "a model", 10))
        view.step(1, RL)
        view.record(1, RL)
        view.close()
    text = captured.get()
    if choice == "plain":
        assert "G generate, R reward, S score, T train, P publish, W wait, . other" in text
        assert "[GGGGGGRTTTP.]" in text
    else:
        assert "generate " in text
        assert "50" in text
        assert "█" * 10 in text
