"""Rewards that misbehave: the run goes on, the counts are right, the message names the culprit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tests.support import runs, tiny_rl
from tests.support.patience import patiently

from homeostat.config import RunConfig
from homeostat.errors import ConfigError
from homeostat.observe.completions import read_completions
from homeostat.observe.jsonl import read_metrics

# Misbehaves by the row: `n` counts the prompts.
REWARDS = """
import time

def sickly(completions, n, **columns):
    kind = n[0] % 6
    if kind == 0:
        raise ZeroDivisionError(f"row {n[0]} is not to be divided")
    if kind == 1:
        time.sleep(60)
    if kind == 2:
        return [float("nan")] * len(completions)
    if kind == 3:
        return [1.0]
    if kind == 4:
        return [None] * len(completions)
    return [float(len(text)) for text in completions]

def healthy(completions, first, **columns):
    return [float(text.startswith(digit)) for text, digit in zip(completions, first)]
"""
FAILURES = {0: "exception", 1: "timeout", 2: "not_finite", 3: "wrong_length", 4: "none"}


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    file = tmp_path / "my_rewards.py"
    file.write_text(REWARDS)
    return file


def test_a_sick_reward_is_counted_named_and_survived(tmp_path: Path, reward_file: Path) -> None:
    functions = [
        {"type": "function", "path": f"{reward_file}:sickly", "weight": 0.1},
        {"type": "function", "path": f"{reward_file}:healthy"},
    ]
    # Every prompt once, in order: rows 0 to 23, so that each kind comes four times.

    def check(limit_s: float) -> None:
        config = tiny_rl.config(
            tmp_path,
            f"name=limit_{limit_s:.0f}",
            "data.shuffle=false",
            "trainer.max_steps=6",
            rewards={"functions": functions, "timeout_s": limit_s},
        )
        assert runs.train(config).step == 6
        assert_survived(config)

    patiently(check, limits_s=(0.4, 4.0, 15.0))


def assert_survived(config: RunConfig) -> None:
    records = list(read_metrics(config.run_dir / "metrics.jsonl"))
    samples = config.rollout.samples_per_prompt
    assert sum(r["rewards/sickly/failed"] for r in records) == 4 * 4 * samples
    assert sum(r["rewards/sickly/none"] for r in records) == 4 * samples
    assert sum(r["rewards/healthy/failed"] + r["rewards/healthy/none"] for r in records) == 0

    told = runs.events(config, "reward_trouble")
    assert Counter(event["failure"] for event in told) == dict.fromkeys(FAILURES.values(), 4)
    for event in told:
        assert event["reward"] == "sickly"
        assert FAILURES[event["prompt_id"] % 6] == event["failure"]
        assert event["num_samples"] == samples
    raised = next(event for event in told if event["failure"] == "exception")
    assert "row 0 is not to be divided" in raised["message"]
    assert "sickly" in raised["traceback"]

    # A sample that a reward failed on has none; one that it does not apply to keeps the others.
    rows = [
        row for step in (1, 2) for row in read_completions(config.run_dir / "completions", step)
    ]
    assert {row["prompt_id"] % 6 for row in rows} == set(range(6))
    for row in rows:
        if row["prompt_id"] % 6 < 4:
            assert (row["reward"], row["failed"]) == (None, '["sickly"]')
            assert row["advantage"] == 0
        else:
            expected = row["reward/healthy"] + 0.1 * (row["reward/sickly"] or 0.0)
            assert (row["reward"], row["failed"]) == (pytest.approx(expected), None)
    assert [record["rollout/failed_share"] for record in records[:2]] == [1.0, 0.5]


def test_samples_without_any_reward_are_not_trained(tmp_path: Path, reward_file: Path) -> None:
    def check(limit_s: float) -> None:
        functions = [{"type": "function", "path": f"{reward_file}:sickly"}]
        config = tiny_rl.config(
            tmp_path,
            f"name=limit_{limit_s:.0f}",
            "data.shuffle=false",
            "trainer.max_steps=3",
            "trainer.updates_per_step=1",
            rewards={"functions": functions, "timeout_s": limit_s},
        )
        runs.train(config)
        records = list(read_metrics(config.run_dir / "metrics.jsonl"))
        # Rows 0-3 all fail; of 4-7 row 5 is sound; of 8-11 row 11.
        assert [record["rollout/untrained_share"] for record in records] == [1.0, 0.75, 0.75]
        assert "train/loss" not in records[0]
        assert records[0]["sampling/sampling_logp_difference/max"] < 1e-5
        assert records[0]["train/updates_without_signal"] == 1
        assert all(record["train/loss"] == record["train/loss"] for record in records[1:])

    patiently(check, limits_s=(0.4, 4.0, 15.0))


def test_what_functions_log_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "talkative.py"
    file.write_text(
        "def talkative(completions, log_metric, log_extra, **columns):\n"
        "    log_metric('longest', max(map(len, completions)))\n"
        "    log_extra('shout', [text.upper() + '!' for text in completions])\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    functions = [{"type": "function", "path": f"{file}:talkative"}]
    config = tiny_rl.config(tmp_path, "trainer.max_steps=1", rewards={"functions": functions})
    runs.train(config)
    record = next(iter(read_metrics(config.run_dir / "metrics.jsonl")))
    assert record["rewards/talkative/logged/longest"] > 0
    for row in read_completions(config.run_dir / "completions", 1):
        assert row["extra/talkative/shout"] == json.dumps(row["completion"].upper() + "!")


def test_sampling_without_chance_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="greedy decoding is not a policy"):
        tiny_rl.config(tmp_path, "rollout.temperature=0")
