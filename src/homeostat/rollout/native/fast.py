"""Which way decoding goes: the fast one, where the device and the model allow it, or the plain one.

plain    one step at a time through the decoder's own forward: the reference
fused    several steps at a time by kernels of fewer launches (cuda/)
graphs   the same kernels, captured as CUDA graphs

In invariant numerics the kernels of the last two are those of the decoder's own forward.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from homeostat.config.rollout import NativeEngineConfig
from homeostat.errors import EngineError
from homeostat.models.decoder import Decoder
from homeostat.models.families import DecoderConfig
from homeostat.ops.linear import Numerics

if TYPE_CHECKING:
    from homeostat.rollout.native.cuda.bursts import Bursts

HEAD_DIMS = (32, 64, 128, 256)


def decoding_way(
    shape: DecoderConfig, config: NativeEngineConfig, *, numerics: Numerics, device: torch.device
) -> str:
    """plain, compact, fused or graphs. An impossible choice is refused."""
    if config.decode == "plain":
        return "plain"
    wanted = ("graphs", "compact") if config.decode == "auto" else (config.decode,)
    obstacles = {way: _obstacle(way, shape, device, numerics=numerics) for way in wanted}
    able = [way for way in wanted if not obstacles[way]]
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
    way: str,
    *,
    device: torch.device,
    max_tokens: int,
) -> Bursts | None:
    """None where decoding goes one step at a time."""
    if way in ("plain", "compact"):
        return None
    # Its kernels need Triton to be imported at all.
    from homeostat.rollout.native.cuda.bursts import Bursts
    from homeostat.rollout.native.cuda.forward import DecodeForward
    from homeostat.rollout.native.cuda.invariant import InvariantForward
    from homeostat.rollout.native.cuda.state import DecodeState
    from homeostat.rollout.native.cuda.steps import Steps
    from homeostat.rollout.native.room import BLOCK_TOKENS

    max_rows = config.max_concurrency
    state = DecodeState(
        max_rows=max_rows,
        max_tokens=max_tokens,
        block_tokens=BLOCK_TOKENS,
        layers=model.config.num_layers,
        device=device,
    )
    forwards = {"fast": DecodeForward, "invariant": InvariantForward}
    forward = forwards[model.numerics](model, state, block_tokens=BLOCK_TOKENS)
    return Bursts(state, Steps(forward, max_rows=max_rows, with_graphs=way == "graphs"))


def _obstacle(way: str, shape: DecoderConfig, device: torch.device, *, numerics: Numerics) -> str:
    """Why decoding cannot go this way; empty where it can."""
    if way == "compact" and numerics == "invariant":
        return "model.numerics is invariant, which it does not keep"
    if way == "compact":
        return "" if device.type == "cpu" else f"it is for a CPU, and this is {device.type}"
    if device.type != "cuda" and not (way == "fused" and _is_interpreted()):
        return f"it needs a CUDA device, and this is {device.type}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if numerics == "fast" and shape.head_dim not in HEAD_DIMS:
        return f"heads are {shape.head_dim} wide, and it knows {HEAD_DIMS}"
    return ""


def _is_interpreted() -> bool:
    """Triton runs kernels in Python, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"
