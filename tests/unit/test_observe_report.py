"""report.html: right numbers, whole with odd runs, safe with hostile text, small with long runs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support import runs, tiny_rl
from tests.support.pages import EVIL, data_of, report

from homeostat.config.loading.load import build_config
from homeostat.observe.completions import write_completions
from homeostat.observe.names import CATALOGUE
from homeostat.observe.report import axes
from homeostat.observe.report.axes import Axis
from homeostat.observe.report.facts import find_worst_rows, read_facts
from homeostat.observe.report.marks import KINDS, MAX_ROWS, Mark, place
from homeostat.observe.report.plots import Band, Line, Marker, Plot, render_plot
from homeostat.observe.report.series import Series, on_steps_of, smooth, thin
from homeostat.observe.run_dir import RunDir
from homeostat.types import Completion, Prompt, RolloutGroup, Sample, Segment, StopReason


def write_run(path: Path, *, num_steps: int, **config: Any) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"name": "my-run", **config}))
    rng = np.random.default_rng()
    with RunDir(path) as run_dir:
        run_dir.append_event("run_started", 0, command="homeostat train a.yaml", total_steps=99)
        for step in range(1, num_steps + 1):
            metrics = {
                "train/loss": 3 / step + rng.random(),
                "grad_norm": float(rng.lognormal(0, 2)),
                "learning_rate": 1e-5,
                "num_tokens": 1000.0 * step,
                "memory/max_alloc": 0.0,
                "memory/host_rss": 2.0**30,
                "throughput/tokens_per_s": 5e4,
                "time/step": 0.5,
                "time/data_wait": 0.001,
            }
            if step % 5 == 0:
                metrics["eval/loss"] = 1 + abs(step - 10) / 10
            run_dir.append_metrics(step, metrics)


def test_a_finished_run_shows_its_numbers(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=20, trainer={"max_grad_norm": 1.0})
    with RunDir(tmp_path) as run_dir:
        run_dir.append_event("checkpoint_saved", 20, path="checkpoints/step_20", bytes=2**30)
        run_dir.append_event("run_finished", 20)
        run_dir.append_row_losses(3, row_ids=[11, 12, 13], losses=[1.0, 1.1, 7.5])
    page = report(tmp_path)
    for part in ("my-run", "finished", "20 of 99", "1.0000 step 10", "Final eval loss 2.0000",
                 "20k", "50k", "Gradient norm", "Time per step", "clipped above 1",
                 "bytes=1GiB", "+6.4000", "homeostat train a.yaml"):  # fmt: skip
        assert part in page.text, part
    assert [tag for tag, _ in page.tags].count("figure") == 6
    assert "allocated" not in page.text  # no device memory was ever used
    data = [json.loads(script) for script in page.scripts[:-1]]
    (loss,) = [one for one in data if one["lines"][0]["label"] == "training"]
    evaluation = loss["lines"][2]
    assert evaluation["x"] == [5, 10, 15, 20]
    assert evaluation["y"] == [1.5, 1.0, 1.5, 2.0]


def test_a_failed_run_shows_why(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=3)
    with RunDir(tmp_path) as run_dir:
        run_dir.append_event("run_failed", 3, error="DataError", message="row 7 is empty")
        run_dir.write_traceback("Traceback: it broke <here>")
        run_dir.console_log.write_text("first line\nlast words\n")
    page = report(tmp_path)
    for part in ("failed", "DataError: row 7 is empty", "it broke <here>", "last words"):
        assert part in page.text


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        (["run_started"], "not finished"),
        (["run_started", "run_stopped"], "stopped"),
        (["run_started", "run_failed", "run_resumed"], "not finished"),
        (["run_started", "run_failed", "run_resumed", "run_finished"], "finished"),
        (["run_started", "early_stop", "run_finished"], "finished early"),
        ([], "not finished"),
    ],
)
def test_status_is_that_of_the_last_session(tmp_path: Path, kinds: list[str], status: str) -> None:
    with RunDir(tmp_path) as run_dir:
        for kind in kinds:
            run_dir.append_event(kind, 1)
    assert read_facts(tmp_path).status[0] == status
    report(tmp_path)


def test_time_between_sessions_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 110.0, 130.0, 5000.0, 5007.0])
    monkeypatch.setattr("time.time", lambda: next(clock))
    with RunDir(tmp_path) as run_dir:
        run_dir.append_event("run_started", 0)
        run_dir.append_metrics(1, {"train/loss": 1.0})
        run_dir.append_metrics(2, {"train/loss": 1.0})
        run_dir.append_event("run_resumed", 2)
        run_dir.append_metrics(3, {"train/loss": 1.0})
    facts = read_facts(tmp_path)
    assert (facts.started_at, facts.duration_s, facts.last_step) == (100.0, 37.0, 3)


def test_an_empty_folder_and_a_run_of_one_step_have_a_page(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "No metrics were recorded" in report(tmp_path / "empty").text
    write_run(tmp_path / "one", num_steps=1)
    assert "Loss" in report(tmp_path / "one").text


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1e300, 1e300, 1e-320])
def test_no_value_breaks_the_page(tmp_path: Path, bad: float) -> None:
    with RunDir(tmp_path) as run_dir:
        run_dir.append_metrics(0, {"train/loss": bad, "eval/loss": bad, "grad_norm": bad})
        run_dir.append_metrics(1, {"train/loss": 1.0, "grad_norm": 1.0, "memory/max_alloc": bad})
        run_dir.append_metrics(2, {"train/loss": bad, "num_tokens": bad, "epoch": bad})
        run_dir.append_row_losses(1, row_ids=[1, 2], losses=[bad, 1.0])
        run_dir.append_event("eval_done", 1, loss=bad)
    report(tmp_path)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=6, model={"path": EVIL}, trainer={"max_grad_norm": 1.0})
    config = json.loads((tmp_path / "config.json").read_text()) | {"name": EVIL}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with RunDir(tmp_path) as run_dir:
        run_dir.append_event("step_skipped", 2, reason=EVIL, **{EVIL: EVIL})
        run_dir.append_event(EVIL, 3, environment={EVIL: EVIL}, command=EVIL)
        run_dir.append_event("run_failed", 4, error=EVIL, message=EVIL)
        run_dir.append_metrics(7, {"train/loss": 1.0, EVIL: 1.0})
        run_dir.write_traceback(EVIL)
        run_dir.console_log.write_text(EVIL)
    page = report(tmp_path)
    tags = [tag for tag, _ in page.tags]
    assert "img" not in tags
    assert tags.count("script") == tags.count("figure") + 1
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert page.text.count("alert(1)") >= 8


@pytest.mark.parametrize("num_steps", [6_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_huge_run_stays_small_and_keeps_its_spikes(tmp_path: Path, num_steps: int) -> None:
    rng = np.random.default_rng()
    losses = rng.random(num_steps)
    losses[num_steps // 2 + 321] = 77.25
    names = ["train/loss", "grad_norm", "learning_rate", "throughput/tokens_per_s",
             "throughput/trained_tokens_per_s", "time/step", "time/data_wait",
             "memory/max_alloc", "memory/max_reserved", "memory/host_rss"]  # fmt: skip
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(losses.tolist(), start=1):
            record = {"step": step, "time": 1e9 + step, **dict.fromkeys(names, loss)}
            file.write(json.dumps(record) + "\n")
    with RunDir(tmp_path) as run_dir:
        for step in range(5000):
            run_dir._events.sync = False
            run_dir.append_event("checkpoint_saved", step, path=f"checkpoints/step_{step}")
    page = report(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
    assert "4,800 events in between" in page.text
    data = json.loads(page.scripts[0])
    assert 77.25 in data["lines"][0]["y"]


def write_rl_run(path: Path, *, num_steps: int) -> None:
    """A run of two reward functions that gets better by 1 % a step."""
    path.mkdir(parents=True, exist_ok=True)
    algorithm = {"type": "grpo"}
    (path / "config.json").write_text(json.dumps({"name": "my-run", "algorithm": algorithm}))
    with RunDir(path) as run_dir:
        run_dir.append_event("run_started", 0, command="homeostat train a.yaml", total_steps=50)
        for step in range(1, num_steps + 1):
            metrics = {
                "reward": step / 100, "reward_std": 0.25, "rewards/correct/mean": step / 100,
                "rewards/format/mean": 0.5, "rewards/format/failed": 2.0, "entropy": 2.0 / step,
                "completions/mean_length": 12.0, "completions/min_length": 2.0,
                "completions/max_length": 40.0, "completions/clipped_ratio": 0.125,
                "sampling/sampling_logp_difference/mean": 0.0 if step == 3 else 1e-7,
                "sampling/sampling_logp_difference/max": 2e-6, "kl_coefficient": 0.0,
                "time/step": 2.0, "time/generate": 0.75, "time/reward": 0.25, "time/train": 0.5,
                "num_tokens": 1000.0 * step,
            }  # fmt: skip
            if step % 5 == 0:
                solved = 1 - abs(step - 10) / 20
                metrics |= {"eval/reward": solved, "eval/pass@1": solved, "eval/pass@8": 1.0}
            run_dir.append_metrics(step, metrics)


def group(prompt_id: int, prompt: Any, answers: list[tuple[str, float | None]]) -> RolloutGroup:
    samples = []
    for text, reward in answers:
        tokens = Segment(np.arange(len(text) % 7), np.zeros(len(text) % 7, np.float32), 0)
        completion = Completion(f"{prompt_id}", (tokens,), StopReason.LENGTH)
        samples.append(Sample(completion, text, {"correct": reward}, reward))
    return RolloutGroup(Prompt(prompt_id, np.arange(3), prompt, {"answer": EVIL}), tuple(samples))


def keep(path: Path, step: int, groups: list[RolloutGroup]) -> Path:
    advantages = [[0.5 for _ in one.samples] for one in groups]
    return write_completions(path / "completions", step, groups, advantages=advantages)


def test_a_run_of_rewards_shows_them_first(tmp_path: Path) -> None:
    write_rl_run(tmp_path, num_steps=20)
    with RunDir(tmp_path) as run_dir:
        run_dir.append_event("run_resumed", 7)
        run_dir.append_event("run_finished", 20)
    page = report(tmp_path)
    for part in ("Reward 0.2 from 0.01", "Best held-out 1.000 step 10", "20 of 50", "Tokens 20k",
                 "Pass@1 50 % from 75 %", "Held-out pass@k", "By function", "Length",
                 "Engine and trainer", "Largest difference 2e-06 nats", "Time per step",
                 "shortest to longest", "Rewards without a value", "resumed"):  # fmt: skip
        assert part in page.text, part
    # What the run did not measure, or what was always 0, has no plot.
    for part in ("Gradient norm", "KL", "Ratio", "Difference", "Clipped", "Memory", "Samples",
                 "Worst rows"):  # fmt: skip
        assert part not in page.text, part
    reward = data_of(page, "held-out prompts")
    assert reward["held-out prompts"]["x"] == [5, 10, 15, 20]
    assert reward["deviation within a group"]["y"] == [0.25] * 20
    times = data_of(page, "generate")
    assert {label: line["y"][0] for label, line in times.items()} == {
        "generate": 0.75, "reward": 0.25, "train": 0.5, "other": 0.5,
    }  # fmt: skip


def test_samples_of_the_first_and_the_last_step_stand_side_by_side(tmp_path: Path) -> None:
    write_rl_run(tmp_path, num_steps=3)
    keep(tmp_path, 1, [group(1, "2+2=", [("5", 0.0)]), group(2, "1+1=", [("", 0.0)])])
    keep(tmp_path, 2, [group(1, "never", [("shown", 1.0)])])
    chat = [{"role": "user", "content": "3+3?"}]
    keep(tmp_path, 3, [group(3, chat, [("six", 1.0), ("7", 0.25), ("?", None)])])
    page = report(tmp_path)
    for part in ("First step 1", "Last step 3", "2+2=", "(empty)", "user: 3+3?", "six", "length",
                 "advantage 0.5", "Best", "Worst", "0.25"):  # fmt: skip
        assert part in page.text, part
    assert "never" not in page.text
    # A file that cannot be read is named; the page is whole all the same.
    (tmp_path / "completions" / "step_00000003.parquet").write_bytes(b"PAR1 torn")
    page = report(tmp_path)
    assert "not a whole Parquet file" in page.text
    assert "2+2=" in page.text


@pytest.mark.parametrize("text", [
    EVIL, "\x1b[31mred\x00\x07\r", "\u202egnp.exe", "long " * 5_000, "]]><!--", "\ud800",
])  # fmt: skip
def test_what_a_model_writes_stays_text(tmp_path: Path, text: str) -> None:
    write_rl_run(tmp_path, num_steps=3)
    keep(tmp_path, 1, [group(1, text, [(text, 1.0), (text, 0.0)])])
    trouble = {"message": text, "prompt": text, "completion": text, "traceback": text}
    with RunDir(tmp_path) as run_dir:
        for step in (1, 2):
            fields = {"reward": text, "failure": text, "num_samples": 4, "prompt_id": 7, **trouble}
            run_dir.append_event("reward_trouble", step, **fields)
    page = report(tmp_path)
    tags = [tag for tag, _ in page.tags]
    assert "img" not in tags
    assert tags.count("script") == tags.count("figure") + 1
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    raw = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", raw)
    assert len(raw) < 400_000


def test_reward_troubles_are_grouped_with_their_first_input(tmp_path: Path) -> None:
    write_rl_run(tmp_path, num_steps=9)
    with RunDir(tmp_path) as run_dir:
        for step in range(1, 10):
            run_dir.append_event(
                "reward_trouble", step, reward="format", failure="exception", num_samples=2,
                message=f"ValueError: number {step}", prompt_id=step, prompt=f"prompt {step}",
                completion=f"answer {step}", traceback="in parse",
            )  # fmt: skip
        run_dir.append_event("reward_trouble", 4, reward="format", failure="timeout", message="5 s")
    page = report(tmp_path)
    assert "Rewards without a value format: 18 samples" in page.text
    assert "format exception 9 1 ValueError: number 1" in page.text
    assert "row: 1 prompt: prompt 1 completion: answer 1 traceback: in parse" in page.text
    assert "format timeout 1 4 5 s" in page.text
    assert "number 2" not in page.text
    # The table of events is spared; the plots mark where each kind began.
    raw = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert ">reward trouble<" not in raw
    # (All but that of pass@k, which begins with the first evaluation.)
    assert raw.count("step 1: reward trouble") == raw.count("<figure") - 1 == 7


def finding(code: str, level: str, *, state: str = "open", **more: Any) -> dict[str, Any]:
    """A line of findings.jsonl."""
    record = {
        "state": state, "code": code, "name": f"{code}-illness", "family": "policy",
        "level": level, "confidence": "measured", "first_step": 4, "subject": "",
        "message": f"message of {code}", "evidence": [f"evidence of {code}"],
        "causes": [{"name": f"{code}-cause", "why": "a reason"}],
        "fixes": [{"setting": "trainer.lr", "value": "a half", "why": "calm", "grade": "unsafe"},
                  {"setting": None, "value": "", "why": "ask a person", "grade": "advice"}],
    }  # fmt: skip
    return {**record, **more}


def remedy(kind: str, **more: Any) -> dict[str, Any]:
    fields = {"code": "POL001", "cause": "POL001-illness", "remedy": "halve-lr"}
    if kind != "remedy_judged":
        fields |= {"path": "trainer.lr", "old": 0.5, "new": 0.25, "window": 10}
    return {"kind": kind, **fields, **more}


def plot_of(run_dir: Path, title: str) -> str:
    """The figure of this title."""
    raw = (run_dir / "report.html").read_text(encoding="utf-8")
    (figure,) = [one for one in raw.split("<figure")[1:] if f">{title}</b>" in one]
    return figure.split("</figure>")[0]


def codes_on(run_dir: Path, title: str) -> list[str]:
    pattern = r'<g class="mark (\w+)"><title>step (\d+).*?<text[^>]*>([^<]+)<'
    return [" ".join(found) for found in re.findall(pattern, plot_of(run_dir, title), re.DOTALL)]


def test_findings_stand_in_a_table_with_what_was_done(tmp_path: Path) -> None:
    write_rl_run(tmp_path, num_steps=20)
    with RunDir(tmp_path) as run_dir:
        run_dir.append_event("rules_watching", 1, rules=83)
        run_dir.append_finding(5, finding("RWD001", "warn"))
        run_dir.append_finding(6, finding("POL001", "warn"))
        run_dir.append_finding(7, finding("POL001", "error", message="now it is worse"))
        run_dir.append_finding(9, finding("RWD001", "warn", state="cleared"))
        run_dir.append_finding(9, finding("PRF001", "info"))
        verdict = {"helped": False, "metric": "entropy", "before": 0.5, "after": 0.25}
        for step, fields in (
            (8, remedy("remedy_applied")),
            (18, remedy("remedy_judged", **verdict)),
            (19, remedy("remedy_applied", remedy="clip-higher", path="")),
        ):
            run_dir.append_event(fields.pop("kind"), step, **fields)
        run_dir.append_event("run_finished", 20)
    page = report(tmp_path)
    for part in ("1 open finding", "1 of 2 findings open at the end. 83 rules watched the run",
                 "error POL001 POL001-illness measured 4 - open now it is worse evidence of POL001",
                 "POL001-cause : a reason trainer.lr a half : calm unsafe ask a person advice",
                 "Done step 8: halve-lr: trainer.lr 0.5 -> 0.25; did not help: entropy 0.5 -> 0.25",
                 "step 19: clip-higher, judged after 10 steps",
                 "warn RWD001 RWD001-illness measured 4 - 9 message of RWD001",
                 "1 note worth knowing, nothing to do"):  # fmt: skip
        assert part in page.text, part
    assert "message of POL001" not in page.text
    # What is open and worst comes first; notes come last.
    assert page.text.index("POL001-cause") < page.text.index("RWD001-cause")
    assert page.text.index("RWD001-cause") < page.text.index("PRF001-cause")


def test_curves_show_where_a_finding_that_speaks_of_them_began(tmp_path: Path) -> None:
    write_rl_run(tmp_path, num_steps=20)
    with RunDir(tmp_path) as run_dir:
        run_dir.append_finding(6, finding("POL001", "error", evidence=["entropy 1 -> 0.1"]))
        spoken = {"message": "The mean length grew.", "first_step": 7}
        run_dir.append_finding(8, finding("POL012", "warn", **spoken))
        run_dir.append_finding(8, finding("CKP002", "warn", family="checkpoint", first_step=None))
        run_dir.append_finding(9, finding("POL003", "info", evidence=["entropy 9"]))
        fields = remedy("remedy_applied")
        run_dir.append_event(fields.pop("kind"), 12, **fields)
    page = report(tmp_path)
    assert codes_on(tmp_path, "Entropy") == ["error 4 POL001", "remedy 12 halve-lr"]
    assert codes_on(tmp_path, "Length") == ["warn 7 POL012"]
    assert codes_on(tmp_path, "Reward") == ["warn 8 CKP002"]  # of no curve: the main plot
    assert codes_on(tmp_path, "Time per step") == []
    labels = [attrs.get("aria-label") or "" for tag, attrs in page.tags if tag == "svg"]
    (entropy,) = [label for label in labels if label.startswith("Entropy")]
    assert "step 4: error POL001 POL001-illness: message of POL001" in entropy


def test_a_healthy_run_is_calm_and_one_that_nobody_watched_says_nothing(tmp_path: Path) -> None:
    write_rl_run(tmp_path, num_steps=5)
    page = report(tmp_path)
    assert "Health" not in page.text
    assert "healthy" not in page.text
    with RunDir(tmp_path) as run_dir:
        run_dir.append_event("rules_watching", 1, rules=83)
        run_dir.append_event("run_finished", 5)
    page = report(tmp_path)
    assert "finished healthy" in page.text
    assert "Health nothing was found. 83 rules watched the run" in page.text
    assert "Finding" not in page.text
    assert not [attrs for tag, attrs in page.tags if "mark" in (attrs.get("class") or "")]
    with RunDir(tmp_path) as run_dir:
        run_dir.append_event("run_failed", 5, error="OSError", message="no disk")
    assert "healthy" not in report(tmp_path).text


def test_remedies_of_findings_that_a_run_went_back_from_are_still_told(tmp_path: Path) -> None:
    write_rl_run(tmp_path, num_steps=5)
    with RunDir(tmp_path) as run_dir:
        run_dir.append_event("rules_watching", 1, rules=83)
        fields = remedy("remedy_applied", remedy="roll-back")
        run_dir.append_event(fields.pop("kind"), 3, **fields)
        back = {"code": "POL001", "cause": "POL001-illness", "from_step": 30, "to_step": 2}
        run_dir.append_event("rolled_back", 2, **back)
        # A guard's own deed stands among the events.
        run_dir.append_event("remedy_applied", 4, code="", cause="x", remedy="skip_step")
    page = report(tmp_path)
    assert "went back from POL001 POL001-illness, step 3: roll-back: trainer.lr 0.5" in page.text
    assert "POL001 POL001-illness, step 2: went back from step 30 to step 2" in page.text
    assert "step 4: skip step" not in page.text


@pytest.mark.parametrize("text", [EVIL, "\x1b[31m\x00\u202e", "long " * 5_000, ""])
def test_hostile_findings_stay_text(tmp_path: Path, text: str) -> None:
    write_rl_run(tmp_path, num_steps=6)
    with RunDir(tmp_path) as run_dir:
        for level in ("error", "warn", "info", text):
            parts = {"name": text, "message": text, "evidence": [text, 3], "subject": level}
            parts |= {"causes": [{"name": text, "why": text}, text], "confidence": text}
            parts |= {"fixes": [{"setting": text, "value": text, "why": text, "grade": text}]}
            run_dir.append_finding(3, finding("POL001", level, **parts))
        fields = remedy("remedy_applied", remedy=text, path=text, new=text, why=text)
        run_dir.append_event(fields.pop("kind"), 4, **fields)
    page = report(tmp_path)
    tags = [tag for tag, _ in page.tags]
    assert "img" not in tags
    assert tags.count("script") == tags.count("figure") + 1
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    raw = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", raw)
    assert len(raw) < 400_000


@given(
    st.lists(st.tuples(st.integers(0, 100), st.sampled_from(KINDS), st.text("AB1", min_size=3,
             max_size=9)), max_size=30)
)  # fmt: skip
def test_marks_keep_their_place_and_no_label_is_covered(
    given_marks: list[tuple[int, str, str]],
) -> None:
    marks = [Mark(float(step), label, f"{label} began", kind) for step, kind, label in given_marks]
    flags = place(marks, Axis(0.0, 100.0, 54.0, 518.0))
    assert sorted(id(m) for flag in flags for m in flag.marks) == sorted(map(id, marks))
    shown = [flag for flag in flags if flag.row is not None]
    assert all(flag.row in range(MAX_ROWS) for flag in shown)
    for flag in shown:
        low, high = flag.span
        assert low >= 0
        assert high <= 540
        for other in shown:
            if other is not flag and other.row == flag.row:
                assert other.span[1] <= low or high <= other.span[0]
            if low < other.x < high and other is not flag:
                assert other.row < flag.row, "a line goes through a label"


def test_marks_of_one_step_are_one_with_the_colour_of_the_worst() -> None:
    marks = [Mark(5.0, "GEN001", "a", "warn"), Mark(5.0, "POL013", "b", "error"),
             Mark(5.0, "halve-lr", "c", "remedy")]  # fmt: skip
    (flag,) = place(marks, Axis(0.0, 10.0, 54.0, 518.0))
    assert flag.label == "POL013 +2"
    series = Series(np.array([0.0, 10.0]), np.array([0.0, 1.0]))
    figure = render_plot(Plot("P", "", [Line("a", series)], marks=marks))
    assert '<g class="mark error"><title>b\na\nc</title>' in figure


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300, 1e-320])
def test_no_value_breaks_the_page_of_rewards(tmp_path: Path, bad: float) -> None:
    names = [re.sub("<i>", "4", re.sub("<name>", "f", info.name)) for info in CATALOGUE]
    with RunDir(tmp_path) as run_dir:
        run_dir.append_metrics(0, dict.fromkeys(names, bad))
        run_dir.append_metrics(1, dict.fromkeys(names, 1.0))
        run_dir.append_metrics(2, dict.fromkeys(names, bad))
        run_dir.append_metrics(3, {"reward": bad, "time/step": 1.0})
    report(tmp_path)


def test_a_real_run_has_a_whole_page(tmp_path: Path) -> None:
    raw = tiny_rl.recipe(
        tmp_path,
        algorithm={"type": "grpo", "kl": {"coefficient": 0.01, "place": "loss"}},
        trainer={"max_steps": 3},
        observe={"console": "plain", "report": False},
    )
    lines = runs.told(build_config(raw, [], file=None))
    assert re.search(r"step 3/3  reward +\d\.\d{3}  \+- .* entropy .* gen .* tok/s", lines), lines
    page = report(tmp_path / "runs" / "run")
    wanted = (
        "finished", "Reward", "Length", "Entropy", "KL from the reference", "Clipped",
        "Ratio of new to old policy", "always on-policy", "Gradient norm", "Learning rate",
        "Time per step", "Throughput", "Memory", "First step 1", "Last step 3",
    )  # fmt: skip
    for part in wanted:
        assert part in page.text, part


values = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(values, min_size=1, max_size=400), st.integers(10, 60))
def test_thinning_keeps_extremes_ends_and_order(ys: list[float], limit: int) -> None:
    series = Series(np.arange(len(ys), dtype=np.float64), np.array(ys, dtype=np.float64))
    thinned = thin(series, max_points=limit)
    assert len(thinned.y) <= max(limit + 2, 3)
    assert (np.diff(thinned.x) > 0).all()
    assert {thinned.x[0], thinned.x[-1]} == {series.x[0], series.x[-1]}
    if series.finite.size:
        assert thinned.finite.min() == series.finite.min()
        assert thinned.finite.max() == series.finite.max()
    assert np.isfinite(thinned.y).all() == np.isfinite(series.y).all()


def test_smoothing_is_the_two_sided_exponential_mean() -> None:
    rng = np.random.default_rng()
    y = rng.normal(size=300)
    y[[3, 40]] = np.nan
    smoothed = smooth(Series(np.arange(300.0), y), half_life_share=0.02)
    distance = np.abs(np.arange(300)[:, None] - np.arange(300)[None, :])
    weights = 0.5 ** (distance / 6.0) * np.isfinite(y)
    expected = (weights * np.nan_to_num(y)).sum(1) / weights.sum(1)
    # A gap in the values is one in their means.
    expected[[3, 40]] = np.nan
    np.testing.assert_allclose(smoothed.y, expected, rtol=1e-9, atol=1e-12)


def test_a_value_between_two_that_are_missing_is_drawn() -> None:
    y = np.array([1.0, np.nan, 2.0, np.nan, 3.0, 4.0])
    line = Line("loss", Series(np.arange(6.0), y), 1)
    drawn = render_plot(Plot("loss", "", [line]))
    assert drawn.count("<circle") == 2


@given(
    st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 12)
)  # fmt: skip
def test_ticks_are_round_inside_and_told_apart(low: float, span: float, count: int) -> None:
    assume(abs(low) < 1e6 * span)
    high = low + span
    found = axes.ticks(low, high, count)
    assert len(found) <= count + 1
    assert all(low - 1e-6 * span <= value <= high + 1e-6 * span for value in found)
    if len(found) > 1 and abs(low) < 1e4 * span:
        labels = [axes.tick_label(value, found[1] - found[0]) for value in found]
        assert len(set(labels)) == len(labels), labels


def test_log_axes_are_used_for_wide_ranges_only() -> None:
    wide = Series(np.arange(4.0), np.array([0.01, 1.0, 10.0, 100.0]))
    narrow = Series(np.arange(4.0), np.array([1.0, 2.0, 3.0, 4.0]))
    with_zero = Series(np.arange(4.0), np.array([0.0, 2.0, 3.0, 400.0]))
    for series, is_log in ((wide, True), (narrow, False), (with_zero, False)):
        figure = render_plot(Plot("Norm", "unit", [Line("a", series)], allow_log=True))
        assert ("log scale" in figure) is is_log
    ticks = [float(text) for text in re.findall(r'text-anchor="end">([^<]+)<', render_plot(
        Plot("Norm", "", [Line("a", wide)], allow_log=True)))]  # fmt: skip
    assert ticks == [0.01, 0.1, 1.0, 10.0, 100.0]


def test_points_are_drawn_where_the_axes_say() -> None:
    series = Series(np.array([0.0, 10.0]), np.array([0.0, 1.0]))
    figure = render_plot(Plot("P", "", [Line("a", series)], markers=[Marker(5, "m", "trouble")]))
    (path,) = re.findall(r'class="c1 line" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', figure)
    x0, y0, x1, y1 = map(float, path)
    (middle,) = re.findall(r'class="trouble" d="M([\d.]+) ', figure)
    assert float(middle) == pytest.approx((x0 + x1) / 2, abs=0.1)
    assert x0 < x1
    assert y0 > y1


def test_a_band_is_drawn_between_its_edges_and_broken_by_holes() -> None:
    steps = np.arange(6.0)
    low, high = np.zeros(6), np.array([1.0, 1.0, np.nan, 1.0, np.inf, 1.0])
    band = Band("b", Series(steps, high), low, high)
    line = Line("a", Series(steps, np.array([0.0, 1.0] * 3)))
    figure = render_plot(Plot("P", "", [line], bands=[band]))
    (outline,) = re.findall(r'class="c1 band" d="([^"]+)"', figure)
    assert outline.count("M") == outline.count("Z") == 3
    (path,) = re.findall(r'class="c1 line" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)L', figure)
    x0, y0, x1, y1 = path  # the line runs from the band's lower edge to its upper one
    assert outline.startswith(f"M{x0} {y1}L{x1} {y1}L{x1} {y0}L{x0} {y0}Z")


def test_values_at_the_steps_of_another_series() -> None:
    here, there = Series(np.array([1.0, 2, 5]), np.zeros(3)), Series(np.array([2.0, 3]), np.ones(2))
    np.testing.assert_array_equal(on_steps_of(here, there), [np.nan, 1.0, np.nan])
    assert np.isnan(on_steps_of(here, None)).all()


def test_worst_rows_stand_out_from_their_own_step() -> None:
    records = [
        {"step": 1, "row_ids": [1, 2, 3], "losses": [9.0, 9.1, 9.2]},
        {"step": 50, "row_ids": [4, 5, 6], "losses": [1.0, 1.0, 4.0]},
        {"step": 60, "row_ids": [6, 7, 8], "losses": [1.0, 2.0, math.nan]},
    ]
    rows = find_worst_rows(records, count=3)
    assert [row.row_id for row in rows] == [8, 6, 7]
    assert rows[1].excess == 3.0
