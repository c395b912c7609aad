"""Routes that the engine recorded are replayed in training: in a run, and in a resumed one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import runs, tiny_moe, tiny_rl
from typer.testing import CliRunner

from homeostat.cli.verbs import app
from homeostat.config import RunConfig
from homeostat.config.moe import MoeConfig
from homeostat.errors import ConfigError, ReplayError
from homeostat.observe.jsonl import read_metrics
from homeostat.ops.moe_shape import MoeShape
from homeostat.run.learning.routes import require_routes
from homeostat.types import Completion, Prompt, RolloutGroup, Sample, Segment, StopReason

MEASURED = ("time", "throughput/", "memory/", "engine/", "rollout/replayed_rounds", "probe/")
MOE = MoeShape(num_experts=8, top_k=2, expert_size=16, layers=(0, 1))


def moe_config(folder: Path, *overrides: str, **moe: Any) -> RunConfig:
    model = folder / "model"
    if not model.exists():
        tiny_rl.write_model(model, **tiny_moe.QWEN)
    settings = {"router_replay": "ids", **moe}
    at = {"path": str(model), "init": "random", "moe": settings}
    kl = {"type": "grpo", "kl": {"coefficient": 0.01}}
    engine = {"decode": "plain"}
    return tiny_rl.config(folder, *overrides, model=at, algorithm=kl, engine=engine)


def comparable(config: RunConfig) -> list[dict[str, Any]]:
    found = read_metrics(config.run_dir / "metrics.jsonl")
    return [{n: v for n, v in record.items() if not n.startswith(MEASURED)} for record in found]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    config = moe_config(tmp_path_factory.mktemp("replay"), replay_reference=True)
    runs.train(config)
    return config


def test_a_run_replays_what_its_engine_recorded(straight: RunConfig) -> None:
    records = comparable(straight)
    assert len(records) == 4
    for record in records:
        # All tokens but the last of each row.
        assert 0.7 < record["moe/replayed_share"] < 1
        # The same weights in fp32 choose the same experts but for ties and near-ties.
        assert record["moe/route_agreement"] > 0.98
        # The second update of a step computes under weights that the first has moved.
        assert record["moe/router_drift"] >= 1 - record["moe/route_agreement"]
        assert record["sampling/sampling_logp_difference/max"] < 1e-4
    assert max(record["moe/router_drift"] for record in records) > 0


def test_routes_read_back_from_the_journal_train_the_same_bits(
    straight: RunConfig, tmp_path: Path
) -> None:
    """Of about 600 bytes a step, some stay in memory."""
    shutil.copytree(straight.model.path, tmp_path / "model")
    spilled = moe_config(tmp_path, replay_reference=True, replay_buffer_bytes=300)
    runs.train(spilled)
    assert comparable(spilled) == comparable(straight)
    assert runs.final_tensors(spilled) == runs.final_tensors(straight)


def test_a_resumed_run_replays_the_journal_to_the_same_bits(
    straight: RunConfig, tmp_path: Path
) -> None:
    """Its last checkpoint is lost; the rollouts after the one before it are in the journal."""
    shutil.copytree(straight.run_dir, tmp_path / straight.name)
    folder = Path(straight.runs_dir).parent
    resumed = moe_config(folder, f"runs_dir={tmp_path}", replay_reference=True)
    before = runs.final_tensors(resumed)
    shutil.rmtree(sorted((resumed.run_dir / "checkpoints").glob("step_*"))[-1])
    runs.train(resumed)
    last = list(read_metrics(resumed.run_dir / "metrics.jsonl"))[-1]
    assert last["rollout/replayed_rounds"] == 1
    assert comparable(resumed)[-2:] == comparable(straight)[-2:]
    assert runs.final_tensors(resumed) == before


def test_the_reference_chooses_for_itself_unless_told_otherwise(
    straight: RunConfig, tmp_path: Path
) -> None:
    shutil.copytree(straight.model.path, tmp_path / "model")
    free = moe_config(tmp_path)
    runs.train(free)
    # By the last step the policy has moved: its routes are no longer those of the reference.
    assert comparable(free)[-1]["kl"] != comparable(straight)[-1]["kl"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["algorithm={type: sft}"], "no engine records routes"),
        (["model.implementation=transformers"], "chooses its experts itself"),
        (["model.moe.router_replay=off", "model.moe.replay_reference=true"], "no effect"),
        (["model.moe.router_replay=off", "model.moe.replay_buffer_bytes=1MiB"], "no effect"),
        (["model.moe.replay_reference=true", "algorithm.kl=null"], "there is no reference"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_the_recipe(
    tmp_path: Path, overrides: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        moe_config(tmp_path, *overrides)


def test_a_dense_model_has_nothing_to_replay(tmp_path: Path) -> None:
    tiny_rl.write_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="the model has no experts"):
        runs.train(moe_config(tmp_path))


def test_check_shows_what_replay_takes(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    moe_config(tmp_path)
    raw = tiny_rl.recipe(tmp_path)
    raw["model"]["moe"] = {"router_replay": "ids"}
    recipe.write_text(json.dumps(raw))
    # Two layers, two experts of a byte each.
    shown = CliRunner().invoke(app, ["check", str(recipe)])
    assert "4 bytes a token" in " ".join(shown.output.split()), shown.output
    assert "for each token" in " ".join(shown.output.split()), shown.output
    off = CliRunner().invoke(app, ["check", str(recipe), "model.moe.router_replay=off"])
    assert "set it to ids" in " ".join(off.output.split()), off.output


def group(**changes: Any) -> RolloutGroup:
    prompt = Prompt(0, np.arange(3), "", {})
    columns = {"routed_experts": np.zeros((4, 2, 2), np.uint8)}
    segment = Segment(np.arange(4), np.zeros(4, np.float32), 0, columns=columns)
    of_prompt = {"routed_experts": np.zeros((3, 2, 2), np.uint8)}
    completion = Completion("train/1/0/0/0", (segment,), StopReason.STOP, of_prompt)
    sample = Sample(replace(completion, **changes), "", {}, 1.0)
    return RolloutGroup(prompt, (sample,))


def segment_with(columns: dict[str, np.ndarray]) -> Segment:
    return Segment(np.arange(4), np.zeros(4, np.float32), 0, columns=columns)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_columns": {}}, "recorded 0 of the prompt's 3 tokens"),
        (
            {"prompt_columns": {"routed_experts": np.zeros((2, 2, 2), np.uint8)}},
            "recorded 2 of the prompt's 3 tokens",
        ),
        ({"segments": (segment_with({}),)}, "nothing of segment 0"),
        (
            {"segments": (segment_with({"routed_experts": np.zeros((4, 3, 2), np.uint8)}),)},
            "they cover 3 layers, but 2 layers have experts",
        ),
        (
            {"segments": (segment_with({"routed_experts": np.full((4, 2, 2), 8, np.uint8)}),)},
            "went to expert 8 in layer 0",
        ),
    ],
)
def test_missing_and_odd_routes_stop_a_step_before_anything_is_computed(
    changes: dict[str, Any], says: str
) -> None:
    require_routes([group()], MoeConfig(router_replay="ids"), MOE)
    with pytest.raises(ReplayError, match=says):
        require_routes([group(**changes)], MoeConfig(router_replay="ids"), MOE)
    with pytest.raises(ReplayError, match="routed_weights: the engine recorded 0"):
        require_routes([group()], MoeConfig(router_replay="weights"), MOE)
