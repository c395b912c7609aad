"""Optimizers on a GPU: state in host memory has the same bits, and trains through pinned copies."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import tiny

from homeostat.algorithms.sft import loss_spec
from homeostat.config.algorithm import SftConfig
from homeostat.config.optimizer import AdafactorConfig, AdamWConfig, AnyOptimizer, MuonConfig
from homeostat.train.build import local_trainer
from homeostat.train.local import LocalTrainer
from homeostat.train.optimizers import host_state
from homeostat.train.optimizers.muon import orthogonalised
from homeostat.train.optimizers.optimizer import MasterOptimizer
from homeostat.train.runtime import resolve_runtime
from homeostat.types import Role, TokenRow, TrainBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
POLICY = Role.POLICY
SHAPES = {
    "model.embed_tokens.weight": (4000, 512),
    "model.layers.0.up_proj.weight": (1536, 512),
    "model.layers.0.experts.gate_up_proj": (8, 768, 512),
    "model.layers.0.norm.weight": (512,),
}
CONFIGS: dict[str, AnyOptimizer] = {
    "adamw": AdamWConfig(weight_decay=0.1),
    "adamw bf16": AdamWConfig(weight_decay=0.1, moments="bf16"),
    "adamw 8bit, bf16 masters": AdamWConfig(weight_decay=0.1, moments="8bit", masters="bf16"),
    "muon 8bit": MuonConfig(type="muon", weight_decay=0.1, moments="8bit"),
    "adafactor": AdafactorConfig(type="adafactor", weight_decay=0.1),
}


def steps_of(config: AnyOptimizer, *, offload: bool, on_host: bool = False) -> dict[str, Any]:
    """The state after a few steps, each behind a queue of products that keeps the GPU busy."""
    device = torch.device("cuda", 0)
    generator = torch.Generator().manual_seed(0)
    params = {
        name: torch.randn(shape, generator=generator).bfloat16().to("cpu" if on_host else device)
        for name, shape in SHAPES.items()
    }
    params = {n: (p.pin_memory() if on_host else p).requires_grad_() for n, p in params.items()}
    optimizer = MasterOptimizer(params.items(), config, offload_to=device if offload else None)
    busy = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    for _ in range(4):
        for _ in range(20):
            busy = busy @ busy * 1e-3
        for name, param in params.items():
            grad = torch.randn(param.shape, generator=generator)
            optimizer.gradients.add(name, grad.to(param.device))
        optimizer.step(learning_rate=1e-2, grad_norm=2.0, max_grad_norm=1.0)
        optimizer.zero_grad()
    return {**{f"param.{n}": p.detach() for n, p in params.items()}, **optimizer.state()}


@pytest.mark.parametrize("on_host", [False, True], ids=["", "weights too"])
@pytest.mark.parametrize("name", CONFIGS)
def test_state_in_host_memory_has_the_bits_of_state_on_the_device(
    name: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_state, "BUCKET_BYTES", 4 * 2**20)
    plain = steps_of(CONFIGS[name], offload=False)
    away = steps_of(CONFIGS[name], offload=True, on_host=on_host)
    assert plain.keys() == away.keys()
    for key, tensor in plain.items():
        assert torch.equal(tensor.cpu(), away[key].cpu()), key
        if not key.startswith(("param", "step")):
            assert away[key].is_pinned(), key


def trainer_of(folder: Path, *overrides: str) -> LocalTrainer:
    """Attention is eager: gradients of faster kernels differ between two runs by themselves."""
    if not (folder / "model").exists():
        shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
        tiny.write_model(folder / "model", **shape)
    config = tiny.config(folder, "trainer.device=cuda", *overrides, model={"attention": "eager"})
    return local_trainer(config.for_trainer, replace(resolve_runtime(config), dtype=torch.bfloat16))


def weights_after(trainer: LocalTrainer, *, updates: int = 4) -> dict[str, torch.Tensor]:
    for step in range(1, updates + 1):
        rng = np.random.default_rng(step)
        rows = [TokenRow(n, rng.integers(3, 20, 60), np.ones(60, np.float32)) for n in range(4)]
        batches = [TrainBatch.of(rows[:2]), TrainBatch.of(rows[2:])]
        trainer.accumulate(POLICY, batches, loss_spec(SftConfig(), rows), step=step)
        report = trainer.apply(POLICY, step=step, learning_rate=1e-2)
        assert report.applied
        assert report.probes is None or report.probes.get("probe/trained_unchanged", 0) == 0
    return {n: p.detach().cpu() for n, p in trainer.roles[POLICY].named_parameters()}


@pytest.mark.parametrize("overrides", [(), ("trainer.optimizer.moments=8bit",)], ids=str)
def test_a_trainer_with_offloaded_state_learns_the_same_weights(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    plain = weights_after(trainer_of(tmp_path, *overrides))
    away = trainer_of(tmp_path, "trainer.backend.offload_optimizer=true", *overrides)
    found = weights_after(away)
    assert all(torch.equal(found[name], value) for name, value in plain.items())


def test_layers_in_host_memory_learn_the_same_weights_with_two_layers_on_the_device(
    tmp_path: Path,
) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
    tiny.write_model(tmp_path / "model", **shape, num_hidden_layers=6)
    # The host sums the norm of its gradients in another order than a GPU, so nothing is clipped.
    free = "trainer.max_grad_norm=null"
    plain = weights_after(trainer_of(tmp_path, free))
    gc.collect()
    before = torch.cuda.memory_allocated()
    how = "trainer.backend={offload_optimizer: true, offload_params: true}"
    trainer = trainer_of(tmp_path, how, free)
    found = weights_after(trainer)
    assert all(torch.equal(found[name], value) for name, value in plain.items())
    layers = [p for n, p in trainer.roles[POLICY].named_parameters() if ".layers." in n]
    matrices = [p for p in layers if p.ndim == 2]
    assert all(p.is_pinned() for p in matrices)
    training = trainer.roles[POLICY].training
    assert training is not None
    assert training.optimizer.host is not None
    held = torch.cuda.memory_allocated() - before - training.optimizer.host.device_bytes
    # Weights, masters, gradients and moments of all layers would be 18 bytes an element.
    assert held < 18 * sum(p.numel() for p in matrices) / 2


def test_a_checkpoint_of_offloaded_state_goes_on_to_the_bit(tmp_path: Path) -> None:
    how = ("trainer.backend.offload_optimizer=true", "trainer.optimizer.moments=bf16")
    first = trainer_of(tmp_path, *how)
    weights_after(first, updates=2)
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved")
    wanted = weights_after(first)
    second = trainer_of(tmp_path, *how)
    second.load(tmp_path / "saved")
    found = weights_after(second)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_bf16_iterations_are_near_those_in_fp32() -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, 128, 320, device="cuda")
    found = orthogonalised(matrices, iterations=5)
    wanted = orthogonalised(matrices, iterations=5, dtype=torch.float32)
    assert found.dtype == torch.bfloat16
    assert float((found.float() - wanted).norm() / wanted.norm()) < 0.03
