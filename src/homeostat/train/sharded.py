"""Training over several ranks, seen from the controller: a Trainer over a WorkerGroup.

    micro-batches -> dealt to data groups, in rounds -> ranks (train/fsdp) -> one report for all

The ranks hold the model; here are only the calls, their deadlines, and the proof that all ranks
did the same. Every rank gets every call that has a collective in it, with one call for a whole
list of micro-batches (several, where recorded routes that are sent with them are large). A rank
that fails leaves the others waiting for it, so the group is ended then. Where the ranks are at
fault, and not what they were asked to do (one died, hung, or lost the others), a TrainerLostError
says so, with a report on a hang: `run/calling/start.py` then resumes from the last checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from homeostat.algorithms.losses import require_columns
from homeostat.config.parts import ExportSettings, TrainerSetup
from homeostat.config.ranks import RanksCluster
from homeostat.data.dealing import deal, in_order, one_per_group
from homeostat.errors import (
    HomeostatError,
    LostRanksError,
    OutOfMemoryHaltError,
    TrainerLostError,
    WorkerDiedError,
    WorkerHungError,
    WorkerOutOfMemoryError,
)
from homeostat.models.build import ModelSheet
from homeostat.observe.timeline import OnSpan
from homeostat.sync.bucket import Bucket, Packer
from homeostat.train.memory import ladder_text
from homeostat.train.replay import portions
from homeostat.train.runtime import Runtime
from homeostat.train.sequence.heads import require_sequence_of
from homeostat.train.trainer import DeviceReport, Origin
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
from homeostat.workers.group import Pending, WorkerGroup, gather
from homeostat.workers.opening import open_group
from homeostat.workers.spec import GroupSpec

FACTORY = "homeostat.train.fsdp.make:make_trainer"
# How long the other ranks may take to answer once one has failed.
GRACE_SECONDS = 3.0
# Ranks have nothing to save when they are closed.
CLOSE_SECONDS = 10.0


def start_sharded(
    config: TrainerSetup, runtime: Runtime, *, log_file: Path, on_span: OnSpan | None = None
) -> ShardedTrainer:
    """Start the ranks and have each build its share of the model."""
    cluster = config.cluster
    assert isinstance(cluster, RanksCluster), "combinations asks for it"
    require_sequence_of(config.model, config.mesh)
    spec = GroupSpec(
        factory=FACTORY,
        kwargs={"config": _on(config, runtime), "threads": runtime.threads},
        kind="trainer",
        name="trainer",
        log_file=log_file,
        size=config.mesh.world_size,
        num_gpus=1 if runtime.device.type == "cuda" else 0,
        env={"OMP_NUM_THREADS": str(runtime.threads)},
        on_span=on_span,
        start_timeout_s=cluster.start_timeout_s,
        close_timeout_s=CLOSE_SECONDS,
    )
    try:
        group = open_group(cluster, spec)
    except WorkerOutOfMemoryError:
        raise
    except (WorkerDiedError, WorkerHungError, LostRanksError) as error:
        raise TrainerLostError(f"the trainer's ranks did not start: {error}") from None
    return ShardedTrainer(group, config, runtime=runtime, timeout_s=cluster.timeout_s)


def _on(config: TrainerSetup, runtime: Runtime) -> TrainerSetup:
    """Name the controller's choice of a device, so that no rank chooses another one."""
    trainer = config.trainer.model_copy(update={"device": runtime.device.type})
    return replace(config, trainer=trainer)


class ShardedTrainer:
    """Drives the ranks of a trainer. Implements `train.trainer.Trainer`."""

    def __init__(
        self, group: WorkerGroup, config: TrainerSetup, *, runtime: Runtime, timeout_s: float
    ) -> None:
        self.group = group
        self.config = config
        self.runtime = runtime
        self.timeout_s = timeout_s
        # Packers that the first rank knows, by their numbers, and numbers that it is to forget.
        self._packers: dict[int, Packer] = {}
        self._numbers = itertools.count(1)
        self._forgotten: list[int] = []

    # A protocol's property is matched by a property, not by a cached one.
    @property
    def sheet(self) -> ModelSheet:
        return self._sheet

    @cached_property
    def _sheet(self) -> ModelSheet:
        return self._all("about")[0]

    @property
    def num_data_groups(self) -> int:
        return self.config.mesh.num_data_groups

    def begin_step(
        self, step: int, *, observes: bool = False, ends: tuple[int, int] | None = None
    ) -> dict[str, Any]:
        return self._all("begin_step", step, observes=observes, ends=ends)[0]

    def forward(
        self, role: Role, batches: Sequence[TrainBatch], outputs: Outputs
    ) -> list[Computed]:
        computed: list[Computed] = []
        for some in self._portions(batches):
            found = self._fit(some, "forward", lambda mine: (role, mine, outputs))
            computed += in_order(found, self.config.mesh, count=len(some))
        return computed

    def accumulate(
        self, role: Role, batches: Sequence[TrainBatch], spec: LossSpec, *, step: int
    ) -> None:
        require_columns(spec, batches)
        for some in self._portions(batches):
            self._fit(some, "accumulate", lambda mine: (role, mine, spec), step=step)

    def measure(self, role: Role, batches: Sequence[TrainBatch], spec: LossSpec) -> Measured:
        require_columns(spec, batches)
        measured: list[Measured] = []
        for some in self._portions(batches):
            found = self._fit(some, "measure", lambda mine: (role, mine, spec))
            measured += one_per_group(found, self.config.mesh)
        return Measured.merged(measured)

    def _portions(self, batches: Sequence[TrainBatch]) -> list[Sequence[TrainBatch]]:
        """Return the batches of each call: all, unless their routes are too large to be sent."""
        max_bytes = self.config.model.moe.replay_buffer_bytes
        return portions(batches, per_round=self.num_data_groups, max_bytes=max_bytes)

    def discard(self, role: Role) -> None:
        self._all("discard", role)

    def apply(self, role: Role, *, step: int, learning_rate: float) -> UpdateReport:
        # Every rank makes its report of what all of them gathered: they are the same.
        return self._all("apply", role, step=step, learning_rate=learning_rate)[0]

    def trace_nonfinite(self, plan: StepPlan) -> tuple[list[TokenRow], Origin]:
        return self._all("trace_nonfinite", plan)[0]

    def refresh(self, role: Role, *, source: Role = Role.POLICY) -> None:
        self._all("refresh", role, source=source)

    def release(self, role: Role) -> None:
        self._all("release", role)

    def weight_buckets(self, role: Role, packer: Packer) -> Iterator[Bucket]:
        """Rank 0 packs what all ranks gather."""
        forgotten, self._forgotten = self._forgotten, []
        first = (role, packer, self._number_of(packer), forgotten)
        each = [first, *[(role, None)] * (self.group.size - 1)]
        self._gather(lambda: self.group.call_each("start_buckets", each))
        while (bucket := self._all("next_bucket")[0]) is not None:
            yield bucket

    def forget_packer(self, packer: Packer) -> None:
        for number, known in list(self._packers.items()):
            if known is packer:
                del self._packers[number]
                self._forgotten.append(number)

    def _number_of(self, packer: Packer) -> int:
        """Return the number of a packer: it has state on the first rank, and comes as it was."""
        known = (number for number, one in self._packers.items() if one is packer)
        number = next(known, None) or next(self._numbers)
        self._packers[number] = packer
        return number

    def checksums(self, role: Role) -> Mapping[str, int]:
        return self._all("checksums", role)[0]

    def export(self, role: Role, folder: Path, config: ExportSettings) -> None:
        self._all("export", role, folder, config)

    @property
    def state_bytes(self) -> int:
        return self._state_bytes

    @cached_property
    def _state_bytes(self) -> int:
        return sum(self._all("num_state_bytes"))

    def save(self, folder: Path) -> None:
        # Each rank writes separate files: one that fails keeps no other waiting.
        self._gather(lambda: self.group.call_all("save", folder), grace_s=self.timeout_s)

    def load(self, folder: Path) -> None:
        self._all("load", folder)

    def device_report(self) -> DeviceReport:
        """Memory of the rank that needs most, and the speed of each."""
        reports = self._all("device_report")
        return DeviceReport(
            max_alloc=max(report.max_alloc for report in reports),
            max_reserved=max(report.max_reserved for report in reports),
            probe_seconds=tuple(seconds for report in reports for seconds in report.probe_seconds),
        )

    def close(self) -> None:
        self.group.close()

    def _all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        return self._gather(lambda: self.group.call_all(method, *args, **kwargs))

    def _gather(
        self, ask: Callable[[], Sequence[Pending[Any]]], *, grace_s: float = GRACE_SECONDS
    ) -> list[Any]:
        """Ask the ranks and return their answers. A rank may have died since it was asked last,
        so that asking fails, too."""
        pending: Sequence[Pending[Any]] = ()
        try:
            pending = ask()
            return gather(pending, timeout_s=self.timeout_s)
        except WorkerHungError as error:
            report = self.group.report_hang()
            self.group.abandon()
            hint = "If a call may take longer, raise cluster.timeout_s."
            raise TrainerLostError("\n".join(filter(None, (str(error), report, hint)))) from None
        except WorkerOutOfMemoryError:
            # New ranks would run out of it again.
            raise
        except (WorkerDiedError, LostRanksError) as error:
            self.group.abandon()
            raise TrainerLostError(str(error)) from None
        except HomeostatError:
            _, waiting = wait([one.future for one in pending], timeout=grace_s)
            if waiting:
                # In a collective, for the one that failed.
                self.group.close()
            raise

    def _fit(
        self,
        batches: Sequence[TrainBatch],
        method: str,
        arguments: Callable[[Sequence[TrainBatch | None]], tuple[Any, ...]],
        **kwargs: Any,
    ) -> list[Any]:
        """Let each rank work on the micro-batches that are assigned to it."""
        dealt = deal(batches, self.config.mesh)
        try:
            return self._gather(
                lambda: [
                    self.group.call(rank, method, *arguments(mine), **kwargs)
                    for rank, mine in enumerate(dealt)
                ]
            )
        except (OutOfMemoryHaltError, WorkerOutOfMemoryError) as error:
            rows = max(int(batch.lengths_B.max()) for batch in batches)
            tokens = max(batch.num_tokens for batch in batches)
            ladder = ladder_text(self.config, longest_row=rows, largest_batch=tokens)
            raise OutOfMemoryHaltError(
                f"{error}\nA rank that runs out of memory leaves the others waiting for it, so "
                f"the step cannot be retried. {ladder}"
            ) from None
