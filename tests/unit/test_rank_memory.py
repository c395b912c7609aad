"""The estimate of a rank: what it shards, gathers and keeps in host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support import tiny, tiny_moe_runs
from tests.unit.test_expert_offload import some_rows

from homeostat.config import RunConfig
from homeostat.models.shape_only import shape_decoder
from homeostat.run.sizing.estimate import loss_of
from homeostat.train.cores import PLAIN
from homeostat.train.estimating.estimate import UpdateMemory, estimate_update
from homeostat.train.estimating.rank_memory import gathered_bytes
from homeostat.train.runtime import resolve_runtime
from homeostat.types import TrainBatch


def over(num_ranks: int, *keys: str) -> tuple[str, str]:
    backend = ", ".join(["type: fsdp", *keys])
    return f"cluster={{type: torchrun, processes: {num_ranks}}}", f"trainer.backend={{{backend}}}"


def estimated(config: RunConfig) -> UpdateMemory:
    runtime = replace(resolve_runtime(config, kept=PLAIN), dtype=torch.bfloat16)
    batch = TrainBatch.of(some_rows(seed=0))
    return estimate_update(config.for_trainer, runtime, batch, loss_of(config, batch))


def num_params(config: RunConfig) -> int:
    how = {"dtype": torch.bfloat16, "kernel": "sdpa", "gradient_checkpointing": False}
    return sum(p.numel() for p in shape_decoder(config.model, None, **how).parameters())


def test_a_rank_holds_sixteen_bytes_of_each_parameter_of_its_share(tmp_path: Path) -> None:
    two, four = (tiny.config(tmp_path, *over(size)) for size in (2, 4))
    count = num_params(two)
    first, second = estimated(two), estimated(four)
    # fp32 masters, gradients and two moments; what is gathered does not depend on the ranks.
    assert first.gradients == pytest.approx(4 * count / 2, abs=8)
    assert first.optimizer == pytest.approx(8 * count / 2, abs=16)
    assert first.weights - second.weights == pytest.approx(4 * count / 4, abs=8)
    assert (first.work, first.host) == (second.work, 0)


def test_what_is_offloaded_moves_to_the_host_of_all_ranks(tmp_path: Path) -> None:
    state = tiny.config(tmp_path, *over(2, "offload_optimizer: true"))
    both = tiny.config(tmp_path, *over(2, "offload_optimizer: true", "offload_params: true"))
    plain = estimated(tiny.config(tmp_path, *over(2)))
    count, first, second = num_params(state), estimated(state), estimated(both)
    assert first.host == pytest.approx(8 * count, abs=32)
    assert (first.weights, first.gradients) == (plain.weights, plain.gradients)
    assert second.host == pytest.approx(16 * count, abs=64)
    assert second.gradients == 0
    assert plain.weights - second.weights == pytest.approx(4 * count / 2, abs=8)


def test_divided_experts_are_not_gathered(tmp_path: Path) -> None:
    plain, divided = (
        tiny_moe_runs.config(tmp_path, *over(2, f"expert_parallel_size: {ep}"), family="dots1")
        for ep in (1, 2)
    )
    how = {"dtype": torch.bfloat16, "kernel": "sdpa", "gradient_checkpointing": False}
    shape = shape_decoder(plain.model, None, **how)
    experts = sum(p.nbytes for p in shape.moe_blocks[0].experts.parameters())
    saved = gathered_bytes(shape, plain.mesh) - gathered_bytes(shape, divided.mesh)
    # Two layers are there at one time, each with half of its experts.
    assert saved == experts
    assert estimated(plain).weights - estimated(divided).weights == saved
