"""Filters, curricula and mixed sources in real runs, which are resumed to the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.integration.test_rl_hostile import NO_SAVE, crash_in_step, values
from tests.support import runs, tiny, tiny_rl

from homeostat.config import RunConfig
from homeostat.errors import DataError, RewardError
from homeostat.observe.jsonl import read_metrics
from homeostat.run.preflight.check import Preflight

FILTERS = """
import time

def most_rows(completions, truncated, rewards, reward_values, n, trainer_state, third=0):
    assert len(completions) == len(rewards) == len(truncated) == 4
    assert list(reward_values) == ["exact_match"], reward_values
    assert trainer_state.global_step <= trainer_state.max_steps
    return n[0] % 3 != third, f"row / {'odd' if n[0] % 2 else 'even'}"

def raises(completions, n, **columns):
    if n[0] % 2:
        raise KeyError("nothing here")
    return True

def nonsense(completions, **columns):
    return "maybe"

def hangs(completions, n, **columns):
    if n[0] % 4 == 1:
        time.sleep(60)
    return True
"""


def with_filter(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    file = folder / "filters.py"
    file.write_text(FILTERS)
    one = {"type": "function", "path": f"{file}:{name}", "options": options}
    return {"rollout": {**tiny_rl.ROLLOUT, "filters": [one], "max_rounds": 4}}


def second_source(folder: Path, **more: Any) -> list[dict[str, Any]]:
    tiny_rl.write_prompts(folder / "others.jsonl", num_rows=10, seed=9)
    common = {"type": "prompts", "chat": False}
    first = {**common, "path": str(folder / "prompts.jsonl"), "weight": 1.0}
    return [first, {**common, "path": str(folder / "others.jsonl"), "weight": 3.0, **more}]


def records(config: RunConfig, *prefixes: str) -> list[dict[str, float]]:
    found = read_metrics(config.run_dir / "metrics.jsonl")
    return [{k: v for k, v in one.items() if k.startswith(prefixes)} for one in found]


COMPARED = (
    "reward",
    "train/loss",
    "grad_norm",
    "filter/",
    "data/",
    "curriculum/",
    "rollout/rounds",
)


def everything(folder: Path) -> dict[str, Any]:
    curriculum = {"difficulty": {}, "replay": {"share": 0.5, "max_age_steps": 9}}
    rollout = {
        **with_filter(folder, "most_rows")["rollout"],
        "curriculum": curriculum,
    }
    rollout["filters"] = [{"type": "truncated", "max_share": 0.9}, *rollout["filters"]]
    weights = {"points": [{"step": 1, "weight": 3.0}, {"step": 5, "weight": 0.0}]}
    data = {"train": second_source(folder, weight=weights, name="late"), "max_length": 16}
    trainer = {"max_steps": 6, "updates_per_step": 1, "lr": 1e-2, "threads": 1, "device": "cpu"}
    return {"rollout": rollout, "data": data, "trainer": trainer}


@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param({}, id="from a checkpoint and the journal after it"),
        pytest.param({"checkpoint": NO_SAVE}, id="from the journal", marks=pytest.mark.slow),
    ],
)
def test_a_run_with_all_of_it_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: dict[str, Any]
) -> None:
    tiny_rl.recipe(tmp_path)
    sections = everything(tmp_path)
    whole = tiny_rl.config(tmp_path, "name=whole", **sections)
    runs.train(whole)
    expected = records(whole, *COMPARED)
    again = tiny_rl.config(tmp_path, "name=again", **sections, **checkpoint)
    crash_in_step(again, 4, monkeypatch)
    runs.train(again)
    assert values(again, "rollout/replayed_rounds")[3] > 0
    assert records(again, *COMPARED) == expected
    assert runs.final_tensors(again) == runs.final_tensors(whole)
    # The second source falls from three quarters to nothing.
    shares = values(whole, "data/share/late")
    assert shares[0] > 0.5
    # Replayed prompts are all that is left of it, up to half of the step's.
    assert shares[4] <= 0.5
    reasons = {name for record in expected for name in record if name.startswith("filter/")}
    assert reasons >= {"filter/too_long", "filter/row_odd", "filter/row_even"}
    dropped = [sum(v for k, v in r.items() if k.startswith("filter/")) for r in expected]
    assert dropped == values(whole, "rollout/groups_passed_over")
    assert values(whole, "curriculum/seen_share")[-1] > 0


def test_saved_rollouts_keep_the_verdicts_of_filters(tmp_path: Path) -> None:
    sections = with_filter(tmp_path, "most_rows")
    keep = {"rollout": {**sections["rollout"], "keep_journal": True}}
    first = tiny_rl.config(tmp_path, "name=first", **keep)
    runs.train(first)
    debug = {"mode": "train_only", "rollouts": str(first.run_dir)}
    # Nothing is asked anew, so the file may be gone.
    (tmp_path / "filters.py").unlink()
    again = tiny_rl.config(tmp_path, "name=again", debug=debug, **sections)
    runs.train(again)
    assert records(again, "filter/", "grad_norm") == records(first, "filter/", "grad_norm")
    other = with_filter(tmp_path, "raises")
    with pytest.raises(DataError, match="no verdicts of the filter"):
        runs.train(tiny_rl.config(tmp_path, "name=other", debug=debug, **other))


def test_dynamic_sampling_and_the_filter_zero_spread_are_the_same(tmp_path: Path) -> None:
    dynamic = tiny_rl.config(
        tmp_path, "name=a", algorithm={"type": "grpo", "dynamic_sampling": {"max_rounds": 4}}
    )
    filters = {**tiny_rl.ROLLOUT, "filters": [{"type": "zero_spread"}], "max_rounds": 4}
    listed = tiny_rl.config(tmp_path, "name=b", rollout=filters)
    for config in (dynamic, listed):
        runs.train(config)
    names = ("filter/", "reward", "grad_norm", "rollout/")
    assert records(dynamic, *names) == records(listed, *names)
    assert sum(values(dynamic, "filter/all_same_reward")) > 0
    assert runs.final_tensors(dynamic) == runs.final_tensors(listed)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("raises", "exception", "KeyError: 'nothing here'"),
        ("nonsense", "exception", "it returned 'maybe': a filter returns True, False or"),
        ("hangs", "timeout", "no answer within rewards.timeout_s = 0.5 s"),
    ],
)
def test_a_filter_that_fails_drops_the_group_and_says_so(
    tmp_path: Path, name: str, kind: str, says: str
) -> None:
    timeout = 0.5 if kind == "timeout" else 30.0
    config = tiny_rl.config(
        tmp_path,
        f"rewards.timeout_s={timeout}",
        "trainer.max_steps=1",
        **with_filter(tmp_path, name),
    )
    runs.train(config)
    failed = values(config, "filter/filter_failed")[0]
    told = runs.events(config, "filter_failed")
    assert failed == len(told) > 0
    assert {event["failure"] for event in told} == {kind}
    assert all(says in event["message"] for event in told)
    if name == "nonsense":
        assert values(config, "rollout/rounds") == [4.0]
        assert values(config, "rollout/groups_lacking") == [4.0]
        assert values(config, "rollout/filtered_share") == [1.0]


def test_a_filter_that_does_not_load_stops_the_run_before_it_starts(tmp_path: Path) -> None:
    config = tiny_rl.config(tmp_path, **with_filter(tmp_path, "missing"))
    with pytest.raises(RewardError, match=r"filter .*filters\.py has no function 'missing'"):
        runs.train(config)


def items(config: RunConfig, name: str) -> list[tuple[str, str]]:
    found = Preflight(config, progress=lambda done, total: None).run()
    return [(item.level, item.text) for item in found if item.name == name]


def test_check_shows_the_mix_and_tries_the_filters(tmp_path: Path) -> None:
    tiny_rl.recipe(tmp_path)
    config = tiny_rl.config(tmp_path, **everything(tmp_path))
    ((level, text),) = items(config, "mix")
    assert level == "ok"
    assert "late: 10 rows, 75.0% at first, 0.0% at last" in text
    shown = items(config, "filters")
    assert [level for level, _ in shown] == ["ok", "ok"]
    assert "up to 4 rounds, until 4 groups pass: truncated" in shown[0][1]
    assert "kept 3 of 6 trial groups; 3 for row / even" in shown[1][1]
    bad = tiny_rl.config(tmp_path, **with_filter(tmp_path, "nonsense"))
    assert "it failed on 6 of 6 trial groups: it returned 'maybe'" in items(bad, "filters")[1][1]


def test_rows_of_two_sources_are_mixed_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    tiny.recipe(tmp_path)
    tiny.write_rows(tmp_path / "few.jsonl", num_rows=6, seed=4)
    train = [
        {"type": "messages", "path": str(tmp_path / "rows.jsonl"), "weight": 1},
        {"type": "messages", "path": str(tmp_path / "few.jsonl"), "weight": 0.5},
    ]
    data = {"train": train, "max_length": 128}
    saved = {"interval_steps": 2, "export": "off", "keep_last": 9}
    whole = tiny.config(tmp_path, "name=whole", data=data, checkpoint=saved)
    runs.train(whole)
    shares = values(whole, "data/share/few")
    assert sum(shares) / len(shares) == pytest.approx(1 / 3, abs=1 / 48)
    assert all(share in (2 / 8, 3 / 8) for share in shares)
    # Killed after step 3, as far as a resumed run can tell.
    parts = tiny.config(tmp_path, "name=parts", data=data, checkpoint=saved)
    shutil.copytree(whole.run_dir, parts.run_dir)
    for step in (4, 6):
        shutil.rmtree(parts.run_dir / "checkpoints" / f"step_{step:08d}")
    runs.train(parts)
    assert runs.events(parts, "run_resumed")[0]["step"] == 2
    assert runs.losses(parts) == runs.losses(whole)
    assert runs.final_tensors(parts) == runs.final_tensors(whole)
