"""How the cores of a CPU are used: lanes compute what one thread does, and the choice is sound."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support import tiny

from homeostat.algorithms import sft
from homeostat.config.algorithm import SftConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN, Way, choose_cores, fastest, measure
from homeostat.train.lanes import Lanes, split
from homeostat.train.runtime import resolve_runtime
from homeostat.types import Role, TokenRow, TrainBatch


def make_batch(lengths: list[int], seed: int = 0) -> TrainBatch:
    rng = np.random.default_rng(seed)
    return TrainBatch.of(
        [
            TokenRow(i, rng.integers(3, 20, size=n), (np.arange(n) > 0).astype(np.float32))
            for i, n in enumerate(lengths)
        ]
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(2, 5))
def test_parts_are_runs_of_rows_of_about_one_size(lengths: list[int], count: int) -> None:
    batch = make_batch(lengths)
    parts = split(batch, count)
    assert 1 <= len(parts) <= count
    assert np.concatenate([part.row_ids_B for part in parts]).tolist() == list(range(len(lengths)))
    assert np.array_equal(np.concatenate([part.tokens_N for part in parts]), batch.tokens_N)
    # A cut is never farther from its place than the row that it stands at the end of.
    assert max(part.num_tokens for part in parts) <= batch.num_tokens / count + 2 * max(lengths)


def trained(folder: Path, lanes: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = tiny.config(folder)
    runtime = resolve_runtime(config, kept=Way(lanes, 1))
    trainer = local_trainer(config, runtime)
    losses = []
    for step in range(1, 4):
        batches = [make_batch([9, 14, 5, 11, 8], step), make_batch([6, 6, 30], step)]
        rows = [row for batch in batches for row in batch.rows()]
        spec = sft.loss_spec(SftConfig(type="sft"), rows)
        trainer.accumulate(Role.POLICY, batches, spec, step=step)
        report = trainer.apply(Role.POLICY, step=step, learning_rate=1e-4)
        assert report.num_micro_batches == 2
        assert report.row_ids_B.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
        losses.append(report.loss)
    trainer.close()
    return losses, {name: param.detach() for name, param in trainer.optimizer.params.items()}


def test_lanes_train_what_one_thread_trains_and_repeat_themselves(tmp_path: Path) -> None:
    losses, weights = trained(tmp_path, 1)
    in_two, once = trained(tmp_path, 2)
    again, twice = trained(tmp_path, 2)
    assert in_two == pytest.approx(losses, rel=1e-5)
    assert again == in_two
    for name, weight in weights.items():
        torch.testing.assert_close(once[name], weight, rtol=1e-4, atol=2e-5)
        assert torch.equal(once[name], twice[name]), name


def test_what_fails_in_a_lane_is_raised_when_all_have_ended() -> None:
    lanes, started, ended = Lanes(2, threads=1), threading.Event(), threading.Event()

    def work(which: str) -> None:
        if which == "bad":
            started.wait(10)
            raise ValueError("bad")
        started.set()
        ended.set()

    with pytest.raises(ValueError, match="bad"):
        lanes.map(work, ["bad", "good"])
    assert ended.is_set()
    lanes.close()


def test_what_the_recipe_says_is_done_without_measuring() -> None:
    def way(**settings: int) -> Way:
        return choose_cores(TrainerConfig(**settings), most=8, may_split=True).way

    assert way(threads=3) == Way(1, 3)
    assert way(lanes=2) == Way(2, 1)
    assert way(lanes=2, threads=4) == Way(2, 4)
    one_core = choose_cores(TrainerConfig(), most=1, may_split=True)
    assert (one_core.way, one_core.why) == (PLAIN, "one core to use")


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ((1.0, 0.95, 0.95), PLAIN),
        ((1.0, 30.0, 0.55), Way(2, 1)),
        ((1.0, 0.5, 0.8), Way(1, 2)),
        ((1.0, 0.6, 0.8), Way(2, 1)),
        ((1.0, 0.8, 1.1), Way(1, 2)),
        ((1.0, 30.0, 1.1), PLAIN),
    ],
)
def test_the_plain_way_stays_unless_another_is_clearly_faster(
    seconds: tuple[float, ...], chosen: Way
) -> None:
    ways = (PLAIN, Way(1, 2), Way(2, 1))
    assert fastest(dict(zip(ways, seconds, strict=True))) == chosen


def test_measuring_leaves_torch_as_it_was() -> None:
    before = torch.get_num_threads()
    found = choose_cores(TrainerConfig(), most=2, may_split=True)
    assert torch.get_num_threads() == before
    assert found.way in (PLAIN, Way(1, 2), Way(2, 1))
    assert found.why.count("ms") == 3
    assert set(measure([PLAIN])) == {PLAIN}
