"""Faults of the machine: memory, disk, files, and waiting for data."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from homeostat.clinic.injector import SORT_SFT, Cure, Dose, Injector
from homeostat.clinic.processes import descendants, workers
from homeostat.clinic.recipes import Body, Raw
from homeostat.health.finding import Family
from homeostat.run.session.session import Session
from homeostat.types import LossSpec, Role, TrainBatch

SAVES_OFTEN = Body("sort", "sft", steps=40, changes={"checkpoint.interval_steps": 5})


OVER_RANKS = Body(
    "sort",
    "sft",
    steps=24,
    changes={
        "checkpoint.interval_steps": 4,
        "cluster": {"type": "torchrun", "processes": 1},
        "trainer.backend": {"type": "fsdp"},
    },
)


OVER_TWO_RANKS = replace(
    OVER_RANKS,
    steps=30,
    changes=OVER_RANKS.changes | {"cluster": {"type": "torchrun", "processes": 2}},
)


class LeakedMemory(Injector):
    """Every step leaks some host memory."""

    name, family, strength = "leaked_memory", Family.MEMORY, (2e7, 6e7)
    expects = ("host-memory-leak",)
    body = Body("sort", steps=50)

    def started(self, parts: Any, session: Session) -> None:
        self.kept: list[bytes] = []

    def after_update(self, step: int, parts: Any) -> None:
        if self.is_ill(step):
            self.kept.append(os.urandom(64) * (round(self.dose.strength) // 64))


class OutOfMemory(Injector):
    """Micro-batches above a size no longer fit: the allocator refuses."""

    name, family, strength = "out_of_memory", Family.MEMORY, (80.0, 250.0)
    expects = ("oom-retries",)
    body, cure, vital = SORT_SFT, Cure.SAFE, "train/loss"
    stays = True

    def started(self, parts: Any, session: Session) -> None:
        trainer, accumulate = parts.trainer, parts.trainer.accumulate

        def limited(
            role: Role, batches: Sequence[TrainBatch], spec: LossSpec, *, step: int
        ) -> None:
            largest = max(batch.num_tokens for batch in batches)
            if self.is_ill(step) and largest > self.dose.strength:
                torch.empty(2**55)
            accumulate(role, batches, spec, step=step)

        trainer.accumulate = limited


class DiskFull(Injector):
    """From a step on, files of a checkpoint's size cannot be written."""

    name, family = "disk_full", Family.CHECKPOINT
    expects = ("disk-full-or-quota", "checkpoint-failing")
    body, onset, strength = SAVES_OFTEN, (6, 20), (2e5, 4e5)
    is_fatal = True

    def before_step(self, step: int, parts: Any) -> None:
        if self.strikes(step):
            limit = round(self.dose.strength)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


class DiskQuota(Injector):
    """The disk has room for three checkpoints, and none for a fourth."""

    name, family = "disk_quota", Family.CHECKPOINT
    expects = ("disk-full-or-quota", "checkpoint-failing")
    body, onset, is_fatal = SAVES_OFTEN, (20, 20), True
    cure, vital = Cure.SAFE, "train/loss"

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["checkpoint"]["keep_last"] = 3

    def started(self, parts: Any, session: Session) -> None:
        store, trainer, save = session.checkpoints, parts.trainer, parts.trainer.save

        def limited(folder: Path) -> None:
            if len(store.steps()) >= 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            save(folder)

        trainer.save = limited


class CorruptCheckpoint(Injector):
    """The run is stopped, its newest checkpoint is damaged, and it is resumed."""

    name, family = "corrupt_checkpoint", Family.CHECKPOINT
    expects = ("resumed-from-older", "checkpoint-file-damaged")
    body, onset, num_calls, cure = SAVES_OFTEN, (12, 25), 2, Cure.SAFE
    vital, stays, goes_back = "train/loss", True, True

    def after_step(self, step: int, parts: Any) -> None:
        if self.strikes(step):
            os.kill(os.getpid(), signal.SIGTERM)

    def between_calls(self, run_dir: Path) -> None:
        newest = max(run_dir.glob("checkpoints/step_*"))
        file = max(newest.glob("*.safetensors"), key=lambda file: file.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)


class FrequentSaves(Injector):
    """A checkpoint is saved after every step, on a slow disk."""

    name, family = "frequent_saves", Family.PERFORMANCE
    expects = ("checkpoint-slow",)
    body, onset, strength = Body("sort", "sft", steps=30), (1, 1), (0.2, 0.4)

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["checkpoint"]["interval_steps"] = 1

    def started(self, parts: Any, session: Session) -> None:
        trainer, save = parts.trainer, parts.trainer.save

        def slow(folder: Path) -> None:
            time.sleep(self.dose.strength)
            save(folder)

        trainer.save = slow


class SlowStore:
    """Rows from a slow disk or network."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __getitem__(self, row_id: int) -> Any:
        time.sleep(self._seconds)
        return self._store[row_id]


class SlowData(Injector):
    """Rows arrive more slowly than they are trained on."""

    name, family, strength = "slow_data", Family.PERFORMANCE, (0.005, 0.01)
    expects = ("data-starved", "data-loading-slow")
    body, onset = SORT_SFT, (1, 1)

    def started(self, parts: Any, session: Session) -> None:
        rows = parts.train_rows
        object.__setattr__(rows, "rows", SlowStore(rows.rows, self.dose.strength))


class RankKilled(Injector):
    """A rank of the trainer is killed, twice in a few steps."""

    name, family = "rank_killed", Family.DISTRIBUTED
    expects = ("trainer-ranks-lost",)
    body, onset = OVER_RANKS, (6, 10)
    cure, vital, stays = Cure.SAFE, "train/loss", True
    # Three starts of torchrun, each of which imports torch.
    deadline_s = 400.0

    def __init__(self, dose: Dose) -> None:
        super().__init__(dose)
        self.left = {dose.onset, dose.onset + 6}

    def before_step(self, step: int, parts: Any) -> None:
        # A step comes again after a restart.
        if step in self.left:
            self.left.remove(step)
            for process in descendants("homeostat.workers.child"):
                os.kill(process, signal.SIGKILL)


class SlowRank(Injector):
    """One of two ranks gets only a share of the processor's time."""

    name, family, strength = "slow_rank", Family.DISTRIBUTED, (0.004, 0.008)
    expects = ("straggler-rank",)
    body, onset = OVER_TWO_RANKS, (6, 10)
    # Two ranks, each of which imports torch, and steps that take several times as long.
    deadline_s = 300.0

    def before_step(self, step: int, parts: Any) -> None:
        if self.strikes(step):
            slowed = max(workers())
            threading.Thread(target=self._hold_up, args=(slowed,), daemon=True).start()

    def _hold_up(self, process: int) -> None:
        """Stop the rank again and again until it ends. It runs for 1 ms in between."""
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(process, signal.SIGSTOP)
                time.sleep(self.dose.strength)
                os.kill(process, signal.SIGCONT)
                time.sleep(0.001)


FAULTS: tuple[type[Injector], ...] = (
    RankKilled,
    SlowRank,
    LeakedMemory,
    OutOfMemory,
    DiskFull,
    DiskQuota,
    CorruptCheckpoint,
    FrequentSaves,
    SlowData,
)
