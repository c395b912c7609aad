"""What a person sees: formats, progress, the three views, and the log that keeps it all."""

from __future__ import annotations

import io
import logging
import math
import random
import shlex
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from homeostat.errors import ConfigError
from homeostat.observe import curves
from homeostat.observe import format as fmt
from homeostat.observe.console import PlainView, QuietView, make_view
from homeostat.observe.curves import MAX_BUCKETS, Curve
from homeostat.observe.health_board import HealthBoard
from homeostat.observe.live import LiveView
from homeostat.observe.logs import logging_to, resolve_level, tail
from homeostat.observe.notebook import NotebookView
from homeostat.observe.outlet import Outlet
from homeostat.observe.panel import Room, SampleBoard
from homeostat.observe.progress import Progress, event_line
from homeostat.observe.samples import best_and_worst_prompts
from homeostat.observe.transcript import SECONDS_UNTIL_STATUS, RunLabel

LABEL = RunLabel("my-run", "qwen3, 596M parameters", total_steps=200)
# What a model may write: escapes that move a cursor, other directions, no end, nothing.
HOSTILE = [
    "\x1b[2J\x1b[31mred\x1b[0m", "a\rb\nc\x07\x00", "\u202egnp.exe\u2066", "long " * 20_000,
    "漢字" * 300, "", "[bold]markup[/bold]", "\ud800", "e\u0301" * 100, "👩‍👩‍👧‍👧" * 40,
]  # fmt: skip


def terminal(width: int = 80, height: int = 40) -> Console:
    return Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, record=True
    )  # fmt: skip


def rl_metrics(step: int, *, with_eval: bool = False) -> dict[str, float]:
    """The values of a step as an RL run tells them."""
    share = step / 200
    metrics = {
        "reward": share, "reward_std": 0.31, "frac_reward_zero_std": 0.5,
        "completions/mean_length": 5.9, "completions/max_length": 8.0,
        "completions/clipped_ratio": 0.021, "train/loss": 0.01, "entropy": 2 - share,
        "kl": 0.0021, "clip_ratio/region_mean": 0.0123, "learning_rate": 1e-5, "grad_norm": 0.5,
        "sampling/sampling_logp_difference/mean": 1.4e-7, "time/step": 2.4,
        "time/generate": 0.9, "time/train": 1.4, "throughput/tokens_per_s": 4123.0,
        "num_tokens": 1e4 * step, "memory/max_alloc": 3 * 2.0**30,
    }  # fmt: skip
    if with_eval:
        metrics |= {"eval/reward": share, "eval/pass@1": share, "eval/pass@8": min(1.0, 2 * share)}
    return metrics


def sample(prompt: str, completion: str, reward: float | None, **more: object) -> dict[str, object]:
    row = {"prompt": prompt, "completion": completion, "reward": reward, "stop_reason": "stop"}
    return {"advantage": 0.0, **row, **more}


def shown(view: LiveView, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(view.render())
    return console.export_text()


def watched_rl(width: int, height: int, *, num_steps: int = 90) -> LiveView:
    view = make_view("live", terminal(width, height), label=LABEL)
    assert isinstance(view, LiveView)
    for step in range(1, num_steps + 1):
        metrics = rl_metrics(step, with_eval=step % 10 == 0)
        view.step(step, metrics)
        view.record(step, metrics)
        rows = [
            sample(f"{step}+{n}=", str(step + n), n / 3, stop_reason="length") for n in range(4)
        ]
        view.samples(step, rows)
        view.status("sampling", 12, 64)
    view.event("checkpoint_saved", num_steps, {"path": "checkpoints/a"})
    view.event("eval_done", num_steps, {"reward": 0.5})
    return view


def finding(
    code: str, level: str = "warn", *, state: str = "open", **more: object
) -> dict[str, object]:
    """A line of findings.jsonl."""
    record = {
        "step": 9, "state": state, "code": code, "name": "lr-too-high", "family": "learning",
        "level": level, "confidence": "measured", "first_step": 7, "subject": "",
        "message": f"{code} saw a loss of 9.5 (limit 3) since step 7. Lower the learning rate.",
        "evidence": ["train/loss 9.5"],
        "causes": [{"name": "lr-too-high", "why": "it was 0.5"}, {"name": "other", "why": "x"}],
        "fixes": [{"setting": "trainer.lr", "value": "a half", "why": "", "grade": "unsafe"}],
    }  # fmt: skip
    return {**record, **more}


APPLIED = {"code": "LRN005", "cause": "lr-too-high", "remedy": "halve-lr", "path": "trainer.lr",
           "old": 0.5, "new": 0.25, "grade": "unsafe", "window": 10}  # fmt: skip
JUDGED = {"code": "LRN005", "cause": "lr-too-high", "remedy": "halve-lr", "helped": False,
          "metric": "grad_norm", "before": 2.0, "after": 4.0}  # fmt: skip


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


@pytest.mark.parametrize("size", [(60, 24), (60, 14), (80, 24), (120, 50), (40, 10), (20, 5)])
def test_the_panel_of_rewards_fits_its_terminal(size: tuple[int, int]) -> None:
    view = watched_rl(*size)
    text = shown(view, size[0])
    view.close()
    lines = text.splitlines()
    assert all(len(line) <= size[0] for line in lines)
    assert len(lines) < size[1]
    assert "reward" in text
    if size[0] >= 40:
        assert "0.450" in text
        assert "entropy 1.55" in text
        # The best answer in green, the worst in red, and which one was cut.
        assert "1.00  90+3= → 93 (length)" in text
        assert "0.00  90+0= → 90 (length)" in text
    if size[1] >= 14:
        assert "│ 0.5 │" in text
        assert text.count("●") >= 6
    if size[1] >= 40:
        for part in ("sampling 12/64", "held-out 0.450", "pass@8 90 %", "best 0.4500 at step 90",
                     "clipped 1.2 %", "engine   diff 1.4e-07", "kl 0.0021", "2.4 s",
                     "train 58 %", "generate 38 %",
                     "tokens/s 4.12k", "0.67  90+2= → 92", "checkpoint saved"):  # fmt: skip
            assert part in text, part
        assert "eval done" not in text


def test_the_panel_colours_samples_by_the_rewards_seen() -> None:
    board = SampleBoard()
    room = Room(76, 30)
    board.take([sample("a", "b", 0.0)])
    assert {str(span.style) for item in board.items(room) for span in item.line.spans} <= {"dim"}
    board.take([sample("a", "good", 5.0), sample("c", "bad", 1.0)])
    good, bad = board.items(room)
    assert "green" in str(good.line.spans)
    assert "red" in str(bad.line.spans)
    board.take([])
    assert board.items(room) == []


def test_hostile_samples_and_events_neither_act_nor_overflow() -> None:
    for text in HOSTILE:
        view = watched_rl(60, 30, num_steps=3)
        view.samples(4, [sample(text, text, 1.0), sample(f"{text}!", text, 0.0, stop_reason=text)])
        view.event("reward_trouble", 3, {"message": text, text: 1})
        hostile = {"name": text, "message": text, "causes": [{"name": text, "why": text}]}
        view.finding(3, finding("LRN005", "error", **hostile))
        view.event("remedy_applied", 3, {**APPLIED, "remedy": text, "path": text, "new": text})
        view.status("sampling", 1, 2)
        console = Console(file=io.StringIO(), width=60, record=True, force_terminal=True,
                          color_system=None)  # fmt: skip
        console.print(view.render())
        drawn = console.export_text()
        view.close()
        assert not [c for c in drawn if c in "\x1b\r\x07\x00\u202e\u2066\ud800"], repr(text[:20])
        assert all(cell_len(line) <= 60 for line in drawn.splitlines())
        assert len(drawn.splitlines()) < 30


@given(
    st.dictionaries(st.sampled_from(sorted(rl_metrics(1, with_eval=True))), st.floats()),
    st.text(), st.floats(), st.integers(1, 130), st.integers(1, 50),
)  # fmt: skip
def test_nothing_that_a_run_tells_breaks_the_panel(
    metrics: dict[str, float], text: str, reward: float, width: int, height: int
) -> None:
    view = make_view("live", terminal(width, height), label=LABEL)
    assert isinstance(view, LiveView)
    for step in (1, 2, 3):
        view.step(step, metrics)
        view.record(step, metrics)
        view.samples(step, [sample(text, text, reward), sample("b", text, 0.0)])
    shown(view, width)
    view.close()


def test_a_terminal_without_blocks_gets_letters() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1")
    console = Console(file=Outlet(stream), width=80, height=40, force_terminal=True)  # type: ignore[arg-type]
    view = make_view("live", console, label=LABEL)
    for step in range(1, 60):
        view.step(step, rl_metrics(step, with_eval=step % 9 == 0))
    view.samples(59, [sample("漢字", "→ ok", 1.0)])
    view.status("updating", 1, 2)
    view.close()
    stream.flush()
    text = raw.getvalue().decode("latin-1")
    assert "##" in text
    assert "reward" in text
    assert "? ok" in text


def test_a_process_without_any_output_writes_nowhere(tmp_path: Path) -> None:
    """Files that are opened later must not become the standard output."""
    code = """
        import os, sys
        from homeostat.observe.outlet import Outlet, open_missing_streams
        Outlet(None).write("nothing")
        open_missing_streams()
        file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
        os.write(file, str(file).encode())
        print("x", flush=True)
        Outlet(sys.stdout).write("y")
        sys.stdout.flush()
    """
    place = tmp_path / "metrics.jsonl"
    command = [sys.executable, "-c", textwrap.dedent(code), str(place)]
    closed = shlex.join(command) + " <&- >&- 2>&-"
    subprocess.run(["sh", "-c", closed], check=True, timeout=60)
    assert int(place.read_text()) > 2


def test_a_resumed_run_of_rewards_shows_its_past() -> None:
    history = [{"step": step, **rl_metrics(step)} for step in range(1, 41)]
    history[19] |= {"eval/reward": 0.9, "eval/pass@1": 0.9}
    label = RunLabel("my-run", "", total_steps=200, start_step=40)
    view = make_view("live", terminal(100, 40), label=label, history=history)
    assert isinstance(view, LiveView)
    assert "held-out 0.900" in shown(view, 100)
    view.step(41, rl_metrics(41))
    text = shown(view, 100)
    view.close()
    assert "best 0.9000 at step 20" in text
    assert "reward 0.205" in text
    assert "● " in text


def test_a_resumed_view_knows_the_best_of_before() -> None:
    history = [{"step": 3, "eval/loss": 0.5, "train/loss": 1.0}, {"step": 6, "eval/loss": 0.7}]
    view = make_view("live", terminal(), label=LABEL, history=history)
    assert isinstance(view, LiveView)
    view.step(9, {"train/loss": 1.0})
    assert "best 0.5000 at step 3" in shown(view, 80)
    view.close()


@pytest.mark.parametrize("size", [(80, 24), (60, 24), (120, 50)])
def test_a_healthy_run_says_so_in_one_line(size: tuple[int, int]) -> None:
    view = watched_rl(*size)
    assert "waiting for the first record" in shown(view, size[0])
    view.event("rules_watching", 90, {"rules": 83})
    view.finding(90, finding("PRF002", "info", name="generation-dominates"))
    text = shown(view, size[0])
    view.close()
    assert "health   healthy   83 rules watch" in text
    assert "since step" not in text
    if size[0] >= 80:
        assert "1 note: PRF002 generation-dominates" in text


@pytest.mark.parametrize("size", [(60, 12), (60, 24), (80, 24), (80, 40), (120, 50)])
def test_what_is_ill_stands_in_the_panel_the_worst_first(size: tuple[int, int]) -> None:
    view = watched_rl(*size)
    view.event("rules_watching", 90, {"rules": 83})
    for number, code in enumerate(("RWD001", "LRN005", "GEN001", "MEM001", "POL001")):
        view.finding(90, finding(code, "error" if code == "LRN005" else "warn", first_step=number))
    view.event("remedy_applied", 90, APPLIED)
    text = shown(view, size[0])
    view.close()
    lines = text.splitlines()
    assert all(cell_len(line) <= size[0] for line in lines)
    assert len(lines) < size[1]
    assert "health   error  LRN005 lr-too-high" in text
    assert "healthy" not in text
    heads = [line for line in lines if " lr-too-high" in line and "cause" not in line]
    num_more = 5 - len(heads)
    assert f"+{num_more} more" in text
    assert len(heads) <= 3
    if size[1] >= 24:
        assert "LRN005 saw a loss of 9.5 (limit 3)" in text
        assert "done   step 90: halve-lr: trainer.lr 0.5" in text
    if size[1] >= 40:
        assert "cause  lr-too-high: it was 0.5" in text
        # Of one level the newest comes first.
        assert [line.split()[2] for line in heads[1:]] == ["POL001", "MEM001"]


def test_what_is_over_leaves_the_panel_and_a_note_for_a_while() -> None:
    view = watched_rl(120, 50)
    view.event("rules_watching", 90, {"rules": 83})
    view.finding(90, finding("LRN005", "error", subject="a"))
    view.finding(90, finding("LRN005", "error", subject="b"))
    assert shown(view, 120).count("LRN005 lr-too-high") == 2
    assert "red" in str(view.render().border_style)  # type: ignore[union-attr]
    view.finding(91, finding("LRN005", "error", subject="a", state="cleared"))
    assert shown(view, 120).count("LRN005 lr-too-high") == 1
    view.finding(91, finding("LRN005", "error", subject="b", state="cleared"))
    assert "healthy   83 rules watch   LRN005 lr-too-high over since step 91" in shown(view, 120)
    assert view.render().border_style == "cyan"  # type: ignore[union-attr]
    view.step(120, rl_metrics(120))
    text = shown(view, 120)
    view.close()
    assert "healthy   83 rules watch" in text
    assert "LRN005" not in text


def test_the_health_of_a_run_is_drawn_when_it_changes_and_else_kept() -> None:
    view = watched_rl(80, 40)
    room = view.room
    view.finding(90, finding("LRN005"))
    first = view._health.items(room, step=90)
    assert view._health.items(room, step=91) is first
    view.event("checkpoint_saved", 91, {"path": "a"})
    assert view._health.items(room, step=91) is first
    view.event("remedy_applied", 91, APPLIED)
    assert view._health.items(room, step=91) is not first
    view.close()


def test_a_resumed_view_knows_what_is_open_and_what_was_done() -> None:
    findings = [finding("LRN005"), finding("RWD001"), finding("RWD001", state="cleared")]
    events = [{"kind": "rules_watching", "step": 1, "time": 1.0, "rules": 83},
              {"kind": "remedy_applied", "step": 8, "time": 2.0, **APPLIED}]  # fmt: skip
    view = make_view("live", terminal(100), label=LABEL, findings=findings, events=events)
    assert isinstance(view, LiveView)
    text = shown(view, 100)
    view.close()
    assert "warn  LRN005 lr-too-high   since step 7" in text
    assert "done   step 8: halve-lr: trainer.lr 0.5 -> 0.25, judged after 10 steps" in text
    assert "RWD001" not in text


def test_plain_lines_tell_of_findings_and_remedies_once() -> None:
    out = io.StringIO()
    view = make_view("plain", Console(file=out, width=40), label=LABEL)
    view.event("rules_watching", 1, {"rules": 83})
    view.finding(9, finding("LRN005", "error"))
    view.event("remedy_applied", 10, APPLIED)
    view.event("remedy_judged", 20, JUDGED)
    view.event("remedy_reverted", 20, {**APPLIED, "old": 0.25, "new": 0.5, "why": "no better"})
    back = {"code": "LRN005", "cause": "lr-too-high", "from_step": 30, "to_step": 10, "path": ""}
    view.event("rolled_back", 10, back)
    view.finding(40, finding("LRN005", state="cleared"))
    # A guard of the run told this by an event of its own.
    view.event("step_skipped", 41, {"origin": "lm_head"})
    view.event("remedy_applied", 41, {**APPLIED, "code": "", "cause": "not finite: lm_head"})
    assert out.getvalue().splitlines()[1:] == [
        "step   9/200  error: LRN005 lr-too-high: LRN005 saw a loss of 9.5 (limit 3) since step 7. "
        "Lower the learning rate.",
        "step  10/200  remedy for LRN005 lr-too-high: halve-lr: trainer.lr 0.5 -> 0.25, judged "
        "after 10 steps",
        "step  20/200  remedy for LRN005 lr-too-high: halve-lr did not help: grad_norm 2.000 -> "
        "4.000",
        "step  20/200  remedy for LRN005 lr-too-high: halve-lr taken back: trainer.lr 0.25 -> 0.5; "
        "no better",
        "step  10/200  remedy for LRN005 lr-too-high: went back from step 30 to step 10",
        "step  40/200  LRN005 lr-too-high is over",
        "step  41/200  step skipped origin=lm_head",
    ]


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


def test_plain_lines_of_rewards_show_what_is_there_and_no_more() -> None:
    out = io.StringIO()
    view = make_view("plain", Console(file=out, width=40), label=LABEL)
    view.step(0, {"eval/reward": 0.05, "eval/pass@1": 0.05})
    view.record(0, {"eval/reward": 0.05, "eval/pass@1": 0.05})
    for step in range(1, 200):
        metrics = rl_metrics(step, with_eval=step in (12, 100))
        view.step(step, metrics)
        view.record(step, metrics)
    few = {"reward": math.nan, "time/step": 3.0}
    view.step(200, few)
    view.record(200, few)
    _, start, legend, first, second, last = out.getvalue().splitlines()
    assert start == "step   0/200  eval 0.0500 (best)  pass@1 5.0 %"
    assert legend.startswith("time of a step: G generate, R reward")
    assert first.startswith(
        "step  12/200  reward  0.060  +- 0.310  len   5.9  cut  2.1 %  entropy 1.940  "
        "kl 2.10e-03  clip  1.2 %  diff 1.4e-07  gen 0.9 s  train 1.4 s  4.12k tok/s  "
        "[GGGGTTTTTTT.]  eta "
    )
    assert first.endswith("eval 0.0600 (best)  pass@1 6.0 %  pass@8 12 %")
    assert second.index("entropy") == first.index("entropy")
    assert last == "step 200/200  reward    nan"


def test_a_long_step_gives_a_sign_of_life() -> None:
    out, now = io.StringIO(), [0.0]
    view = make_view("plain", Console(file=out), label=LABEL)
    assert isinstance(view, PlainView)
    view._transcript.clock = lambda: now[0]
    view._transcript._last_sign_at = 0.0
    for second in range(0, 200, 10):
        now[0] = float(second)
        view.status("sampling", second, 1024)
    assert SECONDS_UNTIL_STATUS == 60
    assert out.getvalue().splitlines()[1:] == [
        f"step   1/200  sampling {second}/1,024" for second in (60, 120, 180)
    ]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=1500), st.integers(1, 120))
def test_a_curve_stays_small_and_keeps_its_mean(values: list[float], width: int) -> None:
    curve = Curve()
    for step, value in enumerate(values, start=1):
        curve.add(step, value)
    assert len(curve.means) <= MAX_BUCKETS
    assert min(values) - 1e-3 <= min(curve.means) <= max(curve.means) <= max(values) + 1e-3
    steps = [step for step, _ in curve.points]
    assert steps == sorted(set(steps))
    if len(values) <= MAX_BUCKETS:
        assert curve.means == values
    last = curves.span_of(len(values), width=width, total_steps=2000)
    assert last >= len(values)
    columns = curve.columns(width, last_step=last)
    assert len(columns) == width
    known = [value is not None for value in columns]
    assert known == sorted(known, reverse=True)  # no gaps, nothing beyond the newest step
    low, high = curves.bounds(values)
    assert low <= min(values)
    assert high >= max(values) * (1 - 1e-6)
    rows = curves.area(columns, 5, low=low, high=high, blocks=True)
    assert [len(row) for row in rows] == [width] * 5


def test_an_area_rises_with_its_values_and_crosses_out_holes() -> None:
    rows = curves.area([0.0, 0.5, 1.0, math.nan, None], 2, low=0.0, high=1.0, blocks=True)
    assert rows == ["  █  ", "▁██x "]
    assert curves.bounds([0.02, 0.41]) == (0.0, 0.5)
    assert curves.bounds([-0.3, 0.2]) == pytest.approx((-0.3, 0.2))
    assert curves.bounds([math.nan]) == (0.0, 1.0)


def test_samples_are_the_best_and_the_worst_of_different_prompts() -> None:
    rows = [
        sample("a", "1", 1.0, advantage=0.1), sample("a", "2", 1.0, advantage=0.9),
        sample("b", "3", 1.0, advantage=0.5), sample("c", "4", 0.0, advantage=-0.9),
        sample("c", "5", 0.0, advantage=-0.2), sample("d", "6", 0.0, advantage=None),
        sample("e", "7", None), sample("f", "8", math.nan),
    ]  # fmt: skip
    best, worst = best_and_worst_prompts(rows, 2)
    assert [row["completion"] for row in best] == ["2", "3"]
    assert [row["completion"] for row in worst] == ["4", "6"]
    assert best_and_worst_prompts(rows[:1], 3) == ([rows[0]], [])
    assert best_and_worst_prompts([], 3) == ([], [])


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
    line = event_line("x", {"prompt": "\x1b[2J\r\u202e"})
    assert line == "x prompt=\\x1b[2J \\u202e"


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


def test_a_notebook_shows_the_panel_in_place_with_findings_and_without_live_code() -> None:
    states: list[dict[str, str]] = []
    handle = SimpleNamespace(update=lambda data, *, raw: states.append(data))

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> SimpleNamespace:
        states.append(data)
        return handle

    now = [0.0]
    progress = Progress(LABEL.run_name, LABEL.total_steps)
    view = NotebookView(display, LABEL, progress, HealthBoard(), clock=lambda: now[0])
    for step in range(1, 41):
        now[0] += 0.1
        view.step(step, rl_metrics(step))
    # Four seconds of ten steps each, at most four updates a second, and the first state.
    assert 10 <= len(states) <= 17
    finding = {"code": "GEN001", "name": "<script>", "level": "error", "state": "open"}
    view.finding(40, {**finding, "message": "<b>too long", "first_step": 31})
    view.close()
    page, text = states[-1]["text/html"], states[-1]["text/plain"]
    assert "step 40/200" in text
    assert "GEN001 <script>" in text
    assert "since step 31" in text
    assert "<b>" not in page
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "color: " in page
    assert "\x1b" not in page + text
