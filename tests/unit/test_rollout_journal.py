"""The journal gives back what was written, to the bit, or says that it has nothing."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save
from tests.support.rollouts import random_groups

from homeostat.errors import DataError, RunDirWriteError
from homeostat.rollout import journal as journal_module
from homeostat.rollout.journal import Journal
from homeostat.types import Prompt, RolloutGroup, Sample, Segment

FACTS = {"policy_version": 11, "config": "a1b2", "nested": {"x": [1, 2.5, None]}}


def bits(value: float | None) -> bytes | None:
    return None if value is None else struct.pack("<d", value)


def array(values: np.ndarray | None) -> tuple[Any, ...] | None:
    return None if values is None else (str(values.dtype), values.shape, values.tobytes())


def flat_segment(segment: Segment) -> tuple[Any, ...]:
    return (
        array(segment.tokens_T),
        array(segment.engine_logp_T),
        array(segment.sampled_logp_T),
        segment.policy_version,
        segment.policy_id,
        segment.author,
        type(segment.author),
    )


def flat_sample(sample: Sample) -> tuple[Any, ...]:
    return (
        sample.completion.request_id,
        [flat_segment(segment) for segment in sample.completion.segments],
        sample.completion.stop_reason,
        type(sample.completion.stop_reason),
        sample.text,
        {name: bits(value) for name, value in sample.rewards.items()},
        bits(sample.reward),
        repr(dict(sample.extras)),
        sample.failed,
    )


def flat(groups: list[RolloutGroup]) -> list[Any]:
    """Everything in a rollout as values that compare by their bits."""
    return [
        (
            group.prompt.prompt_id,
            array(group.prompt.tokens_T),
            list(map(flat_sample, group.samples)),
        )
        for group in groups
    ]


def among(groups: list[RolloutGroup]) -> Callable[[int], Prompt]:
    return {group.prompt.prompt_id: group.prompt for group in groups}.__getitem__


def distinct(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """Groups of one prompt share it, as those of a data set do."""
    prompts = {group.prompt.prompt_id: group.prompt for group in groups}
    return [replace(group, prompt=prompts[group.prompt.prompt_id]) for group in groups]


def some_groups(seed: int = 0, num_groups: int = 5) -> list[RolloutGroup]:
    return distinct(random_groups(np.random.default_rng(seed), num_groups))


def test_what_rewards_told_of_a_sample_comes_back(tmp_path: Path) -> None:
    told = {"parsed": "\ud800 7", "tries": 3, "share": 0.1, "nan": float("nan"), "cut": None}
    (group, *rest) = some_groups()
    first = replace(group.samples[0], extras=told)
    groups = [replace(group, samples=(first, *group.samples[1:])), *rest]
    journal = Journal(tmp_path)
    journal.write(1, 0, groups, FACTS)
    found = journal.read(1, 0, among(groups))
    assert found is not None
    assert flat(found[0]) == flat(groups)


@given(seed=st.integers(0, 2**32), num_groups=st.integers(0, 6))
def test_a_round_comes_back_to_the_bit(tmp_path_factory, seed, num_groups):
    journal = Journal(tmp_path_factory.mktemp("journal"))
    groups = some_groups(seed, num_groups)
    journal.write(3, 1, groups, FACTS)
    found = journal.read(3, 1, among(groups))
    assert found is not None
    assert flat(found[0]) == flat(groups)
    assert found[1] == FACTS
    assert [group.prompt for group in found[0]] == [group.prompt for group in groups]


def as_format_1(path: Path, counts: dict[str, int]) -> None:
    """The file as it was written before failures had a mark of their own."""
    with safe_open(path, framework="numpy") as file:
        text = file.metadata()["journal"].partition(" ")[2]
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header = json.loads(text) | {"version": 1, "facts": {"missing": counts}}
    kinds = arrays["sample/rewards/kinds"]
    kinds[kinds == 3] = 1
    text = json.dumps(header)
    digest = journal_module._digest(text, arrays)
    path.write_bytes(save(arrays, metadata={"journal": f"{digest} {text}"}))


def test_a_round_of_the_first_format_trains_no_sample_that_may_have_failed(tmp_path: Path) -> None:
    (group, *_) = some_groups()
    (sample, *_) = group.samples
    cells = [({"a": None, "b": None}, {"a"}), ({"a": 1.0, "b": None}, set()), ({"a": None}, set())]
    samples = [replace(sample, rewards=r, failed=frozenset(failed)) for r, failed in cells]
    groups = [replace(group, samples=tuple(samples))]
    journal = Journal(tmp_path)
    for counts, expected in (
        ({"rewards/a/failed": 1, "rewards/b/none": 2}, [{"a"}, set(), {"a"}]),
        ({"rewards/b/none": 2}, [set(), set(), set()]),
    ):
        as_format_1(journal.write(1, 0, groups, {}), counts)
        found = journal.read(1, 0, among(groups))
        assert found is not None
        assert [one.failed for one in found[0][0].samples] == expected
        assert [dict(one.rewards) for one in found[0][0].samples] == [r for r, _ in cells]


def test_a_round_that_is_not_there_is_none(tmp_path):
    journal = Journal(tmp_path / "journal")
    assert journal.read(1, 0, among([])) is None
    assert (journal.steps(), journal.rounds(1)) == ([], [])
    assert journal.drop_after(0) == journal.prune_before(9) == 0
    journal.write(1, 0, [], {})
    assert journal.read(1, 1, among([])) is None
    assert journal.read(1, 0, among([])) == ([], {})


def test_rounds_are_found_dropped_and_pruned_by_their_step(tmp_path):
    journal = Journal(tmp_path)
    for step, round in [(3, 0), (3, 1), (5, 0), (12, 100), (12, 2)]:
        journal.write(step, round, some_groups(), FACTS)
    (tmp_path / "step_00000007_round_00.safetensors.bak").touch()
    assert (tmp_path / "step_00000012_round_02.safetensors").is_file()
    assert journal.steps() == [3, 5, 12]
    assert journal.rounds(12) == [2, 100]
    assert journal.prune_before(5) == 2
    assert journal.steps() == [5, 12]
    assert journal.drop_after(5) == 2
    assert journal.steps() == [5]


def test_a_later_write_of_a_round_replaces_it(tmp_path):
    journal, groups = Journal(tmp_path), some_groups(1)
    journal.write(1, 0, some_groups(0), {"config": "old"})
    journal.write(1, 0, groups, {"config": "new"})
    found = journal.read(1, 0, among(groups))
    assert found is not None
    assert (flat(found[0]), found[1]) == (flat(groups), {"config": "new"})


def test_a_damaged_file_counts_as_not_there(tmp_path, caplog):
    journal, groups = Journal(tmp_path), some_groups()
    path = journal.write(1, 0, groups, FACTS)
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    places = {0, 9, len(whole) - 1, *rng.integers(0, len(whole), 150).tolist()}
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = journal.read(1, 0, among(groups))
        # A flip that changes nothing that was said (white space of the header) may pass.
        assert found is None or flat(found[0]) == flat(groups), place
        assert found is not None or "damaged" in caplog.text
    for length in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert journal.read(1, 0, among(groups)) is None
    journal.write(1, 0, groups, FACTS)
    assert path.read_bytes() == whole


def test_rollouts_of_other_prompts_are_refused(tmp_path):
    journal, groups = Journal(tmp_path), some_groups()
    journal.write(1, 0, groups, FACTS)
    with pytest.raises(DataError, match="the data does not have"):
        journal.read(1, 0, among([]))
    other = replace(groups[0].prompt, tokens_T=groups[0].prompt.tokens_T + 1)
    with pytest.raises(DataError, match="Restore the data"):
        journal.read(1, 0, lambda _: other)


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    journal, groups = Journal(tmp_path), some_groups()
    journal.write(1, 0, groups, FACTS)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(RunDirWriteError, match=r"step 2 .* runs_dir") as full:
            journal.write(2, 0, groups, FACTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert full.value.exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001_round_00.safetensors"]
    assert journal.read(1, 0, among(groups)) is not None


WRITER = """
import sys
import numpy as np
from pathlib import Path
from homeostat.rollout.journal import Journal
from tests.support.rollouts import random_groups
journal = Journal(Path(sys.argv[1]))
groups = random_groups(np.random.default_rng(4), 400)
for step in range(1, 10**6):
    journal.write(step, 0, groups, {"step": step})
"""


def test_a_writer_that_is_killed_leaves_whole_files_only(tmp_path):
    groups = random_groups(np.random.default_rng(4), 400)
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writer = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        deadline = time.monotonic() + 60
        while len(Journal(tmp_path).steps()) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    journal = Journal(tmp_path)
    assert len(journal.steps()) >= 3
    expected = [list(map(flat_sample, group.samples)) for group in groups]
    for step in journal.steps():
        prompts = iter(groups)
        found = journal.read(step, 0, lambda _, prompts=prompts: next(prompts).prompt)
        assert found is not None
        assert found[1] == {"step": step}
        assert [list(map(flat_sample, group.samples)) for group in found[0]] == expected
