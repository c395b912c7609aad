"""Read from a checkpoint's tensors and config how each of its layers is stored.

    names, dtypes and shapes of tensors -> parts of each module -> format, real blocks of its scales

The tensors decide, not the config: the config (quantization_config) states the intention, and is
read only to explain why a layer is not quantised. Formats by the names of their tensors:

    fp8                  weight, weight_scale_inv or weight_scale
    compressed-tensors   weight_packed, weight_scale, weight_shape; or weight, weight_scale
    GPTQ, AWQ            qweight, scales, qzeros
    bitsandbytes         weight (uint8 or int8), weight.absmax, weight.quant_state..., SCB
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from homeostat.precision.sheets import LayerSheet

# Bits of an element by its name in a safetensors file.
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F4", "F6_E2M3", "F6_E3M2"), 4),
}
_PLAIN = ("F64", "F32", "BF16", "F16")
_PARTS = re.compile(
    r"^(?P<layer>.+?)\.(?P<part>weight_packed|weight_scale_inv|weight_scale_2|weight_scale|"
    r"weight_zero_point|weight_global_scale|weight_shape|weight_g_idx|weight\.absmax|"
    r"weight\.quant_map|weight\.nested_absmax|weight\.nested_quant_map|weight\.quant_state\..+|"
    r"weight_format|SCB|qweight|qzeros|scales|g_idx|input_scale|input_global_scale|weight|bias)$"
)
_HEADS = re.compile(r"(?:^|\.)(?:lm_head|score|output)$")
_EMBEDDINGS = re.compile(r"embed|wte|wpe")
_NORMS = re.compile(r"norm|(?:^|\.)ln_")


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _BITS.get(self.dtype, 8) // 8


def stored_layers(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> list[LayerSheet]:
    """Return the layers with matrices of a checkpoint, in the order of its tensors."""
    modules: dict[str, dict[str, Stored]] = {}
    for name, tensor in tensors.items():
        match = _PARTS.match(name)
        layer, part = (match["layer"], match["part"]) if match else (name, "weight")
        modules.setdefault(layer, {})[part] = tensor
    intended = config.get("quantization_config")
    intended = intended if isinstance(intended, Mapping) else {}
    found = (_sheet(name, parts, intended) for name, parts in modules.items())
    return [sheet for sheet in found if sheet is not None]


def _sheet(
    name: str, parts: Mapping[str, Stored], intended: Mapping[str, Any]
) -> LayerSheet | None:
    main = next(
        (parts[key] for key in ("weight_packed", "qweight", "weight") if key in parts), None
    )
    if main is None or _NORMS.search(name) or (len(main.shape) < 2 and not _is_packed(parts)):
        return None
    format, scaling = _quantisation(parts, intended)
    return LayerSheet(
        name=name,
        kind=_kind(name, main),
        group=_group(name),
        shape=_shape(parts, main, intended),
        dtype=main.dtype.lower(),
        num_bytes=sum(part.num_bytes for part in parts.values()),
        format=format,
        scaling=scaling,
        why="" if format else _why(name, intended),
    )


def _is_packed(parts: Mapping[str, Stored]) -> bool:
    return any(part.startswith(("weight.quant", "weight.absmax")) for part in parts)


def _quantisation(parts: Mapping[str, Stored], intended: Mapping[str, Any]) -> tuple[str, str]:
    """Return the format of a module and which numbers share a scale; empty if it has none."""
    if "weight_packed" in parts:
        size = parts["weight_packed"].shape
        bits = _number(intended, "num_bits") or 4
        full = (size[0], size[1] * 32 // bits)
        return f"int{bits} (compressed-tensors)", _blocks(full, parts.get("weight_scale"))
    if "qweight" in parts:
        method = str(intended.get("quant_method", "gptq"))
        bits, group = intended.get("bits", 4), intended.get("group_size", "?")
        return f"int{bits} ({method})", f"groups of {group}"
    weight = parts.get("weight")
    if weight is None or weight.dtype in _PLAIN:
        return "", ""
    if _is_packed(parts):
        kind = next(
            (p.rpartition("__")[2] for p in parts if p.startswith("weight.quant_state")), "4bit"
        )
        nested = ", scales quantised too" if "weight.nested_absmax" in parts else ""
        return f"{kind} (bitsandbytes)", f"blocks of {_bnb_block(parts)}{nested}"
    if "SCB" in parts:
        return "int8 (bitsandbytes)", "rows"
    scales = parts.get("weight_scale_inv") or parts.get("weight_scale")
    said = intended.get("weight_block_size")
    return weight.dtype.lower(), _blocks(weight.shape, scales, said=said)


def _blocks(shape: tuple[int, ...], scales: Stored | None, *, said: Any = None) -> str:
    """Return which numbers share a scale, by the shapes of both.

    The last block of a side may be smaller than the others: where the size that the config says
    (`said`) gives as many blocks, it is that.
    """
    if scales is None:
        return "no scales"
    own = scales.shape
    if math.prod(own) == 1:
        return "tensor"
    if len(own) < len(shape):
        own = (*own, *(1,) * (len(shape) - len(own)))
    sizes = [-(-size // count) for size, count in zip(shape[-2:], own[-2:], strict=True)]
    if isinstance(said, list | tuple) and len(said) == 2:
        pairs = zip(shape[-2:], said, strict=True)
        counts = [-(-size // max(1, int(block))) for size, block in pairs]
        sizes = list(said) if counts == list(own[-2:]) else sizes
    if sizes == [1, shape[-1]]:
        return "rows"
    return f"groups of {sizes[1]}" if sizes[0] == 1 else f"{sizes[0]} x {sizes[1]} blocks"


def _bnb_block(parts: Mapping[str, Stored]) -> int:
    packed, scales = parts["weight"], parts.get("weight.absmax")
    count = math.prod(packed.shape) * 2
    return count // max(1, math.prod(scales.shape)) if scales is not None else 64


def _shape(
    parts: Mapping[str, Stored], main: Stored, intended: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the shape of the layer's matrix, where packing lets it be known."""
    if "weight_packed" in parts:
        bits = _number(intended, "num_bits") or 4
        return (main.shape[0], main.shape[1] * 32 // bits)
    if "qweight" in parts:
        bits = int(intended.get("bits", 4))
        return (main.shape[-1], main.shape[0] * 32 // bits)
    return main.shape


def _kind(name: str, main: Stored) -> str:
    if _HEADS.search(name):
        return "head"
    if _EMBEDDINGS.search(name):
        return "embedding"
    return "experts" if len(main.shape) == 3 or ".experts." in name else "linear"


def _group(name: str) -> str:
    if _HEADS.search(name) or _EMBEDDINGS.search(name):
        return "head"
    if "experts" in name:
        return "experts"
    return "attention" if "attn" in name or "attention" in name else "mlp"


def _why(name: str, intended: Mapping[str, Any]) -> str:
    """Return why a layer of a quantised checkpoint is not quantised; empty if nothing is."""
    if not intended:
        return ""
    for key in ("ignore", "modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules"):
        for pattern in intended.get(key) or ():
            if _covers(str(pattern), name):
                return f"quantization_config.{key}: {pattern}"
    if _EMBEDDINGS.search(name) or _HEADS.search(name):
        return "embeddings and heads are left out"
    return "stored as it is, although the config does not leave it out"


def _covers(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.search(pattern[3:], name) is not None
        except re.error:
            return False
    return name == pattern or name.endswith(f".{pattern}") or name.startswith(f"{pattern}.")


def _number(config: Mapping[str, Any], key: str) -> int | None:
    """Return a number of the first group of a compressed-tensors config."""
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and isinstance(weights.get(key), int):
            return int(weights[key])
    return None
