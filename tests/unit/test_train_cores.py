"""How the cores of a CPU are used: lanes compute what one thread does, and the choice is sound."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support import tiny

from homeostat.algorithms import sft
from homeostat.config.algorithm import SftConfig
from homeostat.config.optimizer import AdamWConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN, Way, choose_cores, fastest, measure
from homeostat.train.lanes import Lanes, split
from homeostat.train.optimizers.optimizer import MasterOptimizer
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
    config = tiny.config(folder, f"trainer.lanes={lanes}")
    trainer = local_trainer(config.for_trainer, resolve_runtime(config))
    assert (trainer.lanes is not None) == (lanes > 1)
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
    return losses, {
        name: param.detach()
        for name, param in trainer.roles[Role.POLICY].training.optimizer.params.items()
    }


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


SPLITS = {
    "several rows in all": [[9, 14, 5, 11, 8], [6, 6, 30]],
    "one row in some": [[9, 14, 5], [21], [6, 6, 30]],
    "one row in all": [[9], [21], [14]],
}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("splits", SPLITS.values(), ids=list(SPLITS))
def test_no_gradient_is_lost_in_lanes_in_bf16(
    tmp_path: Path, splits: list[list[int]], lora: bool
) -> None:
    """Against float64: lanes take gradients in another way than `backward`, to the same masters."""
    random_start = tiny.config(tmp_path)
    local_trainer(random_start.for_trainer, resolve_runtime(random_start, kept=PLAIN)).export(
        Role.POLICY, tmp_path / "model", random_start.for_export
    )
    sections: dict = {"model": {"path": str(tmp_path / "model"), "init": "pretrained"}}
    config = tiny.config(
        tmp_path, "trainer.precision=bf16", **sections, **({"lora": {"rank": 4}} if lora else {})
    )
    batches = [make_batch(lengths, seed) for seed, lengths in enumerate(splits)]
    rows = [row for batch in batches for row in batch.rows()]
    spec = sft.loss_spec(SftConfig(type="sft"), rows)
    plain = resolve_runtime(config, kept=PLAIN)
    trainers = [local_trainer(config.for_trainer, replace(plain, lanes=num)) for num in (1, 3)]
    assert [trainer.lanes is not None for trainer in trainers] == [False, True]
    found = []
    for trainer in trainers:
        trainer.accumulate(Role.POLICY, batches, spec, step=1)
        grads = trainer.roles[Role.POLICY].training.optimizer.gradients.present()
        found.append({name: grad.clone() for name, grad in grads.items()})
    policy = trainers[0].roles[Role.POLICY]
    exact = copy.deepcopy(policy.model).double()
    for batch in batches:
        policy.forward.loss(exact, batch, spec, step=1)[1].loss.backward()
    expected = {n: p.grad for n, p in exact.causal_lm.named_parameters() if p.requires_grad}
    for grads in found:
        assert grads.keys() == expected.keys()
        # A product in bf16 is off by up to 2**-8 of its size, and a gradient is a chain of some.
        assert norm_of(grads) == pytest.approx(norm_of(expected), rel=0.02)
        for name, grad in grads.items():
            distance = float((grad.double() - expected[name]).norm())
            assert distance <= 0.05 * norm_of(expected), name
    reports = [t.apply(Role.POLICY, step=1, learning_rate=1e-3) for t in trainers]
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=5e-3)
    for trainer in trainers:
        trainer.close()


def norm_of(grads: dict[str, torch.Tensor]) -> float:
    return float(sum(grad.double().square().sum() for grad in grads.values())) ** 0.5


def test_gradients_reach_their_masters_in_one_way_whatever_the_dtypes() -> None:
    """Parameters in fp32 and bf16 beside each other: `backward` and `add_grad` sum the same."""
    torch.manual_seed(0)
    by_backward, by_hand = (
        torch.nn.ModuleDict(
            {"low": torch.nn.Linear(5, 3).bfloat16(), "high": torch.nn.Linear(3, 2)}
        )
        for _ in range(2)
    )
    by_hand.load_state_dict(by_backward.state_dict())
    optimizers = [
        MasterOptimizer(m.named_parameters(), AdamWConfig(weight_decay=0.01))
        for m in (by_backward, by_hand)
    ]
    expected: dict[str, torch.Tensor] = {}
    for seed in range(3):
        inputs = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed)).bfloat16()

        def loss(module: torch.nn.ModuleDict, inputs: torch.Tensor = inputs) -> torch.Tensor:
            return module["high"](module["low"](inputs).float()).square().sum()

        loss(by_backward).backward()
        params = optimizers[1].params
        grads = torch.autograd.grad(loss(by_hand), tuple(params.values()))
        for name, grad in zip(params, grads, strict=True):
            expected[name] = (
                expected.get(name, torch.zeros((), dtype=torch.float64)) + grad.double()
            )
            optimizers[1].gradients.add(name, grad.clone())
    for optimizer in optimizers:
        assert {m.dtype for m in optimizer.masters.values()} == {torch.float32}
        for name in optimizer.masters:
            found = optimizer.gradients.of(name)
            torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-5)
    norms = [float(optimizer.grad_norm()) for optimizer in optimizers]
    assert norms[0] == pytest.approx(norm_of(expected), rel=1e-5)
    assert norms[1] == norms[0]
