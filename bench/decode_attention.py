"""Claim: a new token's attention over long contexts reads keys and values at the speed of memory.

Reinforcement learning on long answers decodes many rows at first and few at the end, all of them
over thousands of cached tokens. The kernel of a decoding step is timed by itself, in CUDA graphs of
one call a layer over caches that no cache level holds: 1, 8, 64 and 256 rows over 128 to 32,768
cached tokens, with the heads of Qwen2's 0.5 B and 1.5 B and of an 8 B. The floor is the bytes of
keys and values over the bandwidth of a device copy. The peer is torch's attention over the same
keys, laid out one after the other as a cache without blocks would be.

    python bench/decode_attention.py                       # on a GPU
    TRITON_INTERPRET=1 python bench/decode_attention.py --tiny --device cpu   # proves the script
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
import floor
import int4_kernels
import torch
from torch import Tensor
from torch.nn import functional

from homeostat.rollout.native.cuda.attention import (
    AttentionScratch,
    AttentionShape,
    decode_attention,
    shares_for,
)

# Query heads, key heads, width of a head.
HEADS = {"0.5b": (14, 2, 64), "1.5b": (12, 2, 128), "8b": (32, 8, 128)}
ROWS, CONTEXTS = (1, 8, 64, 256), (128, 1024, 8192, 32768)
BLOCK_TOKENS = 16
SCALE = 0.1
# Bytes of keys and values of one layer at most, and of all layers that take turns at least.
LAYER_BYTES, COLD_BYTES = 10e9, 400e6
CALLS = 28


@dataclass(frozen=True, slots=True)
class Cell:
    """Rows that each attend to as many cached tokens, with one cache a layer."""

    shape: AttentionShape
    num_rows: int
    context: int
    device: torch.device
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        per_token = 2 * self.shape.num_kv_heads * self.shape.head_dim * self.dtype.itemsize
        return self.num_rows * self.context * per_token

    @property
    def num_layers(self) -> int:
        return max(1, min(CALLS, int(COLD_BYTES / self.num_bytes)))

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def tables(self) -> Tensor:
        """Blocks in no order, as a cache has them after a while; the last one for the new token."""
        blocks = self.context // BLOCK_TOKENS + 1
        order = 1 + torch.randperm(self.num_rows * blocks, device=self.device)
        return order.view(self.num_rows, blocks).int()

    def ours(self) -> Callable[[int], Tensor]:
        """Return one call by the number of its layer."""
        shape, tables_BK = self.shape, self.tables()
        width, kv_width = shape.group * shape.num_kv_heads, shape.num_kv_heads
        q, k, v = (
            self.drawn(self.num_rows, heads * shape.head_dim)
            for heads in (width, kv_width, kv_width)
        )
        size = 2, tables_BK.numel() + 1, kv_width, BLOCK_TOKENS, shape.head_dim
        caches = [self.drawn(*size) for _ in range(self.num_layers)]
        stores_LA = torch.tensor(
            [[part.data_ptr() for part in cache] for cache in caches], device=self.device
        )
        turns = torch.randn(2, self.num_rows, shape.head_dim // 2, device=self.device)
        positions_B = torch.full((self.num_rows,), self.context, device=self.device).int()
        scratch = AttentionScratch(
            shape,
            num_rows=self.num_rows,
            shares=shares_for(shape, self.num_rows, max_keys=self.context),
            device=self.device,
        )

        def call(number: int) -> Tensor:
            # `caches` are held here: the kernel knows them by their addresses.
            return decode_attention(
                q,
                k,
                v,
                norms=None,
                cos_BF=turns[0],
                sin_BF=turns[1],
                stores=stores_LA[number % len(caches)],
                tables_BK=tables_BK,
                positions_B=positions_B,
                shape=shape,
                scratch=scratch,
                scale=SCALE,
            )

        return call

    def peer(self) -> Callable[[int], Tensor]:
        shape = self.shape
        q = self.drawn(self.num_rows, shape.group * shape.num_kv_heads, 1, shape.head_dim)
        size = self.num_rows, shape.num_kv_heads, self.context, shape.head_dim
        caches = [(self.drawn(*size), self.drawn(*size)) for _ in range(self.num_layers)]

        def call(number: int) -> Tensor:
            keys, values = caches[number % len(caches)]
            return functional.scaled_dot_product_attention(
                q, keys, values, scale=SCALE, enable_gqa=True
            )

        return call

    def seconds(self, call: Callable[[int], Tensor]) -> float:
        if self.device.type == "cuda":
            return int4_kernels.timed(call, CALLS)
        return floor.median_seconds(lambda: call(0), self.device, laps=1)

    def entry(self, rates: floor.Rates) -> dict[str, Any]:
        ours, peer = self.seconds(self.ours()), self.seconds(self.peer())
        least = self.num_bytes / rates.copy_bytes_per_s
        return {
            "us": round(ours * 1e6, 2),
            "floor_us": round(least * 1e6, 2),
            "share_of_floor": round(least / ours, 3),
            "peer_us": round(peer * 1e6, 2),
            "ratio": round(peer / ours, 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_commit(parser)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rates = floor.measure_rates(device, dtype)
    rows, contexts = ((1, 2), (32,)) if arguments.tiny else (ROWS, CONTEXTS)
    found: dict[str, Any] = {}
    for size, (heads, kv_heads, head_dim) in HEADS.items():
        shape = AttentionShape(kv_heads, heads // kv_heads, head_dim, BLOCK_TOKENS, eps=1e-6)
        for context in contexts:
            for num_rows in rows:
                cell = Cell(shape, num_rows, context, device, dtype)
                if cell.num_bytes > LAYER_BYTES:
                    continue
                entry = cell.entry(rates)
                print(size, f"{num_rows} rows over {context}", entry, flush=True)
                found.setdefault(size, {})[f"{num_rows} x {context}"] = entry
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    if not arguments.tiny:
        facts = common.facts_of(arguments, ("torch", "triton"))
        common.write_result(
            "decode_attention", facts | {"rates": rates.to_json(), "attention": found}
        )


if __name__ == "__main__":
    main()
