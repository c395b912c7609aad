"""Measurements of INT4 weights for precision_gpu.py: rounding, products, and decoding.

    bits      rounding on the device has the bits of the CPU, and its speed
    products  each product of a layer, 1.5 B and 8 B shapes, at 1, 32 and 256 rows (int4_kernels.py)
    decode    the engine's steady tokens a second in bf16 and INT4, and the bytes of the weights

Both precisions of a product or shape are measured in one process, one after the other.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Protocol

import engine_decode
import floor
import torch
from shapes import DTYPES, SHAPES, Shape, random_decoder

from homeostat.config.int4 import Int4Config
from homeostat.models.decoder import Decoder
from homeostat.precision.int4 import fake_quantise
from homeostat.precision.int4_rewrite import Int4Rewrite

# Llama 3's 8 B, with tied embeddings.
LARGE = Shape(32, 4096, 32, 8, 128, 14336, vocab=128_256)
BATCHES, TINY_BATCHES = (1, 32, 256), (1, 5)
NEW_TOKENS, TINY_NEW_TOKENS = 128, 8
ROUNDS = 3


class Place(Protocol):
    """Where to measure, and whether only to show that the measurement works."""

    device: torch.device
    is_tiny: bool


def bits(place: Place) -> dict[str, Any]:
    """Compare rounding on the device with the CPU's, over all bf16 numbers and beyond."""
    same, counted = True, 0
    for dtype, width in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32)):
        for size in (32, 64, 128):
            generator = torch.Generator().manual_seed(size)
            weight = torch.randn(512, 1024, generator=generator)
            weight = (weight * torch.logspace(-44, 37, 512)[:, None]).to(dtype)
            weight[0], weight[1, 3], weight[2, 5] = 0.0, torch.inf, torch.nan
            wanted = fake_quantise(weight, group_size=size)
            found = fake_quantise(weight.to(place.device), group_size=size).cpu()
            is_nan = wanted.isnan()
            same &= torch.equal(found.isnan(), is_nan)
            same &= torch.equal(found.view(width)[~is_nan], wanted.view(width)[~is_nan])
            counted += weight.numel()
    return {"same_bits": bool(same), "numbers": counted, "gb_per_s": _rounding_rate(place)}


def _rounding_rate(place: Place) -> float:
    size = 256 if place.is_tiny else 16384
    weight = torch.randn(size, 4096, device=place.device, dtype=torch.bfloat16)
    out = torch.empty_like(weight)
    found = []
    for _ in range(12):
        floor.synchronize(place.device)
        started = time.perf_counter()
        fake_quantise(weight, group_size=128, out=out)
        floor.synchronize(place.device)
        found.append(2 * weight.nbytes / (time.perf_counter() - started) / 1e9)
    return round(statistics.median(found), 1)


def products(place: Place) -> dict[str, Any]:
    """Time the products of a layer; nothing can be said of them without a GPU."""
    if place.device.type != "cuda":
        return {"skipped": "its kernels need a GPU"}
    import int4_kernels

    return int4_kernels.compare()


def decode(place: Place) -> dict[str, Any]:
    """Measure the engine over both shapes and both precisions."""
    if place.is_tiny:
        return {"tiny": _shape(SHAPES["tiny"], place)}
    return {"1.5b": _shape(SHAPES["1.5b"], place), "8b": _shape(LARGE, place)}


def _shape(shape: Shape, place: Place) -> dict[str, Any]:
    dtype = DTYPES[place.device.type]
    model = random_decoder(shape, device=place.device, dtype=dtype)
    found: dict[str, Any] = {"bf16": _engine(shape, model, place)}
    rewrite = Int4Rewrite(model, Int4Config(group_size=32 if place.is_tiny else 128))
    found["int4"] = _engine(shape, model, place)
    packed = sum(w.numel() for layer in rewrite.layers for w in layer.weights.values())
    found["bytes_bf16"] = 2 * packed
    found["bytes_int4"] = packed // 2 + 2 * packed // rewrite.config.group_size
    batches = TINY_BATCHES if place.is_tiny else BATCHES
    for batch in batches:
        after, before = (found[name][f"batch_{batch}"]["tokens_per_s"] for name in ("int4", "bf16"))
        found[f"ratio_{batch}"] = round(after / before, 3)
    del model, rewrite
    if place.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _engine(shape: Shape, model: Decoder, place: Place) -> dict[str, Any]:
    batches = TINY_BATCHES if place.is_tiny else BATCHES
    new_tokens = TINY_NEW_TOKENS if place.is_tiny else NEW_TOKENS
    rates = floor.Rates(1.0, 1.0)
    bench = engine_decode.Bench(shape, place.device, model.output_weight().dtype, rates, new_tokens)
    engine = engine_decode.engine_of(bench, model, max_batch=max(batches))
    found: dict[str, Any] = {}
    for batch in batches:
        engine_decode.generate(engine, bench.requests(batch, min(8, new_tokens), seed=0))
        rounds = [
            engine_decode.generate(engine, bench.requests(batch, new_tokens, seed=1 + number))
            for number in range(ROUNDS)
        ]
        rate = statistics.median(one.steady_tokens / one.steady_s for one in rounds)
        gaps = engine_decode.logp_differences(bench, engine, rounds[-1].completions, batch)
        entry = {"tokens_per_s": round(rate, 1), "step_ms": round(1e3 * batch / rate, 4), **gaps}
        found[f"batch_{batch}"] = entry
        print(f"  {batch} rows: {entry}", flush=True)
    engine.close()
    return found
