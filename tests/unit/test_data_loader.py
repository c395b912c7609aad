"""Plans: every row once an epoch, the same after a resume, ready ahead, exact under any budget."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homeostat.algorithms.row_loss import RowLoss
from homeostat.algorithms.sft import loss_spec
from homeostat.config.algorithm import SftConfig
from homeostat.config.data import DataConfig, TextSource
from homeostat.config.model import ModelConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.data.loader import PlanLoader, eval_batches, repack
from homeostat.data.prepare import prepare_rows
from homeostat.data.store import RowStore
from homeostat.data.tokenizer import load_tokenizer
from homeostat.errors import DataError
from homeostat.types import LossSpec, StepPlan

TINY = Path(__file__).parents[2] / "recipes" / "assets" / "tiny-chat"
NUM_ROWS = 53
FIRST_ROWS = [21, 38, 0, 39, 16, 50, 1, 2]


def make_store(folder: Path, num_rows: int = NUM_ROWS, seed: int = 0) -> RowStore:
    noise = np.random.default_rng(seed)
    file = folder / "a.jsonl"
    texts = ["x" * int(noise.integers(1, 60)) for _ in range(num_rows)]
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    source = TextSource(type="text", path=str(file))
    tokenizer = load_tokenizer(ModelConfig(path=str(TINY)))
    data = DataConfig(train=(source,))
    return prepare_rows([source], tokenizer, data, cache_dir=folder / "cache")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> RowStore:
    return make_store(tmp_path_factory.mktemp("store"))


def sft_loss(**changes: Any) -> RowLoss:
    return RowLoss(partial(loss_spec, SftConfig(**changes)))


def make_loader(store: RowStore, **changes: Any) -> PlanLoader:
    data = {"shuffle": True, "prefetch_updates": 3}
    trainer = {"batch_rows": 8, "epochs": 3, "max_tokens_per_device": 128}
    for name in list(changes):
        if name in DataConfig.model_fields:
            data[name] = changes.pop(name)
        elif name in TrainerConfig.model_fields:
            trainer[name] = changes.pop(name)
    source = TextSource(type="text", path="x")
    arguments: dict[str, Any] = {
        "row_ids": np.arange(len(store)),
        "trainer": TrainerConfig(**trainer),  # type: ignore[arg-type]
        "data": DataConfig(train=(source,), **data),  # type: ignore[arg-type]
        "loss": sft_loss(),
        "seed": 3,
    }
    return PlanLoader(store, **{**arguments, **changes})


def row_ids(plan: StepPlan) -> list[int]:
    return [int(row) for batch in plan.micro_batches for row in batch.row_ids_B]


def same(one: StepPlan, two: StepPlan) -> bool:
    heads = (one.step, one.epoch, one.loss) == (two.step, two.epoch, two.loss)
    pairs = zip(one.micro_batches, two.micro_batches, strict=True)
    names = ("tokens_N", "positions_N", "weights_N", "lengths_B", "row_ids_B")
    return heads and all(
        np.array_equal(getattr(left, name), getattr(right, name))
        for left, right in pairs
        for name in names
    )


def test_each_epoch_has_every_row_once_in_a_new_order(store):
    with make_loader(store) as loader:
        plans = list(loader)
    assert [plan.step for plan in plans] == list(range(1, 22))
    epochs = [
        [row for plan in plans if plan.epoch == epoch for row in row_ids(plan)]
        for epoch in range(3)
    ]
    assert all(sorted(rows) == list(range(NUM_ROWS)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3
    assert [plan.num_rows for plan in plans[:7]] == [8] * 6 + [5]


def test_without_shuffle_rows_come_in_order(store):
    with make_loader(store, shuffle=False, epochs=1) as loader:
        rows = [sorted(row_ids(plan)) for plan in loader]
    assert [row for part in rows for row in part] == list(range(NUM_ROWS))


def test_the_order_of_rows_is_fixed_by_the_seed_for_good(store):
    """Written down: a new numpy must not change what a resumed run sees."""
    with make_loader(store, packing=False) as loader:
        assert row_ids(next(loader)) == FIRST_ROWS
    with make_loader(store, packing=False, seed=4) as loader:
        assert row_ids(next(loader)) != FIRST_ROWS


@pytest.mark.parametrize("stop_after", [0, 1, 6, 7, 13, 21])
def test_a_resumed_loader_continues_exactly(store, stop_after):
    with make_loader(store) as whole:
        expected = list(whole)
    with make_loader(store) as first:
        for _ in range(stop_after):
            next(first)
        state = json.loads(json.dumps(first.state()))
    with make_loader(store, state=state, prefetch_updates=1) as second:
        rest = list(second)
        assert second.state()["step"] == 21
    assert len(rest) == 21 - stop_after
    assert all(same(one, two) for one, two in zip(expected[stop_after:], rest, strict=True))


def test_other_data_or_another_order_cannot_be_continued(store, tmp_path):
    with make_loader(store) as loader:
        next(loader)
        state = loader.state()
    other = make_store(tmp_path, seed=1)
    with pytest.raises(DataError, match="not those that the run started with"):
        make_loader(other, state=state)
    for change in ({"seed": 9}, {"batch_rows": 4}, {"shuffle": False}, {"row_ids": np.arange(9)}):
        with pytest.raises(DataError, match="not those that the run started with"):
            make_loader(store, state=state, **change)
    with pytest.raises(DataError, match="damaged"):
        make_loader(store, state={"step": "1"})
    with make_loader(store, state=state, max_tokens_per_device=64, epochs=4) as loader:
        assert next(loader).step == 2


@pytest.mark.parametrize("normalise", ["token", "row"])
def test_the_loss_is_normalised_over_the_update(store, normalise):
    with make_loader(store, loss=sft_loss(normalise=normalise)) as loader:
        for plan in loader:
            weights = [store[row].weights_T[1:].sum() for row in row_ids(plan)]
            expected = sum(weights) if normalise == "token" else len(weights)
            assert plan.loss.denominator == pytest.approx(expected)
            trained = sum(float(batch.weights_N.sum()) for batch in plan.micro_batches)
            assert normalise == "row" or trained == pytest.approx(plan.loss.denominator)


def test_micro_batches_follow_tokens_or_rows(store):
    with make_loader(store) as loader:
        assert all(b.num_tokens <= 128 for plan in loader for b in plan.micro_batches)
    with make_loader(store, packing=False, micro_batch_rows=3) as loader:
        assert [batch.num_rows for batch in next(loader).micro_batches] == [3, 3, 2]


def test_repacking_keeps_rows_and_loss(store):
    with make_loader(store, max_tokens_per_device=4096) as loader:
        plan = next(loader)
    assert len(plan.micro_batches) == 1
    small = repack(plan, max_tokens=100)
    assert max(batch.num_tokens for batch in small.micro_batches) <= 100
    assert (small.step, small.epoch, small.loss) == (plan.step, plan.epoch, plan.loss)
    assert sorted(row_ids(small)) == sorted(row_ids(plan))
    for batch in small.micro_batches:
        start = 0
        for row_id, length in zip(batch.row_ids_B, batch.lengths_B, strict=True):
            row, span = store[int(row_id)], slice(start, start + length)
            assert np.array_equal(batch.tokens_N[span], row.tokens_T)
            assert np.array_equal(batch.weights_N[span], row.weights_T)
            start += int(length)
    single = repack(plan, max_tokens=1)
    assert all(batch.num_rows == 1 for batch in single.micro_batches)
    assert all(batch.num_rows == 1 for batch in single.micro_batches)


def test_evaluation_sees_every_row_once_in_a_fixed_order(store):
    trainer = TrainerConfig(max_tokens_per_device=128)
    chosen = np.arange(0, NUM_ROWS, 2)
    seen = [batch.row_ids_B.tolist() for batch in eval_batches(store, chosen, trainer=trainer)]
    assert sorted(row for rows in seen for row in rows) == chosen.tolist()
    again = [batch.row_ids_B.tolist() for batch in eval_batches(store, chosen, trainer=trainer)]
    assert seen == again


class FaultyStore:
    """A real store on a disk that fails at one row, or answers when it is let."""

    def __init__(self, store: RowStore, bad_row: int = -1) -> None:
        self.store, self.bad_row = store, bad_row
        self.fingerprint = store.fingerprint
        self.num_reads = 0
        self.may_read = threading.Event()

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, row_id: int) -> Any:
        self.may_read.wait(timeout=30)
        self.num_reads += 1
        if row_id == self.bad_row:
            raise OSError(f"row {row_id} cannot be read")
        return self.store[row_id]


def test_what_fails_in_the_background_reaches_the_loop(store):
    broken: Any = FaultyStore(store, 20)
    broken.may_read.set()
    with make_loader(broken, shuffle=False) as loader:
        assert [next(loader).step for _ in range(2)] == [1, 2]
        with pytest.raises(OSError, match="row 20 cannot be read"):
            next(loader)
        assert loader.state()["step"] == 2


def test_plans_are_made_ahead_and_waiting_is_measured(store):
    slow: Any = FaultyStore(store)
    with make_loader(slow) as loader:
        threading.Timer(0.2, slow.may_read.set).start()
        next(loader)
        assert loader.last_wait_s > 0.1
        deadline = time.monotonic() + 30
        while slow.num_reads < 8 * 4:
            assert time.monotonic() < deadline, "three plans should be made ahead"
            time.sleep(0.01)


def test_closing_ends_the_thread(store):
    before = threading.active_count()
    loader = make_loader(store)
    next(loader)
    assert threading.active_count() == before + 1
    loader.close()
    loader.close()
    assert threading.active_count() == before


def test_rows_of_a_pair_stay_together_in_updates_and_micro_batches(store):
    spec = LossSpec("pairs", 1.0, {"algorithm": "dpo"})
    loss = RowLoss(lambda rows: spec, rows_per_example=2)
    rows = np.arange(NUM_ROWS - 1)
    with make_loader(store, loss=loss, row_ids=rows, max_tokens_per_device=64, epochs=1) as loader:
        plans = list(loader)
    assert [plan.num_rows for plan in plans] == [16, 16, 16, 4]
    batches = [batch for plan in plans for batch in plan.micro_batches]
    batches += repack(plans[0], max_tokens=32).micro_batches
    batches += eval_batches(store, rows, trainer=TrainerConfig(), rows_per_example=2)
    for batch in batches:
        ids = batch.row_ids_B.reshape(-1, 2)
        assert (ids[:, 0] % 2 == 0).all()
        assert (ids[:, 1] == ids[:, 0] + 1).all()
    assert max(len(batch.row_ids_B) for batch in batches) > 2
