"""Every key that a recipe accepts works: a real run shows a difference that only it explains.

Where one part alone reads a key (sources of rows, schedules), that part is asked, and one run shows
that the loop asks it, too. Keys that can be told apart in one run share it.

The table is explicit and complete: a key of the schema without a case fails here by name, and so
does a case whose key is gone. Keys of a union's members are told apart by the member's type.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, get_args

import pytest
from tests.support import ranks
from tests.support.every_key import (
    cluster,
    cluster_ray,
    curriculum,
    engine_sglang,
    engine_vllm,
    fp8,
    inputs,
    int4,
    moe,
    optimizers,
    outputs,
    preference,
    reward_model,
    rl_algorithm,
    rl_async,
    rl_correction,
    rl_critic,
    rl_ebft,
    rl_health,
    rl_model_rewards,
    rl_replay,
    rl_rewards,
    rl_sampling,
    rl_sources,
    rl_surrogates,
    rl_sync,
    trainer,
)
from tests.support.every_key.rl_workshop import RlWorkshop
from tests.support.every_key.workshop import Workshop, assert_same, losses

from homeostat.config import RunConfig
from homeostat.config.loading.schema import walk_keys
from homeostat.errors import ConfigError

SFT_PARTS = (
    *(inputs, moe, optimizers, trainer, fp8, int4),
    *(cluster, cluster_ray, outputs, preference, reward_model),
)
RL_PARTS = (
    rl_algorithm,
    rl_async,
    rl_correction,
    rl_critic,
    rl_ebft,
    rl_surrogates,
    rl_sampling,
    rl_rewards,
    rl_model_rewards,
    rl_sources,
    rl_sync,
    rl_health,
    rl_replay,
    curriculum,
    engine_sglang,
)
SFT_CASES = {name: case for part in SFT_PARTS for name, case in part.CASES.items()}
SFT_CASES |= curriculum.SFT_CASES
RL_CASES = {name: case for part in RL_PARTS for name, case in part.CASES.items()}
# Real runs with vLLM, where it is installed: tests/vllm/test_vllm_keys.py.
CASES = {**SFT_CASES, **RL_CASES, **engine_vllm.CASES}


def all_keys() -> list[str]:
    names = []
    for path, owner, _, _ in walk_keys(RunConfig):
        tag = owner.model_fields.get("type")
        names.append(path if tag is None else f"{path} ({get_args(tag.annotation)[0]})")
    return names


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("every_key"))


@pytest.fixture(scope="module")
def rl_workshop(tmp_path_factory: pytest.TempPathFactory) -> RlWorkshop:
    return RlWorkshop(tmp_path_factory.mktemp("every_rl_key"))


def test_every_key_has_a_case() -> None:
    assert CASES.keys() >= SET_ELSEWHERE
    assert sorted(set(all_keys()) - CASES.keys()) == [], "keys that nothing shows to work"
    assert sorted(CASES.keys() - set(all_keys())) == [], "cases of keys that do not exist"
    parts = (*SFT_PARTS, *RL_PARTS, engine_vllm)
    assert len(CASES) == sum(len(part.CASES) for part in parts) + len(curriculum.SFT_CASES)


def test_two_runs_of_one_recipe_are_equal_to_the_bit(workshop: Workshop) -> None:
    first, second = workshop.run(), workshop.again()
    assert losses(first) == losses(second)
    assert_same(first, second)


@pytest.mark.parametrize(
    "change",
    ["trainer.schedule={type: linear, warmup_steps: 6}", "observe.profiler={steps: [6]}"],
)
def test_what_lies_beyond_the_last_epoch_is_refused(workshop: Workshop, change: str) -> None:
    one_epoch = ("trainer.max_steps=null", "trainer.epochs=1")
    with pytest.raises(ConfigError, match="steps"):
        workshop.again(*one_epoch, change)
    assert len(losses(workshop.again(*one_epoch, change.replace("6", "5")))) == 5


# By day, Ray itself runs in tests/integration/test_ray_run.py and the contract of worker groups.
RAY_BY_DAY = {f"cluster.{key} (ray)" for key in ("type", "placement")}


# Slow cases of keys that other tests set by day: in tests/unit test_observe_sinks.py,
# test_data_store.py, test_grouped_experts.py, test_rewards_classifier.py, test_config_load.py,
# test_fp8_training.py, test_precision_observed.py and test_precision_remedies.py,
# in tests/integration test_rl_async.py, test_healing.py and test_preference_run.py,
# tests/health/test_monitor.py.
SET_ELSEWHERE = {
    "preset",
    "data.num_processes",
    "trainer.share_prompts",
    "model.moe.grouped_kernel",
    "observe.sinks[].type (wandb)",
    "observe.sinks[].project (wandb)",
    "observe.precision_interval",
    "trainer.fp8.power_of_two_scales",
    "trainer.fp8.skip_first",
    "trainer.fp8.skip_last",
    "rewards.functions[].type (reward_model)",
    "rollout.partial",
    "health.heal",
    "health.clear_after",
}


def is_nightly(name: str) -> bool:
    """Return True for keys of Ray, those set elsewhere, and those whose code another runs by day.

    Training and validation data are read by the same code, and so are the keys that an RL algorithm
    has in common with GRPO; the choice of each (`type`, `path`) is tested by day.
    """
    if name in SET_ELSEWHERE:
        return True
    if name.endswith("(ray)"):
        return name not in RAY_BY_DAY
    if name.startswith("data.validation[]."):
        return ".path " not in name and ".type " not in name
    key, _, kind = name.partition(" ")
    is_shared = key.startswith("algorithm.") and f"{key} (grpo)" in RL_CASES
    return is_shared and key != "algorithm.type" and kind != "(grpo)"


def by_ranks(names: Iterable[str]) -> list[Any]:
    """Cases that run over ranks start processes, and are tested with the others that do."""
    over = ("(fsdp)", "(torchrun)", "(ray)")
    return [
        pytest.param(
            name,
            marks=[pytest.mark.ranks] * name.endswith(over) + [pytest.mark.slow] * is_nightly(name),
        )
        for name in names
    ]


@pytest.mark.parametrize("name", by_ranks(SFT_CASES))
def test_a_key_does_what_it_says(workshop: Workshop, name: str) -> None:
    # A forked rank would have started in time.
    with nullcontext() if "start_timeout_s" in name else ranks.forked():
        SFT_CASES[name](workshop)


@pytest.mark.slow
@pytest.mark.parametrize("name", rl_algorithm.NIGHTLY_CASES)
def test_a_key_that_algorithms_share_works_with_all_of_them(
    rl_workshop: RlWorkshop, name: str
) -> None:
    rl_algorithm.NIGHTLY_CASES[name](rl_workshop)


@pytest.mark.parametrize("name", by_ranks(RL_CASES))
def test_a_key_of_rl_does_what_it_says(rl_workshop: RlWorkshop, name: str) -> None:
    RL_CASES[name](rl_workshop)
