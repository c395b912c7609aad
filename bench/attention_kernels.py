"""Compare attention kernels over packed rows, forward and backward, on this GPU.

    python bench/attention_kernels.py

    varlen      torch.nn.attention.varlen: rows of any lengths
    rows        cuDNN where all rows are equally long, else varlen: what model.attention=auto takes
    flash_rows  flash attention through SDPA, where all rows are equally long

Each is compared with varlen before it is timed. `again_s`: the first call with other lengths, which
for cuDNN is a new plan. FLOPs count the causal half, backward as twice forward. The last line
printed is the JSON, also written to bench/results/.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import common
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from homeostat.ops.attention import PackedLayout, packed_attention

Attend = Callable[[Tensor, Tensor, Tensor, PackedLayout], Tensor]
HEADS = {"0.5b": (14, 2, 64), "1.5b": (12, 2, 128)}


def packed(kernel: str) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        return packed_attention(q, k, v, layout, scale=q.shape[-1] ** -0.5, kernel=kernel)

    return attend


def flash_rows(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
    assert len(set(layout.lengths)) == 1, "rows of one length"
    size = (len(layout.lengths), layout.max_length)
    heads = (x.unflatten(0, size).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


WAYS: dict[str, Attend] = {
    "varlen": packed("varlen"),
    "rows": packed("rows"),
    "flash_rows": flash_rows,
}


def inputs(heads: str, num_tokens: int) -> list[Tensor]:
    num_q, num_kv, size = HEADS[heads]
    generator = torch.Generator("cuda").manual_seed(0)
    how = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    sizes = (num_q, num_kv, num_kv, num_q)
    return [torch.randn(num_tokens, count, size, **how) for count in sizes]


def results_of(attend: Attend, given: list[Tensor], layout: PackedLayout) -> list[Tensor]:
    *qkv, upstream = given
    qkv = [x.detach().requires_grad_() for x in qkv]
    out = attend(*qkv, layout)
    out.backward(upstream)
    return [out.detach(), *(x.grad for x in qkv)]


def timed(attend: Attend, given: list[Tensor], layout: PackedLayout) -> tuple[float, float]:
    """Seconds of forward, and of forward and backward."""

    def lap(run: Callable[[], Any]) -> float:
        run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 10

    leaves = [x.detach().requires_grad_() for x in given[:3]]
    return lap(lambda: attend(*leaves, layout)), lap(lambda: results_of(attend, given, layout))


def first_call(attend: Attend, heads: str, lengths: list[int]) -> float:
    layout = PackedLayout.of(lengths, torch.device("cuda"))
    given = inputs(heads, layout.num_tokens)
    torch.cuda.synchronize()
    start = time.perf_counter()
    results_of(attend, given, layout)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(way: str, heads: str, lengths: list[int]) -> dict[str, Any]:
    attend = WAYS[way]
    layout = PackedLayout.of(lengths, torch.device("cuda"))
    given = inputs(heads, layout.num_tokens)
    wanted = results_of(WAYS["varlen"], given, layout)
    try:
        found = results_of(attend, given, layout)
        off = [
            round(float((x - y).float().norm() / y.float().norm()), 5)
            for x, y in zip(found, wanted, strict=True)
        ]
        forward_s, both_s = timed(attend, given, layout)
        shorter = [length - 8 for length in lengths]
        again_s = first_call(attend, heads, shorter)
    except (RuntimeError, AssertionError) as error:
        return {"cannot": str(error).splitlines()[0][:200]}
    num_q, _, size = HEADS[heads]
    flops = 2.0 * num_q * size * sum(length**2 for length in lengths)
    return {
        "off": off,
        "forward_ms": round(forward_s * 1e3, 3),
        "both_ms": round(both_s * 1e3, 3),
        "tflop_per_s": round(3 * flops / both_s / 1e12, 1),
        "again_s": round(again_s, 3),
    }


def main() -> None:
    rng = np.random.default_rng(0)
    mixed = [int(length) * 8 for length in rng.integers(25, 500, 16)]
    workloads = {
        "16x2048": [2048] * 16,
        "16x2000": [2000] * 16,
        "1x32768": [32768],
        "4x8192": [8192] * 4,
        "64x576": [576] * 64,
        "mixed": mixed,
    }
    results: dict[str, Any] = {}
    for heads in HEADS:
        for name, lengths in workloads.items():
            for way in WAYS:
                key = f"{heads} {name} {way}"
                results[key] = measure(way, heads, lengths)
                print(key, results[key], flush=True)
    facts = common.machine(("torch", "triton", "numpy"))
    gpu = torch.cuda.get_device_name()
    common.write_result("attention_kernels", {**facts, "gpu": gpu, "cases": results})


if __name__ == "__main__":
    main()
