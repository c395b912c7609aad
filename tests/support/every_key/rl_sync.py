"""Cases of the keys of an engine in its own process, and of the way that weights take to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import pytest
import torch
from tests.support.every_key.rl_sampling import tokens_per_forward
from tests.support.every_key.rl_workshop import PRETRAINED, transports
from tests.support.every_key.workshop import (
    Case,
    Run,
    Workshop,
    all_of,
    assert_same,
    refuses,
    shows,
)
from tests.support.kills import killed_at
from tests.support.own_process import shared_engine_process

from homeostat.errors import EngineError
from homeostat.models.build import load_model
from homeostat.models.lora import adapter_state, merged_state
from homeostat.rollout.remote import RemoteEngine

OWN = ("engine.own_process=true",)
# A bucket holds less than the smallest matrix, so that every tensor travels alone.
SMALL = "bucket_bytes: 64"


def published(run: Run) -> list[int]:
    return [event["version"] for event in run.events("weights_published")]


@contextmanager
def patched(**verbs: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, verb in verbs.items():
            patch.setattr(RemoteEngine, name, verb)
        yield


def warm(case: Case) -> Case:
    """The case, whose engines share one process: a start takes seconds, and has its own cases."""

    @wraps(case)
    def warm_case(workshop: Workshop) -> None:
        with shared_engine_process():
            case(workshop)

    return warm_case


def a_dead_engine_is_not_started_anew(workshop: Workshop) -> None:
    dying = patched(poll=killed_at("poll", call=1, within_s=0.0))
    run = workshop.attempt(*OWN, "engine.max_restarts=0", watch=dying)
    assert isinstance(run.error, EngineError)
    assert "SIGKILL" in str(run.error)
    assert "engine.max_restarts" in str(run.error)
    assert run.events("engine_restarted") == []


def what_is_published_is_scored(workshop: Workshop) -> None:
    """By the trainer too: fixed rows of 16 tokens, three for each of two publications."""
    num_probes = []
    for more in ((), ("sync.verify=false",)):
        with tokens_per_forward() as sizes:
            run = workshop.again(*OWN, *more)
        num_probes.append(sizes[:3] == [16, 16, 16])
        assert published(run) == [0, 1]
    assert num_probes == [True, False]


def weights_travel_by(transport: str, *more: str) -> Case:
    """The transport is recorded, each tensor is a separate bucket, and the result is the same."""

    def case(workshop: Workshop) -> None:
        buckets: list[int] = []
        plain = RemoteEngine.apply

        def apply(self: RemoteEngine, bucket: Any) -> None:
            buckets.append(len(bucket.entries))
            plain(self, bucket)

        way = f"sync.transport={{type: {transport}, {', '.join((SMALL, *more))}}}"
        run = workshop.again(*OWN, way, watch=patched(apply=apply))
        assert transports(run) == {transport}
        assert set(buckets) == {1}
        assert len(buckets) > 2
        assert_same(workshop.run(), run)

    # One run shows all keys of a transport.
    return cache(case)


@cache
def files_lie_where_they_are_told_to(workshop: Workshop) -> None:
    folder = workshop.folder / "on_their_way"
    weights_travel_by("disk", "folder: on_their_way")(workshop)
    assert folder.is_dir()
    assert list(folder.iterdir()) == []


BY_SHARED_MEMORY = warm(weights_travel_by("shared_memory"))
BY_DISK = warm(files_lie_where_they_are_told_to)
BY_DELTA = warm(weights_travel_by("delta", "folder: differences"))
BY_COLLECTIVE = warm(weights_travel_by("collective"))
NEEDS_A_GPU = warm(
    refuses("sync.transport={type: cuda_ipc, bucket_bytes: 64}", "cuda_ipc", base=OWN)
)


def sent_bytes(run: Run) -> list[int]:
    return [event["sent_bytes"] for event in run.events("weights_published")]


ADAPTED = (*OWN, *PRETRAINED, "lora={rank: 4}")


def the_adapter_alone_travels(workshop: Workshop) -> None:
    """Merged weights have the bytes of the model, an adapter only its own."""
    merged, alone = (workshop.run(*ADAPTED, *more) for more in ((), ("lora.publish=adapter",)))
    path = str(workshop.folder / alone.config.model.path)
    model = load_model(
        alone.config.model.model_copy(update={"path": path}),
        alone.config.lora,
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=0,
        gradient_checkpointing=False,
    ).module
    adapter = sum(tensor.nbytes for _, tensor in adapter_state(model))
    whole = sum(tensor.nbytes for _, tensor in merged_state(model))
    assert set(sent_bytes(alone)) == {adapter}
    assert set(sent_bytes(merged)) == {whole}
    assert 0 < adapter < whole


CASES: dict[str, Case] = {
    "lora.publish": all_of(
        warm(the_adapter_alone_travels),
        refuses("lora.publish=adapter", "nothing is sent", base=ADAPTED[1:]),
        warm(
            refuses(
                "lora.publish=merged", "rounding would remove it",
                base=(*ADAPTED, "lora.publish=adapter", "model.quantization=nf4"),
            )
        ),
        refuses("model.numerics=invariant", r"lora\.publish", base=ADAPTED),
    ),
    "engine.own_process (native)": shows(
        "engine.own_process=true", published, was=[], now=[0, 1], same="bits"
    ),
    "engine.processes (native)": all_of(
        shows(
            "engine.processes=2", lambda run: (run.dir / "helper1.log").is_file(),
            was=False, now=True, same="losses",
        ),
        refuses("engine.processes=2", "own_process", base=OWN),
    ),
    "engine.data_parallel_size (native)": all_of(
        shows(
            "engine.data_parallel_size=2", lambda run: (run.dir / "engine2.log").is_file(),
            was=False, now=True, base=OWN, same="losses",
        ),
        refuses("engine.data_parallel_size=2", "own_process=true"),
    ),
    "engine.start_timeout_s (native)": refuses(
        "engine.start_timeout_s=0.001", "engine", base=OWN
    ),
    "engine.max_restarts (native)": a_dead_engine_is_not_started_anew,
    "sync.interval": warm(
        shows(
            "sync.interval=2", published, was=[0, 1, 2], now=[0, 2],
            base=(*OWN, "trainer.max_steps=2"),
        )
    ),
    "sync.verify": warm(what_is_published_is_scored),
    "sync.timeout_s": warm(refuses("sync.timeout_s=1e-9", r"sync\.timeout_s", base=OWN)),
    "sync.transport.type (in_process)": all_of(
        refuses("sync.transport={type: in_process}", "nothing is sent"),
        warm(refuses("sync.transport={type: in_process}", r"sync\.transport\.type", base=OWN)),
    ),
    "sync.transport.type (shared_memory)": BY_SHARED_MEMORY,
    "sync.transport.bucket_bytes (shared_memory)": BY_SHARED_MEMORY,
    "sync.transport.type (disk)": BY_DISK,
    "sync.transport.bucket_bytes (disk)": BY_DISK,
    "sync.transport.folder (disk)": BY_DISK,
    "sync.transport.type (delta)": BY_DELTA,
    "sync.transport.bucket_bytes (delta)": BY_DELTA,
    "sync.transport.folder (delta)": BY_DELTA,
    "sync.transport.type (collective)": BY_COLLECTIVE,
    "sync.transport.bucket_bytes (collective)": BY_COLLECTIVE,
    "sync.transport.type (cuda_ipc)": NEEDS_A_GPU,
    "sync.transport.bucket_bytes (cuda_ipc)": NEEDS_A_GPU,
}  # fmt: skip
