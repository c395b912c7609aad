"""The matrices of layers in host memory: the same bits, in the order of the layers.

Here host and device are both the CPU, and copies are made as late as can be (test_expert_offload).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import tiny, tiny_moe, tiny_rl
from tests.unit.test_expert_offload import Adversary, seen, some_rows

from homeostat.errors import ConfigError
from homeostat.models import layer_offload
from homeostat.models.decoder import Decoder
from homeostat.models.layer_offload import layer_matrices
from homeostat.run.sizing.estimate import loss_of
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.estimating.estimate import estimate_update
from homeostat.train.local import LocalTrainer
from homeostat.train.runtime import resolve_runtime
from homeostat.train.scoring import score
from homeostat.types import Role, TrainBatch

POLICY = Role.POLICY
AWAY = {"type": "local", "offload_optimizer": True, "offload_params": True}
# Its first layer has no experts, so layers differ in size.
DOTS = {**tiny_moe.DOTS, "num_hidden_layers": 5}


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Adversary]:
    made: list[Adversary] = []

    def adversary(*args: Any, **kwargs: Any) -> Adversary:
        made.append(Adversary(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(layer_offload, "WeightStream", adversary)
    return made


def trainer_of(
    folder: Path, *, away: bool, dtype: torch.dtype = torch.float32, **trainer: Any
) -> LocalTrainer:
    """A trainer on the CPU, which a recipe may not ask for together with offloading."""
    if not (folder / "model").exists():
        tiny.write_model(folder / "model", **DOTS)
    plain = tiny.config(folder, trainer=trainer)
    asked = tiny.config(folder, trainer={**trainer, "backend": AWAY})
    runtime = replace(resolve_runtime(plain, kept=PLAIN), dtype=dtype)
    return local_trainer((asked if away else plain).for_trainer, runtime)


@pytest.mark.parametrize(
    ("checkpointing", "dtype"),
    [
        (True, torch.bfloat16),
        pytest.param(False, torch.float32, marks=pytest.mark.slow),
        pytest.param("selective", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_losses_gradients_updates_and_scores_have_the_same_bits(
    tmp_path: Path, checkpointing: bool | str, dtype: torch.dtype, streams: list[Adversary]
) -> None:
    how = {"dtype": dtype, "gradient_checkpointing": checkpointing}
    plain, away = (trainer_of(tmp_path, away=away, **how) for away in (False, True))
    model = away.roles[POLICY].model
    assert isinstance(model, Decoder)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert seen(away) == seen(plain)
    assert len(streams) == 1
    assert set(streams[0].copies) == set(range(5))
    # Parameters are where they were, under their names.
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert all(isinstance(p, torch.nn.Parameter) for p in model.parameters())


def test_layers_come_in_order_one_ahead_and_vectors_stay(
    tmp_path: Path, streams: list[Adversary]
) -> None:
    trainer = trainer_of(tmp_path, away=True)
    score(trainer, POLICY, [TrainBatch.of(some_rows(seed=0))])
    assert streams[0].copies == streams[0].waits == [0, 1, 2, 3, 4]
    model = trainer.roles[POLICY].model
    assert isinstance(model, Decoder)
    streamed = {p for layer in model.layers for _, _, p in layer_matrices(layer)}
    names = [name for name, p in model.named_parameters() if p not in streamed]
    assert all("norm" in n or "embed" in n or "lm_head" in n or "bias" in n for n in names)


def test_a_frozen_reference_is_streamed_through_its_own_slots(
    tmp_path: Path, streams: list[Adversary]
) -> None:
    tiny_rl.write_model(tmp_path / "model", **DOTS)
    kl = {"algorithm": {"type": "grpo", "kl": {"coefficient": 0.1}}, "engine": {"decode": "plain"}}
    configs = [
        tiny_rl.config(tmp_path, f"trainer.backend={{{text}}}", **kl)
        for text in ("", "offload_optimizer: true, offload_params: true")
    ]
    runtime = resolve_runtime(configs[0], kept=PLAIN)
    both = [local_trainer(config.for_trainer, runtime) for config in configs]
    batch = TrainBatch.of(some_rows(seed=3, vocabulary=12))
    expected, found = (np.concatenate(score(t, Role.REFERENCE, [batch])) for t in both)
    assert found.tobytes() == expected.tobytes()
    assert len(streams) == 2


def test_the_estimate_moves_layers_and_their_state_to_the_host(tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "model", num_hidden_layers=4)
    plain = tiny.config(tmp_path)
    away = tiny.config(tmp_path, trainer={"backend": AWAY})
    runtime = replace(resolve_runtime(plain, kept=PLAIN), dtype=torch.bfloat16)
    batch = TrainBatch.of(some_rows(seed=0))
    first, second = (
        estimate_update(c.for_trainer, runtime, batch, loss_of(c, batch)) for c in (plain, away)
    )
    trainer = local_trainer(plain.for_trainer, runtime)
    model = trainer.roles[POLICY].model
    assert isinstance(model, Decoder)
    matrices = [p.numel() for layer in model.layers for _, _, p in layer_matrices(layer)]
    assert first.gradients - second.gradients == 4 * sum(matrices)
    # Weights and gradients of the layers, and the state of all: half the layers have a slot.
    assert second.host == first.optimizer + 6 * sum(matrices)
    assert first.weights - second.weights == pytest.approx(2 * sum(matrices) / 2, rel=0.05)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.backend.offload_optimizer=false"], "must be in host memory too"),
        (["trainer.backend.offload_experts=true"], "as trainer.backend.offload_experts would"),
        (["model.implementation=transformers"], "all its weights on one device"),
        (["model.meta_init=false"], "built on the GPU first"),
        (["lora={rank: 2}", "model.init=pretrained"], "below an adapter are frozen"),
        (["trainer.fp8={}"], "copies of the weights in fp8"),
    ],
)
def test_what_cannot_stream_is_refused_with_the_reason(
    tmp_path: Path, overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny.config(
            tmp_path,
            "trainer.backend.offload_params=true",
            "trainer.backend.offload_optimizer=true",
            *overrides,
        )


def test_kernels_of_the_engine_and_runs_on_the_cpu_are_refused(tmp_path: Path) -> None:
    backend = "trainer.backend={offload_optimizer: true, offload_params: true}"
    with pytest.raises(ConfigError, match="read all weights from the GPU"):
        tiny_rl.config(tmp_path, backend)
    config = tiny.config(tmp_path, backend, "trainer.device=cpu")
    with pytest.raises(ConfigError, match="weights are already in host memory"):
        resolve_runtime(config, kept=PLAIN)
