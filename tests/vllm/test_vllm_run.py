"""Whole RL runs with vLLM: they learn as with the native engine, outlive what is killed, and say
what is wrong where vLLM does not start.

vLLM seeds its noise by a request's id and by what the request had begun with. So a round that is
sampled from its start, by whichever process, has the same tokens; that is all that is promised, and
with float32 weights it is enough for a run to come out the same.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.engines import HAS_VLLM
from tests.support import runs, tiny_rl
from tests.support.every_key.engine_vllm import HEADS, NEEDS_VLLM
from tests.support.kills import kill_engine

from homeostat.cli.main import main
from homeostat.config import RunConfig
from homeostat.config.loading.load import build_config
from homeostat.errors import EngineError
from homeostat.observe.completions import read_completions
from homeostat.observe.jsonl import read_metrics
from homeostat.rollout.remote import RemoteEngine

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not HAS_VLLM, reason=NEEDS_VLLM)]

NUM_STEPS = 12
# Fewer at one time than a round has: some are handed out while others wait.
VLLM = {"type": "vllm", "enforce_eager": True, "max_concurrency": 16}
# Four times in ten what random weights do.
LEARNED: dict[str, Any] = {
    "rewards": {"functions": [{"type": "regex_format", "pattern": "[0-4].*"}]},
    "rollout": {**tiny_rl.ROLLOUT, "samples_per_prompt": 8},
    "checkpoint": {"interval_steps": 4, "export": "off"},
}
# The run that is killed has these steps in its journal only, and dies in the one after them.
REPLAYED, CUT = (5, 6), 7
# Its engine dies in this one, when the run was begun again.
RESTARTED = 9
KILLED = f"""
import os, signal
from homeostat.rollout.remote import RemoteEngine
plain = RemoteEngine.poll
def poll(self, **named):
    found = plain(self, **named)
    if found and self.life.in_flight and "train/{CUT}/0/0/0" in self._round:
        os.kill(os.getpid(), signal.SIGKILL)
    return found
RemoteEngine.poll = poll
"""


def recipe(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    if not (folder / "model").exists():
        tiny_rl.write_model(folder / "model", **HEADS)
    raw = tiny_rl.recipe(folder, name=name, **{**LEARNED, **sections})
    raw["trainer"]["max_steps"] = NUM_STEPS
    return raw


def config_of(folder: Path, name: str, **sections: Any) -> RunConfig:
    return build_config(recipe(folder, name, **sections), [], file=None)


def values(config: RunConfig, name: str) -> list[Any]:
    records = read_metrics(config.run_dir / "metrics.jsonl")
    return [record[name] for record in records if name in record]


def rows(config: RunConfig, step: int) -> list[dict[str, Any]]:
    return read_completions(config.run_dir / "completions", step)


def texts(config: RunConfig, step: int) -> list[tuple[str, int]]:
    return [(row["completion"], row["num_tokens"]) for row in rows(config, step)]


def processes_with(tag: str) -> list[int]:
    """Those whose environment has the tag: what a process starts inherits it."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and tag.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            # It has ended, or is another user's.
            continue
    return found


@pytest.fixture
def tag(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Marks what the test starts; all of it is gone soon after the test."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("HOMEOSTAT_TEST", mark)
    yield mark
    assert_gone(mark)


def assert_gone(mark: str) -> None:
    until = time.monotonic() + 30.0
    while (left := processes_with(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm_runs")


@pytest.fixture(scope="module")
def whole(folder: Path) -> RunConfig:
    config = config_of(folder, "whole", engine=VLLM)
    runs.train(config)
    return config


def test_it_learns_as_with_the_native_engine(folder: Path, whole: RunConfig) -> None:
    native = config_of(folder, "native")
    runs.train(native)
    for config in (native, whole):
        rewards = values(config, "reward")
        assert len(rewards) == NUM_STEPS
        assert sum(rewards[:2]) / 2 < 0.6
        assert sum(rewards[-3:]) / 3 > 0.85
        # A step without any signal updates, and so measures, nothing.
        differences = values(config, "sampling/sampling_logp_difference/mean")
        assert len(differences) > NUM_STEPS / 2
        assert max(differences) < 1e-4


def test_every_step_is_sampled_with_its_own_weights(whole: RunConfig) -> None:
    published = runs.events(whole, "weights_published")
    assert [event["version"] for event in published] == list(range(NUM_STEPS + 1))
    assert values(whole, "sync/version") == list(range(1, NUM_STEPS + 1))
    for step in range(1, NUM_STEPS + 1):
        assert {row["policy_version"] for row in rows(whole, step)} == {step - 1}
    for name in ("tokens", "sequences"):
        shares = values(whole, f"correction/{name}/truncated")
        assert shares
        assert set(shares) == {0.0}


@pytest.fixture(scope="module")
def hurt(folder: Path, whole: RunConfig) -> RunConfig:
    """Killed in the middle of a round, all of it; begun again; then its engine is killed."""
    raw = recipe(folder, "hurt", engine=VLLM)
    config = build_config(raw, [], file=None)
    with pytest.MonkeyPatch.context() as patch:
        mark = uuid.uuid4().hex
        patch.setenv("HOMEOSTAT_TEST", mark)
        process = runs.start(raw, folder, prelude=KILLED)
        assert process.pid in processes_with(mark)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == -signal.SIGKILL, output
        assert_gone(mark)
        assert max(values(config, "step")) == CUT - 1
        patch.setattr(RemoteEngine, "poll", killing_poll())
        runs.train(config)
        assert_gone(mark)
    return config


def killing_poll() -> Any:
    """poll, after which the engine is dead once; some of its round was handed out already."""
    plain = RemoteEngine.poll
    kills: list[int] = []

    def poll(self: RemoteEngine, **named: Any) -> Any:
        found = plain(self, **named)
        is_due = f"train/{RESTARTED}/0/0/0" in self._round and found and self.life.in_flight
        if is_due and not kills:
            kills.append(len(found))
            kill_engine()
        return found

    return poll


def test_a_run_that_was_killed_goes_on_from_its_journal(hurt: RunConfig, whole: RunConfig) -> None:
    (resumed,) = runs.events(hurt, "run_resumed")
    assert resumed["step"] == 4
    assert values(hurt, "step") == list(range(1, NUM_STEPS + 1))
    replayed = dict(zip(values(hurt, "step"), values(hurt, "rollout/replayed_rounds"), strict=True))
    assert [step for step, num in replayed.items() if num] == list(REPLAYED)
    # What was cut is sampled from its start, in another process.
    for step in (*REPLAYED, CUT):
        assert texts(hurt, step) == texts(whole, step)


def test_an_engine_that_is_killed_begins_its_round_anew(hurt: RunConfig, whole: RunConfig) -> None:
    (restart,) = runs.events(hurt, "engine_restarted")
    assert restart["restarts"] == 1
    assert restart["step"] == RESTARTED - 1
    assert "SIGKILL" in restart["error"]
    assert "engine.log" in restart["error"]
    assert texts(hurt, RESTARTED) == texts(whole, RESTARTED)
    assert values(hurt, "train/loss") == pytest.approx(values(whole, "train/loss"), abs=1e-4)


def test_a_value_that_vllm_refuses_ends_the_command_with_what_it_said(
    folder: Path, tag: str
) -> None:
    raw = recipe(folder, "refused", engine={**VLLM, "options": {"block_size": "many"}})
    process = runs.start(raw, folder)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "Traceback" not in output
    assert "vLLM does not start" in output
    assert "block_size" in output
    assert "engine.options" in output


def test_another_vocabulary_is_refused_before_anything_is_sampled(folder: Path, tag: str) -> None:
    options = {"hf_overrides": {"vocab_size": 20}, "load_format": "dummy"}
    config = config_of(folder, "other", engine={**VLLM, "options": options})
    with pytest.raises(EngineError, match=r"vocabulary of 20 .* and the trainer has 13") as caught:
        runs.train(config)
    assert caught.value.exit_code == 1
    assert values(config, "step") == []


def test_check_names_the_option_that_was_meant(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "misspelt.yaml"
    raw = recipe(folder, "misspelt", engine={**VLLM, "options": {"blok_size": 32}})
    file.write_text(json.dumps(raw))
    monkeypatch.setattr(sys, "argv", ["homeostat", "check", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    said = " ".join((printed.out + printed.err).split())
    assert ended.value.code != 0, said
    assert "engine.options.blok_size" in said
    assert "Did you mean 'block_size'?" in said
