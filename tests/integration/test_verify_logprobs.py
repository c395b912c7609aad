"""Engine, trainer and float64 on the same rows: the one that is off is named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.tiny_models import FAMILIES, random_model, save

from homeostat.config.loading.live import LiveConfig
from homeostat.config.loading.load import build_config
from homeostat.config.native import NativeEngineConfig
from homeostat.config.run import RunConfig
from homeostat.models.build import load_model
from homeostat.rollout.engine import Engine, Request, Sampling, generate
from homeostat.rollout.native.engine import NativeEngine
from homeostat.run.publication.verify_logprobs import LogprobVerifier, judge
from homeostat.train.local import LocalTrainer
from homeostat.train.roles import RoleModel
from homeostat.train.runtime import resolve_runtime
from homeostat.types import Prompt, Role, RolloutGroup, Sample

CPU = torch.device("cpu")
TEMPERATURE = 0.8


def config(folder: Path) -> RunConfig:
    return build_config(
        {
            "name": "verify",
            "model": {"path": str(save(random_model(FAMILIES["qwen3"], seed=1), folder))},
            "data": {"train": [{"type": "prompts", "path": "unused.jsonl"}]},
            "algorithm": {"type": "grpo"},
            "rollout": {"temperature": TEMPERATURE, "max_new_tokens": 12},
            "rewards": {"functions": [{"type": "exact_match"}]},
            "trainer": {"device": "cpu", "threads": 1, "precision": "fp32"},
            "observe": {"verify_logprobs": {"interval_steps": 3, "rows": 3}},
        },
        [],
        file=None,
    )


def trainer_of(settings: RunConfig) -> LocalTrainer:
    loaded = load_model(
        settings.model, None, dtype=torch.float32, device=CPU, seed=0, gradient_checkpointing=False
    )
    models = {Role.POLICY: RoleModel(loaded, settings.trainer)}
    return LocalTrainer(models, settings.trainer, runtime=resolve_runtime(settings), seed=0)


def engine_of(model: Any, *, version: int) -> NativeEngine:
    return NativeEngine(
        model, NativeEngineConfig(), device=CPU, max_tokens=64, decode=None,
        chunk_bytes=1 << 16, policy_version=version,
    )  # fmt: skip


def sampled(engine: Engine) -> list[RolloutGroup]:
    rng = np.random.default_rng(0)
    groups = []
    for number in range(2):
        prompt = Prompt(number, rng.integers(0, 97, 5), "", {})
        wanted = [
            Request(f"{number}/{sample}", prompt.tokens_T, Sampling(12, TEMPERATURE), seed=0)
            for sample in range(2)
        ]
        found = generate(engine, wanted, timeout_s=60)
        samples = tuple(Sample(completion, "", {}, 0.0) for completion in found)
        groups.append(RolloutGroup(prompt, samples))
    return groups


class Events(list):
    def __call__(self, kind: str, step: int, **fields: Any) -> None:
        self.append((kind, step, fields))


def test_both_are_right_and_only_when_it_is_due(tmp_path: Path) -> None:
    settings, events = config(tmp_path), Events()
    trainer = trainer_of(settings)
    engine = engine_of(trainer.roles[Role.POLICY].model, version=3)
    groups = sampled(engine)
    verifier = LogprobVerifier(LiveConfig(settings), trainer=trainer, engine=engine, emit=events)
    assert verifier.verify(groups, step=3, version=2) == {}
    metrics = verifier.verify(groups, step=4, version=3)
    assert {name.split("/")[1] for name in metrics} == {"trainer", "engine", "engine_scoring"}
    assert all(value == 0 for name, value in metrics.items() if name.endswith("share_off"))
    assert 0 < metrics["verify/engine/error_max"] < 2e-5
    assert [(kind, step) for kind, step, _ in events] == [("logprobs_verified", 4)]


def test_an_engine_with_other_weights_is_named(tmp_path: Path) -> None:
    settings, events = config(tmp_path), Events()
    trainer = trainer_of(settings)
    other = copy.deepcopy(trainer.roles[Role.POLICY].model)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight[3] *= 1.5
    engine = engine_of(other, version=0)
    verifier = LogprobVerifier(LiveConfig(settings), trainer=trainer, engine=engine, emit=events)
    metrics = verifier.verify(sampled(engine), step=1, version=0)
    assert metrics["verify/trainer/share_off"] == 0
    assert metrics["verify/engine/share_off"] > 0.5
    assert metrics["verify/engine_scoring/share_off"] > 0.5
    ((kind, _, fields),) = events
    assert kind == "logprobs_off"
    assert "the engine is off" in fields["verdict"]
    assert "the trainer is right" in fields["verdict"]


def test_a_trainer_that_computes_wrongly_is_named(tmp_path: Path) -> None:
    settings, events = config(tmp_path), Events()
    trainer = trainer_of(settings)
    engine = engine_of(copy.deepcopy(trainer.roles[Role.POLICY].model), version=0)
    groups = sampled(engine)
    norm = trainer.roles[Role.POLICY].model.model.layers[0].input_layernorm
    norm.register_forward_hook(lambda module, args, output: output * 1.01)
    verifier = LogprobVerifier(LiveConfig(settings), trainer=trainer, engine=engine, emit=events)
    metrics = verifier.verify(groups, step=1, version=0)
    assert metrics["verify/trainer/share_off"] > 0.5
    assert metrics["verify/engine/share_off"] == 0
    assert "the trainer is off" in events[0][2]["verdict"]
    assert "the engine is right" in events[0][2]["verdict"]


def test_tokens_of_an_older_policy_are_not_judged(tmp_path: Path) -> None:
    settings = config(tmp_path)
    trainer = trainer_of(settings)
    engine = engine_of(copy.deepcopy(trainer.roles[Role.POLICY].model), version=0)
    verifier = LogprobVerifier(LiveConfig(settings), trainer=trainer, engine=engine, emit=Events())
    metrics = verifier.verify(sampled(engine), step=4, version=3)
    assert {name.split("/")[1] for name in metrics} == {"trainer"}


@pytest.mark.parametrize("wrong", [np.nan, -5.0])
def test_one_token_is_enough(wrong: float) -> None:
    reference_M = np.array([-1.0, -2.0, -3.0])
    logp_M = np.array([-1.0, wrong, -3.0], dtype=np.float32)
    found = judge("engine", logp_M, reference_M, tolerance=1e-4)
    assert found.is_off
    assert found.share_off == pytest.approx(1 / 3)
