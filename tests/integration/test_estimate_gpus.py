"""`homeostat estimate --gpus`: a plan from a recipe and a config.json, without weights."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from homeostat.cli.verbs import app
from homeostat.errors import ConfigError, ModelError, PlanError

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "recipes" / "qwen2.5_7b_math_grpo_h200.yaml")
SMALL = ["rollout.prompts_per_step=16", "rollout.samples_per_prompt=4", "engine.max_concurrency=32"]


def estimate(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["estimate", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def planned(*arguments: str) -> dict[str, Any]:
    return json.loads(estimate(RECIPE, *SMALL, "--format", "json", *arguments))


def test_a_plan_names_split_memory_seconds_and_what_binds() -> None:
    text = estimate(RECIPE, *SMALL, "--gpus", "8", "--shape", "qwen3-30b-a3b")
    for word in ("30.5 B parameters", "shards", "training", "a step: generate", "binds first"):
        assert word in text
    # Published figures of the same model, and where the rates come from.
    assert "NeMo RL" in text
    assert "not measured" in text


def test_programs_read_the_same_plan() -> None:
    plan = planned("--gpus", "8", "--shape", "qwen2.5-7b", "--reward-s", "30")
    assert plan["fits"]
    assert plan["memory_bytes"]["peak"] <= plan["memory_bytes"]["capacity"]
    assert plan["split"]["trainer_gpus"] == 8
    assert plan["step"]["reward_s"] >= 30
    assert plan["workload"]["prompts"] == 16


def test_sizes_come_from_a_config_alone(tmp_path: Path) -> None:
    from homeostat.run.sizing.scale import SHAPES

    raw = json.loads((SHAPES / "qwen2.5-7b.json").read_text(encoding="utf-8"))
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 2}))
    by_flag = planned("--gpus", "1", "--shape", str(folder / "config.json"))
    by_recipe = planned("--gpus", "1", f"model.path={folder}")
    assert by_flag["params"] == by_recipe["params"] < 2e9
    assert by_flag["model"] == by_recipe["model"] == "mine"
    assert by_flag["step"] == by_recipe["step"]


def test_an_adapter_needs_less_memory_and_sends_less() -> None:
    full = planned("--gpus", "8", "--shape", "llama3.1-8b")
    lora = planned("--gpus", "8", "--shape", "llama3.1-8b", "lora.rank=16")
    assert lora["memory_bytes"]["optimizer"] < full["memory_bytes"]["optimizer"] / 50
    assert lora["workload"]["adapter_params"] < full["params"] / 100


def test_what_does_not_fit_ends_with_1_and_the_sums() -> None:
    text = estimate(RECIPE, "--gpus", "4", "--shape", "qwen3-235b-a22b", code=1)
    assert "3,761 GB over 4 GPUs" in " ".join(text.split())
    raw = estimate(RECIPE, "--gpus", "4", "--shape", "qwen3-235b-a22b", "--format", "json", code=1)
    assert json.loads(raw)["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "8", "--shape", "nobody-7b"], "nobody-7b"),
        (["--gpus", "8", "--nodes", "3", "--shape", "qwen2.5-7b"], "evenly over 3 nodes"),
        (["--gpus", "8", "--shape", "qwen2.5-7b", "--mean-tokens", "99999"], "max_new_tokens"),
        (["--gpus", "8", "--shape", "qwen2.5-7b", "--gpu", "abacus"], "abacus"),
    ],
)
def test_bad_input_is_refused_with_the_reason(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["estimate", RECIPE, *arguments])
    assert isinstance(result.exception, PlanError | ModelError)
    assert words in str(result.exception)


def test_a_recipe_that_does_not_sample_is_refused() -> None:
    sft = str(ROOT / "recipes" / "tiny_sort_sft_cpu.yaml")
    result = CliRunner().invoke(app, ["estimate", sft, "--gpus", "8", "--shape", "qwen2.5-7b"])
    assert isinstance(result.exception, PlanError)
    assert "Without --gpus" in str(result.exception)


@pytest.mark.parametrize("words", ["--gpu=h100", "--nodes=2", "--spread=0.3", "--reward-s=1"])
def test_what_only_a_plan_on_many_gpus_uses_is_refused_without_one(words: str) -> None:
    result = CliRunner().invoke(app, ["estimate", RECIPE, words])
    assert isinstance(result.exception, ConfigError)
    assert f"{words.partition('=')[0]}: only a plan" in str(result.exception)


def scale_plan() -> ModuleType:
    bench = ROOT / "bench"
    sys.path.insert(0, str(bench))
    try:
        spec = importlib.util.spec_from_file_location("scale_plan", bench / "scale_plan.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(bench))
    return module


def test_a_part_of_the_guide_is_fresh() -> None:
    """The rows that are computed fastest; test_the_guide_is_fresh computes all of them."""
    page, plans = (ROOT / "docs" / "guide" / "scale.md").read_text(encoding="utf-8"), scale_plan()
    rows = [plans.plan_row("qwen3-235b-a22b", 8)]
    rows += plans.published_table(only="qwen3-30b-a3b").splitlines()
    assert [row for row in rows if row not in page] == [], "stale: run python bench/scale_plan.py"


@pytest.mark.slow
def test_the_guide_is_fresh() -> None:
    page, plans = (ROOT / "docs" / "guide" / "scale.md").read_text(encoding="utf-8"), scale_plan()
    assert plans.filled(page) == page, "stale: run python bench/scale_plan.py"
    assert plans.picture() == (ROOT / "docs" / "guide" / "scale.svg").read_text(encoding="utf-8")
