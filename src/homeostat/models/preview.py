"""Check a model's shape against its files without loading a weight.

The module is built on the meta device and "filled" with tensors that have only a shape, so the same
code refuses missing, unknown and misshapen weights here as when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from homeostat.config.cluster import OnHost
from homeostat.config.model import HeadInit, LoraConfig, ModelConfig
from homeostat.errors import ModelError
from homeostat.models import hf, weights
from homeostat.models.adapter_files import require_adapter
from homeostat.models.build import (
    HoldMaps,
    config_origin,
    new_decoder,
    num_params,
    open_source,
    read_configs,
    require_hold,
    require_moe_settings,
    require_native_head,
    vocab_size,
)
from homeostat.models.decoder import Decoder
from homeostat.models.decoder_shape import DecoderConfig
from homeostat.models.families import decoder_config
from homeostat.models.gguf import GgufFile
from homeostat.models.hub_names import stacked_tensors
from homeostat.models.lora import apply_lora
from homeostat.models.memory import require_bytes, require_memory
from homeostat.models.transformers_attention import CacheShape
from homeostat.models.transformers_model import TransformersModel, meta_transformers
from homeostat.models.value_head import with_head
from homeostat.ops.held import held_weights


@dataclass(frozen=True, slots=True)
class ModelPreview:
    """Facts about a model before it is built."""

    family: str
    vocab_size: int
    max_positions: int | None
    num_params: int
    num_trainable: int
    bytes_per_param: int
    num_bytes: int
    # None if transformers computes the model.
    decoder: DecoderConfig | None
    # The sizes that the cache of our own engine has for it; None if it cannot have one.
    cache: DecoderConfig | CacheShape | None
    # Bytes of the keys and values of one token in all layers.
    cache_bytes_per_token: int | None


def preview_model(
    model: ModelConfig,
    lora: LoraConfig | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    head: HeadInit | None = None,
    on_host: OnHost | None = None,
    hold: HoldMaps | None = None,
) -> ModelPreview:
    """Raise ModelError as loading the model would, but fast and without its memory."""
    require_hold(model, hold)
    source = open_source(model)
    config, _ = read_configs(source)
    origin = config_origin(source)
    module: nn.Module
    num_on_host = 0
    if model.implementation == "transformers":
        assert isinstance(source, Path)
        require_native_head(model, head)
        module = TransformersModel(meta_transformers(source))
    else:
        shape = decoder_config(config, origin=origin)
        require_moe_settings(model.moe, shape.moe)
        with torch.device("meta"):
            module = new_decoder(shape, {"kernel": "sdpa"}, has_value_head=head is not None)
        if hold is not None:
            hold(module, dtype)
        if model.init == "pretrained":
            where = f"model.path: {model.path}"
            stream = stacked_tensors(module.config.moe, _shapes(source), source=where)
            if head is not None:
                stream = with_head(stream, module, head, seed=0, source=where)
            weights.fill(module, stream, source=where)
        num_on_host = shape.num_on_host(on_host)
    place = {"dtype": dtype, "device": device}
    if hold is None:
        require_memory(num_params(module), what=origin.sizes, on_host=num_on_host, **place)
    else:
        require_bytes(_num_bytes(module, dtype), device=device, what=origin.sizes)
    if lora is not None:
        apply_lora(module, lora, seed=0)
        if lora.path is not None:
            require_adapter(module, Path(lora.path), lora, base=model)
    return _preview(module, config, dtype)


def _preview(module: Any, config: dict[str, Any], dtype: torch.dtype) -> ModelPreview:
    parameters = list(module.parameters())
    longest = config.get("max_position_embeddings")
    cache = module.config if isinstance(module, Decoder) else module.foreseen
    return ModelPreview(
        family=str(config.get("model_type", "model")),
        vocab_size=vocab_size(module),
        max_positions=longest if isinstance(longest, int) else None,
        num_params=num_params(module),
        num_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        bytes_per_param=dtype.itemsize,
        num_bytes=_num_bytes(module, dtype),
        decoder=module.config if isinstance(module, Decoder) else None,
        cache=cache,
        cache_bytes_per_token=None if cache is None else _cache_bytes(cache, dtype),
    )


def _num_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of the weights: of held ones as they are held, of others in the dtype."""
    held = held_weights(module).values()
    whole = num_params(module) - sum(weight.numel() for weight in held)
    return whole * dtype.itemsize + sum(p.nbytes for weight in held for p in weight.parameters())


def _cache_bytes(shape: DecoderConfig | CacheShape, dtype: torch.dtype) -> int:
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def _shapes(source: GgufFile | Path) -> Iterator[tuple[str, Tensor]]:
    if isinstance(source, GgufFile):
        yield from source.shapes()
        return
    for path in hf.weight_files(source):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping: it has no __iter__)
                    yield name, torch.empty(file.get_slice(name).get_shape(), device="meta")
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"model.path: {path} cannot be read; it is missing, corrupt or truncated ({error})."
            ) from None
