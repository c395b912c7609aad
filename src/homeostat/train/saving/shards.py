"""Tensors in a checkpoint, whole or in shards: any rows of any tensor, whoever wrote it.

    <stem>.safetensors                 whole tensors, as one process writes them
    <stem>.<rank>of<size>.safetensors  of each tensor the rows that this rank holds

A shard's metadata say of each tensor in it the shape of the whole and the first row that is here;
ranks without a row of a tensor leave it out. A tensor without dimensions is in the first shard.
Only safetensors are read and written: reading a checkpoint runs no code of the file's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from homeostat.errors import CheckpointError
from homeostat.json_text import parse_json

Shape = tuple[int, ...]

_SUFFIX = ".safetensors"
_SHARD = re.compile(r"(?P<stem>.+)\.(?P<rank>\d+)of(?P<size>\d+)")
_PLACES = "rows"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows from `start` on of a tensor of `shape`; the whole tensor if it has no dimensions."""

    tensor: Tensor
    start: int
    shape: Shape

    @property
    def stop(self) -> int:
        return self.start + (len(self.tensor) if self.shape else 0)


def write_whole(folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
    data = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(data, folder / f"{stem}{_SUFFIX}")


def write_shard(
    folder: Path, stem: str, tensors: Mapping[str, Rows], *, rank: int, size: int
) -> None:
    here = {
        name: rows
        for name, rows in tensors.items()
        if (len(rows.tensor) if rows.shape else rank == 0)
    }
    places = {name: {"shape": list(rows.shape), "start": rows.start} for name, rows in here.items()}
    data = {name: rows.tensor.detach().contiguous() for name, rows in here.items()}
    file = folder / f"{stem}.{rank}of{size}{_SUFFIX}"
    save_file(data, file, metadata={_PLACES: json.dumps(places)})


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows `start` to `stop` of a tensor, in one file."""

    file: Path
    start: int
    stop: int


class TensorReader:
    """The tensors of one stem; none if the folder has no such file."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.shapes: dict[str, Shape] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        for file in _files(folder, stem):
            for name, shape, piece in _pieces_in(file, whole=file.stem == stem):
                if self.shapes.setdefault(name, shape) != shape:
                    raise CheckpointError(f"{file}: {name} has another shape in another shard.")
                self._pieces.setdefault(name, []).append(piece)
        for name in self.shapes:
            self._require_all_rows(folder / stem, name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of a tensor; the whole tensor if it has no dimensions."""
        pieces = self._pieces[name]
        if not self.shapes[name]:
            return _read(pieces[0].file, name, 0, 0)
        parts = [
            _read(piece.file, name, max(start, piece.start) - piece.start, end - piece.start)
            for piece in pieces
            if max(start, piece.start) < (end := min(stop, piece.stop))
        ]
        if len(parts) == 1:
            return parts[0]
        # No rows at all still have a dtype and a width.
        return torch.cat(parts or [_read(pieces[0].file, name, 0, 0)])

    def whole(self) -> dict[str, Tensor]:
        return {
            name: self.rows(name, 0, shape[0] if shape else 0)
            for name, shape in self.shapes.items()
        }

    def _require_all_rows(self, where: Path, name: str) -> None:
        pieces = sorted(self._pieces[name], key=lambda piece: piece.start)
        shape, row = self.shapes[name], 0
        for piece in pieces if shape else ():
            if piece.start != row:
                raise CheckpointError(
                    f"{where}: no shard has the rows of {name} from row {row} on."
                )
            row = piece.stop
        if shape and row != shape[0]:
            raise CheckpointError(f"{where}: {name} has {row} rows in its shards, not {shape[0]}.")
        self._pieces[name] = pieces


@torch.no_grad()
def copy_rows(own: Mapping[str, Rows], stored: TensorReader, *, what: str) -> None:
    """Fill `own` in place. Raises CheckpointError where names or whole shapes are not the same."""
    require_same_shapes({name: r.shape for name, r in own.items()}, stored.shapes, what=what)
    for name, rows in own.items():
        rows.tensor.copy_(stored.rows(name, rows.start, rows.stop))


def require_same_shapes(
    own: Mapping[str, Shape], stored: Mapping[str, Shape], *, what: str
) -> None:
    odd = sorted(own.keys() ^ stored.keys())
    odd += [name for name in own.keys() & stored.keys() if own[name] != stored[name]]
    if odd:
        raise CheckpointError(
            f"the {what} in the checkpoint belongs to another model or precision: {len(odd)} "
            f"tensors do not match, {odd[0]!r} first. Give this run another name, or restore its "
            "settings."
        )


def _files(folder: Path, stem: str) -> list[Path]:
    """The file of whole tensors, or all shards in order."""
    whole = folder / f"{stem}{_SUFFIX}"
    matches = [_SHARD.fullmatch(file.stem) for file in folder.glob(f"{stem}.*{_SUFFIX}")]
    sizes = {int(match["size"]) for match in matches if match and match["stem"] == stem}
    if not sizes:
        return [whole] if whole.is_file() else []
    if len(sizes) > 1 or whole.is_file():
        raise CheckpointError(f"{folder} holds {stem} more than once: in {sorted(sizes)} shards.")
    (size,) = sizes
    files = [folder / f"{stem}.{rank}of{size}{_SUFFIX}" for rank in range(size)]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: the checkpoint has {size} such shards.")
    return files


def _pieces_in(file: Path, *, whole: bool) -> Iterator[tuple[str, Shape, _Piece]]:
    with _opened(file) as handle:
        places = {} if whole else _places(file, handle.metadata())
        shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    if not whole and places.keys() != shapes.keys():
        raise CheckpointError(f"{file}: its metadata does not name the tensors that it contains.")
    for name, here in shapes.items():
        shape, start = places.get(name, (here, 0))
        if shape[1:] != here[1:] or len(shape) != len(here):
            raise CheckpointError(f"{file}: {name} has rows of {here[1:]} of a tensor of {shape}.")
        yield name, shape, _Piece(file, start, start + (here[0] if here else 0))


def _places(file: Path, metadata: Mapping[str, str] | None) -> dict[str, tuple[Shape, int]]:
    try:
        places = parse_json((metadata or {})[_PLACES])
        return {
            name: (tuple(int(size) for size in place["shape"]), int(place["start"]))
            for name, place in places.items()
        }
    except (KeyError, ValueError, TypeError, AttributeError):
        raise CheckpointError(f"{file}: it does not say which rows it holds.") from None


def _read(file: Path, name: str, start: int, stop: int) -> Tensor:
    with _opened(file) as handle:
        part = handle.get_slice(name)
        return part[start:stop] if part.get_shape() else handle.get_tensor(name)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} cannot be read: {error}.") from None


def described(stem: str) -> str:
    """Return the name of a group of tensors for the error that it does not fit."""
    return stem.replace("optimizer", "optimizer state").replace("_", " ")
