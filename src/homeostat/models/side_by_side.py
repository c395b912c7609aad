"""Place weights that are multiplied by the same inputs next to each other in memory.

The parameters stay as they are: separate, under their own names, at fixed addresses. But one matrix
product can cover all of them (`joined`), which for few rows costs hardly more than the largest of
them alone.

Adapters join them: the rows of A, one map's after the other's and filled up with zeros to whole
tiles of `ADAPTER_ROWS`, lie before the rows of the weights; B's rows are one matrix of all outputs.
A map of the group that has no adapter has zeros there.

Suffixes: `_K` inputs, `_O` outputs of all maps, `_R` rank, `_P` rows of A and the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from homeostat.models.blocks import MLP, Layer, MoeBlock
from homeostat.models.decoder import Decoder
from homeostat.models.lora_layers import LoraLinear
from homeostat.ops.held import HeldLinear
from homeostat.ops.linear import Linear, is_plain_product

# Rows of A are filled up to a multiple of this: the outputs of a tile (rollout/native/cuda).
ADAPTER_ROWS = 64


@dataclass(frozen=True, slots=True)
class AdaptedMaps:
    """Linear maps of one input whose adapters lie beside their weights.

    The first `ahead` rows of `whole_PK` are A's; `sizes` are the numbers of outputs.
    """

    whole_PK: Tensor
    b_OR: Tensor
    ahead: int
    rank: int
    scale: float
    sizes: tuple[int, ...]


@torch.no_grad()
def lay_side_by_side(decoder: Decoder) -> None:
    """Move the parameters next to each other; call it before anything keeps their addresses."""
    for layer in decoder.layers:
        for maps in neighbours(layer):
            if len(maps) == 1:
                continue
            # What is held in another format is no matrix in memory.
            if not any(isinstance(linear, HeldLinear) for linear in maps):
                _lay([linear.weight for linear in maps])
            if all(linear.bias is not None for linear in maps):
                _lay([linear.bias for linear in maps])


@torch.no_grad()
def lay_adapters_side_by_side(decoder: Decoder) -> None:
    """Move adapters next to the weights that they adapt; call it when both have been made."""
    for layer in decoder.layers:
        for maps in neighbours(layer):
            kinds = {type(linear) for linear in maps}
            if LoraLinear in kinds and kinds <= {Linear, LoraLinear}:
                _lay_adapters(maps)


def neighbours(layer: Layer) -> Iterator[tuple[nn.Linear, ...]]:
    """Yield the linear maps of a layer, those of one input together."""
    attention, mlp = layer.self_attn, layer.mlp
    yield attention.into_heads
    yield (attention.o_proj,)
    # The experts of a layer are one tensor anyway; a shared one is an ordinary MLP.
    dense: MLP | None = mlp.shared_experts if isinstance(mlp, MoeBlock) else mlp
    if dense is not None:
        yield dense.into_gates
        yield (dense.down_proj,)


@torch.no_grad()
def joined_adapters(maps: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
    """A of all maps [G * rank, K], and scale * B [O, G * rank], zero outside each map's columns."""
    adapted = [linear for linear in maps if isinstance(linear, LoraLinear)]
    rank, num_maps = adapted[0].rank, len(maps)
    sizes = [linear.out_features for linear in maps]
    a_RK = adapted[0].weight.new_zeros(num_maps * rank, adapted[0].in_features)
    b_OR = adapted[0].weight.new_zeros(sum(sizes), num_maps * rank)
    for number, linear in enumerate(maps):
        if isinstance(linear, LoraLinear):
            columns, first = slice(number * rank, (number + 1) * rank), sum(sizes[:number])
            a_RK[columns] = linear.lora_A.weight
            b_OR[first : first + sizes[number], columns] = linear.lora_B.weight * linear.scaling
    return a_RK, b_OR


def adapted_maps(maps: Sequence[nn.Linear]) -> AdaptedMaps | None:
    """Return the maps with their adapters as one; None if they lie apart, or there is none."""
    adapted = [linear for linear in maps if type(linear) is LoraLinear]
    if not adapted or any(type(linear) not in (Linear, LoraLinear) for linear in maps):
        return None
    weight_OK = joined([linear.weight for linear in maps])
    if weight_OK is None or not all(is_plain_product(linear.product) for linear in maps):
        return None
    first, num_inputs = adapted[0], weight_OK.shape[1]
    rank, sizes = first.rank, tuple(linear.weight.shape[0] for linear in maps)
    ahead = _ahead(len(maps), rank)
    start = weight_OK.storage_offset() - ahead * num_inputs
    if start < 0:
        return None
    whole_PK = weight_OK.as_strided((ahead + sum(sizes), num_inputs), weight_OK.stride(), start)
    number = maps.index(first)
    b_start = first.lora_B.weight.storage_offset() - sum(sizes[:number]) * rank
    if b_start < 0:
        return None
    b_OR = first.lora_B.weight.detach().as_strided((sum(sizes), rank), (rank, 1), b_start)
    found = AdaptedMaps(whole_PK, b_OR, ahead, rank, first.scaling, sizes)
    return found if all(_is_in(found, maps, linear) for linear in adapted) else None


def _is_in(found: AdaptedMaps, maps: Sequence[nn.Linear], linear: LoraLinear) -> bool:
    """Return whether a map's adapter lies where it belongs."""
    number = maps.index(linear)
    a_RK = found.whole_PK[number * found.rank :]
    b_OR = found.b_OR[sum(found.sizes[:number]) :]
    places = (linear.lora_A.weight, a_RK), (linear.lora_B.weight, b_OR)
    return linear.rank == found.rank and all(
        own.data_ptr() == place.data_ptr() and own.is_contiguous() for own, place in places
    )


def _ahead(num_maps: int, rank: int) -> int:
    return -(-num_maps * rank // ADAPTER_ROWS) * ADAPTER_ROWS


def _lay_adapters(maps: Sequence[nn.Linear]) -> None:
    adapted = [linear for linear in maps if type(linear) is LoraLinear]
    rank, num_inputs = adapted[0].rank, adapted[0].in_features
    ahead, sizes = _ahead(len(maps), rank), [linear.out_features for linear in maps]
    weight = adapted[0].weight
    whole_PK = weight.new_zeros(ahead + sum(sizes), num_inputs)
    b_OR = weight.new_zeros(sum(sizes), rank)
    for number, linear in enumerate(maps):
        first = sum(sizes[:number])
        _move(linear.weight, whole_PK[ahead + first :])
        if isinstance(linear, LoraLinear):
            _move(linear.lora_A.weight, whole_PK[number * rank :])
            _move(linear.lora_B.weight, b_OR[first:])


def _move(parameter: Tensor, place: Tensor) -> None:
    """Move a parameter to the first rows of a place."""
    part = place[: parameter.shape[0]]
    part.copy_(parameter)
    parameter.data = part


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one view over all of them along the first dimension; None if they are apart."""
    first = tensors[0]
    end = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    if end > first.untyped_storage().data_ptr() + first.untyped_storage().nbytes():
        return None
    size = sum(tensor.shape[0] for tensor in tensors)
    shape = (size, *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def _lay(parameters: Sequence[nn.Parameter]) -> None:
    whole = torch.cat([parameter.detach() for parameter in parameters])
    sizes = [parameter.shape[0] for parameter in parameters]
    for parameter, part in zip(parameters, whole.split(sizes), strict=True):
        parameter.data = part
