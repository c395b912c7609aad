"""Step plans in order, packed ahead in the background.

    step -> (epoch, place in the epoch) -> row ids -> rows -> loss spec -> micro-batches

A plan is a pure function of the step: the order of an epoch depends only on (seed, epoch), so the
loader's state is the number of the last plan handed out, and a resumed run continues exactly. An
update never spans two epochs; the last one of an epoch may be smaller. If sources have weights,
every update has the same number of examples, and each source its own epochs (data/mixing.py). Rows
that are one example (a pair) stand together in the store, and stay together in updates and
micro-batches.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from homeostat.algorithms.losses import loss_of
from homeostat.algorithms.row_loss import RowLoss
from homeostat.arrays import IntArray
from homeostat.config.data import DataConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.data.mixing import EpochOrder, MixedRows, Mixture, orders_of
from homeostat.data.packing import Bins, group, pack, pack_nested
from homeostat.data.store import RowStore
from homeostat.errors import DataError
from homeostat.types import StepPlan, TokenRow, TrainBatch


class PlanLoader:
    """Iterate over the plans of steps start + 1 .. total_steps. Close it, or use it in `with`."""

    def __init__(
        self,
        store: RowStore,
        *,
        row_ids: IntArray,
        trainer: TrainerConfig,
        data: DataConfig,
        loss: RowLoss,
        seed: int,
        num_data_groups: int = 1,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        assert len(row_ids) > 0, "no rows to train on"
        self._store, self._row_ids = store, np.asarray(row_ids, dtype=np.int64)
        self._trainer, self._data, self._loss = trainer, data, loss
        self._examples = self._row_ids.reshape(-1, loss.rows_per_example)
        self._seed, self._num_data_groups = seed, num_data_groups
        self.total_steps = trainer.total_steps(len(self._examples))
        self._fingerprint = self._hash()
        self._last_step = 0 if state is None else self._resume_from(state)
        self.last_wait_s = 0.0
        numbers = np.arange(len(self._examples))
        self._order = EpochOrder(numbers, key=(seed,), shuffle=data.shuffle)
        self._mixed = self._mixed_rows()
        self._next_step = self._last_step + 1
        self._waiting: deque[Future[StepPlan]] = deque()
        # A single thread, so that plans are made in the order of steps.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="homeostat-plans")
        self._fill()

    def __iter__(self) -> Iterator[StepPlan]:
        return self

    def __next__(self) -> StepPlan:
        """Return the next plan. Errors of the background thread are raised here."""
        if not self._waiting:
            raise StopIteration
        started = time.perf_counter()
        # Futures are taken in the order of steps, so plans never overtake each other.
        plan = self._waiting.popleft().result()
        # Reported as time/data_wait: near 0 if packing keeps up with training.
        self.last_wait_s = time.perf_counter() - started
        self._last_step = plan.step
        self._fill()
        return plan

    def __enter__(self) -> PlanLoader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the background thread. Idempotent."""
        self._waiting.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def state(self) -> dict[str, Any]:
        """Return the position after the last plan handed out."""
        return {"step": self._last_step, "data": self._fingerprint}

    def plan(self, step: int) -> StepPlan:
        """Return the plan of any step, counted from 1. Epochs count from 0."""
        per_epoch = self._trainer.steps_per_epoch(len(self._examples))
        epoch, place = divmod(step - 1, per_epoch)
        if self._mixed is not None:
            chosen = self._mixed.rows(step)
        else:
            first, num = place * self._trainer.batch_rows, len(self._examples)
            count = min(self._trainer.batch_rows, num - first)
            chosen = self._order.span(epoch * num + first, count)
        rows = [self._store[int(row_id)] for row_id in self._examples[chosen].ravel()]
        batches = micro_batches(
            rows,
            self._trainer,
            num_data_groups=self._num_data_groups,
            rows_per_example=self._loss.rows_per_example,
        )
        return StepPlan(step, epoch, micro_batches=batches, loss=self._loss.spec(rows))

    def _fill(self) -> None:
        ahead = self._data.prefetch_updates
        while len(self._waiting) < ahead and self._next_step <= self.total_steps:
            self._waiting.append(self._thread.submit(self.plan, self._next_step))
            self._next_step += 1

    def _mixed_rows(self) -> MixedRows | None:
        mixture = Mixture.of(self._data)
        if mixture is None:
            return None
        orders = orders_of(
            np.arange(len(self._examples)),
            # All rows of an example come from one source.
            self._store.source_B[self._examples[:, 0]],
            names=mixture.names,
            seed=self._seed,
            shuffle=self._data.shuffle,
        )
        return MixedRows(orders, mixture, rows_per_step=self._trainer.batch_rows)

    def _hash(self) -> str:
        """Return a digest of everything that decides which rows a step has."""
        sizes = (self._seed, self._data.shuffle, self._trainer.batch_rows)
        digest = hashlib.sha256(f"{self._store.fingerprint} {sizes}".encode())
        if (mixture := Mixture.of(self._data)) is not None:
            digest.update(mixture.description.encode())
        # The ids, not only their number: another split of the same rows is other data.
        digest.update(self._row_ids.tobytes())
        return digest.hexdigest()

    def _resume_from(self, state: Mapping[str, Any]) -> int:
        step, data = state.get("step"), state.get("data")
        # `type(...) is` and not isinstance, because True is an int.
        if type(step) is not int or step < 0 or not isinstance(data, str):
            raise DataError(f"the checkpoint's state.json: data is damaged: {dict(state)!r:.200}")
        if data != self._fingerprint:
            raise DataError(
                "the rows are not those that the run started with, according to the checkpoint's "
                "state.json (or data.shuffle, seed or trainer.batch_rows changed), so it cannot "
                "be continued where it stopped. Restore the data files and settings, or start a "
                "new run with another `name`."
            )
        return step


def repack(plan: StepPlan, *, max_tokens: int, num_data_groups: int = 1) -> StepPlan:
    """Split the same rows with the same loss under another token budget.

    An example longer than the budget forms a micro-batch by itself.
    """
    rows = [row for batch in plan.micro_batches for row in batch.rows()]
    together = loss_of(plan.loss).rows_per_example
    lengths = _example_lengths([len(row) for row in rows], together)
    bins = _rows_of(pack(lengths, max_tokens, multiple_of=num_data_groups), together)
    return replace(plan, micro_batches=_batches(rows, bins))


def eval_batches(
    store: RowStore,
    row_ids: IntArray,
    *,
    trainer: TrainerConfig,
    num_data_groups: int = 1,
    rows_per_example: int = 1,
) -> Iterator[TrainBatch]:
    """Yield every row once, in an order that depends only on the rows, read on demand."""
    lengths = store.lengths[row_ids].tolist()
    for chosen in _split(lengths, trainer, num_data_groups, rows_per_example):
        yield TrainBatch.of([store[int(row_ids[index])] for index in chosen])


def micro_batches(
    rows: Sequence[TokenRow],
    trainer: TrainerConfig,
    *,
    num_data_groups: int = 1,
    rows_per_example: int = 1,
    nested: bool = False,
) -> tuple[TrainBatch, ...]:
    """Split the rows of an update as the trainer's settings say, in full rounds of data groups.

    `nested`: neighbouring rows continue longer and longer prefixes of a text, which is computed
    once for all rows of a micro-batch (ops/branches.py). So they stay together, and count once.
    """
    if nested and trainer.packing and trainer.shares_prompts:
        budget = trainer.tokens_per_micro_batch
        return _batches(rows, pack_nested(rows, budget, multiple_of=num_data_groups))
    lengths = [len(row) for row in rows]
    return _batches(rows, _split(lengths, trainer, num_data_groups, rows_per_example))


def _split(lengths: list[int], trainer: TrainerConfig, num_data_groups: int, together: int) -> Bins:
    whole = _example_lengths(lengths, together)
    if trainer.packing:
        bins = pack(whole, trainer.tokens_per_micro_batch, multiple_of=num_data_groups)
    else:
        bins = group(whole, trainer.rows_per_micro_batch(), multiple_of=num_data_groups)
    return _rows_of(bins, together)


def _example_lengths(lengths: list[int], together: int) -> IntArray:
    return np.array(lengths, dtype=np.int64).reshape(-1, together).sum(axis=1)


def _rows_of(bins: Bins, together: int) -> Bins:
    """Return the rows of bins that hold examples."""
    inside = range(together)
    return [[together * example + row for example in chosen for row in inside] for chosen in bins]


def _batches(rows: Sequence[TokenRow], bins: Bins) -> tuple[TrainBatch, ...]:
    return tuple(TrainBatch.of([rows[index] for index in chosen]) for chosen in bins)
