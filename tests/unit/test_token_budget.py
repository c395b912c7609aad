"""How many tokens a micro-batch has where the recipe does not say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tests.support import runs, tiny, tiny_rl

from homeostat.config.trainer import DEFAULT_TOKENS
from homeostat.observe.jsonl import read_metrics
from homeostat.run.sizing.estimate import full_batch
from homeostat.run.sizing.token_budget import (
    MOST_TOKENS,
    as_chosen,
    choose_tokens,
    most_that_fit,
    sized,
)
from homeostat.train.cores import PLAIN
from homeostat.train.runtime import resolve_runtime
from homeostat.train.saving.checkpoint import CheckpointStore
from homeostat.train.saving.run_state import RunState


def test_a_recipe_comes_first_then_what_was_chosen_before(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, trainer={"max_tokens_per_device": None})
    runtime = resolve_runtime(config, kept=PLAIN)
    assert choose_tokens(config, runtime) == DEFAULT_TOKENS
    assert choose_tokens(config, runtime, kept=20_000) == 20_000
    assert as_chosen(config, runtime).trainer.tokens_per_micro_batch == DEFAULT_TOKENS
    said = tiny.config(tmp_path, trainer={"max_tokens_per_device": 500})
    assert choose_tokens(said, runtime, kept=20_000) is None
    assert sized(said.trainer, RunState(chosen_tokens=20_000)).tokens_per_micro_batch == 500
    assert sized(config.trainer, RunState(chosen_tokens=99)).tokens_per_micro_batch == 99


def test_an_engine_with_memory_of_its_own_leaves_it_at_the_default(tmp_path: Path) -> None:
    config = tiny_rl.config(tmp_path, "engine.type=vllm", "trainer.max_tokens_per_device=null")
    runtime = replace(resolve_runtime(config, kept=PLAIN), device=torch.device("cuda"))
    assert choose_tokens(config, runtime) == DEFAULT_TOKENS


def test_as_many_as_fit(tmp_path: Path) -> None:
    config = tiny.config(tmp_path)
    runtime = resolve_runtime(config, kept=PLAIN)
    assert most_that_fit(config, runtime) == MOST_TOKENS
    # A token's gates alone take 64 MiB.
    tiny.write_model(tmp_path / "model", intermediate_size=2**24)
    assert most_that_fit(config, runtime) == DEFAULT_TOKENS


def test_a_full_batch_has_rows_as_long_as_they_may_get(tmp_path: Path) -> None:
    config = tiny_rl.config(tmp_path)
    batch = full_batch(config, 10 * config.longest_row + 3)
    assert batch.lengths_B.tolist() == [config.longest_row] * 10
    # A row's first token has nothing that predicts it.
    assert int((batch.weights_N == 0).sum()) == 10
    assert "advantage" in batch.columns


def test_a_run_writes_down_what_it_chose_and_goes_on_with_it(tmp_path: Path) -> None:
    chooses = ("trainer.max_tokens_per_device=null", "trainer.max_steps=2")
    config = tiny.config(tmp_path, *chooses)
    runs.train(config)
    stored = CheckpointStore(config.run_dir / "checkpoints").newest_valid()
    assert stored is not None
    fields = stored.section("run")
    assert fields["chosen_tokens"] == DEFAULT_TOKENS
    # All eight rows of an update in one micro-batch; of 256 tokens it takes more.
    steps = list(read_metrics(config.run_dir / "metrics.jsonl"))
    assert [step["data/micro_batches"] for step in steps] == [1, 1]


def test_checkpoints_from_before_there_was_a_choice_are_read() -> None:
    fields = RunState(step=3).as_json()
    del fields["chosen_tokens"]
    assert RunState.from_json(fields, place="x") == RunState(step=3)
