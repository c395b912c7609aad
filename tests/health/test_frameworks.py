"""Frameworks' tables: names that exist, marks that tell them apart, and lookups both ways."""

from __future__ import annotations

import re

import pytest

from homeostat.config.data import MESSAGE_KEYS, ROLE_NAMES
from homeostat.config.loading.schema import walk_keys
from homeostat.config.run import RunConfig
from homeostat.health import names
from homeostat.health.finding import Fix
from homeostat.health.frameworks import ALL, HOMEOSTAT, UNKNOWN, Framework, planned
from homeostat.health.frameworks.table import HOLE
from homeostat.health.frameworks.telling import told
from homeostat.health.readers.values.settings import ours
from homeostat.health.registry import SIGNATURES
from homeostat.observe.names import describe

TABLES = [table for table in ALL.values() if table not in (HOMEOSTAT, UNKNOWN)]
LEAVES = [path.replace("[]", "").split(".") for path, *_ in walk_keys(RunConfig)]
# A section may be set as a whole, to null for one.
OUR_KEYS = {".".join(parts[:end]) for parts in LEAVES for end in range(1, len(parts) + 1)}
OUR_KEYS |= {f"data.train.columns.{name}" for name in (*MESSAGE_KEYS, *ROLE_NAMES)}
FOREIGN = [re.compile(re.sub(r"<name>|<i>", ".+", name)) for name in names.FOREIGN]


def is_known(metric: str) -> bool:
    plain = metric.replace(HOLE, "x")
    return describe(plain) is not None or any(one.fullmatch(plain) for one in FOREIGN)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_metrics_lead_to_names_that_rules_can_read(table: Framework) -> None:
    assert [ours for ours in table.metrics.values() if not is_known(ours)] == []
    assert all((HOLE in theirs) == (HOLE in ours) for theirs, ours in table.metrics.items())
    assert set(table.scales) <= set(table.metrics.values())


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_settings_are_under_keys_of_ours_or_planned_ones(table: Framework) -> None:
    known = OUR_KEYS | planned.PLANNED.keys() | planned.FOREIGN.keys()
    keys = {*table.settings, *(key for key, _ in table.flags.values())}
    assert {key for key in keys if key not in known} == set()
    assert all(spellings and all(spellings) for spellings in table.settings.values())
    assert not table.base or table.base in ALL


def test_a_name_is_in_one_catalogue_only() -> None:
    assert [name for name in names.FOREIGN if describe(name) is not None] == []
    both = planned.PLANNED.keys() & planned.FOREIGN.keys()
    ours = OUR_KEYS & (planned.PLANNED.keys() | planned.FOREIGN.keys())
    assert (both, ours) == (set(), set()), "a recipe accepts it by now: take it out of planned.py"


@pytest.mark.parametrize(
    ("framework", "theirs", "ours"),
    [
        ("trl", "loss", "train/loss"),
        ("trl", "rewards/accuracy_reward", "rewards/accuracy_reward/mean"),
        ("trl", "rewards/accuracy_reward/std", "rewards/accuracy_reward/std"),
        ("trl", "rewards/margins", "preference/margin"),
        ("verl", "critic/score/mean", "reward"),
        ("verl", "val-core/math/acc/mean@1", "eval/score/math/acc/mean@1"),
        ("slime", "rollout/zero_std/count_0", "zero_std_groups/0"),
        ("slime", "train/train_rollout_logprob_abs_diff", "sampling/sampling_logp_difference/mean"),
        ("openrlhf", "glen", "completions/mean_length"),
        ("nemo_rl", "train/token_mult_prob_error", "sampling/mult_prob_error"),
        ("torchforge", "reward/evaluate_response/avg_MathReward_reward", "rewards/MathReward/mean"),
        ("ms_swift", "memory(GiB)", "memory/max_alloc"),
        ("prime_rl", "grad_norm", "grad_norm"),
        ("unknown", "no_such_metric", None),
        ("homeostat", "reward_std", "reward_std"),
    ],
)
def test_a_metric_is_found_under_our_name(framework: str, theirs: str, ours: str | None) -> None:
    assert ALL[framework].canonical(theirs) == ours


@pytest.mark.parametrize(
    ("framework", "name", "value", "found"),
    [
        ("trl", "num_generations", 8, ("rollout.samples_per_prompt", 8)),
        ("trl", "fp16", True, ("trainer.precision", "fp16")),
        ("trl", "bf16", False, None),
        ("slime", "--n-samples-per-prompt", 8, ("rollout.samples_per_prompt", 8)),
        ("slime", "n_samples_per_prompt", 8, ("rollout.samples_per_prompt", 8)),
        ("verl", "actor_rollout_ref.rollout.n", 16, ("rollout.samples_per_prompt", 16)),
        ("openrlhf", "micro_train_batch_size", 4, ("trainer.micro_batch_rows", 4)),
        ("verl", "no.such.setting", 1, None),
    ],
)
def test_a_setting_is_read_by_any_spelling(
    framework: str, name: str, value: object, found: tuple[str, object] | None
) -> None:
    assert ours({name: value}, ALL[framework]) == (dict([found]) if found else {})


@pytest.mark.parametrize(
    ("framework", "setting"),
    [
        ("homeostat", "rollout.max_new_tokens"),
        ("trl", "max_completion_length"),
        ("axolotl", "trl.max_completion_length"),
        ("verl", "data.max_response_length"),
        ("slime", "--rollout-max-response-len"),
        ("miles", "--rollout-max-response-len"),
        ("openrlhf", "--rollout.max_new_tokens"),
        ("lightrft", "--generate_max_len"),
        ("chatlearn", "models.policy.max_response_tokens_length"),
        ("open_r1", "max_completion_length"),
        ("unknown", None),
    ],
)
def test_a_fix_is_told_by_their_name(framework: str, setting: str | None) -> None:
    fix = Fix("rollout.max_new_tokens", "4096", "answers are cut")
    assert told(fix, ALL[framework]).setting == setting


def test_what_a_fix_says_of_a_framework_goes_first_and_is_inherited() -> None:
    fix = Fix("lora.rank", "8", "too high", theirs={"trl": "lora_alpha"})
    assert told(fix, ALL["trl"]).setting == "lora_alpha"
    assert told(fix, ALL["verl"]).setting == "actor_rollout_ref.model.lora_rank"
    only = Fix("", "off", "a switch of theirs", theirs={"trl": "use_liger_kernel"})
    assert told(only, ALL["unsloth"]).setting == "use_liger_kernel"
    assert told(only, ALL["verl"]).setting is None


def test_frameworks_and_settings_that_error_texts_name_exist() -> None:
    fixes = [fix for one in SIGNATURES for fix in one.fixes]
    assert {name for fix in fixes for name in fix.theirs} - ALL.keys() == set()
    known = OUR_KEYS | planned.PLANNED.keys() | planned.FOREIGN.keys() | {""}
    assert {fix.setting for fix in fixes} - known == set()
