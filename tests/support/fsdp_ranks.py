"""Checks that run on every rank of a sharded trainer, beside a local one of the same recipe.

A process runs all checks of its number of ranks, one after the other, and writes down what became
of each: importing torch takes longer than all of them. Run as a module: rank, size, folder, names.
"""

from __future__ import annotations

import json
import math
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench import meta_init
from safetensors.torch import load_file
from tests.support import tiny, tiny_rl
from tests.support.tiny_moe import with_routes

from homeostat.algorithms.policy import policy_spec
from homeostat.algorithms.sft import loss_spec
from homeostat.config import RunConfig
from homeostat.config.algorithm import SftConfig
from homeostat.config.cluster import LOOPBACK
from homeostat.errors import CheckpointError, CheckpointWriteError, OutOfMemoryHaltError
from homeostat.models.lora import adapter_state
from homeostat.sync.disk import DiskTransport
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.fsdp.make import make_trainer
from homeostat.train.fsdp.mesh import local_part
from homeostat.train.fsdp.trainer import FsdpTrainer
from homeostat.train.inspection.nonfinite import STORED_WEIGHTS
from homeostat.train.local import LocalTrainer
from homeostat.train.roles import Training
from homeostat.train.runtime import resolve_runtime
from homeostat.train.scoring import score
from homeostat.train.update import Measured
from homeostat.types import LossSpec, Role, StepPlan, TokenRow, TrainBatch, UpdateReport
from homeostat.workers.context import WorkerContext

POLICY, REFERENCE = Role.POLICY, Role.REFERENCE
VOCABULARY = 97
# A gradient near zero has a direction that rounding decides, and plain Adam makes a whole step of
# it. With this eps the step is as smooth as the gradient.
SMOOTH = {"eps": 1e-2}
MODELS = ("llama", "llama_tied", "qwen3", "qwen2", "narrow", "gemma2", "phi3")
SAVED_AFTER, STEPS = 2, 4
START = time.monotonic()


@dataclass(frozen=True)
class Place:
    """This process among the ranks, and the folder that all of them share."""

    rank: int
    size: int
    folder: Path

    def trainer(self, config: RunConfig) -> FsdpTrainer:
        context = WorkerContext(self.rank, self.size, self.rank, "trainer", LOOPBACK)
        meeting = f"file://{self.folder / f'meeting_of_{self.size}'}"
        return make_trainer(context, config=config.for_trainer, threads=1, rendezvous=meeting)

    def config(self, model: str = "llama", **sections: Any) -> RunConfig:
        trainer = {
            "backend": sections.pop("backend", {"type": "fsdp"}),
            "optimizer": SMOOTH,
            "max_grad_norm": None,
            **sections.pop("trainer", {}),
        }
        return tiny.config(
            self.folder,
            model={
                "path": str(self.folder / model),
                "init": "pretrained",
                **sections.pop("at", {}),
            },
            trainer=trainer,
            cluster={"type": "torchrun", "processes": self.size, "timeout_s": 60},
            **sections,
        )

    def deal(self, batches: list[TrainBatch]) -> list[TrainBatch | None]:
        """This rank's, in rounds; the first rank has none in the last round."""
        mine: list[TrainBatch | None] = list(batches[self.size - 1 - self.rank :: self.size])
        return mine + [None] * (-(-len(batches) // self.size) - len(mine))


def local(config: RunConfig) -> LocalTrainer:
    return local_trainer(config.for_trainer, resolve_runtime(config, kept=PLAIN))


def training(trainer: FsdpTrainer | LocalTrainer) -> Training:
    """Return what the policy has because it is trained."""
    found = trainer.roles[POLICY].training
    assert found is not None
    return found


def random_rows(num: int = 7, seed: int = 0) -> list[TokenRow]:
    rng = np.random.default_rng(seed)
    made = []
    for row_id in range(num):
        length = int(rng.integers(3, 30))
        weights = (rng.random(length) < 0.6).astype(np.float32) * rng.choice([0.5, 1.0, 2.0])
        weights[-1] = 1.0
        made.append(TokenRow(row_id, rng.integers(0, VOCABULARY, length), weights))
    return made


def batches_of(rows: list[TokenRow]) -> list[TrainBatch]:
    """Return batches of unequal sizes, and one more than any number of ranks here divides."""
    return [TrainBatch.of(rows[:3]), *(TrainBatch.of([row]) for row in rows[3:])]


def sft_spec(rows: list[TokenRow]) -> LossSpec:
    return loss_spec(SftConfig(), rows)


def update(
    place: Place, trainer: FsdpTrainer | LocalTrainer, *, step: int, lr: float = 1e-2
) -> UpdateReport:
    rows = random_rows(seed=step)
    batches = batches_of(rows)
    mine = place.deal(batches) if isinstance(trainer, FsdpTrainer) else batches
    trainer.accumulate(POLICY, mine, sft_spec(rows), step=step)
    return trainer.apply(POLICY, step=step, learning_rate=lr)


def gradients(trainer: FsdpTrainer | LocalTrainer) -> dict[str, torch.Tensor]:
    if isinstance(trainer, LocalTrainer):
        return training(trainer).optimizer.gradients.present()
    shards, params = trainer.shards, training(trainer).params
    return {name: shards.whole(param.grad) for name, param in params.items()}


def assert_same_gradients(sharded: FsdpTrainer, whole: LocalTrainer, rel: float = 1e-5) -> None:
    found, expected = gradients(sharded), gradients(whole)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        # An adapter's first half has no gradient before the first update: its second half is zero.
        error, allowed = (found[name] - grad).norm(), rel * grad.norm() + 1e-9
        assert float(error) < float(allowed), (name, float(error), float(allowed))


def assert_same_weights(
    sharded: FsdpTrainer, whole: LocalTrainer, *, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    found, expected = dict(sharded.weights(POLICY)), dict(whole.weights(POLICY))
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol, msg=name)


def assert_same_report(found: UpdateReport, expected: UpdateReport, rel: float = 1e-6) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=rel)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=10 * rel)
    assert (found.applied, found.num_micro_batches) == (True, expected.num_micro_batches)
    assert sorted(found.row_ids_B) == sorted(expected.row_ids_B)
    order, wanted = np.argsort(found.row_ids_B), np.argsort(expected.row_ids_B)
    np.testing.assert_allclose(
        found.row_losses_B[order], expected.row_losses_B[wanted], rtol=10 * rel
    )
    for mine, theirs in zip(order, wanted, strict=True):
        np.testing.assert_allclose(
            found.row_logp[mine], expected.row_logp[theirs], rtol=10 * rel, atol=10 * rel
        )
    assert found.stats.keys() == expected.stats.keys()
    for name, value in expected.stats.items():
        assert found.stats[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def assert_parity(place: Place, config: RunConfig, *, steps: int = 2, rel: float = 1e-6) -> None:
    """Loss, gradient, report and weights over some updates."""
    sharded, whole = place.trainer(config), local(config)
    for step in range(1, steps + 1):
        rows = random_rows(seed=step)
        batches, spec = batches_of(rows), sft_spec(rows)
        sharded.accumulate(POLICY, place.deal(batches), spec, step=step)
        whole.accumulate(POLICY, batches, spec, step=step)
        # Later on, weights that differ by rounding have gradients that differ by more.
        if step == 1:
            assert_same_gradients(sharded, whole, rel=10 * rel)
        reports = [t.apply(POLICY, step=step, learning_rate=1e-2) for t in (sharded, whole)]
        assert_same_report(*reports, rel=rel)
        told = sharded.ranks.gather((reports[0].loss, reports[0].grad_norm))
        assert len(set(told)) == 1, told
    assert_same_weights(sharded, whole, rtol=10 * rel, atol=10 * rel)


def check_models(place: Place) -> None:
    for model in MODELS if place.size == 2 else ("llama", "narrow"):
        assert_parity(place, place.config(model), steps=3)


def check_random_start(place: Place) -> None:
    config = place.config("qwen2", at={"init": "random"})
    assert_same_weights(place.trainer(config), local(config), rtol=0.0, atol=0.0)


def check_weights_stay_gathered_on_request(place: Place) -> None:
    backend = {"type": "fsdp", "reshard_after_forward": False}
    assert_parity(place, place.config("llama", backend=backend))


def check_checkpointed_activations(place: Place) -> None:
    assert_parity(place, place.config("qwen3", trainer={"gradient_checkpointing": True}))
    lora = {"rank": 3, "dropout": 0.4}
    assert_parity(place, place.config(lora=lora, trainer={"gradient_checkpointing": True}))


def check_hybrid(place: Place) -> None:
    backend = {"type": "fsdp", "shard": "hybrid", "replicas": 2}
    config = place.config("narrow", backend=backend)
    assert_parity(place, config)
    sharded, folder = place.trainer(config), place.folder / f"hybrid_of_{place.size}"
    assert sharded.ranks.num_shards == place.size // 2
    update(place, sharded, step=1)
    save(place, sharded, folder)
    shards = sorted(file.name for file in folder.glob("model.*"))
    assert shards == [f"model.{rank}of{place.size // 2}.safetensors" for rank in range(len(shards))]
    again = place.trainer(config)
    again.load(folder)
    assert update(place, sharded, step=2).loss == update(place, again, step=2).loss
    assert_same_weights(again, resumed_alone(config, folder, steps=(2,)))


def check_bf16(place: Place) -> None:
    """The same bf16 numbers on both sides; only the order of fp32 sums differs."""
    config = place.config("qwen3", trainer={"precision": "bf16"})
    assert_parity(place, config, rel=1e-5)
    sharded = place.trainer(config)
    assert all(
        local_part(param).dtype == torch.float32 for param in training(sharded).params.values()
    )
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in sharded.weights(POLICY))
    update(place, sharded, step=1)
    folder = place.folder / f"bf16_of_{place.size}"
    save(place, sharded, folder)
    again, alone = place.trainer(config), local(config)
    again.load(folder)
    alone.load(folder)
    assert_same_weights(again, alone, rtol=0.0, atol=0.0)
    assert_same_report(update(place, again, step=2), update(place, alone, step=2), rel=1e-5)
    lora = place.config(lora={"rank": 2}, trainer={"precision": "bf16"})
    frozen = [
        p for p in place.trainer(lora).roles[POLICY].model.parameters() if not p.requires_grad
    ]
    assert {local_part(param).dtype for param in frozen} == {torch.bfloat16}
    assert_parity(place, lora, rel=1e-5)


def check_experts(place: Place) -> None:
    """Each rank holds some of a layer's experts; some rounds leave a rank without a batch."""
    assert_parity(place, place.config("qwen3_moe"), steps=1)
    config = place.config("dots1", trainer={"gradient_checkpointing": True})
    assert_parity(place, config)
    sharded = place.trainer(config)
    experts = dict(sharded.roles[POLICY].model.named_parameters())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert local_part(experts[name]).shape[0] == experts[name].shape[0] // place.size
    # A rank without a batch has a gradient for every expert all the same.
    rows = random_rows(2)
    batches = [TrainBatch.of(rows), None] if place.rank == 0 else [None, None]
    sharded.accumulate(POLICY, batches, sft_spec(rows), step=1)
    whole = local(config)
    whole.accumulate(POLICY, [TrainBatch.of(rows)], sft_spec(rows), step=1)
    assert_same_gradients(sharded, whole)


def check_experts_in_bf16(place: Place) -> None:
    """The expert bias stays fp32 beside bf16 weights, on ranks as in one process."""
    config = place.config("dots1", trainer={"precision": "bf16"})
    assert_parity(place, config, rel=1e-5, steps=1)
    sharded, whole = place.trainer(config), local(config)
    biases = [dict(t.weights(POLICY)) for t in (sharded, whole)]
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert biases[0][name].dtype == torch.float32
    assert torch.equal(biases[0][name], biases[1][name])
    assert not torch.equal(biases[0][name], biases[0][name].bfloat16().float())
    # Routed experts take no adapter.
    targets = ["q_proj", "v_proj", "shared_experts.up_proj"]
    adapter = {"rank": 2, "targets": targets}
    lora = place.config("dots1", lora=adapter, trainer={"precision": "bf16"})
    assert_parity(place, lora, rel=1e-5, steps=1)


def check_replayed_routes(place: Place) -> None:
    for model in ("qwen3_moe", "dots1"):
        config = place.config(model, trainer={"gradient_checkpointing": model == "dots1"})
        sharded, whole = place.trainer(config), local(config)
        policy = whole.roles[POLICY].model
        rows = with_routes(policy, random_rows(), "routed_experts", "routed_weights", shift=1)
        batches, spec = batches_of(rows), sft_spec(rows)
        sharded.accumulate(POLICY, place.deal(batches), spec, step=1)
        whole.accumulate(POLICY, batches, spec, step=1)
        assert_same_gradients(sharded, whole)
        found, expected = (t.apply(POLICY, step=1, learning_rate=1e-2) for t in (sharded, whole))
        assert_same_report(found, expected)
        tokens = sum(map(len, rows))
        assert found.stats["replay_replayed"] == tokens - len(rows)
        bare = [replace(row, columns={}) for row in rows]
        free = score(whole, POLICY, batches_of(bare))
        replayed = score(whole, POLICY, batches)
        assert max(np.abs(a - b).max() for a, b in zip(free, replayed, strict=True)) > 0.01


def check_divided_experts(place: Place) -> None:
    """Expert parallelism: a rank's experts see the tokens of all ranks of its group."""
    backend = {"type": "fsdp", "expert_parallel_size": 2}
    for model in ("qwen3_moe", "dots1"):
        recompute = {"gradient_checkpointing": model == "dots1"}
        assert_parity(place, place.config(model, backend=backend, trainer=recompute))
    # In bf16 a product over the tokens of two micro-batches is rounded once, and not twice.
    for precision, rel in (("fp32", 1e-6), ("bf16", 1e-3)):
        how = {"trainer": {"precision": precision, "max_grad_norm": 0.05}}
        config = place.config("dots1", backend=backend, **how)
        assert_parity(place, config, rel=rel, steps=1)
    assert place.trainer(config).checksums(POLICY) == local(config).checksums(POLICY)
    drawn = place.config("qwen3_moe", backend=backend, at={"init": "random"})
    assert_same_weights(place.trainer(drawn), local(drawn), rtol=0.0, atol=0.0)
    assert place.trainer(drawn).sheet.num_params == local(drawn).sheet.num_params
    adapter = place.config("qwen3_moe", backend=backend, lora={"rank": 2, "targets": ["q_proj"]})
    assert_parity(place, adapter)
    # In invariant numerics the bits of a token do not depend on where its experts are.
    tiled = place.config("qwen3_moe", backend=backend, at={"numerics": "invariant"})
    sharded, whole, batches = place.trainer(tiled), local(tiled), batches_of(random_rows(seed=9))
    mine = [batch for batch in place.deal(batches) if batch is not None]
    expected = score(whole, POLICY, mine, temperature=0.7)
    found = scores(place, sharded, POLICY, batches)
    assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))


def check_divided_experts_follow_recorded_routes(place: Place) -> None:
    """Replay as without, also where nobody chose an expert of the last rank."""
    backend = {"type": "fsdp", "expert_parallel_size": 2}
    config = place.config("qwen3_moe", backend=backend)
    sharded, whole = place.trainer(config), local(config)
    policy = whole.roles[POLICY].model
    assert policy.moe is not None
    rows = with_routes(policy, random_rows(), "routed_experts", "routed_weights", shift=1)
    one_sided = [
        replace(row, columns={**row.columns, "routed_experts": chosen})
        for row in rows
        for chosen in [np.zeros_like(row.columns["routed_experts"])]
    ]
    for row in one_sided:
        row.columns["routed_experts"][..., 1] = 1
    for each in (rows, one_sided):
        batches, spec = batches_of(each), sft_spec(each)
        sharded.accumulate(POLICY, place.deal(batches), spec, step=1)
        whole.accumulate(POLICY, batches, spec, step=1)
        assert_same_gradients(sharded, whole)
        reports = [t.apply(POLICY, step=1, learning_rate=1e-2) for t in (sharded, whole)]
        assert_same_report(*reports)
        loads = [report.load for report in reports if report.load is not None]
        assert np.array_equal(loads[0].load_LE, loads[1].load_LE)
    # Only the last token of a row, which no engine ran, chooses for itself.
    assert loads[1].load_LE[:, 4:].sum() == 0


def check_reading_takes_the_memory_of_one_model(place: Place) -> None:
    """The sum over all ranks is about one model, not one for each."""
    folder, ranks = place.folder / f"large_{place.size}", place.trainer(place.config()).ranks
    written = meta_init.write_model(folder / "model", layers=4) if place.rank == 0 else 0
    model_bytes = ranks.of_first(written)
    grown = meta_init.run_rank(place.rank, place.size, folder)
    total = sum(ranks.gather(grown))
    # One tensor that is read, and what an allocator keeps, in each process.
    assert total < 1.2 * model_bytes + place.size * 8e6, (total, model_bytes)


def check_experts_are_saved_and_exported(place: Place) -> None:
    config = place.config("dots1", trainer={"precision": "bf16"})
    sharded, whole = place.trainer(config), local(config)
    for trainer in (sharded, whole):
        update(place, trainer, step=1)
    ours, theirs = (place.folder / f"{who}_experts_of_{place.size}" for who in ("ranks", "local"))
    save(place, sharded, ours)
    if place.rank == 0:
        theirs.mkdir()
        whole.save(theirs)
    sharded.ranks.gather(None)
    for folder in (ours, theirs):
        again, alone = place.trainer(config), local(config)
        again.load(folder)
        alone.load(folder)
        assert_same_weights(again, alone, rtol=0.0, atol=0.0)
        assert_same_report(update(place, again, step=2), update(place, alone, step=2), rel=1e-5)
    exported = place.folder / f"exported_experts_of_{place.size}"
    sharded.export(POLICY, exported, config.for_export)
    sharded.ranks.gather(None)
    start = load_file(place.folder / "dots1" / "model.safetensors")
    found = load_file(exported / "model.safetensors")
    assert found.keys() == start.keys()
    assert "model.layers.1.mlp.experts.7.gate_proj.weight" in found
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert torch.equal(found[bias], start[bias])


def check_lora(place: Place) -> None:
    config = place.config(lora={"rank": 3, "dropout": 0.4})
    assert_parity(place, config)
    sharded, whole = place.trainer(config), local(config)
    assert sharded.checksums(POLICY) == whole.checksums(POLICY)
    for trainer in (sharded, whole):
        update(place, trainer, step=1)
    folder = place.folder / f"adapter_of_{place.size}"
    adapter = {"rank": 3, "dropout": 0.4, "export": "adapter"}
    exported = place.config(lora=adapter, checkpoint={"export": "final"}).for_export
    sharded.export(POLICY, folder, exported)
    sharded.ranks.gather(None)
    stored = load_file(folder / "adapter_model.safetensors")
    for name, tensor in adapter_state(whole.roles[POLICY].model):
        torch.testing.assert_close(stored[f"base_model.model.{name}"], tensor, rtol=1e-5, atol=1e-6)
    # What was exported is read back, of which every rank keeps its rows.
    again = place.trainer(place.config(lora={"rank": 3, "path": str(folder)}))
    assert_same_weights(again, whole)
    save(place, sharded, place.folder / f"lora_of_{place.size}")
    for trainer in (place.trainer(config), local(config)):
        trainer.load(place.folder / f"lora_of_{place.size}")
    other = place.config("llama_bias", lora={"rank": 3, "dropout": 0.4})
    with pytest.raises(CheckpointError, match="other weights than those"):
        place.trainer(other).load(place.folder / f"lora_of_{place.size}")


def rl_config(place: Place, **sections: Any) -> RunConfig:
    return tiny_rl.config(
        place.folder,
        model={"path": str(place.folder / "llama"), "init": "pretrained"},
        algorithm={"type": "grpo", "kl": {"coefficient": 0.1}},
        trainer={
            "backend": {"type": "fsdp"},
            "optimizer": SMOOTH,
            "max_steps": 2,
            "threads": 1,
            "device": "cpu",
        },
        cluster={"type": "torchrun", "processes": place.size, "timeout_s": 60},
        engine={"type": "native", "own_process": True},
        **sections,
    )


def policy_rows(seed: int) -> list[TokenRow]:
    """Pairs of rows begin with the same prompt."""
    rng = np.random.default_rng(seed)
    made = []
    for row in random_rows(8, seed=seed):
        prompt = np.random.default_rng(row.row_id // 2).integers(0, VOCABULARY, 5)
        tokens = np.concatenate([prompt, row.tokens_T])
        weights = np.concatenate([np.zeros(5), np.ones(len(row))]).astype(np.float32)
        names = ("old_logp", "ref_logp", "engine_logp")
        columns = {n: -rng.exponential(4.0, len(tokens)).astype(np.float32) for n in names}
        columns["advantage"] = np.full(len(tokens), rng.standard_normal(), dtype=np.float32)
        made.append(TokenRow(row.row_id, tokens, weights, columns))
    return made


def check_policy_loss_and_its_measurements(place: Place) -> None:
    config = rl_config(place)
    sharded, whole = place.trainer(config), local(config)
    rows = policy_rows(3)
    batches = [TrainBatch.of(rows[:4]), TrainBatch.of(rows[4:6]), TrainBatch.of(rows[6:])]
    spec = policy_spec(config.algorithm, denominator=40.0, temperature=0.9, kl_coefficient=0.1)
    sharded.accumulate(POLICY, place.deal(batches), spec, step=1)
    whole.accumulate(POLICY, batches, spec, step=1)
    assert_same_gradients(sharded, whole)
    mine = sharded.measure(POLICY, place.deal(batches), spec)
    measured = Measured.merged(sharded.ranks.gather(mine))
    reports = [t.apply(POLICY, step=1, learning_rate=1e-2) for t in (sharded, whole)]
    assert reports[1].stats
    found = {**measured.sums, **measured.maxima}
    assert found == pytest.approx(dict(reports[1].stats), rel=1e-4, abs=1e-5)
    assert_same_report(*reports)
    assert_same_weights(sharded, whole)


def scores(place: Place, trainer: FsdpTrainer, role: Role, batches: list[TrainBatch]) -> list:
    dealt = place.deal(batches)
    found = score(trainer, role, dealt, temperature=0.7)
    assert len(found) == sum(batch is not None for batch in dealt)
    return found


def assert_same_scores(place: Place, role: Role, sharded: FsdpTrainer, whole: LocalTrainer) -> list:
    batches = batches_of(random_rows(seed=9))
    mine = [batch for batch in place.deal(batches) if batch is not None]
    expected = score(whole, role, mine, temperature=0.7)
    found = scores(place, sharded, role, batches)
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
    return found


def check_references(place: Place) -> None:
    lora = {"rank": 2}
    choices: tuple[dict[str, Any], ...] = (
        {"reference": {"type": "initial", "refresh_steps": 3}},
        {"reference": {"type": "adapter_off"}, "lora": lora},
        {"reference": {"type": "checkpoint", "path": str(place.folder / "qwen3")}},
        {"reference": {"type": "initial"}, "lora": lora},
    )
    for sections in choices if place.size == 2 else choices[:2]:
        config = rl_config(place, **sections)
        sharded, whole = place.trainer(config), local(config)
        before = assert_same_scores(place, REFERENCE, sharded, whole)
        for trainer in (sharded, whole):
            update(place, trainer, step=1)
        after = assert_same_scores(place, REFERENCE, sharded, whole)
        assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))
        moved = assert_same_scores(place, POLICY, sharded, whole)
        assert not before or not np.allclose(moved[0], before[0], rtol=1e-3)
        folder = place.folder / f"reference_of_{place.size}_{sections['reference']['type']}"
        save(place, sharded, folder)
        if "refresh_steps" in sections["reference"]:
            sharded.refresh(Role.REFERENCE)
            refreshed = scores(place, sharded, REFERENCE, batches_of(random_rows(seed=9)))
            assert all(np.array_equal(*pair) for pair in zip(refreshed, moved, strict=True))
        for trainer in (sharded, whole):
            trainer.load(folder)
        assert_same_scores(place, REFERENCE, sharded, whole)


def check_clipping_is_by_the_norm_of_all_ranks(place: Place) -> None:
    config = place.config("narrow", trainer={"max_grad_norm": 0.05})
    assert_parity(place, config)
    free = place.trainer(place.config("narrow"))
    assert update(place, free, step=1).grad_norm > 0.5


def check_what_is_not_finite_on_one_rank_is_applied_on_none(place: Place) -> None:
    config = place.config("qwen3")
    sharded, whole = place.trainer(config), local(config)
    rows = random_rows(seed=5)
    sick = replace(rows[4], weights_T=np.full(len(rows[4]), math.inf, dtype=np.float32))
    all_rows = [*rows[:4], sick, *rows[5:]]
    before = {name: local_part(p).clone() for name, p in training(sharded).params.items()}
    batches, spec = batches_of(all_rows), sft_spec(rows)
    sharded.accumulate(POLICY, place.deal(batches), spec, step=1)
    report = sharded.apply(POLICY, step=1, learning_rate=1e-2)
    assert not report.applied
    assert not any(sharded.ranks.gather(report.applied))
    plan = StepPlan(1, 0, tuple(batches), spec)
    bad, origin = sharded.trace_nonfinite(plan)
    assert [row.row_id for row in bad] == [sick.row_id]
    expected_bad, expected = whole.trace_nonfinite(plan)
    assert [row.row_id for row in expected_bad] == [sick.row_id]
    assert (origin.direction, origin.module) == (expected.direction, expected.module)
    assert all(
        torch.equal(local_part(p), before[name]) for name, p in training(sharded).params.items()
    )
    assert update(place, sharded, step=2).applied


def check_weights_that_are_not_finite_are_named(place: Place) -> None:
    sharded = place.trainer(place.config("qwen3"))
    name = "model.layers.1.mlp.up_proj.weight"
    if place.rank == place.size - 1:
        local_part(training(sharded).params[name])[-1, 0] = math.nan
    rows = random_rows(3)
    plan = StepPlan(1, 0, (TrainBatch.of(rows),), sft_spec(rows))
    bad, origin = sharded.trace_nonfinite(plan)
    assert len(bad) == 3
    assert (origin.direction, origin.module) == (STORED_WEIGHTS, name)


def check_discard_undoes_what_was_begun(place: Place) -> None:
    config = place.config("llama_tied")
    first, second = place.trainer(config), place.trainer(config)
    rows = random_rows()
    first.accumulate(
        POLICY, place.deal(batches_of(rows)), replace(sft_spec(rows), denominator=0.1), step=1
    )
    first.discard(POLICY)
    for trainer in (first, second):
        update(place, trainer, step=1)
    for name, param in training(first).params.items():
        assert torch.equal(local_part(param), local_part(training(second).params[name])), name


def check_ranks_hold_their_share_and_no_more(place: Place) -> None:
    sharded = place.trainer(place.config("narrow"))
    update(place, sharded, step=1)
    score(sharded, POLICY, [None])
    parameters = dict(sharded.roles[POLICY].model.named_parameters())
    shares = sharded.ranks.gather({n: local_part(p).shape[0] for n, p in parameters.items()})
    for name, param in parameters.items():
        held = [share[name] for share in shares]
        assert sum(held) == param.shape[0], (name, held)
        assert max(held) == -(-param.shape[0] // place.size), (name, held)
    if place.size == 4:
        assert shares[3]["model.layers.0.self_attn.q_norm.weight"] == 0
    slots = training(sharded).optimizer.slots.values()
    moments = sum(slot.state["exp_avg"].numel() for slot in slots)
    assert moments == sum(local_part(p).numel() for p in parameters.values())


def save(place: Place, trainer: FsdpTrainer, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    trainer.save(folder)
    # No one reads before all have written.
    trainer.ranks.gather(None)


def resumed_alone(config: RunConfig, folder: Path, steps: tuple[int, ...]) -> LocalTrainer:
    alone = local(config)
    alone.load(folder)
    for step in steps:
        update(Place(0, 1, folder), alone, step=step)
    return alone


def resume_config(place: Place) -> RunConfig:
    return place.config("narrow", trainer={"max_grad_norm": 1.0})


def check_saving_and_going_on_to_the_same_bits(place: Place) -> None:
    config, folder = resume_config(place), place.folder / f"saved_by_{place.size}"
    straight = place.trainer(config)
    losses = []
    for step in range(1, STEPS + 1):
        losses.append(update(place, straight, step=step).loss)
        if step == SAVED_AFTER:
            save(place, straight, folder)
    resumed = place.trainer(config)
    resumed.load(folder)
    later = [update(place, resumed, step=s).loss for s in range(SAVED_AFTER + 1, STEPS + 1)]
    assert later == losses[SAVED_AFTER:]
    for stem, group in straight.state().items():
        for name, rows in group.items():
            assert torch.equal(rows.tensor, resumed.state()[stem][name].tensor), (stem, name)
    alone = resumed_alone(config, folder, tuple(range(SAVED_AFTER + 1, STEPS + 1)))
    assert_same_weights(resumed, alone)
    if place.rank == 0:
        (place.folder / f"losses_of_{place.size}.json").write_text(json.dumps(losses))


def check_going_on_from_another_number_of_ranks(place: Place) -> None:
    """Whatever was saved before by others: local, 1, 2 or 4 ranks."""
    config, done = resume_config(place), []
    for folder in sorted(place.folder.glob("saved_by_*")):
        losses = json.loads((place.folder / f"losses_of_{folder.name[9:]}.json").read_text())
        resumed = place.trainer(config)
        resumed.load(folder)
        later = [update(place, resumed, step=s).loss for s in range(SAVED_AFTER + 1, STEPS + 1)]
        assert later == pytest.approx(losses[SAVED_AFTER:], rel=1e-6), folder.name
        done.append(folder.name[9:])
    everyone = {"local", "1", "2", "4"}
    assert set(done) == (everyone - {"2"} if place.size == 4 else everyone)


def check_checkpoints_of_other_models_are_refused(place: Place) -> None:
    folder = place.folder / f"saved_by_{place.size}"
    for other in ("qwen3", "llama"):
        with pytest.raises(CheckpointError, match="belongs to another model or precision"):
            place.trainer(place.config(other)).load(folder)
    sharded = place.trainer(place.config("narrow", trainer={"precision": "bf16"}))
    with pytest.raises(CheckpointError, match="'master"):
        sharded.load(folder)


def check_a_rank_without_memory_is_named(place: Place) -> None:
    sharded = place.trainer(place.config())

    def fail(module: torch.nn.Module, args: tuple) -> None:
        raise torch.OutOfMemoryError("tried to allocate 1 GB")

    sharded.roles[POLICY].model.model.embed_tokens.register_forward_pre_hook(fail)
    with pytest.raises(OutOfMemoryHaltError, match=f"rank {place.rank}: .*1 GB"):
        update(place, sharded, step=1)
    with pytest.raises(OutOfMemoryHaltError):
        scores(place, sharded, POLICY, batches_of(random_rows()))


def check_export_is_what_a_local_trainer_writes(place: Place) -> None:
    config = place.config("llama_tied")
    sharded, whole = place.trainer(config), local(config)
    for trainer in (sharded, whole):
        update(place, trainer, step=1)
    folder, other = (place.folder / f"{kind}_of_{place.size}" for kind in ("export", "local"))
    sharded.export(POLICY, folder, config.for_export)
    sharded.ranks.gather(None)
    if place.rank == 0:
        whole.export(POLICY, other, config.for_export)
        ours, theirs = (load_file(f / "model.safetensors") for f in (folder, other))
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)
        assert (folder / "config.json").read_text() == (other / "config.json").read_text()
    # A rank that cannot write leaves no one waiting.
    blocked = place.folder / f"blocked_of_{place.size}"
    blocked.write_text("in the way")
    if place.rank == 0:
        with pytest.raises(CheckpointWriteError, match="rank 0"):
            sharded.export(POLICY, blocked, config.for_export)
    else:
        sharded.export(POLICY, blocked, config.for_export)
    assert update(place, sharded, step=2).applied


def check_buckets_hold_all_weights(place: Place) -> None:
    sharded = place.trainer(place.config("qwen3", lora={"rank": 2}))
    transport = DiskTransport(place.folder, f"buckets_of_{place.size}", 3000)
    packer = pickle.dumps(transport.packer())
    receiver = transport.receiver(0, 1)
    for step in (1, 2):
        update(place, sharded, step=step)
        # It is sent again each time, as it was before its first use.
        sharded.start_buckets(POLICY, pickle.loads(packer) if place.rank == 0 else None)
        got, num_buckets = {}, 0
        while sharded.ranks.of_first((bucket := sharded.next_bucket()) is not None):
            num_buckets += 1
            if bucket is not None:
                got |= {name: tensor.clone() for name, tensor in receiver.unpack(bucket)}
        expected = dict(sharded.weights(POLICY))
        assert num_buckets > 5
        if place.rank == 0:
            assert list(got) == list(expected)
            assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    sharded.close()


CHECKS: dict[str, Callable[[Place], None]] = {
    name.removeprefix("check_"): function
    for name, function in globals().items()
    if name.startswith("check_")
}


def run_checks(
    place: Place, names: list[str], checks: dict[str, Callable[[Place], None]] = CHECKS
) -> dict[str, str]:
    """Return what went wrong, by the name of the check."""
    found = {}
    for name in names:
        print(f"{time.monotonic() - START:.1f} s: {name}", flush=True)
        try:
            checks[name](place)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    return found


if __name__ == "__main__":
    rank, size, folder, *names = sys.argv[1:]
    here = Place(int(rank), int(size), Path(folder))
    torch.set_num_threads(1)
    result = run_checks(here, names)
    (here.folder / f"result_{rank}_of_{size}.json").write_text(json.dumps(result))
