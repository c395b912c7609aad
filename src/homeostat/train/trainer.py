"""The Trainer protocol: what a training backend must do. tests/contract holds every one to it.

Models are addressed by role, and no role is special: one that is trained has its own optimizer and
pending update, one that is frozen has neither. An update is any number of `accumulate` calls and
one `apply`; the gradient is the same however the update's rows are split over micro-batches, calls
and ranks, because the loss carries its denominator with it. Until `apply`, weights and optimizer
state are untouched, so `discard` undoes an update that was begun. The learning rate comes with
`apply`: the controller has the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from homeostat.config.parts import ExportSettings
from homeostat.models.build import ModelSheet
from homeostat.sync.bucket import Bucket, Packer
from homeostat.train.runtime import Runtime
from homeostat.train.update import Measured
from homeostat.types import (
    Computed,
    LossSpec,
    Outputs,
    Role,
    StepPlan,
    TokenRow,
    TrainBatch,
    UpdateReport,
)


@dataclass(frozen=True, slots=True)
class Origin:
    """The first place where a number stopped being finite."""

    direction: str
    module: str
    operation: str = ""

    def describe(self) -> str:
        tail = f" ({self.operation})" if self.operation else ""
        return f"{self.direction}, {self.module}{tail}"


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """Bytes of the training device (of the process, on the CPU) at their highest, and its speed."""

    max_alloc: int
    max_reserved: int
    # Seconds that each rank took for the same short work; empty where one process trains.
    probe_seconds: tuple[float, ...] = ()


class Trainer(Protocol):
    @property
    def sheet(self) -> ModelSheet:
        """The properties of the policy's model."""
        ...

    @property
    def runtime(self) -> Runtime: ...

    @property
    def num_data_groups(self) -> int:
        """Number of micro-batches that are worked on at one time (config/mesh.py)."""
        ...

    def begin_step(
        self, step: int, *, observes: bool = False, ends: tuple[int, int] | None = None
    ) -> dict[str, Any]:
        """Say which step is computed next: layers may change their precision with a step.

        Returns the format and number of the policy's quantised layers, if it has any; at step 0 it
        has none. `observes`: measure them in this step. `ends`: numbers of first and last decoder
        layers that are not quantised, which may be more than the recipe says.
        """
        ...

    def forward(
        self, role: Role, batches: Sequence[TrainBatch], outputs: Outputs
    ) -> list[Computed]:
        """Per batch, what is asked for under the current weights, in order; without a gradient."""
        ...

    def accumulate(
        self, role: Role, batches: Sequence[TrainBatch], spec: LossSpec, *, step: int
    ) -> None:
        """Add these micro-batches' share of the gradient of update `step`, which keys dropout."""
        ...

    def measure(self, role: Role, batches: Sequence[TrainBatch], spec: LossSpec) -> Measured:
        """Return what the loss measures on these micro-batches, without a gradient."""
        ...

    def discard(self, role: Role) -> None:
        """Forget what was accumulated since the last `apply`."""
        ...

    def apply(self, role: Role, *, step: int, learning_rate: float) -> UpdateReport:
        """Clip, check and apply the accumulated gradient; nothing that is not finite is applied.

        Memory that runs out before anything is written is raised as such, and `discard` undoes the
        update; from the first write on it is an OutOfMemoryHaltError, which nobody begins again.
        """
        ...

    def trace_nonfinite(self, plan: StepPlan) -> tuple[list[TokenRow], Origin]:
        """Find the rows at fault in an update that was not applied, and where it went wrong."""
        ...

    def refresh(self, role: Role, *, source: Role = Role.POLICY) -> None:
        """Give a frozen role the weights that another one has now."""
        ...

    def release(self, role: Role) -> None:
        """Free the memory of a frozen role that is no longer needed. It cannot be used again."""
        ...

    def weight_buckets(self, role: Role, packer: Packer) -> Iterator[Bucket]:
        """All weights of a role, adapters merged in, packed to travel."""
        ...

    def forget_packer(self, packer: Packer) -> None:
        """Free what a packer holds where the weights are packed. It is not used again.

        Any thread may call it: nothing is freed before the next weights are sent.
        """
        ...

    def checksums(self, role: Role) -> Mapping[str, int]:
        """Parameter name -> what tells the role's weights from others."""
        ...

    def export(self, role: Role, folder: Path, config: ExportSettings) -> None:
        """Write a model in HF format: all weights, or the adapter where lora.export says so."""
        ...

    @property
    def state_bytes(self) -> int:
        """About as many bytes as `save` will write."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything that an exact resume of all roles needs, as safetensors files."""
        ...

    def load(self, folder: Path) -> None:
        """Put back what `save` wrote, by any trainer and on any number of ranks."""
        ...

    def device_report(self) -> DeviceReport: ...

    def close(self) -> None:
        """End everything that the trainer started. Idempotent."""
        ...
