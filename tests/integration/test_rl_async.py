"""RL with rollout.max_staleness: equal to the sync loop at 0, bounded above, exactly resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support import runs, tiny_rl

from homeostat.config import RunConfig
from homeostat.observe.jsonl import read_metrics

OWN = {"own_process": True}
# What a clock or another process decides, or only one of the loops has.
MEASURED = ("time", "throughput/", "memory/", "engine/", "sync/", "rollout/", "stale/mixed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("async")


def config_of(folder: Path, name: str, *overrides: str, **sections: Any) -> RunConfig:
    sections.setdefault("engine", OWN)
    return tiny_rl.config(folder, f"name={name}", *overrides, **sections)


def values(config: RunConfig, name: str) -> list[Any]:
    return [record.get(name) for record in read_metrics(config.run_dir / "metrics.jsonl")]


def comparable(config: RunConfig) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(MEASURED)}
        for record in read_metrics(config.run_dir / "metrics.jsonl")
    ]


@pytest.mark.parametrize("engine", [{}, OWN], ids=["in_process", "own_process"])
def test_without_staleness_it_is_the_sync_loop_bitwise(
    folder: Path, engine: dict[str, Any]
) -> None:
    place = "own" if engine else "here"
    held_out = {"validation_share": 0.25}
    sync = config_of(folder, f"sync_{place}", "eval.interval_steps=2", engine=engine, data={
        **tiny_rl.recipe(folder)["data"], **held_out})  # fmt: skip
    turns = config_of(
        folder, f"turns_{place}", "eval.interval_steps=2", "rollout.max_staleness=0",
        engine=engine, data={**tiny_rl.recipe(folder)["data"], **held_out},
    )  # fmt: skip
    runs.train(sync)
    runs.train(turns)
    assert comparable(turns) == comparable(sync)
    assert runs.final_tensors(turns) | {"buffer.safetensors": b""} == runs.final_tensors(sync) | {
        "buffer.safetensors": b""
    }


def test_tokens_are_as_stale_as_the_recipe_allows(folder: Path) -> None:
    config = config_of(folder, "two", "rollout.max_staleness=2", "trainer.max_steps=6")
    runs.train(config)
    assert values(config, "stale/steps/max") == [0, 1, 2, 2, 2, 2]
