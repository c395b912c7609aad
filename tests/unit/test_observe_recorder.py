"""Names and the recorder: what a record's value means, and when one is written."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homeostat.observe.jsonl import iter_jsonl, read_metrics
from homeostat.observe.names import CATALOGUE, Reduce, describe
from homeostat.observe.recorder import Recorder
from homeostat.observe.run_dir import RunDir
from homeostat.observe.sinks import VendorGuard, build_sinks


def recorder_on(run_dir: RunDir, *, log_interval: int, extra: list[Any] | None = None) -> Recorder:
    sinks = build_sinks((), run_dir, run_name="run", resumed_from=None)
    return Recorder(run_dir, [*sinks, *(extra or [])], log_interval=log_interval)


def test_every_metric_is_described_once_and_patterns_take_what_they_say() -> None:
    names = [info.name for info in CATALOGUE]
    assert len(set(names)) == len(names)
    for info in CATALOGUE:
        assert describe(info.name.replace("<i>", "7").replace("<name>", "my-1_x.y")) is info
        assert info.meaning.endswith(".")
    for unknown in ("gpu/x/memory_used", "gpu/<i>/memory_used", "gpu/01/memory_used", "loss", ""):
        assert describe(unknown) is None


def test_a_record_stands_for_all_steps_since_the_last_one(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    loss, seconds, tokens = rng.random(7), rng.random(7) + 0.1, rng.integers(100, 900, 7)
    with RunDir(tmp_path) as run_dir:
        recorder = recorder_on(run_dir, log_interval=3)
        for i in range(7):
            recorder.log(
                i + 1,
                {
                    "train/loss": loss[i],
                    "train/row_loss_max": loss[i] * 2,
                    "num_tokens": float(tokens[: i + 1].sum()),
                    "data/rows": 4.0,
                    "time/step": seconds[i],
                    "throughput/tokens_per_s": tokens[i] / seconds[i],
                },
            )
        recorder.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [3, 6, 7]
    for record, (a, b) in zip(records, [(0, 3), (3, 6), (6, 7)], strict=True):
        assert record["train/loss"] == pytest.approx(loss[a:b].mean(), rel=1e-12)
        assert record["train/row_loss_max"] == 2 * loss[a:b].max()
        assert record["num_tokens"] == tokens[:b].sum()
        assert record["data/rows"] == 4 * (b - a)
        assert record["time/step"] == pytest.approx(seconds[a:b].mean(), rel=1e-12)
        # All tokens over all seconds, not the mean of the steps' rates.
        rate = tokens[a:b].sum() / seconds[a:b].sum()
        assert record["throughput/tokens_per_s"] == pytest.approx(rate, rel=1e-12)


def test_an_evaluation_gets_a_record_at_its_own_step(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        recorder = recorder_on(run_dir, log_interval=10)
        for step in range(1, 11):
            extra = {"eval/loss": 2.0} if step == 4 else {}
            recorder.log(step, {"train/loss": float(step), **extra})
        recorder.close()
        recorder.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["train/loss"]) for record in records] == [(4, 2.5), (10, 7.5)]
    assert "eval/loss" not in records[1]


def test_flush_before_a_checkpoint_makes_resumed_records_equal(tmp_path: Path) -> None:
    """Stopped at the checkpoint of step 5 and resumed, the records are those of one run."""

    def steps(run_dir: RunDir, first: int, last: int) -> None:
        recorder = recorder_on(run_dir, log_interval=4)
        for step in range(first, last + 1):
            recorder.log(step, {"train/loss": float(step) ** 2})
            if step == 5:
                recorder.flush()

    with RunDir(tmp_path / "whole") as run_dir:
        steps(run_dir, 1, 12)
    with RunDir(tmp_path / "resumed") as run_dir:
        steps(run_dir, 1, 8)
    with RunDir(tmp_path / "resumed") as run_dir:
        assert run_dir.truncate_after(5) == 1
        steps(run_dir, 6, 12)

    def losses(name: str) -> list[tuple[int, float]]:
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        return [(record["step"], record["train/loss"]) for record in records]

    assert losses("whole") == losses("resumed")
    assert [step for step, _ in losses("whole")] == [4, 5, 8, 12]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_never_averaged_away(tmp_path: Path, bad: float) -> None:
    with RunDir(tmp_path) as run_dir:
        recorder = recorder_on(run_dir, log_interval=3)
        for step, value in enumerate([1.0, bad, 2.0], start=1):
            recorder.log(step, {"train/loss": value, "train/row_loss_max": value})
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert not math.isfinite(record["train/loss"])
    assert not math.isfinite(record["train/row_loss_max"])


def test_an_unknown_name_or_a_step_twice_is_our_own_bug(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        recorder = recorder_on(run_dir, log_interval=1)
        with pytest.raises(AssertionError, match="train/los"):
            recorder.log(1, {"train/los": 1.0})
        recorder.log(2, {"train/loss": 1.0})
        with pytest.raises(AssertionError, match="step 2"):
            recorder.log(2, {"train/loss": 1.0})


class BrokenSink:
    """A service that dies with an error of its own at the third record."""

    name = "broken"

    def __init__(self) -> None:
        self.num_calls = 0

    def log(self, step: int, metrics: Any) -> None:
        self.num_calls += 1
        if self.num_calls == 3:
            raise KeyError("a vendor's own trouble")

    def close(self) -> None:
        raise AssertionError("a sink that failed is not called again")


def test_a_failing_service_is_switched_off_and_written_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = BrokenSink()
    with RunDir(tmp_path) as run_dir:
        recorder = recorder_on(run_dir, log_interval=1, extra=[VendorGuard(broken)])
        for step in range(1, 6):
            recorder.log(step, {"train/loss": 1.0})
        recorder.close()
    assert broken.num_calls == 3
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5
    (event,) = iter_jsonl(tmp_path / "events.jsonl")
    assert (event["kind"], event["step"], event["sink"]) == ("sink_failed", 3, "broken")
    assert "vendor's own trouble" in event["error"]
    assert "switched off" in caplog.text


def test_events_carry_kind_step_time_and_fields(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        recorder = recorder_on(run_dir, log_interval=1)
        recorder.event("eval_done", 7, loss=1.5, path=tmp_path, rows=np.int64(3))
    (event,) = iter_jsonl(tmp_path / "events.jsonl")
    assert event.pop("time") > 1.6e9
    assert event == {
        "kind": "eval_done", "step": 7, "loss": 1.5, "path": str(tmp_path), "rows": 3,
    }  # fmt: skip


def test_all_ways_to_reduce_are_in_use() -> None:
    assert {info.reduce for info in CATALOGUE} == set(Reduce)


EXTREMES = {
    Reduce.MAX: re.compile(r"(^|[/_])max([/_]|$)"),
    Reduce.MIN: re.compile(r"(^|[/_])min([/_]|$)"),
}
MEANINGS = {
    Reduce.MAX: ("Largest", "Longest", "Most", "Peak", "Highest"),
    Reduce.MIN: ("Smallest", "Shortest", "Fewest", "Least", "Lowest"),
}


def test_a_metric_is_reduced_as_its_name_and_meaning_say() -> None:
    for info in CATALOGUE:
        for reduce in EXTREMES:
            means_it = info.meaning.startswith(MEANINGS[reduce])
            says_so = EXTREMES[reduce].search(info.name) or means_it
            assert not says_so or info.reduce is reduce, info.name
        if "so far" in info.meaning or "in all" in info.meaning:
            assert info.reduce is Reduce.LAST, info.name
        if info.name.endswith(("/mean", "_mean")) and not info.name.startswith("eval/"):
            assert info.reduce is Reduce.MEAN, info.name


@pytest.mark.parametrize(
    "name",
    [
        "policy/ratio_min",
        "sampling/importance_sampling_ratio/min",
        "completions/min_length",
        "completions/min_terminated_length",
    ],
)
def test_the_smallest_of_all_steps_is_recorded_and_a_nan_is_not_hidden(
    tmp_path: Path, name: str
) -> None:
    with RunDir(tmp_path) as run_dir:
        recorder = recorder_on(run_dir, log_interval=3)
        for step, value in enumerate((0.5, 0.25, 4.0, 0.5, math.nan, 0.25), start=1):
            recorder.log(step, {name: value, "time/step": 1.0})
    smallest, hidden = read_metrics(tmp_path / "metrics.jsonl")
    assert smallest[name] == 0.25
    assert math.isnan(hidden[name])
