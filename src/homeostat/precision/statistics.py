"""Measure what quantisation does to the numbers of a layer.

    tensor -> some of its rows -> quantised as the layer does -> tally -> metrics of a group

A tally is a vector of sums and extremes on the tensor's device. Tallies of many tensors are merged
there, and copied to the host once. Rows are sampled evenly, in whole blocks, so that a measured
step costs little; the largest number is that of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from homeostat.precision import fp8, int4
from homeostat.precision.recipe import E4M3, E5M2, Block, Fp8Recipe

# Rows of a tensor that are looked at: eight blocks of weights.
MAX_ROWS = 1024
# Numbers this many times the largest of the format are cut by more than its rounding.
_EDGE = {E4M3: 464 / 448, E5M2: 61440 / 57344}
_INT4_EDGE = 7.5 / 7
# How the numbers of a tally are merged: largest, count, cut, flushed, scales, squares.
_MERGE = ("max", "sum", "sum", "sum", "min", "max", "sum", "sum")


@torch.no_grad()
def fp8_tally(x: Tensor, recipe: Fp8Recipe, *, kind: str, expected: Tensor | None = None) -> Tensor:
    """Return the tally of an input, a weight or a gradient that is quantised to FP8.

    `expected` is the largest number that a delayed scale expects.
    """
    block = recipe.weights if kind == "weight" else recipe.rows
    dtype = E4M3 if kind != "gradient" else recipe.gradients or E4M3
    largest = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    given = expected
    if given is None and block == (None, None):
        given = largest.reshape(1)
    rows = _sampled(x.reshape(-1, x.shape[-1]), block)
    how = {"block": block, "dtype": dtype, "power_of_two": recipe.power_of_two, "amax": given}
    found = fp8.quantise(rows, **how)
    values, back = found.values.float(), fp8.dequantise(found)
    limit = fp8.largest_of(dtype)
    return _tally(rows, values, back, found.scales, largest, limit=limit, edge=_EDGE[dtype])


@torch.no_grad()
def int4_tally(weight: Tensor, *, group_size: int) -> Tensor:
    """Return the tally of a weight that is rounded to INT4."""
    largest = torch.linalg.vector_norm(weight, torch.inf, dtype=torch.float32)
    rows = _sampled(weight.reshape(-1, weight.shape[-1]), (1, group_size))
    grouped = rows.float().unflatten(-1, (-1, group_size))
    scales = int4.scales_of(grouped.abs().amax(-1, keepdim=True))
    values = torch.round(grouped / scales).clamp(-int4.LARGEST, int4.LARGEST)
    back = values * scales
    return _tally(grouped, values, back, scales, largest, limit=int4.LARGEST, edge=_INT4_EDGE)


def merged(tallies: Iterable[Tensor]) -> Tensor:
    """Return one tally of all numbers."""
    stack = torch.stack([tally.cpu() for tally in tallies])
    parts = [getattr(torch, how if how == "sum" else f"a{how}")(stack[:, i], 0)
             for i, how in enumerate(_MERGE)]  # fmt: skip
    return torch.stack(parts)


def metrics_of(tallies: Mapping[str, Iterable[Tensor]], *, format: str) -> dict[str, float]:
    """Return the metrics of each group of layers, by their names in observe/catalogue."""
    found: dict[str, float] = {}
    for group, some in tallies.items():
        amax, count, cut, flushed, low, high, error, norm = merged(some).tolist()
        found |= {
            f"{format}/{group}/amax": amax,
            f"{format}/{group}/saturated_share": cut / count,
            f"{format}/{group}/flushed_share": flushed / count,
            f"{format}/{group}/scale_min": low,
            f"{format}/{group}/scale_max": high,
            # Nothing but zeros has no error.
            f"{format}/{group}/error": (error / norm) ** 0.5 if norm else error,
        }
    return found


def _tally(
    x: Tensor,
    values: Tensor,
    back: Tensor,
    scales: Tensor,
    largest: Tensor,
    *,
    limit: float,
    edge: float,
) -> Tensor:
    size = x.float().abs()
    is_cut = (values.abs() == limit) & (size > back.abs() * edge)
    is_flushed = (size > 0) & (values == 0)
    numbers = [
        largest,
        torch.tensor(float(x.numel()), device=x.device),
        is_cut.sum(),
        is_flushed.sum(),
        scales.amin(),
        scales.amax(),
        (x.float() - back).square().sum(),
        size.square().sum(),
    ]
    return torch.stack([number.double() for number in numbers])


def _sampled(x_RC: Tensor, block: Block) -> Tensor:
    """Return at most MAX_ROWS rows, evenly spread, in whole blocks."""
    rows = block[0] or 1
    num_blocks = -(-len(x_RC) // rows)
    step = -(-num_blocks * rows // MAX_ROWS)
    if step <= 1:
        return x_RC
    if rows == 1:
        return x_RC[::step]
    starts = range(0, len(x_RC), rows * step)
    return torch.cat([x_RC[start : start + rows] for start in starts])
