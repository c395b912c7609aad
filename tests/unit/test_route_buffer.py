"""Recorded routes survive the journal byte for byte, and beyond a bound are read back from it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from homeostat.columns import Stored, dense, split
from homeostat.errors import ReplayError
from homeostat.rollout.group_arrays import encode
from homeostat.rollout.groups import GroupRecord
from homeostat.rollout.journal import Journal
from homeostat.rollout.keys import GroupKey
from homeostat.rollout.route_buffer import RouteBuffer, route_bytes
from homeostat.train.replay import portions
from homeostat.types import (
    Author,
    Completion,
    Prompt,
    RolloutGroup,
    Sample,
    Segment,
    StopReason,
    TokenRow,
    TrainBatch,
)

LAYERS, SLOTS = 3, 2
PROMPTS = {number: Prompt(number, np.arange(5) + number, "", {}) for number in range(4)}


def routes(rng: np.random.Generator, length: int, *, wide: bool) -> np.ndarray:
    dtype = np.int16 if wide else np.uint8
    return rng.integers(0, 300 if wide else 256, (length, LAYERS, SLOTS)).astype(dtype)


def segment(rng: np.random.Generator, length: int, *, wide: bool, author: Author) -> Segment:
    columns = {
        "routed_experts": routes(rng, length, wide=wide),
        "routed_weights": rng.random((length, LAYERS, SLOTS), dtype=np.float32),
    }
    logp_T = rng.standard_normal(length).astype(np.float32)
    return Segment(rng.integers(0, 9, length), logp_T, 3, author=author, columns=columns)


def group(number: int, *, wide: bool = False, samples: int = 3) -> RolloutGroup:
    """Samples of two segments, the second by a tool; their prompts have the same routes."""
    rng = np.random.default_rng(number)
    prompt = PROMPTS[number]
    of_prompt = routes(rng, len(prompt.tokens_T), wide=wide)
    made = []
    for place in range(samples):
        segments = (
            segment(rng, 4 + place, wide=wide, author=Author.ENGINE),
            segment(rng, 2, wide=wide, author=Author.TOOL),
        )
        weights = np.ones((len(prompt.tokens_T), LAYERS, SLOTS), np.float32)
        columns = {"routed_experts": of_prompt.copy(), "routed_weights": weights}
        name = f"train/1/0/{number}/{place}"
        completion = Completion(name, segments, StopReason.STOP, columns)
        made.append(Sample(completion, "", {"right": 1.0}, 1.0))
    return RolloutGroup(prompt, tuple(made))


def all_routes(one: RolloutGroup) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    found = []
    for sample in one.samples:
        own = sample.completion
        for columns in (own.prompt_columns, *(segment.columns for segment in own.segments)):
            for name, values in sorted(columns.items()):
                array = dense(values)
                found.append((name, str(array.dtype), array.shape, array.tobytes()))
    return found


def journalled(folder: Path, groups: list[RolloutGroup]) -> tuple[Journal, list[GroupRecord]]:
    journal = Journal(folder)
    records = [
        GroupRecord(GroupKey(1, 0, place), one, {"logged": {}}) for place, one in enumerate(groups)
    ]
    for record in records:
        journal.append(record)
    journal.barrier()
    return journal, records


@pytest.mark.parametrize("wide", [False, True])
def test_routes_come_back_from_the_journal_byte_for_byte(tmp_path: Path, wide: bool) -> None:
    groups = [group(number, wide=wide) for number in range(2)]
    journal, records = journalled(tmp_path, groups)
    journal.close()
    # As a resumed run opens it.
    again = Journal(tmp_path)
    for record in records:
        found = again.read(record.key, PROMPTS.__getitem__)
        assert found is not None
        assert all_routes(found.group) == all_routes(record.group)


def test_the_routes_of_a_groups_prompt_are_written_once() -> None:
    one = group(0, samples=8)
    _, arrays = encode([one])
    kept = arrays["sample/prompt_columns/routed_experts/values"]
    assert kept.shape == (len(one.prompt.tokens_T), LAYERS, SLOTS)
    other = one.samples[1].completion
    changed = dense(other.prompt_columns["routed_experts"]).copy()
    changed[0, 0, 0] ^= 1
    completion = replace(other, prompt_columns={"routed_experts": changed})
    samples = (one.samples[0], replace(one.samples[1], completion=completion), *one.samples[2:])
    _, arrays = encode([replace(one, samples=samples)])
    assert len(arrays["sample/prompt_columns/routed_experts/values"]) == 2 * len(
        one.prompt.tokens_T
    )


def test_beyond_the_bound_routes_are_read_back_when_they_are_needed(tmp_path: Path) -> None:
    groups = [group(number) for number in range(4)]
    journal, records = journalled(tmp_path, groups)
    size = route_bytes(groups[0])
    buffer = RouteBuffer(2 * size, journal, PROMPTS.__getitem__)
    taken = [buffer.take(record).group for record in records]
    in_memory = [
        not any(
            isinstance(values, Stored)
            for sample in one.samples
            for segment in sample.completion.segments
            for values in segment.columns.values()
        )
        for one in taken
    ]
    assert in_memory == [True, True, False, False]
    assert buffer.held_bytes <= 2 * size
    for kept, original in zip(taken, groups, strict=True):
        assert all_routes(kept) == all_routes(original)
    # What a worker gets is the array itself.
    stored = taken[3].samples[1].completion.columns["routed_experts"]
    assert isinstance(stored, Stored)
    sent = pickle.loads(pickle.dumps(stored))
    assert isinstance(sent, np.ndarray)
    np.testing.assert_array_equal(sent, dense(stored))


def test_a_journal_that_lost_its_groups_is_named(tmp_path: Path) -> None:
    journal, records = journalled(tmp_path, [group(0)])
    taken = RouteBuffer(0, journal, PROMPTS.__getitem__).take(records[0])
    journal.drop_after(0)
    column = taken.group.samples[0].completion.columns["routed_experts"]
    with pytest.raises(ReplayError, match=r"train/1/0/0 can no longer be read"):
        dense(column)


def test_batches_of_stored_routes_are_put_together_and_cut_without_reading() -> None:
    rng = np.random.default_rng(0)
    num_read = 0

    def stored(values: np.ndarray) -> Stored:
        def read() -> np.ndarray:
            nonlocal num_read
            num_read += 1
            return values

        return Stored.of(values, read)

    arrays = [routes(rng, length, wide=False) for length in (4, 7, 3)]
    rows = [
        TokenRow(
            number,
            np.zeros(len(array), np.int64),
            np.ones(len(array), np.float32),
            {"routed_experts": stored(array) if number else array},
        )
        for number, array in enumerate(arrays)
    ]
    batch = TrainBatch.of(rows)
    column = batch.columns["routed_experts"]
    assert isinstance(column, Stored)
    assert column.shape == (14, LAYERS, SLOTS)
    parts = [row.columns["routed_experts"] for row in batch.rows()]
    assert num_read == 0
    for part, array in zip(parts, arrays, strict=True):
        np.testing.assert_array_equal(dense(part), array)
    pieces = split(column, np.array([5, 1, 8]))
    whole = np.concatenate([dense(piece) for piece in pieces])
    np.testing.assert_array_equal(whole, np.concatenate(arrays))


def test_what_is_sent_at_one_time_has_at_most_so_many_bytes_of_stored_routes() -> None:
    def batch(number: int, *, is_stored: bool) -> TrainBatch:
        array = np.zeros((10, LAYERS, SLOTS), np.uint8)
        column = Stored.of(array, lambda: array) if is_stored else array
        tokens_T, weights_T = np.zeros(10, np.int64), np.ones(10, np.float32)
        return TrainBatch.of([TokenRow(number, tokens_T, weights_T, {"routed_experts": column})])

    stored = [batch(number, is_stored=True) for number in range(7)]
    # 60 bytes each; rounds of two batches.
    found = portions(stored, per_round=2, max_bytes=250)
    assert [len(some) for some in found] == [4, 3]
    assert [one.row_ids_B[0] for some in found for one in some] == list(range(7))
    assert [len(some) for some in portions(stored, per_round=2, max_bytes=0)] == [2, 2, 2, 1]
    held = [batch(number, is_stored=False) for number in range(7)]
    assert [len(some) for some in portions(held, per_round=2, max_bytes=0)] == [7]
