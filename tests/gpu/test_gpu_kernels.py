"""Kernels on a GPU in bf16 against the plain path; an update that never waits and keeps its memory.

tests/kernels holds them against float64 in fp32, on a GPU and on a CPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.contract.test_trainer_contract import rows
from tests.gpu.test_gpu_training import losses_of, trainer
from torch import Tensor

from homeostat.algorithms.sft import loss_spec
from homeostat.config.algorithm import SftConfig
from homeostat.ops import kernels
from homeostat.ops.activations import gated_silu
from homeostat.ops.logprobs import token_logprobs_and_entropy
from homeostat.ops.norms import add_rms_norm
from homeostat.ops.rope import RopeConfig, apply_rope_to_both, inverse_frequencies, rope_tables
from homeostat.types import Role, TrainBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Of the norm of a tensor: the plain path rounds to bf16 up to three times, a kernel once.
NEAR = 0.01


def drawn(*sizes: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*sizes, generator=generator, device="cuda", dtype=torch.bfloat16)


def assert_same(run: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> None:
    def results() -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = run(*leaves)
        torch.autograd.backward(outputs, [torch.ones_like(x) * 0.1 for x in outputs])
        return [*(x.detach() for x in outputs), *(x.grad for x in leaves)]

    found = results()
    with kernels.plain():
        wanted = results()
    for x, y in zip(found, wanted, strict=True):
        assert float((x.float() - y.float()).norm() / y.float().norm()) < NEAR


@pytest.mark.parametrize("width", [576, 896, 1536, 8960])
@pytest.mark.parametrize("num_rows", [1, 4099])
def test_norms_and_gates_in_bf16(width: int, num_rows: int) -> None:
    x, y, weight_D = (
        drawn(*size, seed=at) for at, size in enumerate([(num_rows, width)] * 2 + [(width,)])
    )
    assert_same(lambda x, y, w: add_rms_norm(x, y, w, eps=1e-6), x, y, weight_D)
    assert_same(lambda x, y: [gated_silu(x, y)], x, y)


@pytest.mark.parametrize("heads", [(14, 2, 64), (12, 2, 128), (9, 3, 64)])
def test_rotations_in_bf16(heads: tuple[int, int, int]) -> None:
    num_q, num_k, size = heads
    rope = RopeConfig(theta=1e6)
    inv_freq_F = inverse_frequencies(rope, head_dim=size).cuda()
    tables = rope_tables(torch.arange(1031, device="cuda"), inv_freq_F, rope)
    q, k = drawn(1031, num_q, size, seed=0), drawn(1031, num_k, size, seed=1)
    assert_same(lambda q, k: apply_rope_to_both(q, k, *tables), q, k)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_logprobs_in_bf16(entropy_grad: bool) -> None:
    hidden, weight = drawn(3001, 896, seed=0) / 8, drawn(30_011, 896, seed=1) / 8
    targets_M = torch.arange(3001, device="cuda") * 10
    how = {"temperature": 0.8, "chunk_bytes": 2**24, "entropy_grad": entropy_grad}

    def run(hidden: Tensor, weight: Tensor) -> Sequence[Tensor]:
        found = token_logprobs_and_entropy(hidden, weight, targets_M, **how)
        return found if entropy_grad else found[:1]

    assert_same(run, hidden, weight)


def test_bf16_learns_the_same_with_kernels_and_without(tmp_path: Path) -> None:
    found = losses_of(trainer(tmp_path, "cuda", torch.bfloat16), 10)
    with kernels.plain():
        wanted = losses_of(trainer(tmp_path, "cuda", torch.bfloat16), 10)
    assert found == pytest.approx(wanted, rel=1e-2)


@contextmanager
def never_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_micro_batch_does_not_wait_for_the_device(tmp_path: Path) -> None:
    made, data = trainer(tmp_path, "cuda", torch.bfloat16), rows(16)
    losses_of(made, 1)
    with never_waiting():
        made.accumulate(Role.POLICY, [TrainBatch.of(data)], loss_spec(SftConfig(), data), step=4)


def test_memory_is_steady_from_the_second_step_on(tmp_path: Path) -> None:
    made, data = trainer(tmp_path, "cuda", torch.bfloat16), rows(16)
    spec, seen = loss_spec(SftConfig(), data), []
    # What earlier tests left in cycles would be freed at any step.
    gc.collect()
    for step in range(1, 13):
        torch.cuda.reset_peak_memory_stats()
        made.accumulate(Role.POLICY, [TrainBatch.of(data)], spec, step=step)
        made.apply(Role.POLICY, step=step, learning_rate=1e-3)
        seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    # What is freed late may make a step smaller; none may be larger than the second.
    assert all(max(column[2:]) <= column[1] for column in zip(*seen, strict=True)), seen
