"""Columns of a batch: values that tokens carry beside themselves, of any dtype and rank.

Torch-free. A column holds one value for each of T tokens, in one of two layouts:

    dense    an array [T, ...]: a number per token, or a block of fixed shape (layers x experts);
             or `Stored`: the same, kept elsewhere and read when it is needed
    ragged   a list of any length per token, stored as all values end to end and T + 1 offsets

`COLUMNS` declares every column once: its dtype, the dimensions behind the tokens', which tokens
have a value and what the others hold, and who reads it. Rows, batches and segments accept no
column that is not declared here, so a misspelt name or a wrong dtype fails where it is made.

Suffixes as in `types`: `_T` tokens of one row, `_N` packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Reader(StrEnum):
    """A reader of a column. A forward pass gets all columns; a loss names those that it needs."""

    MODEL = "model"
    LOSS = "loss"
    COMPARISON = "comparison of engine and trainer"


@dataclass(frozen=True, slots=True)
class Ragged:
    """A list of values per token: token t has `values[offsets_T[t] : offsets_T[t + 1]]`."""

    values: NDArray[Any]
    offsets_T: NDArray[np.int64]

    @classmethod
    def of(cls, lists: Sequence[Sequence[float] | NDArray[Any]], dtype: Any) -> Ragged:
        parts = [np.asarray(part, dtype=dtype) for part in lists]
        sizes = np.array([len(part) for part in parts], dtype=np.int64)
        values = np.concatenate([np.zeros(0, dtype=dtype), *parts])
        return cls(values, _offsets(sizes))

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def sizes_T(self) -> NDArray[np.int64]:
        return np.diff(self.offsets_T)

    def __len__(self) -> int:
        return len(self.offsets_T) - 1

    def __getitem__(self, token: int) -> NDArray[Any]:
        return self.values[self.offsets_T[token] : self.offsets_T[token + 1]]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A run of tokens of a stored column: rows [start, stop) of what `read` returns."""

    read: Callable[[], NDArray[Any]]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A dense column of which only the shape is in memory. `dense` reads it.

    Columns that are put together or cut keep the places of their parts, so nothing is read for
    that. Pickled, it is the array itself: another process could not read it.
    """

    dtype: np.dtype[Any]
    dims: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    @classmethod
    def of(cls, values: NDArray[Any], read: Callable[[], NDArray[Any]]) -> Stored:
        """The stored form of an array that `read` returns again."""
        return cls(values.dtype, values.shape[1:], (StoredPart(read, 0, len(values)),))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.dims)

    @property
    def ndim(self) -> int:
        return 1 + len(self.dims)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __len__(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    def read(self) -> NDArray[Any]:
        empty = np.zeros((0, *self.dims), dtype=self.dtype)
        return np.concatenate(
            [empty, *(part.read()[part.start : part.stop] for part in self.parts)]
        )

    def cut(self, start: int, stop: int) -> Stored:
        """The column of tokens [start, stop)."""
        found, at = [], 0
        for part in self.parts:
            length = part.stop - part.start
            first, last = max(start - at, 0), min(stop - at, length)
            if first < last:
                found.append(StoredPart(part.read, part.start + first, part.start + last))
            at += length
        return replace(self, parts=tuple(found))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return np.asarray, (self.read(),)


ColumnArray = NDArray[Any] | Ragged | Stored
Columns = Mapping[str, ColumnArray]


@dataclass(frozen=True, slots=True)
class Column:
    """The declaration of a column.

    `dims` names the dimensions behind the tokens'; their sizes belong to the model. A prompt's
    tokens have values, too, where `on_prompts` says so. Tokens without a value hold `fill`,
    or an empty list where the column is ragged. Values that do not fit `dtype` come in
    `wider_dtype`, if there is one.
    """

    about: str
    dtype: Any
    readers: frozenset[Reader]
    dims: tuple[str, ...] = ()
    is_ragged: bool = False
    on_prompts: bool = False
    fill: float = 0.0
    wider_dtype: Any = None

    def filled(
        self, num_tokens: int, *, shape: tuple[int, ...] = (), dtype: Any = None
    ) -> ColumnArray:
        """The column of tokens that have no value. `shape`: sizes of the dimensions `dims`."""
        dtype = dtype or self.dtype
        if self.is_ragged:
            offsets_T = np.zeros(num_tokens + 1, dtype=np.int64)
            return Ragged(np.zeros((0, *shape), dtype=dtype), offsets_T)
        return np.full((num_tokens, *shape), self.fill, dtype=dtype)

    def why_odd(self, values: ColumnArray, *, num_tokens: int) -> str:
        """Return what of the values is not as declared; '' if nothing."""
        if isinstance(values, Ragged) != self.is_ragged:
            return f"it is {'ragged' if self.is_ragged else 'dense'} by its declaration"
        if values.dtype not in self._dtypes:
            declared = " or ".join(str(dtype) for dtype in self._dtypes)
            return f"it is of {values.dtype}, declared as {declared}"
        array = values.values if isinstance(values, Ragged) else values
        if array.ndim != 1 + len(self.dims):
            return f"it has {array.ndim} dimensions, declared are tokens{''.join(self._dims)}"
        if len(values) != num_tokens:
            return f"it has {len(values)} tokens of {num_tokens}"
        return ""

    @property
    def _dtypes(self) -> tuple[np.dtype[Any], ...]:
        wider = () if self.wider_dtype is None else (np.dtype(self.wider_dtype),)
        return (np.dtype(self.dtype), *wider)

    @property
    def _dims(self) -> tuple[str, ...]:
        return tuple(f" x {name}" for name in self.dims)


def _floats(about: str, *readers: Reader) -> Column:
    return Column(about, np.float32, frozenset(readers))


COLUMNS: dict[str, Column] = {
    "engine_logp": _floats(
        "log-prob of the token under the engine that sampled it", Reader.LOSS, Reader.COMPARISON
    ),
    "old_logp": _floats(
        "log-prob under the trainer's weights that sampled, scored before the step's updates",
        Reader.LOSS,
        Reader.COMPARISON,
    ),
    "ref_logp": _floats("log-prob under the reference", Reader.LOSS),
    "label": _floats(
        "label of the row's completion: 1 for a chosen or desirable one, -1 for another; for a "
        "reward model its score, or the margin of its pair",
        Reader.LOSS,
    ),
    "advantage": _floats("advantage of the token", Reader.LOSS),
    "value": _floats(
        "critic's value of the state in which the token was chosen, before the step's updates",
        Reader.LOSS,
    ),
    "return": _floats("what the critic is trained towards at the token", Reader.LOSS),
    "truth": _floats(
        "1 for a token of the truth, whose cross-entropy is in the loss; 0 for a sampled one",
        Reader.MODEL,
        Reader.LOSS,
    ),
    "routed_experts": Column(
        "experts that the engine sent the token to, in slot order; none of a row's last token, "
        "which no engine runs",
        np.uint8,
        frozenset((Reader.MODEL,)),
        dims=("layer", "slot"),
        on_prompts=True,
        # More than 256 experts.
        wider_dtype=np.int16,
    ),
    "routed_weights": Column(
        "weight of each of `routed_experts` in the engine's sum of their outputs",
        np.float32,
        frozenset((Reader.MODEL,)),
        dims=("layer", "slot"),
        on_prompts=True,
    ),
    "kept_ids": Column(
        "ids that top-k, top-p or min-p left to draw the token from, ascending; none where the "
        "whole vocabulary was left",
        np.int32,
        frozenset((Reader.MODEL,)),
        is_ragged=True,
    ),
}

# Marks tokens that are imitated, in rows beside those that were sampled.
TRUTH = "truth"

# The sets that tokens were drawn from (rollout/kept.py).
KEPT_IDS = "kept_ids"
# What replay of routes reads (train/replay.py): which experts, and with which weights.
ROUTES = ("routed_experts", "routed_weights")


def check_columns(columns: Columns, *, num_tokens: int, whose: str) -> None:
    """Assert that each column is declared and as declared."""
    for name, values in columns.items():
        declared = COLUMNS.get(name)
        assert declared is not None, f"{whose}: column {name!r} is not declared in columns.py"
        odd = declared.why_odd(values, num_tokens=num_tokens)
        assert not odd, f"{whose}: column {name!r}: {odd}"


def dense(values: ColumnArray) -> NDArray[Any]:
    """The array of a column that is declared as dense; one that is stored is read."""
    assert not isinstance(values, Ragged), "the column is ragged"
    return values.read() if isinstance(values, Stored) else values


def concatenate(parts: Sequence[ColumnArray]) -> ColumnArray:
    """Lay columns of consecutive tokens end to end."""
    flat = [part for part in parts if not isinstance(part, Ragged)]
    ragged = [part for part in parts if isinstance(part, Ragged)]
    assert not flat or not ragged, "a column is ragged in all its parts or in none"
    if any(isinstance(part, Stored) for part in flat):
        stored = [part if isinstance(part, Stored) else _as_stored(part) for part in flat]
        return replace(stored[0], parts=tuple(one for part in stored for one in part.parts))
    if flat:
        return np.concatenate([dense(part) for part in flat])
    sizes_T = np.concatenate([part.sizes_T for part in ragged])
    return Ragged(np.concatenate([part.values for part in ragged]), _offsets(sizes_T))


def split(values: ColumnArray, lengths: NDArray[np.int64]) -> list[ColumnArray]:
    """Cut a column into those of consecutive runs of so many tokens each: undoes `concatenate`."""
    cuts = np.cumsum(lengths)[:-1]
    if isinstance(values, Stored):
        return [values.cut(start, stop) for start, stop in pairwise([0, *cuts, len(values)])]
    if not isinstance(values, Ragged):
        return list(np.split(values, cuts))
    parts = np.split(values.values, values.offsets_T[cuts])
    sizes = np.split(values.sizes_T, cuts)
    return [Ragged(part, _offsets(size)) for part, size in zip(parts, sizes, strict=True)]


def joined(parts: Sequence[Columns], *, lengths: Sequence[int]) -> dict[str, ColumnArray]:
    """The columns of consecutive runs of tokens. A run that lacks one has no values in it."""
    runs = aligned(parts, lengths=lengths)
    return {name: concatenate([run[name] for run in runs]) for name in (runs[0] if runs else ())}


def aligned(parts: Sequence[Columns], *, lengths: Sequence[int]) -> list[dict[str, ColumnArray]]:
    """Give every row all columns that any of them has; those that it lacks hold no values."""
    names = dict.fromkeys(name for part in parts for name in part)
    return [
        {name: part[name] if name in part else _empty(name, length, parts) for name in names}
        for part, length in zip(parts, lengths, strict=True)
    ]


def to_arrays(prefix: str, runs: Sequence[Columns]) -> dict[str, NDArray[Any]]:
    """The columns of several runs of tokens as flat arrays, for a file. A column that no run has
    takes nothing, and runs with the same values (the prompt of a group) are kept once."""
    found: dict[str, NDArray[Any]] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        own = [run[name] for run in runs if name in run]
        found[f"{prefix}/{name}/has"] = np.array([name in run for run in runs], dtype=np.uint8)
        first = _first_alike(own)
        if first != list(range(len(own))):
            found[f"{prefix}/{name}/alike"] = np.array(first, dtype=np.int32)
        whole = concatenate([own[place] for place in dict.fromkeys(first)])
        if isinstance(whole, Ragged):
            found |= {f"{prefix}/{name}/values": whole.values}
            found |= {f"{prefix}/{name}/sizes": whole.sizes_T}
        else:
            found[f"{prefix}/{name}/values"] = dense(whole)
    return found


def from_arrays(
    prefix: str, arrays: Mapping[str, NDArray[Any]], lengths: NDArray[np.int64]
) -> list[dict[str, ColumnArray]]:
    """The columns of each run, from what `to_arrays` made of them."""
    runs: list[dict[str, ColumnArray]] = [{} for _ in lengths]
    keys = [key for key in arrays if key.startswith(f"{prefix}/") and key.endswith("/has")]
    for name in (key.removeprefix(f"{prefix}/").removesuffix("/has") for key in keys):
        has = np.flatnonzero(arrays[f"{prefix}/{name}/has"])
        values, sizes = arrays[f"{prefix}/{name}/values"], arrays.get(f"{prefix}/{name}/sizes")
        whole = values if sizes is None else Ragged(values, _offsets(sizes))
        first = arrays.get(f"{prefix}/{name}/alike", np.arange(len(has)))
        kept = np.unique(first)
        parts = split(whole, lengths[has[kept]])
        for run, place in zip(has, np.searchsorted(kept, first), strict=True):
            runs[run][name] = parts[place]
    return runs


def _first_alike(runs: Sequence[ColumnArray]) -> list[int]:
    """For each dense run of tokens, the first with the same values; a ragged one is its own."""
    first: dict[Any, int] = {}
    return [
        first.setdefault(place if isinstance(run, Ragged) else dense(run).tobytes(), place)
        for place, run in enumerate(runs)
    ]


def as_json(values: ColumnArray) -> ColumnArray | list[NDArray[Any]]:
    """The column as a list with one entry per token, for a file that people read."""
    if not isinstance(values, Ragged):
        return dense(values)
    return [values[token] for token in range(len(values))]


def _empty(name: str, num_tokens: int, parts: Sequence[Columns]) -> ColumnArray:
    known = next(part[name] for part in parts if name in part)
    array = known.values if isinstance(known, Ragged) else known
    return COLUMNS[name].filled(num_tokens, shape=array.shape[1:], dtype=array.dtype)


def _as_stored(values: NDArray[Any]) -> Stored:
    return Stored.of(values, lambda: values)


def _offsets(sizes_T: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes_T)])
