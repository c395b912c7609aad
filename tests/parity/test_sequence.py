"""Ranks that share a micro-batch compute what a local trainer does: on 2 and 4 ranks, by gloo.

The checks are in tests/support/sequence_ranks.py; each set of processes runs all of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.parity import tiny_models
from tests.support import fsdp_ranks, sequence_ranks, tiny, tiny_moe, tiny_rl
from tests.support.forks import SHARDS, Forked
from tests.support.fsdp_ranks import SAVED_AFTER, STEPS, Place
from tests.support.sequence_ranks import CHECKS

pytestmark = pytest.mark.ranks
DEADLINE_S = 270.0
# Enough on one number of ranks.
ON_TWO = {
    "a_row_that_is_not_finite_is_found",
    "a_token_that_is_not_finite_is_found",
    "experts",
    "values_and_pairs",
    "checkpointed_activations_and_dropout",
    "invariant_numerics_keep_their_bits",
    "kept_sets_and_truth",
    "sequence_ratios",
}
# Experts over shared rows are in tests/parity/test_scale.py too; the others are variants.
AT_NIGHT = {
    "experts",
    "checkpointed_activations_and_dropout",
    "kept_sets_and_truth",
    "sequence_ratios",
}
# Checks that one set of processes makes: number of ranks, names.
SETS: dict[str, tuple[int, tuple[str, ...]]] = {
    "2": (2, tuple(name for name in CHECKS if name not in AT_NIGHT)),
    "2 at night": (2, tuple(name for name in CHECKS if name in AT_NIGHT)),
    "4 at night": (4, tuple(name for name in CHECKS if name not in ON_TWO)),
}


def cases() -> list[Any]:
    return [
        pytest.param(chosen, name, marks=[pytest.mark.slow] if "night" in chosen else [])
        for chosen, (_, names) in SETS.items()
        for name in names
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sequence")
    write_inputs(made)
    return made


@pytest.fixture(scope="module")
def results(folder: Path) -> Callable[[str], dict[str, str]]:
    """Set of checks -> check -> what went wrong on any rank."""
    return cache(lambda chosen: run_ranks(folder, *SETS[chosen]))


def write_inputs(folder: Path) -> None:
    """Model folders, and what a local trainer saved."""
    narrow = {**tiny_models.FAMILIES["qwen3"], "head_dim": 2, "intermediate_size": 33}
    families = {**tiny_models.FAMILIES, "narrow": narrow}
    for name in ("llama", "llama_tied", "qwen3", "narrow"):
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


def run_ranks(folder: Path, size: int, names: Sequence[str]) -> dict[str, str]:
    """These checks on `size` processes, none of which outlives this call."""
    code = f"import runpy\nrunpy.run_module({sequence_ranks.__name__!r}, run_name='__main__')"
    ranks = []
    try:
        for rank in range(size):
            arguments = [str(rank), str(size), str(folder), *names]
            with (folder / f"log_{rank}_of_{size}").open("w") as log:
                env = {**os.environ, "OMP_NUM_THREADS": "1"}
                ranks.append(Forked(code, arguments, env=env, output=log.fileno(), imported=SHARDS))
        wait_for(ranks, time.monotonic() + DEADLINE_S)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return joined(folder, size, names)


def wait_for(ranks: list[Forked], deadline: float) -> None:
    """Until all have ended, one has failed, or there is no time left."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        if any(codes) or None not in codes:
            return
        time.sleep(0.1)


def joined(folder: Path, size: int, names: Sequence[str]) -> dict[str, str]:
    found = dict.fromkeys(names, "")
    for rank in range(size):
        file = folder / f"result_{rank}_of_{size}.json"
        if not file.is_file():
            log = (folder / f"log_{rank}_of_{size}").read_text()[-3000:]
            return dict.fromkeys(found, f"rank {rank} did not come to an end:\n{log}")
        for name, wrong in json.loads(file.read_text()).items():
            found[name] += f"rank {rank}: {wrong}\n" if wrong else ""
    return found


@pytest.mark.parametrize(("chosen", "name"), cases())
def test_ranks(results: Callable[[str], dict[str, str]], chosen: str, name: str) -> None:
    wrong = results(chosen)
    assert not wrong[name], wrong[name]
