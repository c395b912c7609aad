"""What a person sees: formats, progress, the three views, and the log that keeps it all."""

from __future__ import annotations

import io
import logging
import math
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from homeostat.errors import ConfigError
from homeostat.observe import format as fmt
from homeostat.observe.console import PlainView, QuietView, make_view
from homeostat.observe.live import LiveView
from homeostat.observe.logs import logging_to, resolve_level, tail
from homeostat.observe.progress import Progress, event_line
from homeostat.observe.transcript import RunLabel

LABEL = RunLabel("my-run", "qwen3, 596M parameters", total_steps=200)


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, record=True)


def shown(view: LiveView, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(view.render())
    return console.export_text()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (59.6, "1:00"), (187, "3:07"),
        (7387, "2:03:07"), (3600 * 50, "2 d 02 h"), (math.inf, "-"), (math.nan, "-"), (-3, "0.0 s"),
    ],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert fmt.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023.9, "1 KiB"), (3.4 * 2**20, "3.4 MiB"), (71 * 2**30, "71 GiB")],
)
def test_byte_sizes(value: float, text: str) -> None:
    assert fmt.byte_size(value) == text


@given(st.floats())
def test_any_number_has_a_short_text(value: float) -> None:
    for show in (fmt.number, fmt.count, fmt.byte_size, fmt.loss, fmt.duration):
        assert 0 < len(show(value)) <= 320
    if math.isfinite(value) and 1e-3 <= abs(value) < 1e6:
        assert float(fmt.number(value)) == pytest.approx(value, rel=1e-3)


@given(st.lists(st.floats(), max_size=300), st.integers(1, 80))
def test_a_sparkline_never_exceeds_its_width(values: list[float], width: int) -> None:
    line = fmt.sparkline(values, width)
    assert len(line) <= width
    assert len(line) >= min(len(values), width) // 2


def test_a_sparkline_follows_its_values_and_crosses_out_holes() -> None:
    assert fmt.sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert fmt.sparkline([1.0, math.nan, 2.0], 10) == "▁x█"
    assert fmt.sparkline([], 10) == ""


def test_eta_is_not_thrown_off_by_one_long_stall() -> None:
    progress = Progress("a", total_steps=100)
    now = 0.0
    for step in range(1, 51):
        now += 1000.0 if step == 30 else 1.0
        progress.on_step(step, {}, now=now)
    remaining = progress.remaining_s(now)
    assert remaining is not None
    assert 50 <= remaining <= 75
    # It counts down while a step is under way, and never below zero.
    assert progress.remaining_s(now + 5) == pytest.approx(remaining - 5)
    assert progress.remaining_s(now + 1e9) == 0


def test_eta_counts_the_evaluations_that_are_still_to_come() -> None:
    progress = Progress("a", total_steps=200)
    now = 0.0
    for step in range(1, 101):
        now += 11.0 if step % 10 == 0 else 1.0
        progress.on_step(step, {}, now=now)
    assert progress.remaining_s(now) == pytest.approx(200, rel=0.05)


def test_eta_of_a_resumed_run_counts_only_what_is_left() -> None:
    progress = Progress("a", total_steps=100, start_step=90, step=90)
    for step in (91, 92, 93):
        progress.on_step(step, {}, now=10.0 * step)
    assert progress.remaining_s(930.0) == pytest.approx(70)
    assert progress.share_done == 0.93


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_live_panel_fits_and_shows_what_matters(width: int) -> None:
    view = make_view("live", terminal(width), label=LABEL)
    assert isinstance(view, LiveView)
    for step in range(1, 81):
        metrics = {"train/loss": 3.0 / step, "learning_rate": 1e-5, "grad_norm": 0.5}
        metrics |= {"throughput/tokens_per_s": 81234.0, "memory/max_alloc": 3 * 2.0**30}
        if step == 60:
            metrics["eval/loss"] = 1.25
        view.step(step, metrics)
        view.record(step, metrics)
    view.event("step_skipped", 70, {"reason": "[bold]loss[/bold] is not finite"})
    text = shown(view, width)
    view.close()
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= 14
    for part in ("my-run", "step 80/200", "40%", "eta", "0.0375", "1.2500", "at step 60", "81.2k"):
        assert part in text
    assert "step skipped reason=[bold]loss" in text
    assert "█" in text


def test_the_live_panel_survives_values_that_are_not_finite_and_no_values() -> None:
    view = make_view("live", terminal(), label=LABEL)
    assert isinstance(view, LiveView)
    assert "step 0/200" in shown(view, 80)
    view.step(1, {"train/loss": math.nan, "grad_norm": math.inf, "eval/loss": math.nan})
    assert "nan" in shown(view, 80)
    view.close()


def test_a_resumed_view_knows_the_best_of_before() -> None:
    history = [{"step": 3, "eval/loss": 0.5, "train/loss": 1.0}, {"step": 6, "eval/loss": 0.7}]
    view = make_view("live", terminal(), label=LABEL, history=history)
    assert isinstance(view, LiveView)
    view.step(9, {"train/loss": 1.0})
    assert "best 0.5000 at step 3" in shown(view, 80)
    view.close()


def test_plain_lines_line_up_and_are_not_too_many() -> None:
    out = io.StringIO()
    view = make_view("plain", Console(file=out, width=40), label=LABEL)
    for step in range(1, 101):
        metrics = {"train/loss": random.uniform(0.5, 9), "grad_norm": random.uniform(0.1, 99)}
        metrics |= {"learning_rate": 1e-5 * step, "throughput/tokens_per_s": 10.0**step}
        if step == 50:
            metrics["eval/loss"] = 0.75
        view.step(step, metrics)
        view.record(step, metrics)
    view.record(200, metrics)
    view.event("checkpoint_saved", 100, {"bytes": 2**30, "path": "checkpoints/step_100"})
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    head, *records, event = lines
    assert head == "my-run: qwen3, 596M parameters, 200 steps"
    # The first, the evaluation and the last; all others came within two seconds.
    assert [line[:12] for line in records] == ["step   1/200", "step  50/200", "step 200/200"]
    assert "eval 0.7500 (best)" in records[1]
    assert event == "step 100/200  checkpoint saved bytes=1GiB path=checkpoints/step_100"
    assert len({line.index("grad") for line in records}) == 1


def test_auto_is_live_on_a_terminal_and_plain_elsewhere() -> None:
    live = make_view("auto", terminal(), label=LABEL)
    assert isinstance(live, LiveView)
    live.close()
    assert isinstance(make_view("auto", Console(file=io.StringIO()), label=LABEL), PlainView)
    latin = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="latin-1"), force_terminal=True)
    assert isinstance(make_view("auto", latin, label=LABEL), PlainView)
    out = io.StringIO()
    quiet = make_view("quiet", Console(file=out), label=LABEL)
    assert type(quiet) is QuietView
    quiet.record(200, {"train/loss": 1.0})
    assert out.getvalue() == ""


def test_an_event_line_is_short_and_one_line() -> None:
    line = event_line("oom_retry", {"why": "a\nb", "kept": {"x": 1}, "n": 2.5, "ids": [1, 2]})
    assert line == "oom retry why=a b n=2.500 ids=1,2"
    assert len(event_line("x", {"text": "y" * 500}, max_length=60)) == 60


def test_log_level_flag_beats_environment_beats_recipe() -> None:
    assert resolve_level(None, config="warning", environ={}) == "warning"
    assert resolve_level(None, config="warning", environ={"HOMEOSTAT_DEBUG": "0"}) == "warning"
    assert resolve_level(None, config="warning", environ={"HOMEOSTAT_DEBUG": "1"}) == "debug"
    assert resolve_level("ERROR", config="info", environ={"HOMEOSTAT_DEBUG": "1"}) == "error"
    with pytest.raises(ConfigError, match="--log-level"):
        resolve_level("loud", config="info", environ={})


def test_console_log_keeps_our_lines_library_warnings_and_progress(tmp_path: Path) -> None:
    out, path = io.StringIO(), tmp_path / "console.log"
    console = Console(file=out, width=100)
    before = list(logging.getLogger().handlers)
    with logging_to(console, level="info", console_log=path):
        logging.getLogger("homeostat.run").info("our line %d", 1)
        logging.getLogger("homeostat.run").debug("too quiet")
        logging.getLogger("some.library").warning("library trouble")
        logging.getLogger("some.library").info("library chatter")
        warnings.warn(" ".join(["an", "old", "function"]), DeprecationWarning, stacklevel=1)
        make_view("plain", console, label=LABEL).record(200, {"train/loss": 1.5})
    kept, seen = path.read_text(), out.getvalue()
    for text in (kept, seen):
        assert text.count("our line 1") == 1
        assert text.count("library trouble") == 1
        assert text.count("an old function") == 1
        assert text.count("loss 1.5000") == 1
        assert "too quiet" not in text
        assert "chatter" not in text
    assert logging.getLogger().handlers == before
    with logging_to(console, level="debug", console_log=path):
        logging.getLogger("homeostat.run").debug("quiet no more")
    assert path.read_text().startswith(kept)
    assert "quiet no more" in tail(path, 1)[0]


def test_a_terminal_shows_brackets_as_they_are(tmp_path: Path) -> None:
    console = terminal(100)
    with logging_to(console, level="info"):
        logging.getLogger("homeostat").info("model[/bold] [red]x")
    assert "model[/bold] [red]x" in console.export_text()


def test_a_full_disk_does_not_stop_logging(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    with logging_to(Console(file=out), level="info", console_log=Path("/dev/full")):
        for number in range(3):
            logging.getLogger("homeostat").info("line %d", number)
    assert "line 2" in out.getvalue()
    assert capsys.readouterr().err.count("cannot write") == 1


def test_import_sets_up_no_logging() -> None:
    code = (
        "import logging, homeostat.observe.console, homeostat.observe.logs as l\n"
        "root = logging.getLogger()\n"
        "assert not root.handlers and root.level == logging.WARNING\n"
        "assert not logging.getLogger('homeostat').handlers\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
