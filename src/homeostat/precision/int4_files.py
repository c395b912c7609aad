"""INT4 weights in files: compressed-tensors' `pack-quantized` layout (W4A16), which vLLM reads.

    X.weight  ->  X.weight_packed  int32 [outputs, inputs / 8], eight integers to a word
                  X.weight_scale   [outputs, inputs / group size], in the dtype of the model
                  X.weight_shape   int64 [2]: outputs and inputs

`config.json` says so under `quantization_config`. Integers are stored plus 8; there are no zero
points, because the range is symmetric. Layers that are not quantised are listed under `ignore`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from homeostat.errors import ModelError
from homeostat.precision.int4 import PER_WORD, Quantised, dequantise, pack, quantise, unpack

KEY = "quantization_config"
_PARTS = ("weight_packed", "weight_scale", "weight_shape")


def quantization_config(*, group_size: int, ignore: Sequence[str]) -> dict[str, Any]:
    """Return the entry of config.json that describes the weights."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def packed_tensors(
    tensors: Iterable[tuple[str, Tensor]],
    *,
    names: Collection[str],
    group_size: int,
    scale_dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Quantise and pack the weights that are named, and pass the others on.

    Scales have `scale_dtype`, or that of their weight.
    """
    for name, tensor in tensors:
        if name not in names:
            yield name, tensor
            continue
        quantised = quantise(tensor, group_size=group_size, name=name)
        prefix = name.removesuffix("weight")
        yield f"{prefix}weight_packed", pack(quantised.values_K)
        dtype = scale_dtype or tensor.dtype
        yield f"{prefix}weight_scale", _exact_scales(quantised.scales_G, dtype, name)
        yield f"{prefix}weight_shape", torch.tensor(tensor.shape, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight as a file holds it."""

    packed_OW: Tensor
    scales_OG: Tensor
    shape: tuple[int, int]

    def quantised(self) -> Quantised:
        """Return its integers and scales."""
        return Quantised(unpack(self.packed_OW), self.scales_OG.float())


def read_group_size(config: Mapping[str, Any], *, source: str) -> int | None:
    """Return the group size of an INT4 checkpoint; None if it is not quantised.

    Raises ModelError for any other quantisation.
    """
    entry = config.get(KEY)
    if entry is None:
        return None
    try:
        groups = list(entry["config_groups"].values())
        weights = groups[0]["weights"]
        size = weights["group_size"]
        is_known = (
            entry["quant_method"] == "compressed-tensors"
            and entry["format"] == "pack-quantized"
            and len(groups) == 1
            and groups[0].get("input_activations") is None
            and (weights["num_bits"], weights["type"], weights["strategy"]) == (4, "int", "group")
            and weights["symmetric"] is True
            and weights.get("actorder") in (None, False)
            and isinstance(size, int)
            and size > 0
        )
    except (KeyError, TypeError, IndexError, AttributeError):
        is_known, size = False, None
    if not is_known:
        raise ModelError(
            f"{source} is quantised in another format than compressed-tensors' pack-quantized INT4 "
            "with symmetric groups, which is the one that can be read. Name an unquantised "
            "checkpoint."
        )
    return size


def read_packed(
    tensors: Iterable[tuple[str, Tensor]], *, group_size: int, source: str
) -> Iterator[tuple[str, Tensor | PackedWeight]]:
    """Yield plain tensors as they come, and packed weights under the name of their weight."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        prefix, _, last = name.rpartition(".")
        if last not in _PARTS:
            yield name, tensor
            continue
        parts = waiting.setdefault(prefix, {})
        parts[last] = tensor
        if len(parts) == len(_PARTS):
            del waiting[prefix]
            yield f"{prefix}.weight", _packed_weight(prefix, parts, group_size, source)
    if waiting:
        prefix, parts = next(iter(waiting.items()))
        missing = [part for part in _PARTS if part not in parts]
        raise ModelError(f"{source}: it lacks {prefix}.{missing[0]}; a file is missing.")


def dequantised_tensors(
    tensors: Iterable[tuple[str, Tensor]], *, group_size: int, source: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield plain weights for everything, packed ones dequantised in the dtype of their scales."""
    for name, tensor in read_packed(tensors, group_size=group_size, source=source):
        if isinstance(tensor, PackedWeight):
            yield name, dequantise(tensor.quantised(), dtype=tensor.scales_OG.dtype)
        else:
            yield name, tensor


def _exact_scales(scales: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    found = scales.to(dtype)
    if not torch.equal(found.float(), scales):
        raise ModelError(
            f"{name}: {dtype} cannot hold the scales of its INT4 groups. Export in bf16 or fp32."
        )
    return found


def _packed_weight(
    prefix: str, parts: Mapping[str, Tensor], group_size: int, source: str
) -> PackedWeight:
    packed, scales, shape = (parts[part] for part in _PARTS)
    outputs, inputs = (int(size) for size in shape.flatten()[:2])
    fits = (
        packed.dtype == torch.int32
        and tuple(packed.shape) == (outputs, inputs // PER_WORD)
        and tuple(scales.shape) == (outputs, inputs // group_size)
        and scales.is_floating_point()
    )
    if not fits:
        raise ModelError(
            f"{source}: {prefix} says a weight of {outputs} x {inputs} in groups of {group_size}, "
            f"and holds {tuple(packed.shape)} words and {tuple(scales.shape)} scales. The files "
            "do not belong together."
        )
    return PackedWeight(packed, scales, (outputs, inputs))
