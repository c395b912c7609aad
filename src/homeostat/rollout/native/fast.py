"""Chooses the decode path: the fastest that device and model allow, or the one that is configured.

plain      one step at a time through the decoder's own forward: the reference
compact    the same on a CPU with copies of the weights and fewer calls (compact.py)
compiled   several steps at a time on a CPU, in compiled code (cpu/)
fused      several steps at a time on a GPU, with fused kernels (cuda/); in invariant numerics, and
           for blocks other than Llama's, with the model's own forward over the state on the GPU
           (cuda/invariant.py)
graphs     the same, captured as CUDA graphs
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from homeostat.config.native import NativeEngineConfig
from homeostat.errors import EngineError
from homeostat.models.decoder import Decoder
from homeostat.models.decoder_shape import DecoderConfig
from homeostat.models.expert_offload import StreamedExperts
from homeostat.ops.linear import Numerics
from homeostat.rollout.native.compact import can_be_copied
from homeostat.rollout.native.cpu.bursts import CpuBursts
from homeostat.rollout.native.cpu.compiled import CompiledModel
from homeostat.rollout.native.cpu.library import load_library
from homeostat.rollout.native.room import BLOCK_TOKENS

if TYPE_CHECKING:
    from homeostat.rollout.native.bursts import Bursts

HEAD_DIMS = (32, 64, 128, 256)
AUTO = ("graphs", "compiled", "compact")


def decode_path(
    shape: DecoderConfig,
    config: NativeEngineConfig,
    *,
    numerics: Numerics,
    device: torch.device,
    is_fp8: bool = False,
    is_int4: bool = False,
) -> str:
    """Choose plain, compact, compiled, fused or graphs. An impossible choice is refused."""
    if config.decode == "plain":
        return "plain"
    wanted = AUTO if config.decode == "auto" else (config.decode,)
    how = {"numerics": numerics, "device": device, "is_fp8": is_fp8, "is_int4": is_int4}
    obstacles = {path: obstacle(path, shape, config, **how) for path in wanted}
    able = [path for path in wanted if not obstacles[path]]
    if not able and config.decode == "auto":
        return "plain"
    if not able:
        raise EngineError(
            f"engine.decode is {config.decode}, which cannot run here: "
            f"{obstacles[config.decode]}. Set engine.decode=auto."
        )
    return able[0]


def make_bursts(
    model: Decoder,
    config: NativeEngineConfig,
    path: str,
    *,
    device: torch.device,
    max_tokens: int,
    threads: int | None,
    is_fp8: bool = False,
) -> Bursts | None:
    """Make the burst decoder of a path; None if the path decodes one step at a time.

    `threads` is for a CPU; None means as many as torch uses. `is_fp8`: layers of the model are in
    FP8, now or later.
    """
    if path in ("plain", "compact"):
        return None
    if path == "compiled":
        return _cpu_bursts(model, config, threads=threads or torch.get_num_threads())
    if any(isinstance(block.experts, StreamedExperts) for block in model.moe_blocks):
        raise EngineError(
            f"engine.decode is {config.decode}, whose kernels read all experts from the GPU, and "
            "trainer.backend.offload_experts leaves them in host memory. Set engine.decode=plain."
        )
    # Parameters of packed weights are empty, on whatever device.
    if device.type == "cuda" and any(p.device.type == "cpu" for p in model.parameters()):
        raise EngineError(
            f"engine.decode is {config.decode}, whose kernels read all weights from the GPU, and "
            "trainer.backend.offload_params leaves them in host memory. Set engine.decode=plain."
        )
    # Imported here because these modules need Triton.
    from homeostat.rollout.native.cuda.bursts import CudaBursts
    from homeostat.rollout.native.cuda.forward import DecodeForward
    from homeostat.rollout.native.cuda.fp8_forward import Fp8Forward
    from homeostat.rollout.native.cuda.int4_forward import Int4Forward
    from homeostat.rollout.native.cuda.int4_weights import int4_products
    from homeostat.rollout.native.cuda.invariant import InvariantForward
    from homeostat.rollout.native.cuda.state import DecodeState
    from homeostat.rollout.native.cuda.steps import Steps

    max_rows = config.max_concurrency
    state = DecodeState(
        max_rows=max_rows,
        max_tokens=max_tokens,
        block_tokens=BLOCK_TOKENS,
        layers=model.config.num_layers,
        device=device,
        moe=model.config.moe,
        fp8_cache=config.kv_cache_dtype == "fp8",
    )
    is_own = model.numerics == "invariant" or not model.config.is_llama_like
    kind = InvariantForward if is_own else DecodeForward
    if kind is DecodeForward and int4_products(model):
        kind = Int4Forward
    elif kind is DecodeForward and is_fp8:
        kind = Fp8Forward
    forward = kind(model, state, block_tokens=BLOCK_TOKENS)
    return CudaBursts(state, Steps(forward, max_rows=max_rows, with_graphs=path == "graphs"))


def _cpu_bursts(model: Decoder, config: NativeEngineConfig, *, threads: int) -> Bursts | None:
    """Make the compiled burst decoder. Return None if weights alone do not describe the model.

    If the recipe asks for the compiled path, that is an EngineError instead.
    """
    if can_be_copied(model):
        return CpuBursts(CompiledModel(model, load_library(), threads=threads))
    if config.decode == "compiled":
        raise EngineError(
            "engine.decode is compiled, which computes with copies of the weights in fp32: a model "
            "with hooks, with a quantised base or in another precision it cannot copy. Set "
            "engine.decode=auto."
        )
    return None


def obstacle(
    path: str,
    shape: DecoderConfig,
    config: NativeEngineConfig,
    *,
    numerics: Numerics,
    device: torch.device,
    is_fp8: bool = False,
    is_int4: bool = False,
) -> str:
    """Say why this decode path cannot be taken; empty where it can."""
    beyond = _beyond(path, shape)
    if beyond:
        return f"the model's block has {beyond}, which it does not compute"
    if path in ("compact", "compiled") and is_int4:
        return "INT4 weights are multiplied, rounded, by the model's own forward on a CPU"
    if path in ("compact", "compiled") and is_fp8:
        return "FP8 is emulated on a CPU, by the model's own forward"
    if path == "compiled" and config.kv_cache_dtype == "fp8":
        return "engine.kv_cache_dtype is fp8, which it does not read"
    if path in ("compact", "compiled") and numerics == "invariant":
        return "model.numerics is invariant, which it does not keep"
    if path == "compact":
        return "" if device.type == "cpu" else f"it is for a CPU, and this is {device.type}"
    if path == "compiled":
        return _obstacle_to_compiled(device)
    if device.type != "cuda" and not (path == "fused" and _is_interpreted()):
        return f"it needs a CUDA device, and this is {device.type}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if shape.is_llama_like:
        knows = numerics == "invariant" or shape.head_dim in HEAD_DIMS
        return "" if knows else f"heads are {shape.head_dim} wide, and it knows {HEAD_DIMS}"
    if config.kv_cache_dtype == "fp8":
        return "engine.kv_cache_dtype is fp8, which it reads for a block like Llama's only"
    return ""


def require_length(shape: DecoderConfig, max_tokens: int) -> None:
    """Raise EngineError for texts that the model's rotation does not reach."""
    longest = shape.rope.max_length
    if longest is not None and max_tokens > longest:
        raise EngineError(
            f"texts may have {max_tokens} tokens, and the native decoder computes up to {longest} "
            "(original_max_position_embeddings): beyond it longrope changes all frequencies, those "
            "of cached keys too. Lower data.max_length."
        )


def _beyond(path: str, shape: DecoderConfig) -> str:
    """Name what a model has that a decode path other than plain does not compute."""
    block = shape.block
    if path in ("fused", "graphs"):
        # It goes through the model's own forward, and draws by a kernel.
        return "soft-capped logits" if block.logit_cap is not None else ""
    found = block.beyond_llama(shape.rope)
    if path != "compact" and block.is_windowed:
        found = ("sliding windows", *found)
    return ", ".join(found)


def _obstacle_to_compiled(device: torch.device) -> str:
    if device.type != "cpu":
        return f"it is for a CPU, and this is {device.type}"
    try:
        load_library()
    except EngineError as error:
        return str(error)
    return ""


def _is_interpreted() -> bool:
    """Return whether Triton interprets kernels in Python, which works on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"
