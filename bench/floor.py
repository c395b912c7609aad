"""The limits of the hardware: copy bandwidth, matmul rate, and the least time for given work.

Decoding is bound by bytes: each step reads all weights once, and keys and values of every live
token. Training is bound by arithmetic: three products (forward, gradient of the input, gradient of
the weight) per weight and token, and attention over the pairs of tokens that see each other. The
floors count what must be done, not what an implementation does: a group's prompt once, the head for
trained tokens only, nothing computed again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from shapes import Shape

_COPY_BYTES = {"cuda": 2**31, "cpu": 2**27}
_MATMUL_SIZE = {"cuda": 8192, "cpu": 512}
_LAPS = 10


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(work: Callable[[], object], device: torch.device, *, laps: int = _LAPS) -> float:
    found = []
    for lap in range(laps + 2):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        if lap >= 2:
            found.append(time.perf_counter() - started)
    return statistics.median(found)


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured: bytes per second of a device copy (read and written), FLOP per second of a matmul
    in the compute dtype."""

    copy_bytes_per_s: float
    matmul_flops: float

    def to_json(self) -> dict[str, float]:
        return {
            "copy_tb_per_s": round(self.copy_bytes_per_s / 1e12, 3),
            "matmul_tflops": round(self.matmul_flops / 1e12, 3),
        }


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    num_bytes = _COPY_BYTES[device.type]
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_seconds(lambda: target.copy_(source), device)
    size = _MATMUL_SIZE[device.type]
    left = torch.randn(size, size, dtype=dtype, device=device)
    right = torch.randn(size, size, dtype=dtype, device=device)
    matmul_s = median_seconds(lambda: left @ right, device)
    return Rates(2 * num_bytes / copy_s, 2 * size**3 / matmul_s)


def decode_bytes(
    shape: Shape,
    dtype: torch.dtype,
    *,
    batch: int,
    context: float,
    experts_hit: float | None = None,
) -> float:
    """Return the bytes that one decoding step must read, at this mean context."""
    weights = shape.weight_bytes(dtype, experts_hit=experts_hit)
    return weights + batch * context * shape.token_bytes(dtype)


def generate_seconds(
    shape: Shape, dtype: torch.dtype, rates: Rates, *, batch: int, prompt: int, new: int
) -> float:
    """The floor of decoding `new` tokens for `batch` prompts at once."""
    per_step = decode_bytes(shape, dtype, batch=batch, context=prompt + (new + 1) / 2)
    return new * per_step / rates.copy_bytes_per_s


def train_flops(shape: Shape, *, groups: int, samples: int, prompt: int, new: int) -> float:
    """One update on `groups` x `samples` completions: forward and backward."""
    rows, trained = groups * samples, groups * samples * new
    products = 6 * (shape.body_params * (groups * prompt + trained) + shape.head_params * trained)
    pairs = groups * prompt * (prompt + 1) / 2 + rows * new * (prompt + (new + 1) / 2)
    # Scores and weighted values: 2 products forward, twice that backward.
    attention = 3 * 4 * shape.layers * shape.heads * shape.head_dim * pairs
    return products + attention
