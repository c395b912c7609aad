"""Rewards run beside sampling, and nothing that is drawn, kept or trained depends on the timing."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support import runs, tiny_rl

from homeostat.config import RunConfig
from homeostat.observe.jsonl import read_metrics
from homeostat.rollout.journal_part import frames
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion

# What a clock decides.
MEASURED = ("time", "throughput/", "memory/", "engine/")
# Values are of the group alone; how long they take is not.
REWARDS = """
import random, time

def uneven(completions, first, n, log_metric, **columns):
    time.sleep(random.random() * 0.02)
    log_metric("share", 0.1 * len(completions[0]))
    if n[0] % 5 == 0:
        raise ValueError(f"row {n[0]}")
    return [0.1 * len(text) + (text[:1] == wanted) for text, wanted in zip(completions, first)]
"""
TELLING = """
from pathlib import Path

def telling(completions, **columns):
    Path(__file__).with_name("scored").touch()
    return [float(len(text)) for text in completions]
"""

Poll = Callable[..., list[Completion]]


def config(folder: Path, name: str, source: str, function: str, **sections: Any) -> RunConfig:
    (folder / "rewards.py").write_text(source)
    functions = [{"type": "function", "path": f"{folder / 'rewards.py'}:{function}"}]
    rewards = {"functions": functions, "normalise": "standardise", "workers": 2}
    rollout = {**tiny_rl.ROLLOUT, "keep_journal": True}
    return tiny_rl.config(folder, f"name={name}", rewards=rewards, rollout=rollout, **sections)


def comparable(config: RunConfig) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(MEASURED)}
        for record in read_metrics(config.run_dir / "metrics.jsonl")
    ]


def journal(config: RunConfig) -> list[tuple[str, bytes]]:
    """Heads and bodies of all frames, in the order of writing."""
    return [
        (json.dumps(frame.head), frame.body())
        for path in sorted((config.run_dir / "journal").glob("*.log"))
        for frame in frames(path)
    ]


def problems(config: RunConfig) -> list[tuple[int, int, str]]:
    events = runs.events(config, "reward_trouble")
    return [(event["step"], event["prompt_id"], event["message"]) for event in events]


def out_of_order(rng: random.Random) -> Poll:
    """Return a poll that hands out what the engine finished one by one, in a random order."""
    plain, held = NativeEngine.poll, []

    def poll(engine: NativeEngine, *, timeout_s: float) -> list[Completion]:
        while found := plain(engine, timeout_s=timeout_s):
            held.extend(found)
        rng.shuffle(held)
        time.sleep(rng.random() * 0.005)
        return [held.pop()] if held else []

    return poll


def test_a_run_does_not_depend_on_what_finishes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {
        "algorithm": {"type": "dapo", "dynamic_sampling": {"max_rounds": 3}},
        "trainer": {"max_steps": 3},
    }
    plain = config(tmp_path, "plain", REWARDS, "uneven", **sections)
    runs.train(plain)
    shuffled = config(tmp_path, "shuffled", REWARDS, "uneven", **sections)
    monkeypatch.setattr(NativeEngine, "poll", out_of_order(random.Random(3)))
    runs.train(shuffled)
    assert comparable(shuffled) == comparable(plain)
    assert runs.final_tensors(shuffled) == runs.final_tensors(plain)
    assert journal(shuffled) == journal(plain)
    assert problems(shuffled) == problems(plain)
    assert problems(plain)


def test_a_group_is_scored_while_others_are_still_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = config(tmp_path, "one", TELLING, "telling", trainer={"max_steps": 1})
    plain, held = NativeEngine.poll, []

    def poll(engine: NativeEngine, *, timeout_s: float) -> list[Completion]:
        """Keeps back one completion until a reward has been called."""
        while found := plain(engine, timeout_s=timeout_s):
            held.extend(found)
        if len(held) > 1:
            now, held[:] = held[:-1], held[-1:]
            return now
        end = time.monotonic() + 60
        while held and not (tmp_path / "scored").exists():
            assert time.monotonic() < end, "the rewards wait for the last completion"
            time.sleep(0.01)
        return [held.pop()] if held else []

    monkeypatch.setattr(NativeEngine, "poll", poll)
    assert runs.train(one).step == 1
