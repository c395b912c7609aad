"""A sharded trainer is a local one: on 1, 2 and 4 ranks, by gloo on the CPU.

The checks are in tests/support/fsdp_ranks.py. One rank runs in this process, two and four in
processes of their own, each set of which runs all its checks. Their order matters: what some have
saved, others go on from.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.parity import tiny_families, tiny_models
from tests.support import fsdp_ranks, tiny, tiny_moe, tiny_rl
from tests.support.forks import SHARDS, Forked
from tests.support.fsdp_ranks import CHECKS, SAVED_AFTER, STEPS, Place

pytestmark = pytest.mark.ranks
DEADLINE_S = 240.0
NEEDS_FOUR = {"hybrid"}
CROSSING = "going_on_from_another_number_of_ranks"
# Enough on one number of ranks.
ON_TWO = {
    "a_rank_without_memory_is_named",
    "bf16",
    "checkpointed_activations",
    "checkpoints_of_other_models_are_refused",
    "clipping_is_by_the_norm_of_all_ranks",
    "discard_undoes_what_was_begun",
    "divided_experts",
    "divided_experts_follow_recorded_routes",
    "experts",
    "experts_are_saved_and_exported",
    "experts_in_bf16",
    "export_is_what_a_local_trainer_writes",
    "buckets_hold_all_weights",
    "policy_loss_and_its_measurements",
    "random_start",
    "references",
    "replayed_routes",
    "weights_stay_gathered_on_request",
}


def names_for(size: int) -> list[str]:
    skipped = (NEEDS_FOUR if size != 4 else set()) | (ON_TWO if size != 2 else set())
    return [name for name in CHECKS if name not in skipped]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, dict[str, str]]]:
    """Size -> check -> what went wrong on any rank."""
    folder = tmp_path_factory.mktemp("fsdp")
    write_inputs(folder)
    alone = Place(0, 1, folder)
    before = [name for name in names_for(1) if name != CROSSING]
    found = {1: fsdp_ranks.run_checks(alone, before)}
    for size in (4, 2):
        found[size] = run_ranks(folder, size)
    found[1] |= fsdp_ranks.run_checks(alone, [CROSSING])
    yield found
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def write_inputs(folder: Path) -> None:
    """Model folders, and what a local trainer saved."""
    narrow = {**tiny_models.FAMILIES["qwen3"], "head_dim": 2, "intermediate_size": 33}
    families = {**tiny_models.FAMILIES, **tiny_families.BLOCKS, "narrow": narrow}
    for name in (*fsdp_ranks.MODELS, "llama_bias"):
        tiny_models.save(tiny_models.random_model(families[name]), folder / name)
    tiny_moe.save_model(folder / "qwen3_moe", **tiny_moe.QWEN)
    tiny_moe.save_model(folder / "dots1", **tiny_moe.DOTS)
    tiny.recipe(folder)
    tiny_rl.recipe(folder)
    place = Place(0, 1, folder)
    trainer, losses = fsdp_ranks.local(fsdp_ranks.resume_config(place)), []
    (folder / "saved_by_local").mkdir()
    for step in range(1, STEPS + 1):
        losses.append(fsdp_ranks.update(place, trainer, step=step).loss)
        if step == SAVED_AFTER:
            trainer.save(folder / "saved_by_local")
    (folder / "losses_of_local.json").write_text(json.dumps(losses))


def run_ranks(folder: Path, size: int) -> dict[str, str]:
    """All checks on `size` processes, none of which outlives this call."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = f"import runpy\nrunpy.run_module({fsdp_ranks.__name__!r}, run_name='__main__')"
    ranks = []
    try:
        for rank in range(size):
            arguments = [str(rank), str(size), str(folder), *names_for(size)]
            with (folder / f"log_{rank}_of_{size}").open("w") as log:
                ranks.append(
                    Forked(code, arguments, env=environment, output=log.fileno(), imported=SHARDS)
                )
        wait_for(ranks, time.monotonic() + DEADLINE_S)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return join_results(folder, size)


def wait_for(ranks: list[Forked], deadline: float) -> None:
    """Until all have ended, one has failed, or there is no time left."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        if any(codes) or None not in codes:
            return
        time.sleep(0.1)


def join_results(folder: Path, size: int) -> dict[str, str]:
    joined = dict.fromkeys(names_for(size), "")
    for rank in range(size):
        file = folder / f"result_{rank}_of_{size}.json"
        if not file.is_file():
            log = (folder / f"log_{rank}_of_{size}").read_text()[-3000:]
            return dict.fromkeys(joined, f"rank {rank} did not come to an end:\n{log}")
        for name, wrong in json.loads(file.read_text()).items():
            joined[name] += f"rank {rank}: {wrong}\n" if wrong else ""
    return joined


@pytest.mark.parametrize(("size", "name"), [(s, n) for s in (1, 2, 4) for n in names_for(s)])
def test_ranks(results: dict[int, dict[str, str]], size: int, name: str) -> None:
    assert not results[size][name], results[size][name]
