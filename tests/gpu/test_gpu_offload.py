"""Experts in host memory on a GPU: the same bits as on the device, and two layers of them there."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import tiny, tiny_moe

from homeostat.algorithms.sft import loss_spec
from homeostat.config.algorithm import SftConfig
from homeostat.models.decoder import Decoder
from homeostat.train.build import local_trainer
from homeostat.train.local import LocalTrainer
from homeostat.train.runtime import resolve_runtime
from homeostat.train.saving.frozen import checksums
from homeostat.train.scoring import score
from homeostat.types import Role, TokenRow, TrainBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
POLICY = Role.POLICY
SHAPE = {
    **tiny_moe.QWEN,
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "num_experts": 32,
    "moe_intermediate_size": 128,
    "initializer_range": 0.05,
}


def trainer_of(folder: Path, *, offload: bool, checkpointing: bool | str) -> LocalTrainer:
    """Attention is eager: gradients of faster kernels differ between two runs by themselves."""
    model = folder / "model"
    if not model.exists():
        tiny.write_model(model, **SHAPE)
    config = tiny.config(
        folder,
        model={"attention": "eager"},
        trainer={
            "device": "cuda",
            "gradient_checkpointing": checkpointing,
            "backend": {"type": "local", "offload_experts": offload},
        },
    )
    return local_trainer(config.for_trainer, replace(resolve_runtime(config), dtype=torch.bfloat16))


def batch_of(seed: int) -> list[TokenRow]:
    rng = np.random.default_rng(seed)
    return [
        TokenRow(number, rng.integers(3, 90, 100), np.ones(100, np.float32)) for number in range(8)
    ]


def first_update(trainer: LocalTrainer) -> tuple[bytes, dict[str, int], bytes]:
    """Scores, checksums of the gradients of two micro-batches, and log-probs of the update.

    Not its loss, whose terms a GPU adds up in any order.
    """
    batches = [TrainBatch.of(batch_of(seed)) for seed in (1, 2)]
    scores = np.concatenate(score(trainer, POLICY, batches)).tobytes()
    spec = loss_spec(SftConfig(), [row for batch in batches for row in batch.rows()])
    trainer.accumulate(POLICY, batches, spec, step=1)
    training = trainer.roles[POLICY].training
    assert training is not None
    grads = training.optimizer.gradients.present()
    assert grads.keys() == training.params.keys()
    sums = {name: int(total) for name, total in checksums(grads.items()).items()}
    report = trainer.apply(POLICY, step=1, learning_rate=1e-3)
    return scores, sums, np.concatenate(report.row_logp).tobytes()


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_streamed_experts_have_the_bits_of_experts_on_the_device(
    tmp_path: Path, checkpointing: bool | str
) -> None:
    how = {"checkpointing": checkpointing}
    plain = first_update(trainer_of(tmp_path, offload=False, **how))
    streamed = first_update(trainer_of(tmp_path, offload=True, **how))
    assert streamed == plain


def test_updates_reach_the_next_pass_and_only_two_layers_are_on_the_device(tmp_path: Path) -> None:
    # Of other tests in this process.
    gc.collect()
    before = torch.cuda.memory_allocated()
    trainer = trainer_of(tmp_path, offload=True, checkpointing=False)
    model = trainer.roles[POLICY].model
    assert isinstance(model, Decoder)
    experts = [p for block in model.moe_blocks for p in block.experts.parameters()]
    assert all(p.is_pinned() and not p.is_cuda for p in experts)
    batches = [TrainBatch.of(batch_of(1))]
    spec, losses = loss_spec(SftConfig(), batch_of(1)), []
    for step in range(1, 9):
        trainer.accumulate(POLICY, batches, spec, step=step)
        losses.append(trainer.apply(POLICY, step=step, learning_rate=1e-2).loss)
    assert losses[-1] < 0.8 * losses[0]
    on_device = torch.cuda.memory_allocated() - before
    del trainer, model
    all_of_it = sum(p.nbytes for p in experts)
    # Weights, masters, gradients and moments of all experts would be 9 times the weights.
    assert on_device < 9 * all_of_it / 2
