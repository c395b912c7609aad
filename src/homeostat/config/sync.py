"""Settings of weight synchronisation: when new weights are sent to the engine, and how."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import Field

from homeostat.config.base import ByteSize, PathText, Settings, key
from homeostat.config.plugins import Pluggable, Plugged


class InProcessConfig(Settings):
    """Nothing is sent: the engine computes with the trainer's own tensors."""

    type: Literal["in_process"]


class _BucketedConfig(Settings):
    """Settings that all transports share that send weights."""

    bucket_bytes: ByteSize = key(
        256 * 2**20,
        ge=1,
        resume="free",
        help="Size of a bucket in bytes. Weights are sent bucket by bucket, so this is also the "
        "memory that sending needs. A larger tensor is sent alone.",
    )


class SharedMemoryConfig(_BucketedConfig):
    """Send through shared memory (/dev/shm), to another process on the same machine."""

    type: Literal["shared_memory"] = "shared_memory"


class DiskConfig(_BucketedConfig):
    """Send through safetensors files in a folder that both trainer and engine can access."""

    type: Literal["disk"]
    folder: PathText | None = key(
        None,
        resume="free",
        help="Folder for the files while they are being sent. Default: the run folder.",
    )


class DeltaConfig(_BucketedConfig):
    """Send only the changes since the last publication, compressed, through files.

    Trainer and engine each keep the last published weights in host memory.
    """

    type: Literal["delta"]
    folder: PathText | None = key(
        None,
        resume="free",
        help="Folder for the files while they are being sent. Default: the run folder.",
    )


class CollectiveConfig(_BucketedConfig):
    """Broadcast in a separate process group: NCCL between GPUs, gloo on the CPU."""

    type: Literal["collective"]


class CudaIpcConfig(_BucketedConfig):
    """Send through GPU memory that trainer and engine share."""

    type: Literal["cuda_ipc"]


class TransportPlugin(Plugged, _BucketedConfig):
    """Base of your transports (homeostat.plugins.Transport)."""

    @classmethod
    def noun(cls) -> str:
        return "transport"

    @abstractmethod
    def open(self, site: Any) -> Any:
        """Return the transport (homeostat.sync.bucket.Transport) of a run.

        `site` is a homeostat.sync.transports.TransportSite.
        """


AnyTransport = Annotated[
    InProcessConfig
    | SharedMemoryConfig
    | DiskConfig
    | DeltaConfig
    | CollectiveConfig
    | CudaIpcConfig,
    Field(discriminator="type"),
    Pluggable("transport", (TransportPlugin,)),
]


class SyncConfig(Settings):
    """The schedule and the transport of weight publications to the engine."""

    interval: int = key(
        1,
        ge=1,
        help="Number of optimizer updates between two publications of the weights. Weights are "
        "published at the end of a step. If this is above trainer.updates_per_step, the engine "
        "samples with older weights (metrics stale/*). An evaluation always uses the weights of "
        "its own step: they are published for it, and the count starts again.",
    )
    overlap: Literal["never", "always", "if_possible"] = key(
        "never",
        resume="free",
        help="Send new weights while the engine keeps sampling, so that it pauses only for the "
        "switch to the new weights. Meanwhile the engine holds the weights twice. never: pause "
        "the engine while weights are sent. always: stop with an error if overlap is not "
        "possible. if_possible: send as with never in that case, and record an event. The metric "
        "sync/seconds is the pause; sync/staged_seconds is the time that was hidden.",
    )
    verify: bool = key(
        True,
        resume="free",
        help="After each publication, verify that the engine computes with the new weights: "
        "compare its log-probs of fixed rows with the trainer's. That it received all of them is "
        "verified in any case, by a checksum.",
    )
    timeout_s: float = key(
        600.0,
        gt=0,
        resume="free",
        help="Seconds that any single wait during a publication may take before the publication "
        "fails.",
    )
    transport: AnyTransport | None = key(
        None,
        resume="free",
        help="How weights are sent to an engine in a separate process. Default: shared_memory. "
        "Refused if the engine shares the trainer's weights, because then nothing is sent "
        "(records name the transport in_process).",
    )
