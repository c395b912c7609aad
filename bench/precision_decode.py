"""Claim: decoding from FP8 weights is faster than from bf16 ones, most of all in small batches.

The native engine decodes the same random weights in every precision, one after the other in one
run: Qwen2's 1.5 B shape and one of 8 B, batches of 1, 32 and 256. Counted is the steady phase, as
in bench/engine_decode.py. Beside each rate stand the engine's own gap (what it samples, scored by
the trainer's function in the same precision) and its memory.

    python bench/precision_gpu.py --only decode_1_5b decode_8b
    python bench/precision_decode.py --shapes 1.5b --batches 1      # parts of it
    python bench/precision_decode.py --tiny --device cpu            # proves the script
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import engine_decode
import floor
import torch
from shapes import DTYPES, SHAPES, random_decoder

from homeostat.config.fp8 import Fp8Config
from homeostat.config.native import NativeEngineConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.models.decoder import Decoder
from homeostat.rollout.native.engine import NativeEngine

BATCHES = (1, 32, 256)
NEW_TOKENS = 192
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Precision:
    """How an engine is made: its FP8 settings and its own."""

    fp8: Fp8Config | None = None
    engine: dict[str, Any] = field(default_factory=dict)


PRECISIONS = {
    "bf16": Precision(),
    "fp8": Precision(Fp8Config(recipe="blockwise")),
    "fp8_rowwise": Precision(Fp8Config(recipe="rowwise")),
    "fp8_cache": Precision(Fp8Config(recipe="blockwise"), {"kv_cache_dtype": "fp8"}),
}


def decode_1_5b(place: Any) -> dict[str, Any]:
    """Decode the 1.5 B shape; `place` has a device and says whether to be tiny."""
    return measure("tiny" if place.is_tiny else "1.5b", place.device, BATCHES, list(PRECISIONS))


def decode_8b(place: Any) -> dict[str, Any]:
    """Decode the 8 B shape."""
    return measure("tiny" if place.is_tiny else "8b", place.device, BATCHES, ["bf16", "fp8"])


def measure(
    shape: str, device: torch.device, batches: Sequence[int], precisions: Sequence[str]
) -> dict[str, Any]:
    """Return tokens per second by precision and batch, and the ratios to bf16."""
    dtype = DTYPES[device.type]
    is_tiny = shape == "tiny"
    batches = [min(batch, 4) for batch in batches] if is_tiny else list(batches)
    rates = floor.Rates(copy_bytes_per_s=1.0, matmul_flops=1.0)
    new_tokens = 6 if is_tiny else NEW_TOKENS
    bench = engine_decode.Bench(SHAPES[shape], device, dtype, rates, new_tokens)
    model = random_decoder(bench.shape, device=device, dtype=dtype)
    found: dict[str, Any] = {}
    for name in precisions:
        found[name] = _measure_engine(bench, model, PRECISIONS[name], batches)
        print(shape, name, json.dumps(found[name]), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for name in precisions[1:]:
        for batch in batches:
            key = f"batch_{batch}"
            ratio = found[name][key]["tokens_per_s"] / found["bf16"][key]["tokens_per_s"]
            found[name][key]["ratio"] = round(ratio, 3)
    return found


def _measure_engine(
    bench: engine_decode.Bench, model: Decoder, precision: Precision, batches: Sequence[int]
) -> dict[str, Any]:
    engine = NativeEngine(
        model,
        NativeEngineConfig(max_concurrency=max(batches), **precision.engine),
        device=bench.device,
        max_tokens=engine_decode.PROMPT_TOKENS + bench.new_tokens,
        decode=None,
        chunk_bytes=TrainerConfig().logits_bytes(bench.device.type),
        fp8=precision.fp8,
    )
    found: dict[str, Any] = {}
    for batch in dict.fromkeys(batches):
        engine_decode.generate(engine, bench.requests(batch, 4, seed=0))
        rounds = [
            engine_decode.generate(engine, bench.requests(batch, bench.new_tokens, seed=1 + n))
            for n in range(ROUNDS)
        ]
        rate = statistics.median(one.steady_tokens / one.steady_s for one in rounds)
        gaps = engine_decode.logp_differences(bench, engine, rounds[-1].completions, batch)
        found[f"batch_{batch}"] = {
            "tokens_per_s": round(rate, 1),
            "step_ms": round(1e3 * batch / rate, 4),
            **{name: round(value, 5) for name, value in gaps.items()},
        }
    found["cache_bytes"] = engine.stats().cache_bytes
    if bench.device.type == "cuda":
        found["allocated_gb"] = round(torch.cuda.memory_allocated() / 1e9, 3)
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["1.5b", "8b"])
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    shapes = ["tiny"] if options.tiny else options.shapes
    for shape in shapes:
        found = measure(shape, device, options.batches, options.precisions)
        print(json.dumps({shape: found}), flush=True)


if __name__ == "__main__":
    main()
