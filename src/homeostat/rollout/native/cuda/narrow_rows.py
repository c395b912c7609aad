"""Parts of the kernels for very few rows (narrow.py).

They load weights and a row, apply the norm, sum up products, and store A x of adapters or wait for
it (low_rank.py).

Suffixes: `_D` model dim, `_O` outputs, `_K` inputs, `_T` threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from homeostat.rollout.native.cuda.low_rank import EMPTY, MAX_PARTS

_EMPTY, _MAX_PARTS = tl.constexpr(EMPTY), tl.constexpr(MAX_PARTS)


@triton.jit
def weights_of(weight_ptr, at_O, is_out, start, num_inputs, INPUTS: tl.constexpr):
    at_K = start + tl.arange(0, INPUTS)
    is_in = is_out[:, None] & (at_K < num_inputs)[None, :]
    at = at_O[:, None].to(tl.int64) * num_inputs + at_K[None, :]
    return tl.load(weight_ptr + at, mask=is_in, other=0.0)


@triton.jit
def row_and_norm(x_ptr, norm_ptr, row, width, WIDTH: tl.constexpr):
    """Load a row and the weight of the norm before a product, [inputs] each, in fp32."""
    at_D = tl.arange(0, WIDTH)
    is_in = at_D < width
    x = tl.load(x_ptr + row * width + at_D, mask=is_in, other=0.0).to(tl.float32)
    return x, tl.load(norm_ptr + at_D, mask=is_in, other=0.0).to(tl.float32)


@triton.jit
def normed_row(x_ptr, norm_ptr, row, width, eps, WIDTH: tl.constexpr):
    x, norm = row_and_norm(x_ptr, norm_ptr, row, width, WIDTH)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    return (x * rstd * norm).to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def sums_of_threads(weight, x, THREADS: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Return products with the inputs, [outputs, threads], summed up within each thread."""
    outputs: tl.constexpr = weight.shape[0]
    rounds: tl.constexpr = weight.shape[1] // (THREADS * NEIGHBOURS)
    parts = weight.to(tl.float32) * x.to(tl.float32)[None, :]
    return tl.sum(tl.sum(tl.reshape(parts, (outputs, rounds, THREADS, NEIGHBOURS)), 3), 1)


@triton.jit
def columns_of_b(b_ptr, at_O, is_output, number, RANK: tl.constexpr, PARTS: tl.constexpr,
                 THREADS: tl.constexpr):  # fmt: skip
    """Load rows of B, [outputs, threads].

    They are repeated for each part of A x, and follow the columns of `number` other maps. All other
    numbers are 0.
    """
    column = tl.arange(0, THREADS) - number * RANK
    is_in = (column >= 0) & (column < PARTS * RANK)
    at = b_ptr + at_O[:, None] * RANK + (column % RANK)[None, :]
    return tl.load(at, mask=is_output[:, None] & is_in[None, :], other=0.0).to(tl.float32)


@triton.jit
def asked_low(low_ptr, first, row, COUNT: tl.constexpr, LOW_WIDTH: tl.constexpr,
              PART: tl.constexpr, PARTS: tl.constexpr, THREADS: tl.constexpr):  # fmt: skip
    """Request `COUNT` numbers of A x from `first` on, of each part, [threads].

    For a program that starts late they are already complete.
    """
    at_T = tl.arange(0, THREADS)
    at = low_ptr + at_T // COUNT * PART + row * LOW_WIDTH + first + at_T % COUNT
    is_in = at_T < PARTS * COUNT
    return tl.load(at, mask=is_in, other=0, volatile=True), at, is_in


@triton.jit
def low_row(asked, element: tl.constexpr):
    """Wait for the requested numbers and return them, [threads]; zeros beyond."""
    bits, at, is_in = asked
    while tl.min((bits != _EMPTY).to(tl.int32), 0) == 0:
        bits = tl.load(at, mask=is_in, other=0, volatile=True)
    return bits.to(element, bitcast=True).to(tl.float32)


@triton.jit
def leave_low(sums, low_ptr, place, part, row, element: tl.constexpr, LOW_WIDTH: tl.constexpr,
              PART: tl.constexpr):  # fmt: skip
    """Store this program's part of A x."""
    outputs: tl.constexpr = sums.shape[0]
    bits = tl.sum(sums, 1).to(element).to(low_ptr.dtype.element_ty, bitcast=True)
    at = part * PART + row * LOW_WIDTH + place + tl.arange(0, outputs)
    tl.store(low_ptr + at, bits)


@triton.jit
def empty_row(next_ptr, place, row, LOWS: tl.constexpr, LOW_WIDTH: tl.constexpr,
              PART: tl.constexpr):  # fmt: skip
    """Empty a row of the next product's buffer, in the first program after those of A x."""
    if LOW_WIDTH > 0:
        if place == LOWS:
            at = tl.arange(0, _MAX_PARTS)[:, None] * PART + tl.arange(0, 64)[None, :]
            empty = tl.full(at.shape, _EMPTY, next_ptr.dtype.element_ty)
            for first in tl.static_range(0, LOW_WIDTH, 64):
                tl.store(next_ptr + row * LOW_WIDTH + first + at, empty)
