"""Limits the memory of recorded routes: routes beyond the limit stay in the journal.

    group in the journal -> take -> the same group; beyond the bound its routes are `Stored`

Routes are by far the largest thing that a completion carries (384 bytes a token for a model with 48
layers of experts and 8 experts per token), and a step reads them a few times, micro-batch by
micro-batch. The journal holds them anyway, with a checksum, so routes beyond the limit are read
from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from numpy.typing import NDArray

from homeostat.columns import ROUTES, Columns, Stored, dense
from homeostat.errors import ReplayError
from homeostat.rollout.group_arrays import PromptOf
from homeostat.rollout.groups import GroupRecord
from homeostat.rollout.journal import Journal
from homeostat.rollout.keys import GroupKey
from homeostat.types import RolloutGroup

# The place of a column in a group: sample, segment (None: the prompt's), name.
_Place = tuple[int, int | None, str]


class RouteBuffer:
    """The routes of one step. Groups must be in the journal before its next barrier."""

    def __init__(self, max_bytes: int, journal: Journal, prompt_of: PromptOf) -> None:
        self.max_bytes = max_bytes
        self.journal = journal
        self.prompt_of = prompt_of
        self.held_bytes = 0
        # The group that was read last, because its rows are read one after another.
        self._last: tuple[GroupKey, RolloutGroup] | None = None

    def take(self, record: GroupRecord) -> GroupRecord:
        """Return the record; its routes stay in memory if there is room for all of them."""
        size = route_bytes(record.group)
        if self.held_bytes + size <= self.max_bytes:
            self.held_bytes += size
            return record
        return replace(record, group=self._stored(record))

    def _stored(self, record: GroupRecord) -> RolloutGroup:
        samples = []
        for number, sample in enumerate(record.group.samples):
            completion = sample.completion
            segments = tuple(
                replace(segment, columns=self._columns(segment.columns, record, number, place))
                for place, segment in enumerate(completion.segments)
            )
            prompt = self._columns(completion.prompt_columns, record, number, None)
            completion = replace(completion, segments=segments, prompt_columns=prompt)
            samples.append(replace(sample, completion=completion))
        return replace(record.group, samples=tuple(samples))

    def _columns(
        self, columns: Columns, record: GroupRecord, sample: int, segment: int | None
    ) -> Columns:
        return {
            name: Stored.of(dense(values), self._reader(record.key, (sample, segment, name)))
            if name in ROUTES
            else values
            for name, values in columns.items()
        }

    def _reader(self, key: GroupKey, place: _Place) -> Callable[[], NDArray]:
        return lambda: self._read(key, place)

    def _read(self, key: GroupKey, place: _Place) -> NDArray:
        # Read once: lanes read at the same time, and another lane may replace it.
        last = self._last
        if last is None or last[0] != key:
            record = self.journal.read(key, self.prompt_of)
            if record is None:
                raise ReplayError(
                    f"{self.journal.folder}: the recorded routes of {key} can no longer be read, "
                    "so its samples cannot be trained on. If the disk is sound, raise "
                    "model.moe.replay_buffer_bytes, which keeps them in memory, and resume."
                )
            last = self._last = (key, record.group)
        sample, segment, name = place
        completion = last[1].samples[sample].completion
        if segment is None:
            return dense(completion.prompt_columns[name])
        return dense(completion.segments[segment].columns[name])


def route_bytes(group: RolloutGroup) -> int:
    """Return the memory of a group's routes. Samples that share an array count it once."""
    arrays = [
        values
        for sample in group.samples
        for columns in (
            sample.completion.prompt_columns,
            *(segment.columns for segment in sample.completion.segments),
        )
        for name, values in columns.items()
        if name in ROUTES
    ]
    return sum({id(values): dense(values).nbytes for values in arrays}.values())
