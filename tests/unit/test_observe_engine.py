"""What a person sees of engine and trainer: differences, staleness, corrections, publications."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.support.pages import EVIL, Page, data_of, report

from homeostat.observe.console import make_view
from homeostat.observe.live import LiveView
from homeostat.observe.report.plots import Line, Plot, render_plot
from homeostat.observe.report.series import Series
from homeostat.observe.run_dir import RunDir
from homeostat.observe.transcript import RunLabel, off_policy_signs

LABEL = RunLabel("my-run", "", total_steps=50)
DIFFERENCE = "sampling/sampling_logp_difference/"
# Each is the whole text of a token, and of what stands around it.
HOSTILE = [
    EVIL,
    "\x1b[31mred\x00\x07\r",
    "\u202egnp.exe\u2066",
    "]]><!--",
    "\ud800",
    "long " * 9999,
]


def write_rl(path: Path, records: list[dict[str, float]], **config: Any) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"name": "my-run", **config}))
    with RunDir(path) as run_dir:
        for step, record in enumerate(records, start=1):
            run_dir.append_metrics(step, {"reward": 0.5, **record})


def stale_record(age: int, *, truncated: float) -> dict[str, float]:
    """A step of 2 updates, sampled by weights `age` steps old."""
    return {
        f"{DIFFERENCE}mean": 0.01 * age, f"{DIFFERENCE}max": 0.5 * age,
        "sampling/importance_sampling_ratio/max": math.exp(0.5 * age), "sampling/k3": 0.01 * age,
        "sampling/ess": 1 / (1 + age), "sampling/ess_sequence": 1 / (1 + 2 * age),
        "stale/steps/mean": float(age), "stale/steps/max": float(age),
        "stale/updates/mean": 2 * age + 0.5, "stale/updates/max": 2 * age + 1.0,
        "correction/tokens/truncated": truncated, "correction/sequences/truncated": 4 * truncated,
        "correction/tokens/vetoed": 0.0, "correction/sequences/vetoed": 0.0,
    }  # fmt: skip


def titles(page: Page) -> list[str]:
    return [str(attrs.get("aria-label")) for tag, attrs in page.tags if tag == "svg"]


def token(**more: Any) -> dict[str, Any]:
    told = {"prompt_id": 7, "sample": 0, "position": 3, "token_id": 11, "before": "a b ",
            "text": "c", "after": " d", "engine_logp": -0.5, "trainer_logp": -5.0,
            "policy_version": 2}  # fmt: skip
    return told | more


def tell_worst(path: Path, step: int, tokens: list[Any]) -> None:
    with RunDir(path) as run_dir:
        run_dir.append_event("worst_tokens", step, text="c", tokens=tokens)


def test_an_engine_that_keeps_up_gets_a_line_and_no_plot(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    tops = rng.uniform(1e-7, 2e-6, size=8).tolist()
    calm = stale_record(0, truncated=0.0) | {"sampling/k3": 1e-14}
    write_rl(tmp_path, [{**calm, f"{DIFFERENCE}max": top} for top in tops])
    page = report(tmp_path)
    told = f"Largest difference {max(tops):.2g} nats, nothing corrected, always on-policy."
    assert f"Engine and trainer the same tokens, computed twice {told}" in page.text
    assert titles(page) == ["Reward"]


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({f"{DIFFERENCE}max": 0.0, "stale/steps/max": 0.0},
         "Not a bit of difference, nothing corrected, always on-policy."),
        ({f"{DIFFERENCE}max": math.nan},
         "Difference not a number at 3 of 3 records, nothing corrected."),
        ({f"{DIFFERENCE}max": 0.25, "stale/steps/max": 1.0},
         "Largest difference 0.25 nats, nothing corrected, sampled by weights up to 1 step old."),
    ],
)  # fmt: skip
def test_the_line_says_what_is_known_and_no_more(
    tmp_path: Path, record: dict[str, float], told: str
) -> None:
    write_rl(tmp_path, [record] * 3)
    assert told in report(tmp_path).text


def test_a_run_that_was_never_compared_has_no_such_group(tmp_path: Path) -> None:
    write_rl(tmp_path, [{"entropy": 1.0}] * 3)
    assert "Engine and trainer" not in report(tmp_path).text


def test_a_stale_engine_is_shown_with_what_was_done_about_it(tmp_path: Path) -> None:
    records = [stale_record(age, truncated=0.02 * age) for age in (0, 1, 2, 0, 1, 2)]
    records[2] |= {"sync/seconds": 0.25, "sync/bytes": 2.0**20}
    records[5] |= {"sync/seconds": 0.5, "sync/bytes": 2.0**20}
    weight = {"type": "token", "high": 2.0, "outside": "truncate"}
    write_rl(tmp_path, records, algorithm={"type": "grpo", "correction": {"weight": weight}})
    with RunDir(tmp_path) as run_dir:
        for step in (0, 3, 6):
            run_dir.append_event("weights_published", step, version=step, bytes=2**20, seconds=0.3)
        run_dir.append_event("engine_restarted", 4, error="killed", restarts=1)
        run_dir.append_event("logprobs_off", 5, verdict="the engine is off", rows=4)
    page = report(tmp_path)
    assert (
        "Largest difference 1 nats, up to 4.0 % of the tokens corrected, sampled by weights up to "
        "5 updates old, weights sent 3 times, 1 MiB each. "
        "Against float64 at step 5: the engine is off."
    ) in page.text
    assert ("div", {"class": "notice"}) in page.tags
    wanted = ["Difference", "Ratio", "KL of trainer from engine", "Effective sample", "Staleness",
              "Tokens corrected", "Completions corrected", "Weights sent"]  # fmt: skip
    assert titles(page) == ["Reward", *wanted]
    for part in ("truncated above 2", "percent, truncated", "seconds for 1 MiB"):
        assert part in page.text
    assert "vetoed" not in page.text
    assert data_of(page, "oldest token")["oldest token"]["y"] == [1, 3, 5, 1, 3, 5]
    assert data_of(page, "of completions")["of tokens"]["y"][:2] == [100, 50]
    lines = [line for script in page.scripts[:-1] for line in json.loads(script)["lines"]]
    shares = [line["y"] for line in lines if line["label"] == "truncated"]
    assert shares == [[0, 2, 4] * 2, [0, 8, 16] * 2]
    assert data_of(page, "seconds")["seconds"] | {"colour": 1} == {
        "label": "seconds", "colour": 1, "x": [3, 6], "y": [0.25, 0.5],
    }  # fmt: skip
    raw = (tmp_path / "report.html").read_text(encoding="utf-8")
    # Publications are told by the line and the plot; troubles stand in the table and the plots.
    assert "weights published" not in raw
    assert raw.count("step 4: engine restarted") == raw.count("step 5: logprobs off") >= 8


def test_sizes_that_change_and_checks_have_plots_of_their_own(tmp_path: Path) -> None:
    records = [{f"{DIFFERENCE}max": 0.0, "sync/bytes": 2.0**20 * n, "sync/seconds": 1.0,
                "verify/engine_scoring/error_max": 1e-6 * n, "verify/trainer/error_max": 0.0}
               for n in (1, 2, 3)]  # fmt: skip
    write_rl(tmp_path, records)
    page = report(tmp_path)
    assert titles(page)[1:] == ["Weights sent", "Size of the weights sent", "Error against float64"]
    assert data_of(page, "MiB")["MiB"]["y"] == [1, 2, 3]
    assert "engine scoring" in data_of(page, "trainer")


def test_zero_has_a_place_of_its_own_on_a_log_axis() -> None:
    values = Series(np.arange(4.0), np.array([1e-2, 0.0, 1e-3, 1.0]))
    figure = render_plot(Plot("D", "", [Line("a", values)], prefer_log=True))
    labels = re.findall(r'y="([\d.]+)" text-anchor="end">([^<]+)<', figure)
    ticks = {label: float(y) for y, label in labels}
    assert {"0", "0.001", "1"} <= set(ticks)
    (path,) = re.findall(r'class="c1 line" d="M([^"]+)"', figure)
    heights = [float(point.split()[1]) for point in path.split("L")]
    # Lower is larger. A label's text stands 3.5 below its line.
    assert heights[1] == pytest.approx(ticks["0"] - 3.5, abs=0.1)
    assert heights[2] == pytest.approx(ticks["0.001"] - 3.5, abs=0.1)
    assert heights[1] - heights[2] > 10
    positive = values.at(np.array([0, 2, 3]))
    figure = render_plot(Plot("D", "", [Line("a", positive)], prefer_log=True))
    assert not re.search(r'text-anchor="end">0<', figure)


def test_the_worst_tokens_of_the_run_stand_before_the_latest(tmp_path: Path) -> None:
    write_rl(tmp_path, [{}] * 3)
    tell_worst(tmp_path, 2, [token(position=n, trainer_logp=-5.0 - n) for n in range(8)])
    again = [token(sample=n, before="x", text="\n", trainer_logp=-1.0) for n in range(3)]
    tell_worst(tmp_path, 30, again)
    page = report(tmp_path)
    assert "60.7 % -0.500 6.1e-06 -12.000 -11.500 2 7" in page.text
    assert "0.7 % -5.000 -4.500" in page.text
    # The same prefix in three samples of a group is one row; a token of no ink can be seen.
    _, latest = page.text.split("Also at step 30, the latest that was told")
    assert "30 x \\n d 60.7 % -0.500 36.8 % -1.000 -0.500 2 7 3 samples" in latest
    assert [tag for tag, _ in page.tags].count("mark") == 9


def test_a_token_without_a_number_is_worse_than_all_others(tmp_path: Path) -> None:
    write_rl(tmp_path, [{}])
    tokens = [token(position=n, trainer_logp=-5.0 - n) for n in range(20)]
    tokens[3] |= {"text": "lost", "trainer_logp": math.nan}
    tell_worst(tmp_path, 1, tokens)
    text = report(tmp_path).text
    assert "Prompt 1 a b lost d 60.7 % -0.500 - nan nan" in text
    assert text.index("lost") < text.index("-24.000")


@pytest.mark.parametrize("text", HOSTILE)
def test_tokens_of_any_text_stay_text(tmp_path: Path, text: str) -> None:
    write_rl(tmp_path, [{}])
    tell_worst(tmp_path, 1, [token(before=text, text=text, after=text, prompt_id=n)
                             for n in range(8)])  # fmt: skip
    page = report(tmp_path)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("mark") == 8
    assert "img" not in tags
    assert tags.count("script") == tags.count("figure") + 1
    raw = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\u2066]", raw)
    assert len(raw) < 100_000


@pytest.mark.parametrize("tokens", [
    None, [], "tokens", [None, 3], [{}], [token(text="", token_id=2)], [token(text="nan")],
    [token(engine_logp=math.nan)], [token(engine_logp=900.0, trainer_logp=-math.inf)],
    [token(engine_logp=None, trainer_logp="x", policy_version=None, prompt_id="a")],
])  # fmt: skip
def test_events_with_odd_or_missing_tokens_do_not_break_the_page(
    tmp_path: Path, tokens: Any
) -> None:
    write_rl(tmp_path, [{}])
    with RunDir(tmp_path) as run_dir:
        run_dir.append_event("worst_tokens", 1, tokens=tokens)
        run_dir.append_event("worst_tokens", 2)
        run_dir.append_event("weights_published", 2)
    page = report(tmp_path)
    is_shown = isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], dict)
    assert ("disagree on most" in page.text) is is_shown
    if tokens == [token(text="", token_id=2)]:
        assert "token 2" in page.text
    if tokens == [token(text="nan")]:
        assert "a b nan d" in page.text


names = st.sampled_from(sorted(stale_record(1, truncated=0.1)))


@given(st.lists(st.dictionaries(names, st.floats()), min_size=1, max_size=4))
def test_no_part_of_the_metrics_breaks_page_or_lines(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, float]]
) -> None:
    path = tmp_path_factory.mktemp("run")
    write_rl(path, records)
    report(path)
    for record in records:
        assert all(label and value for label, value in off_policy_signs(record))


def plain(metrics: Mapping[str, float], step: int = 50) -> str:
    out = io.StringIO()
    view = make_view("plain", Console(file=out), label=LABEL)
    view.step(step, {"reward": 0.5, **metrics})
    view.record(step, {"reward": 0.5, **metrics})
    return out.getvalue().splitlines()[1]


def test_lines_tell_age_and_corrections_where_there_are_any() -> None:
    tail = "  stale 7 upd  corr 3.2 %"
    stale = {"stale/steps/max": 3.0, "stale/updates/max": 7.0, "correction/tokens/masked": 0.001,
             "correction/tokens/vetoed": 0.032, "correction/sequences/vetoed": 0.5}  # fmt: skip
    assert plain(stale) == f"step 50/50  reward  0.500{tail}"
    # Two updates of a step that the engine's own weights began: nothing to tell.
    fresh = {"stale/steps/max": 0.0, "stale/updates/max": 1.0, "correction/tokens/masked": 0.0}
    for metrics in ({}, fresh, {"stale/steps/max": math.nan, "correction/tokens/masked": math.nan}):
        assert plain(metrics) == "step 50/50  reward  0.500"


def drawn(view: LiveView) -> str:
    console = Console(file=io.StringIO(), width=100, record=True)
    console.print(view.render())
    return console.export_text()


def live() -> LiveView:
    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True)
    view = make_view("live", console, label=LABEL)
    assert isinstance(view, LiveView)
    return view


def test_the_panel_tells_age_and_corrections_where_there_are_any() -> None:
    view = live()
    calm = {"reward": 0.5, f"{DIFFERENCE}mean": 2.1e-7, f"{DIFFERENCE}max": 0.0}
    view.step(1, calm | {"stale/steps/max": 0.0, "stale/updates/max": 1.0})
    text = drawn(view)
    assert "engine   diff 2.1e-07   largest 0 " in text
    assert "stale" not in text
    view.step(2, calm | stale_record(3, truncated=0.032) | {"sync/seconds": 0.2})
    text = drawn(view)
    view.close()
    assert "largest 1.5   stale 7 upd   corr 3.2 %   weights sent in 0.2 s" in text


def test_publications_are_quiet_and_troubles_are_not_crowded_out() -> None:
    out = io.StringIO()
    lines, view = make_view("plain", Console(file=out), label=LABEL), live()
    for one in (lines, view):
        one.step(1, {"reward": 0.5})
        one.event("engine_restarted", 3, {"error": "killed", "restarts": 1})
        for step in range(4, 9):
            one.event("weights_published", step, {"version": step, "bytes": 2**20})
            one.event("checkpoint_saved", step, {"path": f"checkpoints/{step}"})
            one.event("eval_done", step, {"reward": 0.5})
    text = drawn(view)
    view.close()
    for told in (text, out.getvalue()):
        assert "engine restarted error=killed" in told
        assert "weights published" not in told
    assert "checkpoints/8" in text
    assert "checkpoints/7" not in text
