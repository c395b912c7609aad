"""Experts in host memory: the same bits, in the order of the layers, with one layer ahead.

Here host and device are both the CPU. `Adversary` copies as a GPU's side stream may at worst: a
slot is overwritten as soon as a copy is begun, and has its values only once somebody waits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import tiny, tiny_moe, tiny_rl

from homeostat.algorithms.sft import loss_spec
from homeostat.config.algorithm import SftConfig
from homeostat.config.cluster import LocalBackend
from homeostat.config.native import NativeEngineConfig
from homeostat.config.run import RunConfig
from homeostat.errors import ConfigError, EngineError, ModelError
from homeostat.models import expert_offload
from homeostat.models.decoder import Decoder
from homeostat.models.expert_offload import StreamedExperts
from homeostat.models.weight_stream import WeightStream
from homeostat.rollout.native.fast import make_bursts
from homeostat.run.sizing.estimate import loss_of
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.estimating.estimate import estimate_update
from homeostat.train.local import LocalTrainer
from homeostat.train.runtime import resolve_runtime
from homeostat.train.scoring import score
from homeostat.types import Role, TokenRow, TrainBatch

POLICY = Role.POLICY
CPU = torch.device("cpu")
FAMILIES = {
    "qwen3_moe": {**tiny_moe.QWEN, "num_hidden_layers": 5},
    # Its first layer has no experts.
    "dots1": {**tiny_moe.DOTS, "num_hidden_layers": 5},
}
OFFLOADED = {"type": "local", "offload_experts": True}


class Adversary(WeightStream):
    """Notes the layers that are copied, and makes each copy as early and as late as can be."""

    copies: list[int]
    waits: list[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.copies, self.waits, self._late = [], [], {}

    def _copy(self, layer: int, slot: int) -> None:
        self.copies.append(layer)
        for place in self._places[layer]:
            place.data.fill_(math.nan)
        self._late[slot] = layer

    def _wait(self, slot: int) -> None:
        if slot in self._late:
            layer = self._late.pop(slot)
            self.waits.append(layer)
            self._fill(layer)


@pytest.fixture(autouse=True)
def adversary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_offload, "WeightStream", Adversary)


def experts_config(folder: Path, family: str = "qwen3_moe", **sections: Any) -> RunConfig:
    model = folder / "model"
    if not model.exists():
        tiny.write_model(model, **FAMILIES[family])
    return tiny.config(folder, **sections)


def trainer_of(folder: Path, *, offload: bool, dtype: torch.dtype = torch.float32, **sections: Any):
    """A trainer on the CPU, which a recipe may not ask for together with offloading."""
    family = sections.pop("family", "qwen3_moe")
    plain = experts_config(folder, family, **sections)
    runtime = replace(resolve_runtime(plain, kept=PLAIN), dtype=dtype)
    trainer = {**sections.get("trainer", {}), "backend": OFFLOADED}
    asked = experts_config(folder, family, **{**sections, "trainer": trainer})
    return local_trainer((asked if offload else plain).for_trainer, runtime)


def model_of(trainer: LocalTrainer) -> Decoder:
    model = trainer.roles[POLICY].model
    assert isinstance(model, Decoder)
    return model


def stream_of(trainer: LocalTrainer, role: Role = POLICY) -> Adversary:
    experts = trainer.roles[role].model.moe_blocks[0].experts
    assert isinstance(experts, StreamedExperts)
    assert isinstance(experts.stream, Adversary)
    return experts.stream


def some_rows(*, seed: int, count: int = 3, vocabulary: int = 90) -> list[TokenRow]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 12, count)
    return [
        TokenRow(number, rng.integers(3, vocabulary, n), np.ones(n, np.float32))
        for number, n in enumerate(lengths)
    ]


def seen(trainer: LocalTrainer, *, updates: int = 2) -> list[bytes]:
    """The bits of losses, gradients, weights and scores over some updates."""
    found: list[bytes] = []
    training = trainer.roles[POLICY].training
    assert training is not None
    for step in range(1, updates + 1):
        batches = [some_rows(seed=10 * step + part) for part in range(2)]
        spec = loss_spec(SftConfig(), [row for rows in batches for row in rows])
        trainer.accumulate(POLICY, [TrainBatch.of(rows) for rows in batches], spec, step=step)
        grads = training.optimizer.gradients.present()
        assert grads.keys() == training.params.keys()
        found += [grad.numpy().tobytes() for grad in grads.values()]
        report = trainer.apply(POLICY, step=step, learning_rate=1e-2)
        assert report.applied
        found.append(np.float64([report.loss, report.grad_norm]).tobytes())
        found += [logp.tobytes() for logp in score(trainer, POLICY, [TrainBatch.of(batches[0])])]
    named = model_of(trainer).named_parameters()
    return found + [p.detach().float().numpy().tobytes() for _, p in named]


@pytest.mark.parametrize(
    ("family", "checkpointing", "kernel", "dtype"),
    [
        ("qwen3_moe", False, "plain", torch.float32),
        ("dots1", True, "grouped", torch.bfloat16),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("qwen3_moe", True, "plain", torch.float32),
                ("dots1", "selective", "grouped", torch.float32),
                ("qwen3_moe", False, "grouped", torch.bfloat16),
            )
        ),
    ],
)
def test_losses_gradients_updates_and_scores_have_the_same_bits(
    tmp_path: Path, family: str, checkpointing: bool | str, kernel: str, dtype: torch.dtype
) -> None:
    sections = {
        "trainer": {"gradient_checkpointing": checkpointing},
        "model": {"moe": {"grouped_kernel": kernel}},
    }
    both = [
        trainer_of(tmp_path, offload=offload, family=family, dtype=dtype, **sections)
        for offload in (False, True)
    ]
    assert seen(both[1]) == seen(both[0])
    assert stream_of(both[1]).copies


def test_layers_come_in_order_one_ahead_and_go_back_in_reverse(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, offload=True)
    stream, rows = stream_of(trainer), some_rows(seed=0)
    score(trainer, POLICY, [TrainBatch.of(rows)])
    assert stream.copies == stream.waits == [0, 1, 2, 3, 4]
    stream.copies.clear()
    trainer.accumulate(POLICY, [TrainBatch.of(rows)], loss_spec(SftConfig(), rows), step=1)
    # Layers 4 and 3 are still there when the backward pass begins.
    assert stream.copies == [0, 1, 2, 3, 4, 2, 1, 0]


def test_a_layer_is_copied_while_the_one_before_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path, offload=True)
    stream, copied_by_then = stream_of(trainer), []
    compute = expert_offload.experts_of

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        copied_by_then.append(list(stream.copies))
        return compute(*args, **kwargs)

    monkeypatch.setattr(expert_offload, "experts_of", watched)
    score(trainer, POLICY, [TrainBatch.of(some_rows(seed=0))])
    assert copied_by_then == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_two_layers_of_experts_are_on_the_device_and_the_rest_is_not(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, offload=True)
    slots = stream_of(trainer)._places[:2]
    assert len(stream_of(trainer)._buffers) == 2
    blocks = model_of(trainer).moe_blocks
    assert len(slots) == 2 < len(blocks)
    addresses = {place.data_ptr() for slot in slots for place in slot}
    assert len(addresses) == 4
    assert not addresses & {p.data_ptr() for block in blocks for p in block.experts.parameters()}


def test_frozen_experts_under_an_adapter_and_a_reference_are_streamed_too(tmp_path: Path) -> None:
    lora = {"rank": 2, "targets": ["q_proj", "v_proj"]}
    tiny_moe.save_model(tmp_path / "model", **FAMILIES["qwen3_moe"])
    sections = {"model": {"init": "pretrained"}, "lora": lora}
    both = [trainer_of(tmp_path, offload=offload, **sections) for offload in (False, True)]
    assert seen(both[1]) == seen(both[0])


def test_a_frozen_reference_has_its_own_slots_and_the_same_scores(tmp_path: Path) -> None:
    tiny_rl.write_model(tmp_path / "model", **FAMILIES["qwen3_moe"])
    sections = {
        "algorithm": {"type": "grpo", "kl": {"coefficient": 0.1}},
        "engine": {"decode": "plain"},
    }
    configs = [
        tiny_rl.config(tmp_path, f"trainer.backend.offload_experts={offload}", **sections)
        for offload in ("false", "true")
    ]
    runtime = resolve_runtime(configs[0], kept=PLAIN)
    both = [local_trainer(config.for_trainer, runtime) for config in configs]
    batch = TrainBatch.of(some_rows(seed=3, vocabulary=12))
    expected, found = (np.concatenate(score(t, Role.REFERENCE, [batch])) for t in both)
    assert found.tobytes() == expected.tobytes()
    assert stream_of(both[1], Role.REFERENCE) is not stream_of(both[1])


@pytest.mark.parametrize(
    ("sections", "overrides", "said"),
    [
        ({"model": {"implementation": "transformers"}}, [], "transformers model has all"),
        ({"model": {"meta_init": False}}, [], "built on the GPU first"),
        (
            {"cluster": {"type": "torchrun", "processes": 2}},
            ["trainer.backend={type: fsdp, offload_experts: true}"],
            "ranks split every tensor, including those of experts",
        ),
    ],
)
def test_what_cannot_stream_is_refused_with_the_reason(
    tmp_path: Path, sections: dict[str, Any], overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny.config(tmp_path, "trainer.backend.offload_experts=true", *overrides, **sections)


def test_a_dense_model_and_a_run_on_the_cpu_are_refused(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, trainer={"backend": OFFLOADED, "device": "cpu"})
    with pytest.raises(ConfigError, match="already in host memory"):
        resolve_runtime(config, kept=PLAIN)
    runtime = resolve_runtime(tiny.config(tmp_path), kept=PLAIN)
    with pytest.raises(ModelError, match="has no experts"):
        local_trainer(config.for_trainer, runtime)


def test_decode_paths_that_read_all_experts_are_refused(tmp_path: Path) -> None:
    for decode in ("auto", "graphs", "fused"):
        with pytest.raises(ConfigError, match="keeps them in host memory"):
            tiny_rl.config(
                tmp_path, "trainer.backend.offload_experts=true", f"engine.decode={decode}"
            )
    model = model_of(trainer_of(tmp_path / "sft", offload=True))
    how = {"device": CPU, "max_tokens": 64, "threads": 1}
    config = NativeEngineConfig(decode="graphs")
    with pytest.raises(EngineError, match=r"Set engine\.decode=plain"):
        make_bursts(model, config, "graphs", **how)
    assert make_bursts(model, NativeEngineConfig(decode="plain"), "plain", **how) is None


def test_the_estimate_moves_experts_and_their_state_to_the_host(tmp_path: Path) -> None:
    config = experts_config(tmp_path)
    runtime = replace(resolve_runtime(config, kept=PLAIN), dtype=torch.bfloat16)
    offloaded = experts_config(tmp_path, trainer={"backend": OFFLOADED})
    batch = TrainBatch.of(some_rows(seed=0))
    plain, streamed = (
        estimate_update(c.for_trainer, runtime, batch, loss_of(c, batch))
        for c in (config, offloaded)
    )
    # 8 experts of 3 matrices, 16 x 32 each.
    each = 8 * 3 * 16 * 32
    assert streamed.host == 5 * each * (2 + 16)
    assert plain.weights - streamed.weights == 3 * each * 2
    assert plain.optimizer - streamed.optimizer == 5 * each * 12
    assert plain.gradients - streamed.gradients == 5 * each * 4
    assert plain.host == 0


def test_a_backend_without_a_type_is_the_local_one(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, "trainer.backend.offload_experts=true")
    assert config.trainer.backend == LocalBackend(offload_experts=True)
