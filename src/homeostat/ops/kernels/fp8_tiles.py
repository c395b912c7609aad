"""The product of FP8 matrices in the invariant numerics: a @ b.T in tiles, with both sides' scales.

    out[m, o] = sum over blocks of 128 inputs:  (a[m, :] . b[o, :]) * scale_a * scale_b

A program computes one tile and adds up blocks of inputs in one order, in fp32; the sum inside a
block is made by the tensor cores. So the bits of an entry depend only on its row, its column and
the number of inputs. Scales of rows are multiplied at the end.

Two tile shapes serve many rows and few. Each device is tested once for whether they give the same
bits (`_tiles_agree`); if they do not, only one is used.

Suffixes: `_M` rows, `_K` inputs, `_O` outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels import launches
from homeostat.ops.kernels.e4m3 import BLOCK
from homeostat.ops.kernels.products import along


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of a tile. `is_turned` puts the weight's rows into the tile's rows."""

    rows: int
    outputs: int
    warps: int
    stages: int
    is_turned: bool = False


MANY = Tile(rows=128, outputs=128, warps=8, stages=3)
FEW = Tile(rows=16, outputs=64, warps=4, stages=5, is_turned=True)
_FEW_ROWS = 64


def scaled_product(
    a_MK: Tensor,
    a_scales: Tensor,
    b_OK: Tensor,
    b_scales: Tensor,
    *,
    num_rows: int,
    is_blockwise: bool,
    tile: Tile | None = None,
) -> Tensor:
    """Return bf16 [num_rows, O]. Rows, inputs and outputs may be padded with zeros.

    Blockwise, `a_scales` is [K / 128, M] and `b_scales` [O / 128, K / 128 or more]; else they are
    [M, 1] and [O, 1]. `tile` overrides the choice of the tile shape.
    """
    (num_outputs, num_inputs), num_padded = b_OK.shape, len(a_MK)
    out_MO = torch.empty(num_rows, num_outputs, dtype=torch.bfloat16, device=a_MK.device)
    if launches(out_MO):
        tile = tile or _chosen(a_MK.device, num_rows)
        grid = (triton.cdiv(num_rows, tile.rows), triton.cdiv(num_outputs, tile.outputs))
        _product[grid](
            a_MK, a_scales, b_OK, b_scales, out_MO, num_rows, num_outputs, num_inputs, num_padded,
            b_scales.stride(0), BLOCKWISE=is_blockwise, IS_WHOLE=num_inputs % BLOCK.value == 0,
            ROWS=tile.rows, OUTPUTS=tile.outputs, IS_TURNED=tile.is_turned,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out_MO


def _chosen(device: torch.device, num_rows: int) -> Tile:
    return FEW if num_rows <= _FEW_ROWS and _tiles_agree(device) else MANY


@cache
def _tiles_agree(device: torch.device) -> bool:
    """Return whether an entry has the same bits in both tile shapes; not in the interpreter."""
    if device.type != "cuda":
        return False
    generator = torch.Generator(device).manual_seed(0)
    a_MK, b_OK = torch.randn(2, 128, 1024, generator=generator, device=device)
    values = a_MK.to(torch.float8_e4m3fn), b_OK.to(torch.float8_e4m3fn)
    a_scales = torch.rand(8, 128, generator=generator, device=device)
    b_scales = torch.rand(1, 8, generator=generator, device=device)
    how = {"num_rows": 128, "is_blockwise": True}
    found = [
        scaled_product(values[0], a_scales, values[1], b_scales, **how, tile=tile)
        for tile in (MANY, FEW)
    ]
    return torch.equal(*found)


@triton.jit(do_not_specialize=["num_rows", "num_padded"])
def _product(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, out_ptr, num_rows, num_outputs, num_inputs,
    num_padded, pitch, BLOCKWISE: tl.constexpr, IS_WHOLE: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    first_output = tl.program_id(1) * OUTPUTS
    row = along(tl.program_id(0) * ROWS + tl.arange(0, ROWS), not IS_TURNED)
    output = along(first_output + tl.arange(0, OUTPUTS), IS_TURNED)
    at_ka, at_kb = along(tl.arange(0, BLOCK), IS_TURNED), along(tl.arange(0, BLOCK), not IS_TURNED)
    # Beyond the last row read the first one; its result is not stored.
    read_row = tl.where(row < num_rows, row, 0)
    read_output = tl.where(output < num_outputs, output, 0)
    at_a = a_ptr + read_row.to(tl.int64) * num_inputs + at_ka
    at_b = b_ptr + read_output.to(tl.int64) * num_inputs + at_kb
    total = tl.zeros((OUTPUTS, ROWS) if IS_TURNED else (ROWS, OUTPUTS), dtype=tl.float32)
    for block in range(0, tl.cdiv(num_inputs, BLOCK)):
        if IS_WHOLE:
            a, b = tl.load(at_a), tl.load(at_b)
        else:
            left = num_inputs - block * BLOCK
            a = tl.load(at_a, mask=at_ka < left, other=0.0)
            b = tl.load(at_b, mask=at_kb < left, other=0.0)
        found = tl.dot(b, a) if IS_TURNED else tl.dot(a, b)
        if BLOCKWISE:
            a_scale = tl.load(a_scales_ptr + block * num_padded + read_row)
            b_scale = tl.load(b_scales_ptr + first_output // BLOCK * pitch + block)
            found = found * (a_scale * b_scale)
        total += found
        at_a += BLOCK
        at_b += BLOCK
    if not BLOCKWISE:
        total = total * (tl.load(a_scales_ptr + read_row) * tl.load(b_scales_ptr + read_output))
    at = out_ptr + row.to(tl.int64) * num_outputs + output
    is_in = (row < num_rows) & (output < num_outputs)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=is_in)
