"""An engine with helpers: who gets what, and what becomes of it when a helper dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.engines import CHUNK_BYTES, CPU, MAX_TOKENS, VOCABULARY, Model, load, native

from homeostat.config.cluster import InProcessCluster
from homeostat.config.model import ModelConfig
from homeostat.config.rollout import NativeEngineConfig
from homeostat.errors import EngineDiedError
from homeostat.models.lora import merged_state
from homeostat.rollout.engine import Quiesce, Request, Sampling, generate
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.split import SplitEngine
from homeostat.sync.shared_memory import SharedMemoryTransport
from homeostat.types import Completion
from homeostat.workers.opening import open_group
from homeostat.workers.spec import GroupSpec


class Workshop:
    """A split engine over a real process, and what was lost of it."""

    def __init__(self, model: Model, folder: Path) -> None:
        kwargs = {
            "model": ModelConfig(path=str(model.folder)),
            "engine": NativeEngineConfig(own_process=True),
            "device": CPU,
            "dtype": torch.float32,
            "threads": 1,
            "seed": 0,
            "max_tokens": MAX_TOKENS,
            "chunk_bytes": CHUNK_BYTES,
        }
        server = {"factory": "homeostat.rollout.native.host:build_engine", "kwargs": kwargs}
        spec = GroupSpec(
            factory="homeostat.rollout.remote:serve_engine",
            kwargs=server,
            kind="engine",
            name="helper",
            log_file=folder / "helper.log",
        )
        self.helper = RemoteEngine(
            lambda: open_group(InProcessCluster(), spec),
            vocabulary=VOCABULARY,
            can_decode=True,
            timeout_s=60,
            update_timeout_s=60,
        )
        self.model = model
        self.lost: list[EngineDiedError] = []
        self.transport = SharedMemoryTransport(f"homeostat-split-{os.getpid()}", 1 << 16)
        self.helper.connect(self.transport)
        self.engine = SplitEngine(
            native(model), [self.helper], give_weights=self.give, on_loss=self.lost.append
        )

    def give(self, helper: RemoteEngine, version: int, how: Quiesce) -> None:
        helper.begin_update(how)
        packer = self.transport.packer()
        for parcel in packer.pack(merged_state(self.model.ours)):
            helper.apply(parcel)
        packer.close()
        helper.commit(version)

    def kill_helper(self) -> None:
        (launcher,) = self.helper._group._launchers
        os.kill(launcher.pid, signal.SIGKILL)


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    made = Workshop(load("qwen3"), tmp_path)
    yield made
    made.engine.close()


def wanted() -> list[Request]:
    rng = np.random.default_rng(0)
    sampling = Sampling(max_new_tokens=24)
    prompts = [rng.integers(0, VOCABULARY, 9) for _ in range(4)]
    return [
        Request(f"{group}/{sample}", tokens_T, sampling, seed=1, session_key=f"{group}")
        for group, tokens_T in enumerate(prompts)
        for sample in range(4)
    ]


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens_T.tolist() for completion in completions]


def test_sessions_stay_whole_and_both_have_as_much(workshop: Workshop) -> None:
    alone = tokens_of(generate(native(workshop.model), wanted(), timeout_s=60))
    assert tokens_of(generate(workshop.engine, wanted(), timeout_s=60)) == alone
    own, helper = workshop.engine.own.stats(), workshop.helper.stats()
    # Of each of four prompts 9 tokens, once; the rest of its group shares them.
    assert own.prompt_tokens == helper.prompt_tokens == 2 * 9
    assert workshop.engine.stats().new_tokens == own.new_tokens + helper.new_tokens


def test_a_helper_samples_with_the_weights_of_the_commit(workshop: Workshop) -> None:
    workshop.engine.begin_update(Quiesce.DRAIN)
    with torch.no_grad():
        for parameter in workshop.model.ours.parameters():
            parameter.mul_(1.2)
    workshop.engine.commit(1)
    alone = tokens_of(generate(native(workshop.model), wanted(), timeout_s=60))
    found = generate(workshop.engine, wanted(), timeout_s=60)
    assert tokens_of(found) == alone
    assert {segment.policy_version for one in found for segment in one.segments} == {1}


@pytest.mark.parametrize("when", ["in flight", "at a commit", "asleep"])
def test_a_helper_that_dies_loses_nothing(workshop: Workshop, when: str) -> None:
    alone = tokens_of(generate(native(workshop.model), wanted(), timeout_s=60))
    if when == "in flight":
        for request in wanted():
            workshop.engine.submit(request)
        workshop.engine.poll(timeout_s=0)
        workshop.kill_helper()
        found: dict[str, Completion] = {}
        while len(found) < len(wanted()):
            found |= {one.request_id: one for one in workshop.engine.poll(timeout_s=60)}
        assert tokens_of([found[request.id] for request in wanted()]) == alone
    else:
        workshop.kill_helper()
        if when == "at a commit":
            workshop.engine.begin_update(Quiesce.DRAIN)
            workshop.engine.commit(1)
        else:
            workshop.engine.sleep()
        assert tokens_of(generate(workshop.engine, wanted(), timeout_s=60)) == alone
    assert len(workshop.lost) == 1
    assert workshop.engine.helpers == []
