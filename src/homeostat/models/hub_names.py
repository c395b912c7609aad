"""Names of experts' tensors: those in checkpoints on the hub, and those in the decoder.

    model.layers.0.mlp.experts.7.gate_proj.weight  <->  model.layers.0.mlp.experts.gate_up_proj[7]

The hub's names are canonical, with one tensor for each matrix of each expert: files, weights that
are sent to engines and exports use them. The decoder, and transformers since version 5, hold a
layer's experts stacked; a checkpoint that stores them stacked is read as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from homeostat.errors import ModelError
from homeostat.ops.moe_shape import MoeShape

# How a spelling names the block and the three matrices of an expert: gate, up, down.
_SPELLINGS = {
    "qwen": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}
_STACKED = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)")
_OTHER = re.compile(r"(.*\.layers\.\d+\.)mlp\.(gate\..*|shared_experts\..*)")


def hub_tensors(shape: MoeShape | None, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (hub name, view) for a tensor of the decoder: several for stacked experts."""
    if shape is None:
        yield name, tensor
        return
    block, (gate, up, down) = _SPELLINGS[shape.names]
    stacked = _STACKED.fullmatch(name)
    if stacked is None:
        yield _OTHER.sub(rf"\1{block}.\2", name), tensor
        return
    prefix = f"{stacked[1]}{block}.experts"
    for expert, matrix in enumerate(tensor):
        if stacked[2] == "down_proj":
            yield f"{prefix}.{expert}.{down}.weight", matrix
        else:
            gate_ID, up_ID = matrix.chunk(2)
            yield f"{prefix}.{expert}.{gate}.weight", gate_ID
            yield f"{prefix}.{expert}.{up}.weight", up_ID


def stacked_tensors(
    shape: MoeShape | None,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    source: str = "model.path",
) -> Iterator[tuple[str, Tensor]]:
    """Turn a checkpoint's stream into the decoder's names; experts come once all have been read.

    What is no expert's tensor passes through. Raises ModelError, which begins with `source`, for
    experts that are missing or of another shape than the config says.
    """
    if shape is None:
        yield from tensors
        return
    reader = _Stacker(shape, source)
    for name, tensor in tensors:
        yield from reader.take(name, tensor)
    reader.require_complete()


@dataclass(frozen=True, slots=True)
class _Piece:
    """A matrix of one expert: the stacked parameter it belongs to, and its part there."""

    stack: str
    expert: int
    part: int


class _Stacker:
    """Collects the matrices of experts until a layer's are complete."""

    def __init__(self, shape: MoeShape, source: str) -> None:
        self.shape = shape
        self.source = source
        block, self._parts = _SPELLINGS[shape.names]
        self._block_name = block
        parts = "|".join(self._parts)
        self._expert = re.compile(rf"(.*\.){block}\.experts\.(\d+)\.({parts})\.weight")
        self._block = re.compile(rf"(.*\.layers\.\d+\.){block}\.")
        self._waiting: dict[str, dict[_Piece, tuple[str, Tensor]]] = {}

    def take(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        piece = self._piece(name)
        if piece is None:
            yield self._block.sub(r"\1mlp.", name), tensor
            return
        if piece.expert >= self.shape.num_experts:
            raise ModelError(
                f"{self.source}: it has {name}, and the config says {self.shape.num_experts} "
                "experts, counted from 0. The weights do not belong to this config."
            )
        self._check(name, tensor, piece)
        waiting = self._waiting.setdefault(piece.stack, {})
        waiting[piece] = name, tensor
        per_expert = 1 if piece.stack.endswith("down_proj") else 2
        if len(waiting) == per_expert * self.shape.num_experts:
            yield piece.stack, self._stack(self._waiting.pop(piece.stack), per_expert)

    def require_complete(self) -> None:
        """Raise ModelError if the matrices of some layer did not all come."""
        for stack, waiting in self._waiting.items():
            prefix, _, matrix = stack.removesuffix("_proj").partition("mlp.experts.")
            words = self._parts[2:] if matrix == "down" else self._parts[:2]
            names = [
                f"{prefix}{self._block_name}.experts.{expert}.{word}.weight"
                for expert in range(self.shape.num_experts)
                for word in words
            ]
            there = {name for name, _ in waiting.values()}
            missing = [name for name in names if name not in there]
            more = f" and {len(missing) - 1} more of its layer" if len(missing) > 1 else ""
            raise ModelError(
                f"{self.source}: it lacks {missing[0]}{more}; the config says "
                f"{self.shape.num_experts} experts. The weights do not belong to this config, or "
                "a file is missing."
            )

    def _check(self, name: str, tensor: Tensor, piece: _Piece) -> None:
        size, axis = self.shape.expert_size, 1 if piece.stack.endswith("down_proj") else 0
        others = next(iter(self._waiting.get(piece.stack, {}).values()), (name, tensor))[1]
        if tensor.ndim != 2 or tensor.shape[axis] != size or tensor.shape != others.shape:
            wanted = [str(other) for other in others.shape] if others.ndim == 2 else ["?", "?"]
            wanted[axis] = str(size)
            raise ModelError(
                f"{self.source}: {name} has shape {tuple(tensor.shape)}, and the config and the "
                f"other experts ask for ({', '.join(wanted)}). The weights do not belong to this "
                "config."
            )

    def _piece(self, name: str) -> _Piece | None:
        found = self._expert.fullmatch(name)
        if found is None:
            return None
        prefix, expert, word = found.groups()
        part = self._parts.index(word)
        stack = "down_proj" if part == 2 else "gate_up_proj"
        return _Piece(f"{prefix}mlp.experts.{stack}", int(expert), part % 2)

    def _stack(self, pieces: dict[_Piece, tuple[str, Tensor]], per_expert: int) -> Tensor:
        ordered = sorted(pieces, key=lambda piece: (piece.expert, piece.part))
        matrices = [pieces[piece][1] for piece in ordered]
        return torch.stack(matrices).unflatten(0, (-1, per_expert)).flatten(1, 2)
