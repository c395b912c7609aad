"""Write a model as a GGUF file, the format of llama.cpp: the inverse of models/gguf.py.

    config.json and weights under HF names -> metadata and tensors under llama.cpp's names

Vectors (norms, biases) are always written in fp32, as llama.cpp's own converter does. A matrix
whose rows are no multiple of 32 values cannot be quantised and is written in fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from homeostat.errors import MissingDependencyError, ModelError
from homeostat.models.families import DecoderConfig, decoder_config
from homeostat.ops.rope import RopeConfig, inverse_frequencies, yarn_attention_factor

GgufType = Literal["F32", "F16", "BF16", "Q8_0"]
# Yields every weight under its HF name. It is called twice: for the shapes, and for the values.
Weights = Callable[[], Iterator[tuple[str, Tensor]]]

# model_type of config.json -> the architecture's name in GGUF.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}
_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Written:
    """Facts about a written file: its tensors, those that were not written as asked, and lines for
    people on what is not as it was trained."""

    num_tensors: int
    not_quantised: tuple[str, ...]
    notes: tuple[str, ...] = ()


def require_writable(config: Mapping[str, Any]) -> None:
    """Raise unless the model can be written as GGUF, before its weights are loaded."""
    gguf_library()
    architecture, shape = _architecture(config), decoder_config(config)
    if shape.mlp_bias or (shape.qkv_bias and architecture == "qwen3"):
        raise ModelError(
            "--format gguf: the model has biases where this architecture of GGUF has none. Export "
            "it with --format hf."
        )
    if shape.block.is_windowed:
        raise ModelError(
            "--format gguf: some layers attend over a sliding window, which this architecture of "
            "GGUF does not say. Export it with --format hf, and use llama.cpp's own converter."
        )
    _require_rope(shape.rope)


def gguf_library() -> Any:
    """Return the gguf package, or raise the error that names its extra."""
    try:
        import gguf
    except ImportError:
        raise MissingDependencyError.of(
            "gguf", extra="gguf", needed_for="Writing a .gguf file (--format gguf)"
        ) from None
    return gguf


def write_gguf(
    path: Path,
    weights: Weights,
    *,
    source_config: Mapping[str, Any],
    name: str,
    kind: GgufType,
    add_tokenizer: Callable[[Any], None],
) -> Written:
    """Write the file. `add_tokenizer` gives the tokenizer's metadata to the library's writer."""
    gguf = gguf_library()
    architecture = _architecture(source_config)
    shape = decoder_config(source_config)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, shape, source_config)
    add_tokenizer(writer)
    try:
        return _write_tensors(writer, weights, shape, architecture=architecture, kind=kind)
    finally:
        writer.close()


def _architecture(config: Mapping[str, Any]) -> str:
    family = config.get("model_type")
    if family not in _ARCHITECTURES:
        raise ModelError(
            f"--format gguf: model_type {family!r} cannot be written as GGUF; "
            f"{', '.join(_ARCHITECTURES)} can. Export it with --format hf, and use llama.cpp's own "
            "converter."
        )
    return _ARCHITECTURES[family]


def _add_shape(writer: Any, shape: DecoderConfig, config: Mapping[str, Any]) -> None:
    writer.add_block_count(shape.num_layers)
    longest = config.get("max_position_embeddings")
    if not isinstance(longest, int):
        raise ModelError("--format gguf: config.json does not say max_position_embeddings.")
    writer.add_context_length(longest)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope.theta)
    if shape.rope.type in ("linear", "yarn"):
        kinds = gguf_library().RopeScalingType
        writer.add_rope_scaling_type(kinds[shape.rope.type.upper()])
        writer.add_rope_scaling_factor(shape.rope.factor)
    if shape.rope.type == "yarn":
        writer.add_rope_scaling_orig_ctx_len(shape.rope.original_length)


def _require_rope(rope: RopeConfig) -> None:
    """Refuse rotary settings that a GGUF file has no place for."""
    usual = RopeConfig(
        rope.theta,
        "yarn",
        factor=rope.factor,
        original_length=rope.original_length,
        attention_factor=yarn_attention_factor(rope.factor, mscale=0.0, mscale_all_dim=0.0),
    )
    if rope.type == "yarn" and rope != usual:
        raise ModelError(
            "--format gguf: the model's rope_parameters change more of yarn than its factor and "
            "original length, which a GGUF file cannot say. Export it with --format hf."
        )


def _write_tensors(
    writer: Any, weights: Weights, shape: DecoderConfig, *, architecture: str, kind: GgufType
) -> Written:
    gguf = gguf_library()
    types = gguf.GGMLQuantizationType
    arch = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, shape.num_layers)
    kinds: dict[str, Any] = {}
    refused = []
    for name, tensor in weights():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise ModelError(f"--format gguf: {name} has no name in GGUF.")
        chosen = types.F32 if tensor.ndim == 1 else types[kind]
        if chosen == types.Q8_0 and tensor.shape[-1] % _BLOCK:
            chosen, refused = types.F16, [*refused, theirs]
        kinds[theirs] = chosen
        # A shape that goes with a dtype of bytes is that of the packed blocks.
        size = gguf.quant_shape_to_byte_shape(tuple(tensor.shape), chosen)
        place = (theirs, size, np.dtype(np.uint8), int(np.prod(size)))
        writer.add_tensor_info(*place, raw_dtype=chosen)
    factors_F = rope_factors(shape.rope, head_dim=shape.head_dim)
    if factors_F is not None:
        place = ("rope_freqs.weight", factors_F.shape, factors_F.dtype, factors_F.nbytes)
        writer.add_tensor_info(*place)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in weights():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        values = _permuted(name, tensor, shape) if architecture == "llama" else tensor
        writer.write_tensor_data(_packed(theirs, values, kinds[theirs]))
    if factors_F is not None:
        writer.write_tensor_data(factors_F)
    return Written(len(kinds), tuple(refused))


def _packed(name: str, values: Tensor, kind: Any) -> np.ndarray:
    """Return the bytes of a tensor in a type of GGUF."""
    from gguf.quants import quantize

    array = values.detach().to("cpu", torch.float32).contiguous().numpy()
    packed = quantize(array, kind)
    if kind.name == "F16" and not np.isfinite(packed).all() and np.isfinite(array).all():
        raise ModelError(
            f"--format gguf: {name} has values beyond fp16's largest number (65504). "
            "Use --dtype bf16 or fp32."
        )
    return packed


def _permuted(name: str, values: Tensor, shape: DecoderConfig) -> Tensor:
    """Return q and k of a Llama with the halves of each head as neighbouring pairs."""
    heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return values
    return values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(values.shape)


def rope_factors(rope: RopeConfig, *, head_dim: int) -> np.ndarray | None:
    """Return what llama.cpp divides each frequency by (Llama 3.1 and later); None for others."""
    if rope.type != "llama3":
        return None
    plain_F = inverse_frequencies(RopeConfig(rope.theta), head_dim=head_dim)
    return (plain_F / inverse_frequencies(rope, head_dim=head_dim)).numpy()
