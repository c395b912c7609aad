"""AdamW in one pass over memory, with moments in fp32, bf16 or 8 bits and masters in fp32 or bf16.

A program updates a row of blocks of 256 elements. 8-bit moments are decoded by a table of 256
values and encoded by a binary search among the 255 bounds between them (ops/moments.py); bf16 is
rounded by a hash of the element's index (ops/stochastic.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.adamw_step import AdamWStep
from homeostat.ops.kernels import launches
from homeostat.ops.moments import BLOCK, Moment, code_book, code_bounds, on_device
from homeostat.ops.stochastic import Noise

_ROWS = 4
_FP32, _BF16, _8BIT = 0, 1, 2
_KINDS = {torch.float32: _FP32, torch.bfloat16: _BF16, torch.uint8: _8BIT}


def fused_adamw_(
    master: Tensor,
    grad: Tensor,
    mean: Moment,
    square: Moment,
    *,
    how: AdamWStep,
    noise: Noise,
    measure: bool,
) -> Tensor | None:
    """Update flat, contiguous tensors in place; see `ops.adamw.adamw_`."""
    kind = _KINDS[mean.values.dtype]
    assert square.values.dtype == mean.values.dtype, "both moments are stored alike"
    count = len(grad)
    num_programs = triton.cdiv(count, _ROWS * BLOCK)
    squares = torch.empty(num_programs if measure else 1, device=grad.device)
    books = [on_device(code_book(signed), grad.device) for signed in (True, False)]
    bounds = [on_device(code_bounds(signed), grad.device) for signed in (True, False)]
    scales = [grad if one.absmax is None else one.absmax for one in (mean, square)]
    if launches(grad):
        _update[(num_programs,)](
            master, grad, mean.values, square.values, *scales, *books, *bounds, squares,
            count, noise.start, *noise.words, *noise.other().words,
            how.kept, how.size, how.root, how.eps, 1.0 - how.beta1, how.beta2, 1.0 - how.beta2,
            KIND=kind, ROUNDS=master.dtype == torch.bfloat16, MEASURES=measure,
            ROWS=_ROWS, BLOCK=BLOCK,
        )  # fmt: skip
    return squares.sum().sqrt() if measure else None


@triton.jit
def _random(at, low, high):
    bits = (at & 0xFFFFFFFF).to(tl.uint32) ^ low.to(tl.uint32, bitcast=True)
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= high.to(tl.uint32, bitcast=True)
    bits ^= bits >> 15
    bits *= 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _rounded(value, bits):
    raised = value.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)
    raised = (raised & 0xFFFF0000).to(tl.float32, bitcast=True)
    is_finite = tl.abs(value) < float("inf")
    return tl.where(is_finite, raised, value).to(tl.bfloat16)


@triton.jit
def _encoded(unit, bounds_ptr):
    """Return the number of bounds below each value, by binary search."""
    code = tl.zeros(unit.shape, dtype=tl.int32)
    for place in tl.static_range(8):
        bound = tl.load(bounds_ptr + code + ((128 >> place) - 1))
        code = tl.where(bound < unit, code + (128 >> place), code)
    return code


@triton.jit(do_not_specialize=["start", "low", "high", "master_low", "master_high"])
def _update(
    master_ptr, grad_ptr, mean_ptr, square_ptr, mean_scale_ptr, square_scale_ptr,
    signed_ptr, unsigned_ptr, signed_bounds_ptr, unsigned_bounds_ptr, norms_ptr,
    count, start, low, high, master_low, master_high,
    kept, size, root, eps, rate1, beta2, rate2,
    KIND: tl.constexpr, ROUNDS: tl.constexpr, MEASURES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    here = at < count
    has_row = row * BLOCK < count
    grad = tl.load(grad_ptr + at, mask=here, other=0.0)
    if KIND == 2:
        codes = tl.load(mean_ptr + at, mask=here, other=0).to(tl.int32)
        scale = tl.load(mean_scale_ptr + row, mask=has_row, other=0.0)
        mean = tl.load(signed_ptr + codes) * scale[:, None]
        codes = tl.load(square_ptr + at, mask=here, other=0).to(tl.int32)
        scale = tl.load(square_scale_ptr + row, mask=has_row, other=0.0)
        square = tl.load(unsigned_ptr + codes) * scale[:, None]
    else:
        mean = tl.load(mean_ptr + at, mask=here, other=0.0).to(tl.float32)
        square = tl.load(square_ptr + at, mask=here, other=0.0).to(tl.float32)
    mean = tl.where(here, mean + rate1 * (grad - mean), 0.0)
    square = tl.where(here, square * beta2 + rate2 * grad * grad, 0.0)
    update = mean / (tl.sqrt_rn(square) / root + eps) * size
    master = tl.load(master_ptr + at, mask=here, other=0.0).to(tl.float32) * kept - update
    if ROUNDS:
        bits = _random(at + start, master_low, master_high)
        tl.store(master_ptr + at, _rounded(master, bits), mask=here)
    else:
        tl.store(master_ptr + at, master, mask=here)
    if KIND == 0:
        tl.store(mean_ptr + at, mean, mask=here)
        tl.store(square_ptr + at, square, mask=here)
    elif KIND == 1:
        bits = _random(at + start, low, high)
        tl.store(mean_ptr + at, _rounded(mean, bits), mask=here)
        tl.store(square_ptr + at, _rounded(square, bits >> 16), mask=here)
    else:
        scale = tl.max(tl.abs(mean), axis=1)
        unit = mean / tl.where(scale > 0, scale, 1.0)[:, None]
        tl.store(mean_ptr + at, _encoded(unit, signed_bounds_ptr).to(tl.uint8), mask=here)
        tl.store(mean_scale_ptr + row, scale, mask=has_row)
        scale = tl.max(square, axis=1)
        unit = square / tl.where(scale > 0, scale, 1.0)[:, None]
        tl.store(square_ptr + at, _encoded(unit, unsigned_bounds_ptr).to(tl.uint8), mask=here)
        tl.store(square_scale_ptr + row, scale, mask=has_row)
    if MEASURES:
        tl.store(norms_ptr + tl.program_id(0), tl.sum(tl.sum(update * update, axis=1), axis=0))
