"""Build a model that is ready to train from the settings: the only entry point.

    model.path -> config -> module (built without memory, or with) -> weights -> adapter

Both implementations provide `hidden(tokens_N, positions_N, layout, dropout_keys_N=)` and
`output_weight()`, and have `causal_lm`, the module whose parameter names are the HF names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from homeostat.config.cluster import OnHost
from homeostat.config.loading.beside import not_there
from homeostat.config.model import HeadInit, LoraConfig, ModelConfig
from homeostat.config.moe import MoeConfig
from homeostat.config.trainer import Checkpointing
from homeostat.errors import ModelError
from homeostat.models import hf, lora, weights
from homeostat.models.adapter_files import load_adapter
from homeostat.models.decoder import Decoder
from homeostat.models.decoder_shape import DecoderConfig
from homeostat.models.families import decoder_config
from homeostat.models.gguf import GgufFile
from homeostat.models.hub_names import stacked_tensors
from homeostat.models.layer_offload import allocate_on_host
from homeostat.models.memory import require_memory
from homeostat.models.origin import ConfigOrigin
from homeostat.models.side_by_side import lay_adapters_side_by_side, lay_side_by_side
from homeostat.models.transformers_model import (
    TransformersModel,
    load_transformers,
    meta_transformers,
)
from homeostat.models.value_head import add_value_head, start_head, value_weight, with_head
from homeostat.ops.attention import resolve_kernel
from homeostat.ops.held import held_weights
from homeostat.ops.moe_shape import MoeShape


@dataclass(frozen=True, slots=True)
class ModelSheet:
    """Facts about a model that are known without building it.

    `packs` means that one forward pass can hold several rows at full speed.
    """

    source_config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None
    num_params: int
    num_trainable: int
    vocab_size: int
    packs: bool
    facts: Mapping[str, str | int | float | bool]
    # The shape of its experts; None if it has none, or if transformers computes it.
    moe: MoeShape | None = None
    # It gives values in place of log-probs (models/value_head.py).
    has_value_head: bool = False


Model = Decoder | TransformersModel
# Turns the tensors of a quantised checkpoint into plain weights.
Decode = Callable[[Iterator[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]
# Exchanges the linear maps of a decoder on the meta device by ones that are held in another format
# (precision/bases.py); products are computed in the dtype.
HoldMaps = Callable[[nn.Module, torch.dtype], None]
ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device."""

    module: Model
    sheet: ModelSheet


def load_model(
    model: ModelConfig,
    adapter: LoraConfig | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    gradient_checkpointing: Checkpointing,
    head: HeadInit | None = None,
    on_host: OnHost | None = None,
    decode: Decode | None = None,
    hold: HoldMaps | None = None,
) -> LoadedModel:
    """Build the model that `model` and `lora` describe. Refuse one that cannot be trained.

    With `head` it has a value head in place of its output matrix, loaded from a sequence classifier
    or else new, as `head` says. `on_host` names matrices that are in host memory; the model cannot
    compute before they are streamed (models/weight_stream.py). `decode` turns
    what the files of a quantised checkpoint hold into plain weights (native decoder). `hold` is
    what model.quantization asks for (precision/bases.py).
    """
    require_hold(model, hold)
    started = time.perf_counter()
    source = open_source(model)
    config, generation_config = read_configs(source)
    place = {"dtype": dtype, "device": device, "seed": seed}
    if model.implementation == "transformers":
        require_native_head(model, head)
        module, kernel = _transformers(model, source, gradient_checkpointing, **place)
    else:
        how = {"head": head, "on_host": on_host, "decode": decode, "hold": hold}
        how |= place
        shape = config if decode is None else unquantised(config)
        module, kernel = _native(model, source, shape, gradient_checkpointing, **how)
    num_targets = _adapt(module, adapter, seed, base=model) if adapter is not None else 0
    if num_targets and device.type == "cuda" and isinstance(module, Decoder):
        lay_adapters_side_by_side(module)
    module.train()
    facts = {
        "implementation": model.implementation,
        "attention": kernel,
        "meta_init": model.meta_init,
        "lora_modules": num_targets,
        "bytes": num_bytes(module),
        "seconds": time.perf_counter() - started,
    }
    return LoadedModel(module, model_sheet(module, config, generation_config, facts))


def unquantised(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without its word on quantised weights, which someone else decodes."""
    return {name: value for name, value in config.items() if name != "quantization_config"}


def model_sheet(
    module: Decoder | TransformersModel,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None,
    facts: Mapping[str, str | int | float | bool],
) -> ModelSheet:
    """Collect the facts about a built model."""
    return ModelSheet(
        source_config=config,
        generation_config=generation_config,
        num_params=num_params(module),
        num_trainable=sum(p.numel() for p in module.parameters() if p.requires_grad),
        vocab_size=vocab_size(module),
        packs=module.packs,
        facts=facts,
        moe=module.moe,
        has_value_head=value_weight(module) is not None,
    )


def vocab_size(module: Model) -> int:
    """Return the size of the vocabulary that the model reads."""
    is_native = isinstance(module, Decoder)
    return module.config.vocab_size if is_native else module.output_weight().shape[0]


def num_params(module: nn.Module) -> int:
    """Return the number of parameters of a module; a held weight counts as the matrix it is."""
    held = held_weights(module).values()
    codes = sum(parameter.numel() for weight in held for parameter in weight.parameters())
    whole = sum(weight.numel() for weight in held)
    return sum(parameter.numel() for parameter in module.parameters()) - codes + whole


def num_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters as they are held."""
    return sum(parameter.nbytes for parameter in module.parameters())


def require_hold(model: ModelConfig, hold: HoldMaps | None) -> None:
    """Whoever builds a model passes on what its settings ask for."""
    assert (hold is None) == (model.quantization is None), model.quantization


def open_source(model: ModelConfig) -> GgufFile | Path:
    """Open the file or folder that model.path names."""
    path = Path(model.path)
    if not path.exists():
        raise ModelError(f"model.path: {not_there(path)}")
    return GgufFile(path) if path.suffix == ".gguf" else path


def read_configs(source: GgufFile | Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return config.json, and generation_config.json if there is one."""
    if isinstance(source, GgufFile):
        return source.config(), None
    if not source.is_dir():
        raise ModelError(
            f"model.path: {source} is neither the folder of an HF checkpoint nor a .gguf file."
        )
    return hf.read_config(source), hf.read_generation_config(source)


def config_origin(source: GgufFile | Path) -> ConfigOrigin:
    """The file that errors about the model's config name."""
    return source.origin if isinstance(source, GgufFile) else hf.config_origin(source)


def _native(
    model: ModelConfig,
    source: GgufFile | Path,
    config: dict[str, Any],
    gradient_checkpointing: Checkpointing,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    head: HeadInit | None,
    on_host: OnHost | None,
    decode: Decode | None,
    hold: HoldMaps | None,
) -> tuple[Decoder, str]:
    origin = config_origin(source)
    shape = decoder_config(config, origin=origin)
    num_on_host = shape.num_on_host(on_host)
    place = {"dtype": dtype, "device": device}
    if hold is None:
        require_memory(shape.num_params, what=origin.sizes, on_host=num_on_host, **place)
    require_moe_settings(model.moe, shape.moe)
    flags = decoder_flags(model, shape, gradient_checkpointing, **place)
    how = {"has_value_head": head is not None, "on_host": on_host, **place}
    how |= {"hold": hold}
    module = _empty_decoder(shape, flags, model.meta_init, **how)
    if device.type == "cuda":
        lay_side_by_side(module)
    give_weights(module, model, source, seed=seed, head=head, decode=decode)
    return module, attention_name(module)


def decoder_flags(
    model: ModelConfig,
    shape: DecoderConfig,
    gradient_checkpointing: Checkpointing,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Return how a decoder of this shape is to compute."""
    _refuse_plain_experts(model, shape, device)
    heads = {"head_dim": shape.head_dim, "has_soft_cap": shape.block.attention_cap is not None}
    return {
        "kernel": resolve_kernel(model.attention, device_type=device.type, dtype=dtype, **heads),
        "gradient_checkpointing": gradient_checkpointing,
        "numerics": model.numerics,
        "grouped_kernel": model.moe.grouped_kernel,
    }


def require_moe_settings(config: MoeConfig, shape: MoeShape | None) -> None:
    """Raise ModelError for settings of experts that the model cannot follow."""
    # Replay is a matter of the engine, too: run/wiring/replay.py judges it.
    used = sorted(name for name in config.model_fields_set if "replay" not in name)
    if shape is None and used:
        raise ModelError(
            f"model.moe.{used[0]} is set, and the model of model.path has no experts, so it would "
            "have no effect. Remove it."
        )
    if shape is not None and config.balancing == "bias" and not shape.has_bias:
        raise ModelError(
            "model.moe.balancing=bias moves the routers' expert bias, and this model family has "
            "none. Use aux or sequence_aux."
        )


def _refuse_plain_experts(model: ModelConfig, shape: DecoderConfig, device: torch.device) -> None:
    """The engine decodes in CUDA graphs, where the plain path cannot ask for the experts' loads."""
    is_plain = shape.moe is not None and model.moe.grouped_kernel == "plain"
    if is_plain and model.numerics == "invariant" and device.type == "cuda":
        raise ModelError(
            "model.moe.grouped_kernel is plain, and model.numerics is invariant: on a GPU engine "
            "and trainer have equal bits by the grouped kernels alone. Set "
            "model.moe.grouped_kernel=auto."
        )


def attention_name(module: Decoder) -> str:
    return "tiled" if module.numerics == "invariant" else module.kernel


def give_weights(
    module: Decoder,
    model: ModelConfig,
    source: GgufFile | Path,
    *,
    seed: int,
    head: HeadInit | None = None,
    part: weights.Part = weights.all_of_it,
    decode: Decode | None = None,
) -> None:
    """Load the weights of model.path, or draw random ones, for everything except an adapter.

    `head`: where the value head starts that the files do not hold; None if the module has none.
    """
    if model.init == "random":
        weights.draw(module, std=module.config.initializer_range, seed=seed, part=part)
        if head is not None:
            start_head(module, head, seed=seed, part=part)
        return
    is_gguf = isinstance(source, GgufFile)
    stream = source.tensors() if is_gguf else hf.read_tensors(source)
    if decode is not None:
        stream = decode(stream)
    where = f"model.path: {source.path if is_gguf else source}"
    stream = stacked_tensors(module.config.moe, stream, source=where)
    if head is not None:
        stream = with_head(stream, module, head, seed=seed, source=where)
    adapter = {name for name, _ in lora.adapter_state(module)}
    weights.fill(module, stream, source=where, without=adapter, part=part)


def _empty_decoder(
    shape: DecoderConfig,
    flags: dict[str, Any],
    meta_init: bool,
    *,
    has_value_head: bool,
    dtype: torch.dtype,
    device: torch.device,
    on_host: OnHost | None,
    hold: HoldMaps | None,
) -> Decoder:
    """Build the decoder before its weights; with `meta_init` only the final copy is allocated."""
    assert meta_init or not (on_host or hold), "combinations asks for meta_init"
    if meta_init:
        with torch.device("meta"):
            module = new_decoder(shape, flags, has_value_head=has_value_head).to(dtype)
        if hold is not None:
            hold(module, dtype)
        if on_host is not None:
            allocate_on_host(module, on_host)
        return _allocate(module, device)
    # torch's own initialisation draws from the global generators, so restore them afterwards.
    drawn_from = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=drawn_from), torch.device(device):
        return new_decoder(shape, flags, has_value_head=has_value_head).to(dtype)


def new_decoder(shape: DecoderConfig, flags: dict[str, Any], *, has_value_head: bool) -> Decoder:
    """Build a decoder on the default device, with a value head if it is to have one."""
    module = Decoder(shape, **flags)
    if has_value_head:
        add_value_head(module)
    return module


def require_native_head(model: ModelConfig, head: HeadInit | None) -> None:
    """Raise ModelError for a value head on a model that transformers computes."""
    if head is not None and model.implementation == "transformers":
        raise ModelError(
            "model.implementation is transformers, and a value head is built on the native decoder "
            "alone. Set model.implementation=native, or use a method without critic or reward "
            "model."
        )


def _allocate(module: ModuleT, device: torch.device) -> ModuleT:
    """Allocate what is on the meta device. `to_empty` would import sympy, which takes a second."""

    def allocated(t: torch.Tensor) -> torch.Tensor:
        return torch.empty(t.shape, dtype=t.dtype, device=device) if t.is_meta else t

    return module._apply(allocated)


def _transformers(
    model: ModelConfig,
    source: GgufFile | Path,
    gradient_checkpointing: Checkpointing,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> tuple[TransformersModel, str]:
    # config/combinations has already refused settings that only the native decoder supports.
    assert isinstance(source, Path), source
    assert model.meta_init, model
    sizes = config_origin(source).sizes
    require_memory(num_params(meta_transformers(source)), dtype=dtype, device=device, what=sizes)
    causal_lm = load_transformers(
        source, attention=model.attention, dtype=dtype, init=model.init, seed=seed
    )
    assert gradient_checkpointing != "selective", "combinations asks for the native decoder"
    module = TransformersModel(causal_lm.to(device), gradient_checkpointing=gradient_checkpointing)
    module.probe()
    return module, causal_lm.config._attn_implementation


def _adapt(module: nn.Module, adapter: LoraConfig, seed: int, *, base: ModelConfig) -> int:
    names = lora.apply_lora(module, adapter, seed=seed)
    if adapter.path is not None:
        load_adapter(module, Path(adapter.path), adapter, base=base)
    return len(names)
