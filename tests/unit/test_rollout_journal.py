"""The journal gives back what was written, to the bit, or says that it has nothing."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forks import Forked
from tests.support.old_journal import write_round
from tests.support.patience import eventually
from tests.support.rollouts import random_groups

from homeostat.errors import DataError, RunDirWriteError
from homeostat.rollout.groups import GroupRecord
from homeostat.rollout.journal import Journal
from homeostat.rollout.journal_part import MAGIC
from homeostat.rollout.keys import GroupKey
from homeostat.types import Prompt, RolloutGroup, Sample, Segment

FACTS = {"policy_version": 11, "origin": "a1b2", "nested": {"x": [1, 2.5, None]}}
OLD = Path(__file__).parents[1] / "support" / "journals" / "by_rounds"


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


def records(
    groups: list[RolloutGroup], *, step: int = 1, round: int = 0, facts: dict[str, Any] = FACTS
) -> list[GroupRecord]:
    return [GroupRecord(GroupKey(step, round, n), group, facts) for n, group in enumerate(groups)]


def write(
    journal: Journal,
    groups: list[RolloutGroup],
    *,
    step: int = 1,
    round: int = 0,
    facts: dict[str, Any] = FACTS,
) -> None:
    """Append a round and keep it."""
    for record in records(groups, step=step, round=round, facts=facts):
        journal.append(record)
    journal.barrier()


def read(journal: Journal, groups: list[RolloutGroup], *, step: int = 1) -> list[RolloutGroup]:
    """The groups of a step that are found."""
    prompt_of = among(groups)
    found = [journal.read(key, prompt_of) for key in journal.keys(step)]
    return [record.group for record in found if record is not None]


def test_what_rewards_told_of_a_sample_comes_back(tmp_path: Path) -> None:
    told = {"parsed": "\ud800 7", "tries": 3, "share": 0.1, "nan": float("nan"), "cut": None}
    (group, *rest) = some_groups()
    first = replace(group.samples[0], extras=told)
    groups = [replace(group, samples=(first, *group.samples[1:])), *rest]
    write(Journal(tmp_path), groups)
    assert flat(read(Journal(tmp_path), groups)) == flat(groups)


@given(seed=st.integers(0, 2**32), num_groups=st.integers(0, 6))
def test_groups_come_back_to_the_bit(tmp_path_factory, seed, num_groups):
    folder = tmp_path_factory.mktemp("journal")
    groups = some_groups(seed, num_groups)
    journal = Journal(folder)
    write(journal, groups, step=3, round=1)
    for one in (journal, Journal(folder)):
        assert one.keys(3) == [record.key for record in records(groups, step=3, round=1)]
        found = [one.read(key, among(groups)) for key in one.keys(3)]
        assert flat([record.group for record in found]) == flat(groups)
        assert [record.facts for record in found] == [FACTS] * len(groups)
        assert [record.group.prompt for record in found] == [group.prompt for group in groups]


def test_keys_name_groups_and_sort_by_the_order_of_drawing() -> None:
    keys = [GroupKey(2, 0, 1), GroupKey(10, 0, 0), GroupKey(2, 1, 0), GroupKey(2, 0, 10)]
    assert [str(key) for key in sorted(keys)] == [
        "train/2/0/1", "train/2/0/10", "train/2/1/0", "train/10/0/0",
    ]  # fmt: skip
    assert [GroupKey.parse(str(key)) for key in keys] == keys
    for text in ("train/2/0", "train/2/0/1/3", "eval/2/0/1", "train/2/0/-1"):
        with pytest.raises(ValueError, match="no key"):
            GroupKey.parse(text)


def test_a_group_that_is_not_there_is_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    assert journal.read(GroupKey(1, 0, 0), among([])) is None
    assert (journal.steps(), journal.keys(1)) == ([], [])
    journal.drop_after(0)
    journal.prune_before(9)
    journal.barrier()
    assert not (tmp_path / "journal").exists()


def test_a_group_counts_only_with_a_barrier_behind_it(tmp_path: Path) -> None:
    groups = some_groups()
    journal = Journal(tmp_path)
    write(journal, groups[:2])
    for record in records(groups)[2:]:
        journal.append(record)
    assert Journal(tmp_path).keys(1) == journal.keys(1) == [GroupKey(1, 0, 0), GroupKey(1, 0, 1)]
    journal.barrier()
    assert flat(read(Journal(tmp_path), groups)) == flat(groups)


def test_a_barrier_costs_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, journal = some_groups(), Journal(tmp_path)
    write(journal, groups)
    synced: list[int] = []
    plain = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), plain(file)))
    for step in (2, 3):
        write(journal, groups, step=step)
        assert len(synced) == step - 1
    journal.barrier()
    assert len(synced) == 2, "there was nothing to keep"


def test_groups_are_dropped_and_pruned_by_their_step(tmp_path: Path) -> None:
    groups = some_groups()
    for step in (3, 5, 12):
        journal = Journal(tmp_path)
        write(journal, groups, step=step)
        write(journal, groups, step=step, round=100)
        journal.close()
    (tmp_path / "groups_000007.log.bak").touch()
    assert len(list(tmp_path.glob("groups_*.log"))) == 3
    journal = Journal(tmp_path)
    assert journal.steps() == [3, 5, 12]
    assert [key.round for key in journal.keys(12)] == [0] * 5 + [100] * 5
    journal.prune_before(5)
    assert Journal(tmp_path).steps() == journal.steps() == [5, 12]
    journal.drop_after(5)
    assert Journal(tmp_path).steps() == journal.steps() == [5]
    # What was dropped does not come back when the file that says so is not needed any more.
    journal.prune_before(6)
    assert Journal(tmp_path).steps() == journal.steps() == []
    assert list(tmp_path.glob("groups_*.log")) == []


def test_files_are_removed_oldest_first(tmp_path: Path) -> None:
    """A later file may replace groups of an earlier one, which must not come to light again."""
    groups, others = some_groups(0), some_groups(1)
    first = Journal(tmp_path)
    write(first, groups, step=9, facts={"origin": "old"})
    write(first, groups, step=20)
    first.close()
    second = Journal(tmp_path)
    write(second, others, step=9, facts={"origin": "new"})
    second.prune_before(10)
    found = Journal(tmp_path)
    assert found.steps() == [9, 20]
    record = found.read(GroupKey(9, 0, 0), among(others))
    assert record is not None
    assert record.facts == {"origin": "new"}


def test_a_later_group_with_the_same_key_replaces_it(tmp_path: Path) -> None:
    groups, journal = some_groups(1), Journal(tmp_path)
    write(journal, some_groups(0), facts={"origin": "old"})
    write(journal, groups, facts={"origin": "new"})
    for one in (journal, Journal(tmp_path)):
        found = [one.read(key, among(groups)) for key in one.keys(1)]
        assert flat([record.group for record in found]) == flat(groups)
        assert {record.facts["origin"] for record in found} == {"new"}


def test_damage_costs_the_groups_that_it_hits(tmp_path: Path, caplog) -> None:
    """Between two barriers all groups are found or none, unless only a body is damaged."""
    before, groups = some_groups(1, 2), some_groups()
    journal = Journal(tmp_path)
    write(journal, before, step=1)
    write(journal, groups, step=2)
    (path,) = tmp_path.glob("*.log")
    whole = path.read_bytes()
    start = whole.index(MAGIC, whole.index(b'"barrier"'))
    rng = np.random.default_rng(1)
    expected = flat(groups)
    places = {start, start + 9, start + 13, *rng.integers(start, len(whole), 150).tolist()}
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            now = Journal(tmp_path)
            found = flat(read(now, groups, step=2))
        assert all(one in expected for one in found), place
        assert len(found) in (0, len(groups) - 1), place
        # The last barrier itself is missed by nobody who says so: what it kept was not kept.
        assert "damaged" in caplog.text or now.keys(2) == []
        assert flat(read(now, before, step=1)) == flat(before)
    for length in (start, start + 5, (start + len(whole)) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert Journal(tmp_path).steps() == [1]
    # A run goes on in a file of its own, behind what was cut off.
    write(Journal(tmp_path), groups, step=2)
    assert flat(read(Journal(tmp_path), groups, step=2)) == expected


def test_rollouts_of_other_prompts_are_refused(tmp_path: Path) -> None:
    journal, groups = Journal(tmp_path), some_groups()
    write(journal, groups)
    key = GroupKey(1, 0, 0)
    with pytest.raises(DataError, match="the data does not have"):
        journal.read(key, among([]))
    other = replace(groups[0].prompt, tokens_T=groups[0].prompt.tokens_T + 1)
    with pytest.raises(DataError, match="Restore the data"):
        journal.read(key, lambda _: other)


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    journal, groups = Journal(tmp_path), some_groups()
    write(journal, groups)
    (path,) = tmp_path.glob("*.log")
    whole = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 1000, limits[1]))
    try:
        with pytest.raises(RunDirWriteError, match=r"step 2 .* runs_dir") as full:
            write(journal, groups, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert full.value.exit_code == 1
    assert path.read_bytes() == whole
    assert flat(read(Journal(tmp_path), groups)) == flat(groups)


WRITER = """
import sys
import numpy as np
from pathlib import Path
from homeostat.rollout.groups import GroupRecord
from homeostat.rollout.journal import Journal
from homeostat.rollout.keys import GroupKey
from tests.support.rollouts import random_groups
journal = Journal(Path(sys.argv[1]))
groups = random_groups(np.random.default_rng(4), 100)
for step in range(1, 10**6):
    for place, group in enumerate(groups):
        journal.append(GroupRecord(GroupKey(step, 0, place), group, {"step": step}))
    journal.barrier()
"""


def test_a_writer_that_is_killed_leaves_whole_rounds_only(tmp_path: Path) -> None:
    groups = random_groups(np.random.default_rng(4), 100)
    writer = Forked(WRITER, [str(tmp_path)], env=os.environ)
    try:
        assert eventually(lambda: len(Journal(tmp_path).steps()) >= 3)
    finally:
        writer.kill()
        writer.wait(60)
    journal = Journal(tmp_path)
    expected = [list(map(flat_sample, group.samples)) for group in groups]
    for step in journal.steps():
        assert journal.keys(step) == [GroupKey(step, 0, place) for place in range(100)]
        for key in journal.keys(step):
            record = journal.read(key, lambda _, key=key: groups[key.place].prompt)
            assert record is not None
            assert record.facts == {"step": step}
            assert list(map(flat_sample, record.group.samples)) == expected[key.place]


# Journals of earlier versions.


def test_a_journal_that_an_earlier_version_wrote_is_read_to_the_bit() -> None:
    """The file is one that the version before this form wrote; beside it is what went in."""
    expected = json.loads((OLD / "expected.json").read_text())
    prompts = {
        one["prompt_id"]: Prompt(one["prompt_id"], np.array(one["prompt_tokens"]), "", {})
        for one in expected["groups"]
    }
    journal = Journal(OLD)
    assert journal.steps() == [12]
    assert journal.keys(12) == [GroupKey(12, 0, place) for place in range(3)]
    for key, wanted in zip(journal.keys(12), expected["groups"], strict=True):
        record = journal.read(key, prompts.__getitem__)
        assert record is not None
        assert json.loads(json.dumps(as_json(record.group))) == wanted
        assert record.facts["origin"] == "a1b2"
        assert record.facts["policy_version"] == 11
    logged = [journal.read(key, prompts.__getitem__).facts["logged"] for key in journal.keys(12)]
    assert logged == [{"rewards/mine/logged/x": [0.3, 0.0, 0.0]}, {}, {}]


def as_json(group: RolloutGroup) -> dict[str, Any]:
    """A group as JSON that compares by bits."""
    return {
        "prompt_id": group.prompt.prompt_id,
        "prompt_tokens": group.prompt.tokens_T.tolist(),
        "samples": [
            {
                "request_id": sample.completion.request_id,
                "stop_reason": str(sample.completion.stop_reason),
                "text": sample.text,
                "rewards": {n: None if v is None else v.hex() for n, v in sample.rewards.items()},
                "reward": None if sample.reward is None else sample.reward.hex(),
                "failed": sorted(sample.failed),
                "segments": [
                    {
                        "tokens": segment.tokens_T.tolist(),
                        "engine_logp": segment.engine_logp_T.astype("<f4").tobytes().hex(),
                        "sampled_logp": None
                        if segment.sampled_logp_T is None
                        else segment.sampled_logp_T.astype("<f4").tobytes().hex(),
                        "version": segment.policy_version,
                        "policy": segment.policy_id,
                        "author": str(segment.author),
                    }
                    for segment in sample.completion.segments
                ],
            }
            for sample in group.samples
        ],
    }


def test_rounds_of_an_earlier_version_are_replaced_dropped_and_pruned(tmp_path: Path) -> None:
    groups, others = some_groups(0), some_groups(1)
    for step in (3, 5, 12):
        write_round(tmp_path, step, 0, groups, {"origin": "old"})
    journal = Journal(tmp_path)
    assert journal.steps() == [3, 5, 12]
    write(journal, others, step=5, facts={"origin": "new"})
    assert flat(read(Journal(tmp_path), others, step=5)) == flat(others)
    assert flat(read(journal, groups, step=12)) == flat(groups)
    journal.drop_after(5)
    assert Journal(tmp_path).steps() == journal.steps() == [3, 5]
    journal.prune_before(4)
    assert Journal(tmp_path).steps() == journal.steps() == [5]
    assert not (tmp_path / "step_00000003_round_00.safetensors").exists()


def test_a_damaged_file_of_an_earlier_version_counts_as_not_there(tmp_path: Path, caplog) -> None:
    groups = some_groups()
    path = write_round(tmp_path, 1, 0, groups, FACTS)
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    for place in {0, 9, len(whole) - 1, *rng.integers(0, len(whole), 100).tolist()}:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = read(Journal(tmp_path), groups)
        # A flip that changes nothing that was said (white space of the header) may pass.
        assert found == [] or flat(found) == flat(groups), place
        assert found or "damaged" in caplog.text


def test_a_round_of_the_first_format_trains_no_sample_that_may_have_failed(tmp_path: Path) -> None:
    (group, *_) = some_groups()
    (sample, *_) = group.samples
    cells = [({"a": None, "b": None}, {"a"}), ({"a": 1.0, "b": None}, set()), ({"a": None}, set())]
    samples = [replace(sample, rewards=r, failed=frozenset(failed)) for r, failed in cells]
    groups = [replace(group, samples=tuple(samples))]
    for counts, expected in (
        ({"rewards/a/failed": 1, "rewards/b/none": 2}, [{"a"}, set(), {"a"}]),
        ({"rewards/b/none": 2}, [set(), set(), set()]),
    ):
        write_round(tmp_path, 1, 0, groups, {"missing": counts}, version=1)
        (found,) = read(Journal(tmp_path), groups)
        assert [one.failed for one in found.samples] == expected
        assert [dict(one.rewards) for one in found.samples] == [r for r, _ in cells]
