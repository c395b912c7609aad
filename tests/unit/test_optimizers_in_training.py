"""Every optimizer in a trainer: resumed exactly, estimated as held, refused where it must be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import tiny, tiny_moe, tiny_rl

from homeostat.algorithms.sft import loss_spec
from homeostat.config.algorithm import SftConfig
from homeostat.errors import CheckpointError, ConfigError
from homeostat.run.sizing.estimate import full_batch, loss_of
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.estimating.estimate import estimate_update
from homeostat.train.estimating.optimizer_memory import optimizer_bytes
from homeostat.train.local import LocalTrainer
from homeostat.train.roles import Training
from homeostat.train.runtime import resolve_runtime
from homeostat.types import Role, TokenRow, TrainBatch, UpdateReport

POLICY = Role.POLICY
OFFLOAD = "trainer.backend.offload_optimizer=true"
OPTIMIZERS = {
    "adamw": "{}",
    "adamw bf16": "{moments: bf16}",
    "adamw 8bit, bf16 masters": "{moments: 8bit, masters: bf16}",
    "muon": "{type: muon}",
    "muon bf16": "{type: muon, moments: bf16}",
    "adafactor": "{type: adafactor}",
}
SHAPE = {**tiny_moe.QWEN, "moe_intermediate_size": 48, "hidden_size": 64}


def trainer_of(folder: Path, *overrides: str) -> LocalTrainer:
    """In bf16 on the CPU, where a recipe may not ask for host memory."""
    if not (folder / "model").exists():
        tiny.write_model(folder / "model", **SHAPE)
    runtime = replace(resolve_runtime(tiny.config(folder), kept=PLAIN), dtype=torch.bfloat16)
    return local_trainer(tiny.config(folder, *overrides).for_trainer, runtime)


def update(trainer: LocalTrainer, step: int, *, learning_rate: float = 1e-2) -> UpdateReport:
    rng = np.random.default_rng(step)
    rows = [TokenRow(n, rng.integers(3, 20, 12), np.ones(12, np.float32)) for n in range(4)]
    batches = [TrainBatch.of(rows[:2]), TrainBatch.of(rows[2:])]
    trainer.accumulate(POLICY, batches, loss_spec(SftConfig(), rows), step=step)
    report = trainer.apply(POLICY, step=step, learning_rate=learning_rate)
    assert report.applied
    return report


def training_of(trainer: LocalTrainer) -> Training:
    training = trainer.roles[POLICY].training
    assert training is not None
    return training


def everything(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    groups = trainer.state().items()
    return {f"{stem}/{n}": rows.tensor for stem, group in groups for n, rows in group.items()}


@pytest.mark.parametrize("offload", [(), (OFFLOAD,)], ids=["", "offloaded"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_trainer_goes_on_to_the_bit(
    tmp_path: Path, name: str, offload: tuple[str, ...]
) -> None:
    """With experts, in bf16; what is saved does not depend on where it was."""
    chosen = f"trainer.optimizer={OPTIMIZERS[name]}"
    first = trainer_of(tmp_path, chosen, *offload)
    reports = [update(first, step) for step in (1, 2)]
    assert reports[0].probes is not None
    assert reports[0].probes["probe/trained_unchanged"] == 0
    assert all(ratio > 0 for key, ratio in reports[0].probes.items() if "ratio" in key)
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved")
    update(first, 3)
    wanted = everything(first)
    second = trainer_of(tmp_path, chosen)
    second.load(tmp_path / "saved")
    update(second, 3)
    found = everything(second)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize(
    ("saved", "loaded", "said"),
    [
        ("adamw", "muon", r"holds exp_avg, exp_avg_sq, step, and .* needs exp_avg, .*momentum"),
        ("muon", "muon bf16", "needs exp_avg_bf16"),
        ("adafactor", "adamw", "holds column_sq, exp_avg_sq, row_sq"),
        ("adamw bf16", "adamw", "Restore trainer.optimizer"),
    ],
)
def test_a_checkpoint_of_another_optimizer_is_refused(
    tmp_path: Path, saved: str, loaded: str, said: str
) -> None:
    first = trainer_of(tmp_path, f"trainer.optimizer={OPTIMIZERS[saved]}")
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved")
    second = trainer_of(tmp_path, f"trainer.optimizer={OPTIMIZERS[loaded]}")
    before = {key: tensor.clone() for key, tensor in everything(second).items() if "opt" in key}
    with pytest.raises(CheckpointError, match=said):
        second.load(tmp_path / "saved")
    after = everything(second)
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


def test_an_adapters_matrices_are_updated_by_muon(tmp_path: Path) -> None:
    trainer_of(tmp_path).export(POLICY, tmp_path / "start", tiny.config(tmp_path).for_export)
    over = (
        f"model.path={tmp_path / 'start'}",
        "model.init=pretrained",
        "lora={rank: 2, targets: [q_proj, v_proj]}",
    )
    trainer = trainer_of(tmp_path, "trainer.optimizer.type=muon", *over)
    slots = training_of(trainer).optimizer.slots.values()
    assert all("momentum" in slot.state for slot in slots)
    # The second matrix of an adapter starts at 0, so the first one has no gradient at first.
    update(trainer, 1)
    probes = update(trainer, 2).probes
    assert probes is not None
    assert probes["probe/trained_unchanged"] == 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.optimizer.type=muon"], "muon needs whole matrices"),
        (["trainer.optimizer.moments=8bit"], "can save moments only in fp32"),
        (["trainer.optimizer.masters=bf16"], "keep the trained weights in fp32"),
    ],
)
def test_ranks_refuse_what_needs_whole_tensors(
    tmp_path: Path, overrides: list[str], said: str
) -> None:
    ranks = ["cluster={type: torchrun, processes: 2}", "trainer.backend.type=fsdp"]
    with pytest.raises(ConfigError, match=said):
        tiny.config(tmp_path, *ranks, *overrides)


def test_a_run_on_the_cpu_refuses_host_memory_and_masters_below_its_precision(
    tmp_path: Path,
) -> None:
    for override, said in (
        (OFFLOAD, "already in host memory"),
        ("trainer.optimizer.masters=bf16", "fp32 on a CPU"),
    ):
        config = tiny.config(tmp_path, override, "trainer.device=cpu")
        with pytest.raises(ConfigError, match=said):
            resolve_runtime(config, kept=PLAIN)
    with pytest.raises(ConfigError, match="no separate master weights"):
        tiny.config(tmp_path, "trainer.optimizer.masters=bf16", "trainer.precision=fp32")


def test_a_critic_has_its_own_optimizer_and_the_same_rules(tmp_path: Path) -> None:
    ppo = {"algorithm": {"type": "ppo"}, "critic": {"optimizer": {"type": "adafactor"}}}
    config = tiny_rl.config(tmp_path, **ppo)
    assert config.critic is not None
    assert config.critic.optimizer.type == "adafactor"
    assert config.critic.optimizer.weight_decay == 0.01
    low = {**ppo, "critic": {"optimizer": {"masters": "bf16"}}}
    with pytest.raises(ConfigError, match=r"critic.optimizer.masters"):
        tiny_rl.config(tmp_path, "trainer.precision=fp32", **low)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_estimate_is_what_the_optimizer_holds(tmp_path: Path, name: str) -> None:
    chosen = f"trainer.optimizer={OPTIMIZERS[name]}"
    for offload in ((), (OFFLOAD,)):
        trainer = trainer_of(tmp_path, chosen, *offload)
        optimizer = training_of(trainer).optimizer
        shapes = [
            (name, torch.empty_like(p, device="meta").requires_grad_())
            for name, p in optimizer.params.items()
        ]
        found = optimizer_bytes(trainer.config.optimizer, shapes, trainer.config, ())
        state = optimizer.state()
        total = sum(t.nbytes for key, t in state.items() if not key.startswith("step"))
        if offload:
            assert optimizer.host is not None
            assert (found.device, found.host) == (optimizer.host.device_bytes, total)
        else:
            assert (found.device, found.host) == (total, 0)


def test_the_plan_of_a_run_counts_the_optimizer_on_its_side(tmp_path: Path) -> None:
    """In bf16, as on a GPU: 6 bytes of 8-bit moments and masters, and 4 of a summed gradient."""
    tiny.write_model(tmp_path / "model", hidden_size=64, intermediate_size=128, head_dim=32)
    runtime = replace(resolve_runtime(tiny.config(tmp_path), kept=PLAIN), dtype=torch.bfloat16)
    batch = full_batch(tiny.config(tmp_path), 64)
    plans = [
        estimate_update(config.for_trainer, runtime, batch, loss_of(config, batch))
        for config in (
            tiny.config(tmp_path),
            tiny.config(tmp_path, "trainer.optimizer.moments=8bit"),
            tiny.config(tmp_path, OFFLOAD),
        )
    ]
    plain, low, away = plans
    assert plain.optimizer == 6 * plain.weights == 3 * plain.gradients
    assert low.optimizer == pytest.approx(3 * plain.weights, rel=0.05)
    assert away.host == plain.optimizer
    assert plain.host == low.host == 0
    assert low.gradients == away.gradients == plain.gradients
