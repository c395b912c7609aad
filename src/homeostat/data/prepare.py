"""Tokenise all rows once, before the first step, with several processes if asked for.

    sources -> chunks of rows -> workers: encode_row -> parts, in order -> StoreWriter -> RowStore

The result does not depend on the number of processes. It is cached under a name derived from
everything that could change it (files, source settings, tokenizer, length rules), so a second run
of the same recipe starts at once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from homeostat.arrays import IntArray
from homeostat.config.data import DataConfig, LabelledSource, MessagesSource, TrainSource
from homeostat.data.helpers import ANSWER_SECONDS, HelperDiedError, HelperHungError, computed
from homeostat.data.opening import open_source, source_files
from homeostat.data.overlong import OverlongTextError
from homeostat.data.plugin_rows import plugin_digests
from homeostat.data.preferences import Labelled, encode_labelled, labelled_columns, needed_columns
from homeostat.data.rows import columns_of, encode_row, needs_chat_template, truncate
from homeostat.data.sources import BadRowError, RowSource
from homeostat.data.store import (
    FORMAT_VERSION,
    PrepareReport,
    RowStore,
    StoreWriter,
    open_store,
)
from homeostat.data.tally import Tally, judge
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import DataError, DataWriteError

MAX_CHUNK_ROWS = 512

Progress = Callable[[int, int], None]
Chunk = tuple[int, int, int]  # source, first row, row after the last
# Tokenised rows that stay together, as those of a pair, with their labels.
Example = list[Labelled]


@dataclass(slots=True)
class _Part:
    """The result of a chunk: `read` rows of the source became the examples of the tally.

    `kept` of them were kept; an example has one row, or two if it is a pair.
    """

    read: int
    tally: Tally = field(default_factory=Tally)
    kept: int = 0
    rows: list[Labelled] = field(default_factory=list)
    origins: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Encoder:
    """Turn chunks into parts, in this process or in a worker. Sources are opened on first use."""

    sources: tuple[TrainSource, ...]
    tokenizer: ChatTokenizer
    max_length: int
    overlong: str
    opened: dict[int, RowSource] = field(default_factory=dict)

    def open(self, number: int) -> RowSource:
        if number not in self.opened:
            source = self.sources[number]
            required = needed_columns(source) if isinstance(source, LabelledSource) else ()
            self.opened[number] = open_source(
                source, columns=_columns_of(source), required=required
            )
        return self.opened[number]

    def encode(self, chunk: Chunk) -> _Part:
        number, start, stop = chunk
        rows, part = self.open(number), _Part(read=stop - start)
        source, tokenizer = self.sources[number], self._tokenizer_for(self.sources[number])
        for index in range(start, stop):
            place = (number, rows.number(index))
            try:
                made = _examples(rows.row(index), source, tokenizer)
            # The row was not even tokenised: its length alone shows that it is too long.
            except OverlongTextError as error:
                part.tally.seen += 1
                self._drop_overlong(place, part, error.least_tokens)
                continue
            except BadRowError as error:
                part.tally.seen += 1
                part.tally.drop_bad(self._name(place), error)
                continue
            for example in made:
                self._take(example, place, part)
        return part

    def _tokenizer_for(self, source: TrainSource) -> ChatTokenizer:
        """Return a tokenizer that skips the parts of overlong rows that are not needed.

        Rows that are dropped are not tokenised, if one source row makes one row; of rows that are
        truncated only the beginning is.
        """
        if self.overlong == "truncate":
            return self.tokenizer.cutting(self.max_length)
        one_each = not (isinstance(source, MessagesSource) and source.turns == "each")
        return self.tokenizer.bounded(self.max_length) if one_each else self.tokenizer

    def _drop_overlong(self, place: tuple[int, int], part: _Part, num_tokens: int) -> None:
        part.tally.drop_overlong(
            self._name(place), num_tokens=num_tokens, max_length=self.max_length
        )

    def _take(self, example: Example, place: tuple[int, int], part: _Part) -> None:
        part.tally.seen += 1
        longest = max(len(encoded[0]) for encoded, _ in example)
        try:
            if longest > self.max_length:
                self._shorten(example, place, part, longest)
            else:
                _keep(example, place, part)
        except BadRowError as error:
            part.tally.drop_bad(self._name(place), error)

    def _shorten(self, example: Example, place: tuple[int, int], part: _Part, longest: int) -> None:
        if self.overlong == "truncate":
            _keep([(truncate(one, self.max_length), label) for one, label in example], place, part)
            part.tally.truncated += 1
            return
        self._drop_overlong(place, part, longest)

    def _name(self, place: tuple[int, int]) -> str:
        before, after = self.open(place[0]).brackets
        return f"{before}{place[1]}{after}"


def _keep(example: Example, place: tuple[int, int], part: _Part) -> None:
    part.kept += 1
    for (tokens_T, weights_T), label in example:
        part.rows.append(((tokens_T.astype(np.int32), weights_T), label))
        part.origins.append(place)


def _columns_of(source: TrainSource) -> list[str] | None:
    labelled = isinstance(source, LabelledSource)
    return labelled_columns(source) if labelled else columns_of(source)


def _examples(row: dict[str, Any], source: TrainSource, tokenizer: ChatTokenizer) -> list[Example]:
    """Return the examples that a row of a source gives. Raises BadRowError."""
    if isinstance(source, LabelledSource):
        return [encode_labelled(row, source=source, tokenizer=tokenizer)]
    made = encode_row(row, source=source, tokenizer=tokenizer)
    return [[(encoded, math.nan)] for encoded in made]


def prepare_rows(
    sources: Sequence[TrainSource],
    tokenizer: ChatTokenizer,
    data: DataConfig,
    *,
    cache_dir: Path,
    num_processes: int = 1,
    progress: Progress | None = None,
) -> RowStore:
    """Tokenise the rows of the sources, or find them in the cache. Raises DataError."""
    for source in sources:
        if needs_chat_template(source):
            tokenizer.require_chat_template(wanted_by=f"{source.type} source {source.path}")
    folder = cache_dir / cache_key(sources, tokenizer, data)
    store = open_store(folder)
    if store is None:
        store = _build(sources, tokenizer, data, folder, num_processes, progress)
    # The cache may have been built with `drop`, while this run says `refuse`.
    judge(store.report, data)
    return store


def cache_key(sources: Sequence[TrainSource], tokenizer: ChatTokenizer, data: DataConfig) -> str:
    """Return a digest of everything that could change a token or a weight."""
    files: list[Any] = [_identity(file) for source in sources for file in source_files(source)]
    files += plugin_digests(sources)
    parts = {
        "format": FORMAT_VERSION,
        # Name and weight say how rows are mixed, not what they are.
        "sources": [s.model_dump(mode="json", exclude={"name", "weight"}) for s in sources],
        "files": files,
        "tokenizer": tokenizer.fingerprint,
        "max_length": data.max_length,
        # drop and refuse keep the same rows, so they share a cache.
        "truncate": data.overlong == "truncate",
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _identity(file: Path) -> list[str | int]:
    try:
        stat = file.stat()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}.") from None
    # Size and modification time identify a file without reading it.
    return [str(file.absolute()), stat.st_size, stat.st_mtime_ns]


def split_rows(made_from_B: IntArray, share: float, seed: int) -> tuple[IntArray, IntArray]:
    """Return the ids of training and held-out rows, both ascending, at least one of each.

    `made_from_B` is that of RowStore: rows made from one source row stay on one side, because the
    longer ones contain the shorter.
    """
    num_rows = int(made_from_B.max()) + 1
    if num_rows < 2:
        raise DataError(
            "data.validation_share: a single row cannot be split into two parts. Add rows, "
            "or set data.validation_share=0."
        )
    num_held_out = min(max(1, round(num_rows * share)), num_rows - 1)
    is_held_out = np.zeros(num_rows, dtype=bool)
    is_held_out[shuffled(num_rows, (seed, 0, 1))[:num_held_out]] = True
    held_out_B = is_held_out[made_from_B]
    return np.flatnonzero(~held_out_B), np.flatnonzero(held_out_B)


def shuffled(num_rows: int, counter: tuple[int, ...]) -> IntArray:
    """Return 0..num_rows in an order that depends only on the counter.

    Only numpy's seed sequence and raw generator are used, because their values never change; those
    of `Generator.permutation` may change with a release.
    """
    raw = np.random.Philox(np.random.SeedSequence(counter)).random_raw(num_rows)
    return np.argsort(raw, kind="stable")


def _build(
    sources: Sequence[TrainSource],
    tokenizer: ChatTokenizer,
    data: DataConfig,
    folder: Path,
    num_processes: int,
    progress: Progress | None,
) -> RowStore:
    encoder = _Encoder(tuple(sources), tokenizer, data.max_length, data.overlong)
    opened = [encoder.open(number) for number in range(len(sources))]
    sizes = [
        min(len(rows), source.limit or len(rows))
        for rows, source in zip(opened, sources, strict=True)
    ]
    parts = _encode_all(encoder, sizes, num_processes)
    try:
        with StoreWriter(folder) as writer:
            report = _write_all(parts, writer, sum(sizes), progress)
            judge(report, data)
            return writer.commit(report, [rows.brackets for rows in opened])
    except OSError as error:
        raise DataWriteError(
            f"{folder.parent}: tokenised rows cannot be written: {error.strerror}. Free some "
            "room, or set data.cache_dir to another folder."
        ) from None


def _write_all(
    parts: Iterator[_Part], writer: StoreWriter, num_rows: int, progress: Progress | None
) -> PrepareReport:
    tally, read, kept, trained = Tally(), 0, 0, 0
    if progress is not None:
        progress(0, num_rows)
    for part in parts:
        kept += part.kept
        trained += sum(int(np.count_nonzero(weights_T)) for (_, weights_T), _ in part.rows)
        tally.add(part.tally)
        read += part.read
        if part.rows:
            writer.add(
                np.concatenate([tokens_T for (tokens_T, _), _ in part.rows]),
                np.concatenate([weights_T for (_, weights_T), _ in part.rows]),
                lengths_B=np.array([len(tokens_T) for (tokens_T, _), _ in part.rows]),
                origins_B2=np.array(part.origins),
                labels_B=np.array([label for _, label in part.rows]),
            )
        if progress is not None:
            progress(read, num_rows)
    return tally.report(kept=kept, tokens=writer.num_tokens, trained_tokens=trained)


def _chunks(sizes: list[int], num_processes: int) -> Iterator[Chunk]:
    """Yield chunks lazily: a damaged file may claim any number of rows."""
    step = max(1, min(MAX_CHUNK_ROWS, sum(sizes) // (4 * num_processes)))
    for number, size in enumerate(sizes):
        for start in range(0, size, step):
            yield number, start, min(start + step, size)


def _encode_all(encoder: _Encoder, sizes: list[int], num_processes: int) -> Iterator[_Part]:
    """Yield parts in the order of the rows, with a few of them in flight."""
    chunks = _chunks(sizes, num_processes)
    if num_processes == 1:
        yield from map(encoder.encode, chunks)
        return
    job = _Encoder(encoder.sources, encoder.tokenizer, encoder.max_length, encoder.overlong)
    try:
        yield from computed(job.encode, chunks, num_processes=num_processes)
    except HelperDiedError:
        raise DataError(
            "a process that tokenises rows ended without a message, most likely killed for lack of "
            f"memory. Set data.num_processes below {num_processes}, or free memory."
        ) from None
    except HelperHungError:
        raise DataError(
            f"a process that tokenises rows gave no answer within {ANSWER_SECONDS:.0f} s: it was "
            "stopped, or the machine swaps. data.num_processes=1 tokenises in this process."
        ) from None
