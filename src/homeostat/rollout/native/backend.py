"""The native engine as an entry of rollout/registry.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from homeostat.config.engine import EngineConfig
from homeostat.config.fp8 import Fp8Config
from homeostat.config.native import NativeEngineConfig
from homeostat.errors import ConfigError, Problem
from homeostat.models.decoder import Decoder
from homeostat.models.transformers_attention import refused_sizes
from homeostat.models.transformers_model import TransformersModel
from homeostat.observe import format as fmt
from homeostat.rollout.backend import EngineBackend, EngineSite, Foreseen, Prospect
from homeostat.rollout.engine import Capabilities, Engine
from homeostat.rollout.native.cache import token_bytes
from homeostat.rollout.native.engine import NativeEngine, native_capabilities
from homeostat.rollout.native.fast import decode_path, obstacle, require_length
from homeostat.rollout.native.memory import free_bytes

# A model of 1 M weights samples a tenth faster in two processes, and loses that by being sent.
MIN_PARAMS_TO_SPLIT = 20_000_000

_PATHS = {
    "plain": "the model's own forward",
    "compact": "torch over a compact copy of the weights",
    "compiled": "compiled code over a copy of the weights",
    "fused": "fused kernels",
    "graphs": "fused kernels in CUDA graphs",
}


def open_here(
    site: EngineSite,
    model: nn.Module,
    decode: Callable[[Sequence[int]], str],
    version: int,
    *,
    engine: type[NativeEngine] = NativeEngine,
) -> NativeEngine:
    """Open the engine over the trainer's weights; a plug-in may derive from its class."""
    assert isinstance(model, Decoder | TransformersModel), type(model)
    return engine(
        model,
        _own(site.engine),
        device=site.device,
        max_tokens=site.max_tokens,
        decode=decode,
        chunk_bytes=site.chunk_bytes,
        policy_id=site.policy_id,
        policy_version=version,
        threads=site.lanes * site.threads,
        fp8=site.fp8,
    )


def factory_arguments(site: EngineSite) -> dict[str, Any]:
    return {
        "model": site.model,
        "adapter": site.adapter,
        "engine": _own(site.engine),
        "device": site.device,
        "dtype": site.dtype,
        "threads": site.threads,
        "seed": site.seed,
        "max_tokens": site.max_tokens,
        "chunk_bytes": site.chunk_bytes,
        "policy_id": site.policy_id,
        "fp8": site.fp8,
    }


def num_helpers(site: EngineSite, own: Engine) -> int:
    assert isinstance(own, NativeEngine), own
    if site.model.implementation == "transformers":
        # Helpers build the native decoder.
        return 0
    if site.model.quantization is not None and site.adapter is None:
        # Helpers would need weights with the adapter merged in.
        return 0
    return _num_processes(
        _own(site.engine),
        lanes=site.lanes,
        num_params=site.num_params,
        has_threads=own.bursts is not None,
    ) - 1  # fmt: skip


def capabilities(prospect: Prospect) -> Capabilities:
    shape = prospect.preview.decoder
    return native_capabilities(
        shares_weights=prospect.engine.shares_weights,
        numerics=prospect.model.numerics,
        max_tokens=prospect.max_tokens,
        has_experts=shape is not None and shape.moe is not None,
    )


def preflight(prospect: Prospect) -> Foreseen:
    """Choose the decode path and size the cache, or say why that cannot be."""
    engine, shape = _own(prospect.engine), prospect.preview.decoder
    if shape is None:
        most = _cache_bytes(prospect)
        text = f", at most {fmt.byte_size(most)} of cached keys and values, computed by the layers "
        text += "of transformers: slower than the native decoder, whose decode paths it lacks"
        return Foreseen(text, {"processes": 1, "cache_bytes_at_most": most, "decode": "plain"})
    require_length(shape, prospect.max_tokens)
    numerics, device = prospect.model.numerics, prospect.device
    how = {"numerics": numerics, "device": device, "is_fp8": prospect.fp8 is not None}
    how["is_int4"] = prospect.is_int4
    path = decode_path(shape, engine, **how)
    processes = 1
    if engine.shares_weights:
        processes = _num_processes(
            engine,
            lanes=prospect.lanes,
            num_params=prospect.preview.num_params,
            has_threads=path == "compiled",
        )
    most = _cache_bytes(prospect)
    text = f", in {processes} processes" if processes > 1 else ""
    kind = "FP8 " if engine.kv_cache_dtype == "fp8" else ""
    text += f", at most {fmt.byte_size(most)} of cached {kind}keys and values, decoded by "
    text += _PATHS[path]
    if path == "compact" and engine.decode == "auto":
        text += f" (not by compiled code: {obstacle('compiled', shape, engine, **how)})"
    if path == "plain" and engine.decode == "auto" and not shape.is_llama_like:
        fastest = "compiled" if device.type == "cpu" else "graphs"
        text += f" (the faster path is not taken: {obstacle(fastest, shape, engine, **how)})"
    if prospect.fp8 is not None:
        text += _fp8_text(prospect.fp8, device)
    if prospect.is_int4:
        text += "; INT4 weights, " + ("packed" if device.type == "cuda" else "rounded, not packed")
    return Foreseen(text, {"processes": processes, "cache_bytes_at_most": most, "decode": path})


def _fp8_text(fp8: Fp8Config, device: torch.device) -> str:
    text = f"; {fp8.recipe} FP8"
    if fp8.start_step > 1:
        text += f" from policy version {fp8.start_step - 1} on"
    return text + (", emulated for correctness only" if device.type == "cpu" else "")


def _num_processes(
    engine: NativeEngineConfig, *, lanes: int, num_params: int, has_threads: bool
) -> int:
    """Number of processes that sample at one time: see engine.processes. `has_threads`: one process
    can use all cores."""
    pays = not has_threads and num_params >= MIN_PARAMS_TO_SPLIT
    return engine.processes or (lanes if pays else 1)


def _cache_bytes(prospect: Prospect) -> int:
    """The most that the cache will take. Raises ConfigError where not even one request fits."""
    shape, engine = prospect.preview.cache, prospect.engine
    if shape is None:
        raise refused_sizes()
    is_fp8 = engine.kv_cache_dtype == "fp8"
    one = token_bytes(shape, prospect.dtype, is_fp8=is_fp8) * prospect.longest
    budget = int(prospect.engine.memory_share * free_bytes(prospect.device))
    if one > budget:
        raise ConfigError(
            [
                Problem(
                    "engine.memory_share",
                    f"the cache of one completion takes up to {fmt.byte_size(one)}, and the engine "
                    f"may have {fmt.byte_size(budget)}.",
                    "Raise it, or lower rollout.max_new_tokens or data.max_length.",
                )
            ]
        )
    return min(one * prospect.running, budget)


def _own(config: EngineConfig) -> NativeEngineConfig:
    assert isinstance(config, NativeEngineConfig), config
    return config


NATIVE = EngineBackend(
    factory="homeostat.rollout.native.host:build_engine",
    factory_arguments=factory_arguments,
    capabilities=capabilities,
    preflight=preflight,
    open_here=open_here,
    num_helpers=num_helpers,
)
