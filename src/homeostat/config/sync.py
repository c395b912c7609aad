"""How new weights reach the engine: when, and by which way."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from homeostat.config.base import ByteSize, PathText, Settings, key


class InProcessConfig(Settings):
    """The engine computes with the trainer's own tensors: nothing is sent."""

    type: Literal["in_process"]


class _BucketedConfig(Settings):
    """What all transports share that send."""

    bucket_bytes: ByteSize = key(
        256 * 2**20,
        ge=1,
        resume="free",
        help="Bytes sent at one time, and so the memory that sending takes. A larger tensor is "
        "sent alone.",
    )


class SharedMemoryConfig(_BucketedConfig):
    """Through /dev/shm, to another process of the same machine."""

    type: Literal["shared_memory"] = "shared_memory"


class DiskConfig(_BucketedConfig):
    """Through safetensors files, in a folder that trainer and engine both see."""

    type: Literal["disk"]
    folder: PathText | None = key(
        None, resume="free", help="Where the files lie while on their way. Default: the run's."
    )


class CollectiveConfig(_BucketedConfig):
    """By broadcast in a group of their own: NCCL between GPUs, gloo on the CPU."""

    type: Literal["collective"]


class CudaIpcConfig(_BucketedConfig):
    """Through memory of the GPU that trainer and engine share."""

    type: Literal["cuda_ipc"]


AnyTransport = Annotated[
    InProcessConfig | SharedMemoryConfig | DiskConfig | CollectiveConfig | CudaIpcConfig,
    Field(discriminator="type"),
]


class SyncConfig(Settings):
    interval: int = key(
        1,
        ge=1,
        help="Optimizer updates between publications of the weights, which are at the end of a "
        "step. Above trainer.updates_per_step, the engine samples with older weights (stale/*). "
        "An evaluation is of its step's own weights: they are published for it, and counting "
        "begins anew.",
    )
    verify: bool = key(
        True,
        resume="free",
        help="After each publication, prove that the engine serves these weights: its checksum, "
        "and the log-probs of fixed rows against the trainer's.",
    )
    timeout_s: float = key(
        600.0,
        gt=0,
        resume="free",
        help="Seconds that any one wait of a publication may take before it is an error.",
    )
    transport: AnyTransport | None = key(
        None,
        resume="free",
        help="How weights travel to an engine that has a process of its own. Default: "
        "shared_memory. Refused where the engine shares the trainer's weights, to which nothing "
        "is sent (in_process in the records).",
    )
