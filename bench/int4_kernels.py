"""Claim: decoding by INT4 weights reads a quarter of the bytes, and the time follows.

    python bench/int4_kernels.py              # products of 1.5 B and 8 B shapes
    python bench/int4_kernels.py --sweep      # tiles against each other

Every product of a layer is timed by itself, in bf16 (the engine's kernels for one row, else
torch's) and in INT4 with groups of 128, in CUDA graphs over as many copies of the weights as do not
fit into the cache. The result of each is compared with that of the dequantised weights. GB/s counts
the bytes of the weights and their scales. The last line printed is the JSON, also written to
bench/results/.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import common
import torch
from torch import Tensor
from torch.nn import functional
from triton.runtime.errors import OutOfResources

from homeostat.rollout.native.cuda import int4_few, int4_products, narrow
from homeostat.rollout.native.cuda.int4_layout import Int4Matrix
from homeostat.rollout.native.cuda.int4_products import Scratch, Tile
from homeostat.rollout.native.cuda.products import Scaled

# (outputs, inputs) of a layer's products: q, k and v; o; gate and up; down.
SHAPES = {
    "1.5b": {"qkv": (2048, 1536), "o": (1536, 1536), "gate": (17920, 1536), "down": (1536, 8960)},
    "8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate": (28672, 4096), "down": (4096, 14336)},
}
ROWS = (1, 32, 256)
GROUP = 128
EPS = 1e-6
# Bytes of weights that no cache holds.
COLD_BYTES = 300e6
REPEATS = 15
DEVICE = torch.device("cuda")


def timed(step: Callable[[int], Any], copies: int) -> float:
    """Return the seconds of one call, in a CUDA graph of one call for each copy of the weights."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            step(copy)
    for _ in range(3):
        graph.replay()
    found = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / copies)
    return statistics.median(found)


class Product:
    """A product of a layer in both precisions, with inputs for some rows."""

    def __init__(self, name: str, outputs: int, inputs: int) -> None:
        self.name = name
        weight = torch.randn(outputs, inputs, device=DEVICE) * 0.02
        matrix = Int4Matrix.of_weights([weight], group_size=GROUP)
        exact = matrix.dequantised(dtype=torch.bfloat16)
        self.copies = max(1, min(64, int(COLD_BYTES // exact.nbytes) + 1))
        small = max(1, min(128, int(COLD_BYTES // matrix.num_bytes) + 1))
        self.weights = [exact.clone() for _ in range(self.copies)]
        self.matrices = [
            replace(
                matrix,
                words_TBW=matrix.words_TBW.clone(),
                scales_TGP=matrix.scales_TGP.clone(),
            )
            for _ in range(small)
        ]
        self.norm = torch.rand(inputs, device=DEVICE, dtype=torch.bfloat16) + 0.5
        self.scratch = Scratch(DEVICE)
        self.num_outputs = outputs

    def rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        inputs = self.weights[0].shape[1]
        x = torch.randn(num_rows, inputs, device=DEVICE, dtype=torch.bfloat16)
        return x, torch.randn(num_rows, self.num_outputs, device=DEVICE, dtype=torch.bfloat16)

    def bf16(self, num_rows: int) -> float:
        x, residual = self.rows(num_rows)
        if num_rows > narrow.MAX_ROWS:
            return timed(lambda n: functional.linear(x, self.weights[n]), self.copies)
        half = self.num_outputs // 2

        def step(n: int) -> None:
            weight = self.weights[n]
            if self.name == "gate":
                narrow.gated(x, self.norm, weight[:half], weight[half:], eps=EPS)
            elif self.name == "qkv":
                maps = weight.split([half, half // 2, half // 2])
                narrow.into_heads(x, self.norm, narrow.HeadMaps(tuple(maps), None), eps=EPS)
            else:
                narrow.added(residual, x, weight)

        return timed(step, self.copies)

    def dense(self, num_rows: int) -> tuple[float, float]:
        """Time dequantising the weights and a library's product."""
        x, _ = self.rows(num_rows)

        def step(n: int) -> Tensor:
            weight = self.matrices[n].dequantised(dtype=torch.bfloat16)
            return functional.linear(x, weight)

        return 0.0, timed(step, min(8, len(self.matrices)))

    def int4(
        self, num_rows: int, tile: Tile | None = None, few: tuple[int, int] | None = None
    ) -> tuple[float, float]:
        """Return how far the result is from the dequantised weights', and the seconds."""
        if tile is None and num_rows > int4_products.MAX_ROWS:
            return self.dense(num_rows)
        x, residual = self.rows(num_rows)
        is_gated, is_added = self.name == "gate", self.name in ("o", "down")
        width = self.num_outputs // 2 if is_gated else self.num_outputs
        out = torch.zeros_like(residual[:, :width]).contiguous()
        norm = torch.ones(width, device=DEVICE, dtype=torch.bfloat16) if is_added else None
        how = {"is_gated": is_gated, "norm_O": norm}

        def step(n: int) -> None:
            if few is None:
                int4_products.launch(
                    Scaled(x), self.matrices[n], out, self.scratch, **how, tile=tile
                )
            else:
                int4_few.launch(Scaled(x), self.matrices[n], out, **how, sizes=few)

        step(0)
        return self._difference(out, x.float()), timed(step, len(self.matrices))

    def _difference(self, out: Tensor, x: Tensor) -> float:
        """Return the largest difference from the dequantised weights, relative to the largest."""
        wanted = x @ self.weights[0].float().t()
        if self.name == "gate":
            gate, up = wanted.chunk(2, dim=1)
            wanted = functional.silu(gate) * up
        return float((out.float() - wanted).abs().max() / wanted.abs().max())

    def entry(self, num_rows: int) -> dict[str, Any]:
        before = self.bf16(num_rows)
        difference, after = self.int4(num_rows)
        return {
            "bf16_us": round(before * 1e6, 2),
            "int4_us": round(after * 1e6, 2),
            "ratio": round(before / after, 3),
            "bf16_gb_s": round(self.weights[0].nbytes / before / 1e9),
            "int4_gb_s": round(self.matrices[0].num_bytes / after / 1e9),
            "difference": difference,
        }


def compare() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size, products in SHAPES.items():
        for name, (outputs, inputs) in products.items():
            product = Product(name, outputs, inputs)
            for num_rows in ROWS:
                entry = product.entry(num_rows)
                found.setdefault(size, {}).setdefault(str(num_rows), {})[name] = entry
                print(size, name, num_rows, entry, flush=True)
            del product
            torch.cuda.empty_cache()
    for size, by_rows in found.items():
        for num_rows, entries in by_rows.items():
            totals = [sum(e[key] for e in entries.values()) for key in ("bf16_us", "int4_us")]
            by_rows[num_rows] = {**entries, "layer_ratio": round(totals[0] / totals[1], 3)}
            print(size, num_rows, "layer", [round(t, 1) for t in totals], flush=True)
    return found


# Warps of a program and units that each reads ahead, for one row.
FEW = (
    (2, 3),
    (2, 4),
    (2, 6),
    (4, 1),
    (4, 3),
    (4, 4),
    (4, 8),
    (8, 4),
    (8, 7),
    (8, 9),
    (16, 2),
    (16, 5),
)
# Tiles of tensor cores: outputs, rows, shares, warps, stages.
TILES = {
    32: ((64, 32, 1, 4, 4), (64, 32, 4, 4, 4), (64, 32, 8, 4, 4), (64, 32, 11, 4, 3),
         (128, 32, 4, 8, 4), (64, 32, 4, 4, 6)),
    256: ((64, 128, 1, 4, 2), (128, 128, 1, 8, 2), (64, 64, 1, 4, 3)),
}  # fmt: skip


def sweep(product: Product, label: str) -> None:
    """Print the time of a product with every tile."""
    print(label, "bf16", [round(product.bf16(rows) * 1e6, 1) for rows in ROWS], flush=True)
    tries: list[tuple[int, Any, Callable[[], tuple[float, float]]]] = [
        (1, f"{few[0]} warps, {few[1]} units", partial(product.int4, 1, None, few)) for few in FEW
    ]
    for rows, tiles in TILES.items():
        chosen = [Tile(*sizes) for sizes in tiles if sizes[2] == 1 or product.name != "gate"]
        tries += [(rows, tile, partial(product.int4, rows, tile)) for tile in chosen]
    tries.append((256, "dense", partial(product.dense, 256)))
    for rows, tile, run in tries:
        try:
            difference, seconds = run()
        except (RuntimeError, ValueError, OutOfResources) as error:
            print(label, rows, tile, "failed:", str(error)[:80], flush=True)
            continue
        gb_s = product.matrices[0].num_bytes / seconds / 1e9
        text = f"{seconds * 1e6:.1f} us, {gb_s:.0f} GB/s, difference {difference:.1e}"
        print(label, rows, tile, text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_commit(parser)
    parser.add_argument("--sweep", action="store_true", help="compare tiles")
    parser.add_argument("--sizes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--names", nargs="*", default=["gate", "down"])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.sweep:
        for size in arguments.sizes:
            for name in arguments.names:
                sweep(Product(name, *SHAPES[size][name]), f"{size} {name}")
                torch.cuda.empty_cache()
        return
    facts = common.facts_of(arguments, ("torch", "triton"))
    common.write_result("int4_kernels", facts | {"group_size": GROUP, "products": compare()})


if __name__ == "__main__":
    main()
