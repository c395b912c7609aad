"""Defaults that depend on the method are chosen at load, and seen where a recipe is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import tiny, tiny_rl

from homeostat.config import RunConfig
from homeostat.config.loading.load import build_config
from homeostat.config.loading.resume import compare_configs
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.local import LocalTrainer
from homeostat.train.runtime import resolve_runtime
from homeostat.types import Role

LORA = {"rank": 4}


def built(folder: Path, *, rl: bool, lora: bool = False, **sections: object) -> RunConfig:
    """A recipe that leaves out what the method decides."""
    raw = tiny_rl.recipe(folder, **sections) if rl else tiny.recipe(folder, **sections)
    del raw["trainer"]["lr"]
    if lora:
        raw |= {"lora": LORA, "model": {**raw["model"], "init": "pretrained"}}
    return build_config(raw, [], file=None)


@pytest.mark.parametrize(
    ("rl", "lora", "rate", "decay"),
    [
        (False, False, 2e-5, 0.01),
        (False, True, 2e-4, 0.0),
        (True, False, 1e-6, 0.01),
        (True, True, 1e-5, 0.0),
    ],
)
def test_rate_and_weight_decay_follow_the_method(
    tmp_path: Path, rl: bool, lora: bool, rate: float, decay: float
) -> None:
    config = built(tmp_path, rl=rl, lora=lora)
    assert config.trainer.lr == rate
    assert config.trainer.optimizer.weight_decay == decay
    # What config.json holds reads back as the same config, so that a resumed run keeps it.
    again = RunConfig.model_validate_json(config.model_dump_json())
    assert compare_configs(config, again) == []


def test_what_the_recipe_says_is_kept(tmp_path: Path) -> None:
    trainer = {**tiny.recipe(tmp_path)["trainer"], "lr": 3e-4}
    trainer["optimizer"] = {"weight_decay": 0.1}
    raw = tiny.recipe(tmp_path, trainer=trainer, lora=LORA)
    raw["model"]["init"] = "pretrained"
    config = build_config(raw, [], file=None)
    assert (config.trainer.lr, config.trainer.optimizer.weight_decay) == (3e-4, 0.1)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, 0.0),
        ({"samples_per_prompt": 4}, 0.7),
        ({"top_p": 0.9}, 0.7),
        ({"top_k": 5}, 0.7),
        ({"temperature": 0.3}, 0.3),
        ({"samples_per_prompt": 4, "temperature": 1.0}, 1.0),
    ],
)
def test_one_sample_is_greedy_and_several_are_drawn_as_in_training(
    tmp_path: Path, sampling: dict[str, float], expected: float
) -> None:
    raw = tiny_rl.recipe(tmp_path, eval={"sampling": sampling} if sampling else {})
    raw["data"]["validation_share"] = 0.25
    raw["rollout"] = {**raw["rollout"], "temperature": 0.7}
    assert build_config(raw, [], file=None).eval.sampling.temperature == expected


def test_an_adapter_is_not_decayed_and_the_model_is(tmp_path: Path) -> None:
    plain = built(tmp_path, rl=False)
    trainer = local_trainer(plain, resolve_runtime(plain, kept=PLAIN))
    trainer.export(Role.POLICY, tmp_path / "model", plain)
    assert decays(trainer) == {0.01, 0.0}
    adapted = built(tmp_path, rl=False, lora=True)
    trainer = local_trainer(adapted, resolve_runtime(adapted, kept=PLAIN))
    assert decays(trainer) == {0.0}


def decays(trainer: LocalTrainer) -> set[float]:
    """Weight decays of the policy's tensors."""
    training = trainer.roles[Role.POLICY].training
    assert training is not None
    return {slot.decay for slot in training.optimizer.slots.values()}
