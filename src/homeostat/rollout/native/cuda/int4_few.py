"""Linear maps of few rows with packed INT4 weights, bound by reading the weights.

A program owns a tile of 16 outputs; in a gated product, one tile of gate and one of up. Its warps
share the inputs. Each reads whole tiles of the weights into registers, turns their integers into
bf16 and multiplies them with the rows on tensor cores, group by group. Nothing passes through
shared memory until the warps' sums are added up. The first weights are read before the program
waits for its inputs, and the next ones while it multiplies. A unit is the smallest number of inputs
that makes both whole tiles and whole groups (int4_layout.py). All loops over units are unrolled.

Suffixes: `_B` rows, `_O` outputs, `_T` tiles of outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.int4_layout import Int4Matrix
from homeostat.rollout.native.cuda.int4_tiles import plane_of
from homeostat.rollout.native.cuda.products import Scaled

# The number of rows that a tensor core instruction takes.
MAX_ROWS = 8
# Measured on an H200. A warp reads up to _MOST units before it waits for its inputs, and a program
# has as many warps as that takes, but no more than _MOST_WARPS. A product that is added to the
# residual stream has at least _MIN_ADDING warps. For weights with more inputs, a program has
# _MANY_WARPS warps, each of which reads _AHEAD units ahead.
_MOST, _MOST_WARPS, _MIN_ADDING, _MANY_WARPS, _AHEAD = 9, 8, 4, 16, 2


@triton.jit
def _loaded(at, is_in, IS_WHOLE: tl.constexpr):
    if IS_WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=is_in, other=0)


@triton.jit
def _places(words_ptr, scales_ptr, tile, num_units, GROUP: tl.constexpr, WARPS: tl.constexpr):
    """Return where the words [WARPS * 256] and scales [WARPS, 16] of each warp begin."""
    blocks: tl.constexpr = GROUP // 64 if GROUP > 64 else 1
    groups: tl.constexpr = 64 // GROUP if GROUP < 64 else 1
    at, warp = tl.arange(0, WARPS * 256), tl.arange(0, WARPS)
    first = tile.to(tl.int64) * num_units
    at_words = words_ptr + (first + at // 256) * (blocks * 256) + at % 256
    at_scales = scales_ptr + (first + warp)[:, None] * (groups * 16) + tl.arange(0, 16)[None, :]
    return at_words, at_scales


@triton.jit
def _read(places, number, num_units, GROUP: tl.constexpr, WARPS: tl.constexpr,
          IS_WHOLE: tl.constexpr):  # fmt: skip
    """Load the words and scales of unit `number` of each warp.

    Words come by blocks of 64 inputs, scales by groups. `IS_WHOLE`: every warp has such a unit.
    """
    blocks: tl.constexpr = GROUP // 64 if GROUP > 64 else 1
    groups: tl.constexpr = 64 // GROUP if GROUP < 64 else 1
    at, words, scales = number * WARPS, (), ()
    is_in = at + tl.arange(0, WARPS * 256) // 256 < num_units
    for block in tl.static_range(blocks):
        words += (_loaded(places[0] + (at * blocks + block) * 256, is_in, IS_WHOLE),)
    is_in = (at + tl.arange(0, WARPS) < num_units)[:, None]
    for group in tl.static_range(groups):
        scales += (_loaded(places[1] + (at * groups + group) * 16, is_in, IS_WHOLE),)
    return words, scales


@triton.jit
def _inputs(x_ptr, num_rows, num_inputs, number, GROUP: tl.constexpr, WARPS: tl.constexpr,
            ROWS: tl.constexpr, IS_WHOLE: tl.constexpr):  # fmt: skip
    """Load the inputs of unit `number` of each warp, plane by plane.

    Each plane is [WARPS, 16, ROWS], in the order in which threads hold weights.
    """
    unit_size: tl.constexpr = GROUP if GROUP > 64 else 64
    at = tl.arange(0, WARPS * ROWS * 16)
    half, warp = at // (8 * ROWS * WARPS), at // (8 * ROWS) % WARPS
    # Missing rows repeat the last one; their sums are not stored.
    row = tl.minimum(at // 8 % ROWS, num_rows - 1)
    # In this form the compiler sees pairs: a thread holds two inputs of each half.
    at_16 = half * 8 + at // 2 % 4 * 2 + at % 2
    at_x = x_ptr + row.to(tl.int64) * num_inputs + warp * unit_size + at_16
    first, found = number * WARPS * unit_size, ()
    for plane in tl.static_range(unit_size // 16):
        # The last tile of groups of 32 may be half empty.
        is_in = first + warp * unit_size + plane * 16 < num_inputs
        x = _loaded(at_x + (first + plane * 16), is_in, IS_WHOLE)
        x = tl.permute(tl.reshape(x, (2, WARPS, ROWS, 8)), (1, 0, 3, 2))
        found += (tl.reshape(x, (WARPS, 16, ROWS)),)
    return found


@triton.jit
def _sums(
    sums, words, scales, x, NUMBER: tl.constexpr, GROUP: tl.constexpr, WARPS: tl.constexpr,
    ROWS: tl.constexpr, HAS_ASM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of unit NUMBER of each warp."""
    groups: tl.constexpr = 64 // GROUP if GROUP < 64 else 1
    blocks: tl.constexpr = GROUP // 64 if GROUP > 64 else 1
    planes: tl.constexpr = GROUP // 16
    for group in tl.static_range(groups):
        part = tl.zeros((WARPS, 16, ROWS), tl.float32)
        for number in tl.static_range(planes):
            inputs = x[group * planes + number]
            tile = words[NUMBER * blocks + number // 4]
            weight = plane_of(tile, (group * planes + number) % 4, HAS_ASM, inputs.dtype)
            weight = tl.permute(tl.reshape(weight, (WARPS, 8, 4, 2, 2, 2)), (0, 3, 1, 4, 2, 5))
            weight = tl.reshape(weight, (WARPS, 16, 16))
            part = tl.dot(weight, inputs, part, input_precision=PRECISION)
        sums += part * scales[NUMBER * groups + group].to(tl.float32)[:, :, None]
    return sums


@triton.jit
def _rstd(squares_ptr, num_rows, width, eps, TILES: tl.constexpr, PADDED_TILES: tl.constexpr,
          ROWS: tl.constexpr):  # fmt: skip
    """Return the factor of the norm for each row, [1, ROWS]; ones if there is no norm."""
    at_B, at_T = tl.arange(0, ROWS), tl.arange(0, PADDED_TILES)
    if TILES == 0:
        return tl.full((1, ROWS), 1.0, tl.float32)
    else:
        is_in = (at_B < num_rows)[:, None] & (at_T < TILES)[None, :]
        at = squares_ptr + at_B[:, None] * TILES + at_T[None, :]
        squares = tl.sum(tl.load(at, mask=is_in, other=0.0), 1)
        return (1.0 / tl.sqrt(squares / width + eps))[None, :]


@triton.jit
def _store_gated(gate, up, at_out, is_in):
    element = at_out.dtype.element_ty
    gate, up = gate.to(element).to(tl.float32), up.to(element).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
    tl.store(at_out, (activated * up).to(element), mask=is_in)


@triton.jit
def _store_added(total, out_ptr, scaled_ptr, norm_ptr, squares_ptr, at_out, at_O, is_in):
    """Add the sums to the residual rows, and store what the next norm needs."""
    element = out_ptr.dtype.element_ty
    so_far = tl.load(out_ptr + at_out, mask=is_in, other=0.0).to(tl.float32)
    out = (so_far + total.to(element).to(tl.float32)).to(element)
    whole = out.to(tl.float32)
    norm = tl.load(norm_ptr + at_O).to(tl.float32)
    tl.store(scaled_ptr + at_out, (whole * norm[:, None]).to(element), mask=is_in)
    squares = tl.sum(tl.where(is_in, whole * whole, 0.0), 0)
    at_B = tl.arange(0, total.shape[1])
    at_square = squares_ptr + at_B * tl.num_programs(0) + tl.program_id(0)
    tl.store(at_square, squares, mask=tl.max(is_in.to(tl.int32), 0) > 0)
    tl.store(out_ptr + at_out, out, mask=is_in)


@triton.jit
def _few(
    x_ptr, words_ptr, scales_ptr, bias_ptr, out_ptr, norm_ptr, scaled_ptr, squares_ptr, eps,
    num_rows, num_inputs, num_units, num_outputs,
    HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, IS_ADDED: tl.constexpr, TILES: tl.constexpr,
    PADDED_TILES: tl.constexpr, GROUP: tl.constexpr, WARPS: tl.constexpr, UNITS: tl.constexpr,
    DEPTH: tl.constexpr, IS_EVEN: tl.constexpr, ROWS: tl.constexpr, HAS_ASM: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    tile = tl.program_id(0)
    places = _places(words_ptr, scales_ptr, tile, num_units, GROUP, WARPS)
    if IS_GATED:
        up_tile = tile + num_outputs // 16
        up_places = _places(words_ptr, scales_ptr, up_tile, num_units, GROUP, WARPS)
    words, scales, up_words, up_scales = (), (), (), ()
    sums = tl.zeros((WARPS, 16, ROWS), tl.float32)
    up_sums = sums
    # Weights are read DEPTH units ahead of their product.
    for step in tl.static_range(UNITS + DEPTH):
        if step == DEPTH:
            wait_for_last(EARLY)
            rstd = _rstd(squares_ptr, num_rows, num_inputs, eps, TILES, PADDED_TILES, ROWS)
        if step < UNITS:
            more = _read(places, step, num_units, GROUP, WARPS, IS_EVEN or step < UNITS - 1)
            words, scales = words + more[0], scales + more[1]
            if IS_GATED:
                more = _read(up_places, step, num_units, GROUP, WARPS, IS_EVEN or step < UNITS - 1)
                up_words, up_scales = up_words + more[0], up_scales + more[1]
        if step >= DEPTH:
            x = _inputs(
                x_ptr, num_rows, num_inputs, step - DEPTH, GROUP, WARPS, ROWS,
                IS_EVEN or step - DEPTH < UNITS - 1,
            )  # fmt: skip
            sums = _sums(
                sums, words, scales, x, step - DEPTH, GROUP, WARPS, ROWS, HAS_ASM, PRECISION
            )
            if IS_GATED:
                up_sums = _sums(
                    up_sums, up_words, up_scales, x, step - DEPTH, GROUP, WARPS, ROWS, HAS_ASM,
                    PRECISION,
                )  # fmt: skip
    total, up = tl.sum(sums, 0) * rstd, tl.sum(up_sums, 0) * rstd
    # Outputs are whole tiles.
    at_B, at_O = tl.arange(0, ROWS), tile * 16 + tl.arange(0, 16)
    at_out = at_B[None, :].to(tl.int64) * num_outputs + at_O[:, None]
    is_in = (at_B < num_rows)[None, :] & (at_O >= 0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias_ptr + at_O).to(tl.float32)[:, None]
    if IS_GATED:
        _store_gated(total, up, out_ptr + at_out, is_in)
    elif IS_ADDED:
        _store_added(total, out_ptr, scaled_ptr, norm_ptr, squares_ptr, at_out, at_O, is_in)
    else:
        tl.store(out_ptr + at_out, total.to(out_ptr.dtype.element_ty), mask=is_in)


def sizes_for(matrix: Int4Matrix, *, is_added: bool) -> tuple[int, int]:
    """Return the number of warps that share the inputs, and how many units each reads ahead."""
    warps = triton.next_power_of_2(triton.cdiv(matrix.num_units, _MOST))
    if warps > _MOST_WARPS:
        return _MANY_WARPS, _AHEAD
    return max(warps, _MIN_ADDING if is_added else 1), _MOST


def launch(
    x: Scaled,
    matrix: Int4Matrix,
    out_BO: Tensor,
    *,
    bias_O: Tensor | None = None,
    norm_O: Tensor | None = None,
    is_gated: bool = False,
    eps: float = 0.0,
    sizes: tuple[int, int] | None = None,
) -> Scaled:
    """Write a product to `out`; with `norm_O`, add it to `out` and return the next norm's input."""
    num_rows, num_outputs = out_BO.shape
    num_programs = triton.cdiv(num_outputs, 16)
    warps, depth = sizes or sizes_for(matrix, is_added=norm_O is not None)
    units = triton.cdiv(matrix.num_units, warps)
    squares_BT, scaled_BO = x.squares_BT, out_BO
    if norm_O is not None:
        assert squares_BT is None, "what is added has no norm before it"
        scaled_BO = torch.empty_like(out_BO)
        squares_BT = torch.empty(num_rows, num_programs, dtype=torch.float32, device=out_BO.device)
    _few[(num_programs,)](
        x.rows_BD,
        matrix.words_TBW,
        matrix.scales_TGP,
        out_BO if bias_O is None else bias_O,
        out_BO,
        out_BO if norm_O is None else norm_O,
        scaled_BO,
        out_BO if squares_BT is None else squares_BT,
        eps,
        num_rows,
        matrix.num_inputs,
        matrix.num_units,
        num_outputs,
        HAS_BIAS=bias_O is not None,
        IS_GATED=is_gated,
        IS_ADDED=norm_O is not None,
        GROUP=matrix.group_size,
        **x.options(),
        WARPS=warps,
        UNITS=units,
        DEPTH=min(depth, units),
        IS_EVEN=units * warps * matrix.unit == matrix.num_inputs,
        ROWS=MAX_ROWS,
        # The assembly handles bf16 on a GPU only.
        HAS_ASM=out_BO.is_cuda and out_BO.dtype == torch.bfloat16,
        PRECISION="ieee" if out_BO.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=1,
        **early(out_BO.device),
    )
    return Scaled(scaled_BO, squares_BT)
