"""Memory that is estimated without data against what the same code holds with data."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import tiny, tiny_moe, tiny_rl
from typer.testing import CliRunner

from homeostat.cli.verbs import app
from homeostat.config import RunConfig
from homeostat.data.loader import micro_batches
from homeostat.generation.layers import recipe_layers
from homeostat.models.preview import preview_model
from homeostat.ops.live_bytes import LiveBytes
from homeostat.run.sizing.estimate import MemoryPlan, full_batch, ladder, loss_of, plan_memory
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.estimating.estimate import UpdateMemory, estimate_update
from homeostat.train.runtime import Runtime, resolve_runtime
from homeostat.types import Role, TokenRow, TrainBatch

SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "head_dim": 32}


def write_model(folder: Path) -> None:
    tiny.write_model(folder / "model", **SHAPE)


def rows(*, count: int, length: int, columns: tuple[str, ...] = ()) -> list[TokenRow]:
    """With a common prompt in every two."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 12, size=(count, length // 2))
    return [
        TokenRow(
            number,
            np.concatenate([prompts[number // 2], rng.integers(3, 12, size=length // 2)]),
            (np.arange(2 * (length // 2)) >= length // 2).astype(np.float32),
            {name: np.zeros(2 * (length // 2), np.float32) for name in columns},
        )
        for number in range(count)
    ]


def estimated(config: RunConfig, runtime: Runtime, batch: TrainBatch) -> UpdateMemory:
    return estimate_update(config.for_trainer, runtime, batch, loss_of(config, batch))


def measured(config: RunConfig, batch: TrainBatch) -> int:
    trainer = local_trainer(config.for_trainer, resolve_runtime(config, kept=PLAIN))
    spec = loss_of(config, batch)
    with LiveBytes("cpu") as live:
        for _ in range(2):
            trainer.accumulate(Role.POLICY, [batch], spec, step=1)
    return live.peak


def num_quantised(config: RunConfig) -> int:
    return sum(
        math.prod(sheet.shape) for sheet in recipe_layers(config.for_trainer) if sheet.format
    )


@pytest.mark.parametrize("format", ["bf16_gradients", pytest.param("e4m3", marks=pytest.mark.slow)])
def test_an_update_in_fp8_holds_what_was_estimated(tmp_path: Path, format: str) -> None:
    write_model(tmp_path)
    settings = f"trainer.fp8={{recipe: blockwise, format: {format}}}"
    config, plain = tiny.config(tmp_path, settings), tiny.config(tmp_path)
    batch = TrainBatch.of(rows(count=6, length=40))
    runtime = resolve_runtime(config, kept=PLAIN)
    update, bare = (estimated(one, runtime, batch) for one in (config, plain))
    held = update.weights - bare.weights
    # The first pass makes the copies of weights, which are held from then on.
    assert measured(config, batch) == pytest.approx(update.work + held, rel=0.15)
    # An emulation keeps copies in fp32, of which gradients in bf16 need but one.
    assert held == 4 * num_quantised(config) * (2 if format == "e4m3" else 1)


def test_fp8_halves_what_a_gpu_keeps_of_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    write_model(tmp_path)
    batch = TrainBatch.of(rows(count=64, length=128))
    gpu = replace(
        resolve_runtime(tiny.config(tmp_path)), device=torch.device("cuda"), dtype=torch.bfloat16
    )
    plain, fp8 = (
        estimated(tiny.config(tmp_path, "model.attention=sdpa", *settings), gpu, batch)
        for settings in ([], ["trainer.fp8={recipe: tensorwise}"])
    )
    assert 0.5 * plain.work < fp8.work < 0.95 * plain.work
    config = tiny.config(tmp_path, "trainer.fp8={recipe: tensorwise}")
    assert fp8.weights - plain.weights == 2 * num_quantised(config)


@pytest.mark.parametrize(
    ("count", "checkpointing"),
    [
        (6, False),
        (1, True),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(6, True, marks=pytest.mark.slow),
    ],
)
def test_an_update_holds_what_was_estimated(
    tmp_path: Path, checkpointing: bool, count: int
) -> None:
    write_model(tmp_path)
    config = tiny.config(tmp_path, trainer={"gradient_checkpointing": checkpointing})
    batch = TrainBatch.of(rows(count=count, length=96))
    found = estimated(config, resolve_runtime(config, kept=PLAIN), batch)
    assert found.work == pytest.approx(measured(config, batch), rel=0.03)
    weights = sum(
        p.numel()
        for p in local_trainer(config.for_trainer, resolve_runtime(config))
        .roles[Role.POLICY]
        .model.parameters()
    )
    assert found.weights == 4 * weights
    assert found.optimizer == 8 * weights


def test_an_rl_update_holds_what_was_estimated(tmp_path: Path) -> None:
    config = tiny_rl.config(tmp_path)
    made = rows(count=6, length=64, columns=("advantage", "engine_logp"))
    (batch, *_) = micro_batches(made, config.trainer)
    found = estimated(config, resolve_runtime(config, kept=PLAIN), batch)
    assert found.work == pytest.approx(measured(config, batch), rel=0.05)


@pytest.mark.parametrize(
    ("checkpointing", "family"),
    [(True, "DOTS"), pytest.param(False, "QWEN", marks=pytest.mark.slow)],
)
def test_an_update_of_experts_holds_what_was_estimated(
    tmp_path: Path, checkpointing: bool, family: str
) -> None:
    """Whichever experts tokens choose, the bytes are the same up to rounding and small tensors."""
    experts = {**getattr(tiny_moe, family), **SHAPE, "moe_intermediate_size": 96}
    tiny.write_model(tmp_path / "model", **experts)
    config = tiny.config(tmp_path, trainer={"gradient_checkpointing": checkpointing})
    batch = TrainBatch.of(rows(count=6, length=96))
    found = estimated(config, resolve_runtime(config, kept=PLAIN), batch)
    assert found.work == pytest.approx(measured(config, batch), rel=0.1)


def test_each_lane_has_gradients_of_its_own(tmp_path: Path) -> None:
    config = tiny_rl.config(tmp_path)
    (batch, *_) = micro_batches(
        rows(count=6, length=64, columns=("advantage", "engine_logp")), config.trainer
    )
    plain = resolve_runtime(config, kept=PLAIN)
    one, two = (estimated(config, replace(plain, lanes=n), batch) for n in (1, 2))
    assert two.peak - one.peak == 2 * one.weights


@pytest.mark.parametrize(("decode", "copies"), [("plain", 0), ("compact", 1)])
def test_copies_to_decode_by_are_counted(tmp_path: Path, decode: str, copies: int) -> None:
    config = tiny_rl.config(tmp_path, engine={"decode": decode, "sleep": False})
    runtime = resolve_runtime(config, kept=PLAIN)
    preview = preview_model(config.model, None, dtype=runtime.dtype, device=runtime.device)
    plan = plan_memory(config, runtime, full_batch(config, 256), preview=preview, longest_prompt=16)
    assert plan.copies == copies * plan.update.weights
    assert plan.sampling_peak >= plan.process + plan.update.held + plan.copies + plan.cache
    # An engine that does not sleep has them while the trainer works.
    assert plan.training_peak == plan.process + plan.update.peak + plan.cache + plan.copies


def test_views_of_what_was_there_before_are_not_counted() -> None:
    weight = torch.randn(8, 4)
    with LiveBytes("cpu") as live:
        view = weight.t()[1:]
        assert live.now == 0
        other = view + 1
        assert live.now == 512 == live.peak
        del other
    assert live.now == 0


def test_on_a_gpu_the_gates_activation_is_not_kept(tmp_path: Path) -> None:
    """Kernels keep gate and up alone; fp32, so that no GPU is asked what it can do."""
    write_model(tmp_path)
    config = tiny.config(tmp_path, model={"attention": "sdpa"})
    here = resolve_runtime(config)
    batch = TrainBatch.of(rows(count=6, length=96))
    on_cpu = estimated(config, here, batch)
    on_gpu = estimated(config, replace(here, device=torch.device("cuda")), batch)
    assert on_gpu.work < on_cpu.work


def test_below_fp32_masters_and_gradients_are_held(tmp_path: Path) -> None:
    config = tiny.config(tmp_path)
    runtime = replace(resolve_runtime(config, kept=PLAIN), dtype=torch.bfloat16)
    batch = TrainBatch.of(rows(count=2, length=32))
    found = estimated(config, runtime, batch)
    assert (found.optimizer, found.gradients) == (6 * found.weights, 2 * found.weights)


def plan_of(config: RunConfig, *, capacity: int) -> MemoryPlan:
    """A made-up model of memory: what matters is the order of the ladder."""
    trainer = config.trainer
    kept = {False: 4, "selective": 3, True: 1}[trainer.gradient_checkpointing]
    work = trainer.max_tokens_per_device * kept
    held = 1000 if config.lora is None else 100
    update = UpdateMemory(weights=held, optimizer=0, gradients=0, reference=0, work=work)
    return MemoryPlan("cpu", capacity, 0, update)


def test_the_ladder_ends_with_what_fits_and_begins_with_what_changes_nothing(
    tmp_path: Path,
) -> None:
    config = tiny.config(tmp_path, trainer={"max_tokens_per_device": 1024})
    found = list(ladder(config, lambda c: plan_of(c, capacity=1200)))
    peaks = [plan.peak for _, plan in found]
    assert peaks == sorted(peaks, reverse=True)
    assert [changes[-1] for changes, _ in found][:2] == [
        "trainer.max_tokens_per_device=512",
        "trainer.max_tokens_per_device=256",
    ]
    assert not found[-2][1].fits
    assert found[-1][1].fits
    assert "trainer.gradient_checkpointing=true" in found[-1][0]


def recipe_file(folder: Path, **sections: Any) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(tiny.recipe(folder, **sections)))
    return file


def test_the_verb_prints_the_plan(tmp_path: Path) -> None:
    found = CliRunner().invoke(
        app, ["estimate", str(recipe_file(tmp_path)), "--format", "json"], catch_exceptions=False
    )
    assert found.exit_code == 0
    plan = json.loads(found.stdout)
    assert plan["fits"]
    parts = ("process", "weights", "optimizer", "gradients", "reference", "work", "lanes")
    assert plan["peak_bytes"] == sum(plan[f"{name}_bytes"] for name in parts)
