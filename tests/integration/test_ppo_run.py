"""PPO runs from recipe to weights, in small: the critic learns, and a run goes on exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support import ranks, runs, tiny_rl
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from homeostat.config import RunConfig
from homeostat.errors import ConfigError, ModelError
from homeostat.observe.completions import read_completions
from homeostat.observe.jsonl import read_metrics
from homeostat.run import rl as loop
from homeostat.run.preflight.check import Preflight
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.runtime import resolve_runtime
from homeostat.train.saving.checkpoint import CheckpointStore
from homeostat.types import Role

PPO = {"type": "ppo"}
MEASURED = ("time", "throughput/", "memory/", "engine/", "rollout/replayed_rounds")


def config_of(folder: Path, *overrides: str, **sections: Any) -> RunConfig:
    critic = {"lr": 1e-2, **sections.pop("critic", {})}
    return tiny_rl.config(folder, *overrides, algorithm=PPO, critic=critic, **sections)


def records(config: RunConfig) -> list[dict[str, Any]]:
    return list(read_metrics(config.run_dir / "metrics.jsonl"))


def comparable(config: RunConfig) -> list[dict[str, Any]]:
    found = records(config)
    return [{k: v for k, v in one.items() if not k.startswith(MEASURED)} for one in found]


def saved(config: RunConfig, step: int, stem: str) -> dict[str, torch.Tensor]:
    path = CheckpointStore(config.run_dir / "checkpoints").path(step)
    return load_file(path / f"{stem}.safetensors")


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Six steps with everything: a KL in the reward, two passes, a warm-up, an export."""
    config = config_of(
        tmp_path_factory.mktemp("ppo"),
        "trainer.max_steps=6",
        "trainer.epochs_per_step=2",
        "algorithm.kl={coefficient: 0.01, place: reward}",
        critic={"warmup_steps": 2, "gae_lambda": 0.9, "bootstrap_truncated": True, "export": True},
        checkpoint={"interval_steps": 2, "export": "final", "keep_last": 10},
    )
    runs.train(config)
    return config


def test_the_critic_learns_what_samples_earn(finished: RunConfig) -> None:
    found = records(finished)
    assert len(found) == 6
    # A zero head says 0 of every state, which explains nothing and is wrong by the mean.
    assert found[0]["critic/value_mean"] == 0
    assert found[0]["critic/explained_variance"] == pytest.approx(0, abs=1e-9)
    assert found[-1]["critic/value_mean"] != 0
    for record in found:
        assert np.isfinite(record["critic/loss"])
        assert record["critic/grad_norm"] > 0
        assert 0 <= record["critic/clipped_share"] <= 1
        assert record["critic/return_std"] > 0
        assert record["critic/lr"] > 0


def test_the_policy_and_its_version_stand_still_while_the_critic_warms_up(
    finished: RunConfig,
) -> None:
    found = records(finished)
    assert ["grad_norm" in record for record in found] == [False] * 2 + [True] * 4
    assert [record["engine/policy_version"] for record in found] == [0, 0, 1, 2, 3, 4]
    versions = [
        {row["policy_version"] for row in read_completions(finished.run_dir / "completions", step)}
        for step in (1, 2, 3, 4)
    ]
    assert versions == [{0}, {0}, {0}, {1}]
    # Its learning rate starts after the warm-up, where the schedule begins.
    assert found[2]["learning_rate"] == pytest.approx(finished.trainer.learning_rate(4, 16))


def test_only_the_critic_changes_in_its_warm_up(finished: RunConfig) -> None:
    policy, critic = (
        [saved(finished, step, stem) for step in (2, 4)] for stem in ("model", "critic")
    )
    assert not same(*policy)
    assert not same(*critic)
    assert "score.weight" in critic[0]
    assert "lm_head.weight" not in critic[0]
    fresh = config_of(finished.run_dir / "beside", "trainer.max_steps=1")
    start = local_trainer(fresh.for_trainer, resolve_runtime(fresh, kept=PLAIN))
    named = dict(start.roles[Role.POLICY].named_parameters())
    assert all(torch.equal(named[name], tensor) for name, tensor in policy[0].items())


def test_the_critic_is_exported_as_a_sequence_classifier(finished: RunConfig) -> None:
    folder = CheckpointStore(finished.run_dir / "checkpoints").path(6) / "hf_critic"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(model.score.weight, saved(finished, 6, "critic")["score.weight"])
    assert model.config.num_labels == 1
    # Rows end with the token that they are padded with elsewhere.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id


def test_a_stopped_run_goes_on_exactly_with_both_optimizers(
    finished: RunConfig, tmp_path: Path
) -> None:
    config = finished.model_copy(update={"runs_dir": str(tmp_path)})
    plain = loop.Saver.after_step

    def stops(self: Any, sections: Any, *, at_end: bool, is_best: bool) -> tuple[bool, bool]:
        """As a request to end that comes in step 3."""
        is_there = self.parts.state.step == 3
        done, last = plain(self, sections, at_end=at_end, is_best=is_best)
        if is_there:
            self.save(sections(), at_end=False, must=True)
        return done, last or is_there

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Saver, "after_step", stops)
        runs.train(config)
    assert records(config)[-1]["step"] == 3
    runs.train(config)
    assert comparable(config) == comparable(finished)
    for stem in ("model", "optimizer", "critic", "critic_optimizer"):
        assert same(saved(config, 6, stem), saved(finished, 6, stem)), stem


def test_a_critic_may_start_from_a_reward_model(finished: RunConfig, tmp_path: Path) -> None:
    folder = CheckpointStore(finished.run_dir / "checkpoints").path(6) / "hf_critic"
    config = config_of(tmp_path, "trainer.max_steps=1", critic={"path": str(folder)})
    runs.train(config)
    assert records(config)[0]["critic/value_mean"] != 0
    with pytest.raises(ModelError, match=r"critic\.path: "):
        runs.train(config_of(tmp_path, "name=gone", critic={"path": str(tmp_path / "no")}))


def test_an_adapter_of_a_critic_names_the_model_that_it_was_trained_on(
    finished: RunConfig, tmp_path: Path
) -> None:
    start = CheckpointStore(finished.run_dir / "checkpoints").path(6)
    config = config_of(
        tmp_path,
        "trainer.max_steps=1",
        "checkpoint.export=final",
        f"model={{path: {start / 'hf'}}}",
        "lora={rank: 2, alpha: 4.0, targets: [q_proj], export: adapter}",
        critic={"path": str(start / "hf_critic"), "export": True},
    )
    runs.train(config)
    folder = CheckpointStore(config.run_dir / "checkpoints").path(1)
    for name in ("hf", "hf_critic"):
        settings = json.loads((folder / name / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == str(start / name)


def test_check_and_estimate_know_the_critic(tmp_path: Path) -> None:
    plans = {}
    for name, algorithm in (("grpo", {"type": "grpo"}), ("ppo", PPO)):
        config = tiny_rl.config(tmp_path / name, algorithm=algorithm)
        preflight = Preflight(config, progress=lambda done, total: None)
        preflight.read_inputs()
        plans[name] = preflight.memory_plan(config)
    assert plans["grpo"].update.critic == 0
    # fp32: weights and two moments, of a model without its output matrix and with a head.
    assert plans["ppo"].update.critic > 0
    assert plans["ppo"].update.held > 1.8 * plans["grpo"].update.held
    assert json.loads(json.dumps(plans["ppo"].as_json()))["critic_bytes"] > 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["algorithm.type=grpo"], "has no critic"),
        (["algorithm.scale=group"], "already scales advantages"),
        (["model.implementation=transformers"], "native decoder"),
        (["critic.warmup_steps=4"], "the critic would be trained alone"),
        (["critic.export=true"], "nothing is exported"),
        (
            ["critic.bootstrap_truncated=true", "algorithm.overlong={type: mask}"],
            "cut off are not trained",
        ),
        (["critic.schedule={type: linear, warmup_steps: 99}"], "never reached"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, changes: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config_of(tmp_path, *changes)


@pytest.mark.ranks
def test_two_ranks_train_policy_and_critic_as_one_process_does(tmp_path: Path) -> None:
    """And what two ranks saved, one process loads: both models and both optimizers."""
    common = ("trainer.max_steps=2", "engine={type: native, own_process: true}")
    one = config_of(tmp_path, "name=one", *common)
    two = config_of(tmp_path, "name=two", *common, *ranks.over(2))
    with ranks.forked():
        runs.train(one)
        runs.train(two)
    for mine, theirs in zip(records(one), records(two), strict=True):
        for name in ("train/loss", "critic/loss", "critic/value_mean", "critic/grad_norm"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-6), name
    alone = local_trainer(one.for_trainer, resolve_runtime(one, kept=PLAIN))
    alone.load(CheckpointStore(two.run_dir / "checkpoints").path(2))
    named = dict(alone.roles[Role.CRITIC].named_parameters())
    for name, tensor in saved(one, 2, "critic").items():
        torch.testing.assert_close(named[name].detach(), tensor, rtol=1e-3, atol=1e-5)
