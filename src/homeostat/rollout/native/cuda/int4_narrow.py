"""Linear maps of very few rows by packed INT4 weights, bound by reading them: one launch each, with
what comes before and after them.

A thread reads 16 bytes of an output at a time: 16 inputs of each of a block's two groups. Their 32
integers are eight planes, one for each nibble of a word, and inputs are read plane by plane. An
integer q becomes the float 24 + q by two operations on bits, because its nibble is moved to the top
of the mantissa of a number between 16 and 32; what that adds to the sums is known from the inputs.

    into_heads   norm -> q, k and v           three weights, one matrix
    gated        norm -> silu(gate) * up      two weights, one matrix
    added        x += out @ weight.T          in place

Programs of the first two hold a row of inputs in registers and go through some of the outputs; the
weights of the next ones are in flight while they sum. Those of `added` own some outputs, and read
all their weights before they wait for the inputs. `gated` can store its results plane by plane
(`PlaneRows`), so that `added` reads them as they are.

Suffixes: `_B` rows, `_G` groups of 16 bytes, `_O` outputs, `_K` inputs.
"""

# Triton compiles its kernels from source: pyright misreads their calls.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels import num_programs
from homeostat.rollout.native.cuda.early import early, let_next_start, wait_for_last
from homeostat.rollout.native.cuda.int4_layout import Int4Matrix

# Rows up to which reading the weights costs more than multiplying by them one by one.
MAX_ROWS = 4
# Outputs up to which a program for each tile of them is computed in one wave.
_FEW_OUTPUTS = 2048


@dataclass(frozen=True, slots=True)
class PlaneRows:
    """Rows whose numbers lie in the order in which `added` reads them; padding is undefined."""

    values_BK: Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """The outputs and chunks of 16 bytes that a program handles at a time, and its warps.

    `programs` bounds the number of programs that go through the outputs; 0: one for each tile.
    """

    outputs: int
    chunks: int
    warps: int
    programs: int = 0


@triton.jit
def _plane(words, NUMBER: tl.constexpr):
    """24 + q of the integers in a nibble of each word."""
    moved = words << (19 - 4 * NUMBER) if NUMBER < 5 else words >> (4 * NUMBER - 19)
    return ((moved & 0x780000) | 0x41800000).to(tl.float32, bitcast=True)


@triton.jit
def _words(words_ptr, at_O, is_out, at_G, row_words):
    """The chunks of some outputs, [outputs, chunks, 4]."""
    at = at_G[:, None] * 4 + tl.arange(0, 4)[None, :]
    is_in = is_out[:, None, None] & (at < row_words)[None, :, :]
    at_row = at_O[:, None, None].to(tl.int64) * row_words
    return tl.load(words_ptr + at_row + at[None, :, :], mask=is_in, other=0)


@triton.jit
def _scales(scales_ptr, at_O, is_out, at_G, row_words, GROUP: tl.constexpr):
    """The scales of both groups of each chunk's block, as one word: [outputs, chunks]."""
    at_row = at_O[:, None] * (row_words // (GROUP // 4))
    is_in = is_out[:, None] & (at_G * 4 < row_words)[None, :]
    return tl.load(scales_ptr + at_row + (at_G // (GROUP // 16))[None, :], mask=is_in, other=0)


@triton.jit
def _inputs(x_ptr, at_G, num_inputs, PLANE: tl.constexpr, BY_PLANES: tl.constexpr,
            GROUP: tl.constexpr):  # fmt: skip
    """A plane of the inputs, [chunks, 4]: 0 to 3 of the first group, 4 to 7 of the second."""
    per_block: tl.constexpr = GROUP // 16
    first = at_G // per_block * (2 * GROUP) + (PLANE // 4) * GROUP + at_G % per_block * 16
    at_4 = tl.arange(0, 4)[None, :]
    if BY_PLANES:
        at = at_G[:, None] * 32 + PLANE * 4 + at_4
    else:
        at = first[:, None] + PLANE % 4 + at_4 * 4
    return tl.load(x_ptr + at, mask=(first < num_inputs)[:, None], other=0.0)


@triton.jit
def _sums(words, scales, planes):
    """Sum the products of each chunk, times the scales: [outputs, chunks]."""
    first = _plane(words, 0) * planes[0][None]
    first += _plane(words, 2) * planes[1][None]
    first += _plane(words, 4) * planes[2][None]
    first += _plane(words, 6) * planes[3][None]
    second = _plane(words, 1) * planes[4][None]
    second += _plane(words, 3) * planes[5][None]
    second += _plane(words, 5) * planes[6][None]
    second += _plane(words, 7) * planes[7][None]
    first_less = 24.0 * tl.sum(planes[0] + planes[1] + planes[2] + planes[3], 1)
    second_less = 24.0 * tl.sum(planes[4] + planes[5] + planes[6] + planes[7], 1)
    low = (scales << 16).to(tl.float32, bitcast=True)
    high = (scales & -65536).to(tl.float32, bitcast=True)
    first = tl.sum(first, 2) - first_less[None]
    return first * low + (tl.sum(second, 2) - second_less[None]) * high


@triton.jit
def _outputs(first, num_outputs, OUTPUTS: tl.constexpr, IS_GATED: tl.constexpr):
    """Rows of the matrix, and which of them exist: those of the gate, then of up beside them."""
    at = tl.arange(0, OUTPUTS)
    if IS_GATED:
        at_O = first + at % (OUTPUTS // 2)
        return at_O + (at // (OUTPUTS // 2)) * num_outputs, at_O < num_outputs
    else:
        return first + at, first + at < num_outputs


@triton.jit
def _store_gated(total, out_ptr, first, num_outputs, OUTPUTS: tl.constexpr,
                 BY_PLANES: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    element = out_ptr.dtype.element_ty
    gate, up = tl.split(tl.trans(tl.reshape(total, (2, OUTPUTS // 2))))
    gate, up = gate.to(element).to(tl.float32), up.to(element).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
    at_out = first + tl.arange(0, OUTPUTS // 2)
    place = at_out
    if BY_PLANES:
        chunk = at_out // (2 * GROUP) * (GROUP // 16) + at_out % GROUP // 16
        place = chunk * 32 + at_out // GROUP % 2 * 16 + at_out % 4 * 4 + at_out % 16 // 4
    tl.store(out_ptr + place, (activated * up).to(element), mask=at_out < num_outputs)


@triton.jit
def _normed_planes(x_ptr, norms, at_G, rstd, num_inputs, GROUP: tl.constexpr):
    """The planes of a row after its norm, as the module rounds it, in fp32."""
    planes = ()
    for number in tl.static_range(8):
        x = _inputs(x_ptr, at_G, num_inputs, number, False, GROUP).to(tl.float32)
        normed = x * rstd * norms[number].to(tl.float32)
        planes += (normed.to(x_ptr.dtype.element_ty).to(tl.float32),)
    return planes


@triton.jit
def _normed_product(
    x_ptr, norm_ptr, words_ptr, scales_ptr, bias_ptr, out_ptr, eps, width, row_words, num_outputs,
    out_stride, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, BY_PLANES: tl.constexpr,
    GROUP: tl.constexpr, OUTPUTS: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    per_step: tl.constexpr = OUTPUTS // 2 if IS_GATED else OUTPUTS
    first, stride = tl.program_id(0) * per_step, tl.num_programs(0) * per_step
    at_O, is_out = _outputs(first, num_outputs, OUTPUTS, IS_GATED)
    at_G, at_D = tl.arange(0, CHUNKS), tl.arange(0, WIDTH)
    words = _words(words_ptr, at_O, is_out, at_G, row_words)
    scales = _scales(scales_ptr, at_O, is_out, at_G, row_words, GROUP)
    norms = ()
    for number in tl.static_range(8):
        norms += (_inputs(norm_ptr, at_G, width, number, False, GROUP),)
    wait_for_last(EARLY)
    x_ptr += tl.program_id(1) * width
    out_ptr += tl.program_id(1) * out_stride
    x = tl.load(x_ptr + at_D, mask=at_D < width, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    planes = _normed_planes(x_ptr, norms, at_G, rstd, width, GROUP)
    for start in range(first, num_outputs, stride):
        # The next outputs' weights are in flight while these are summed up.
        next_O, is_next = _outputs(start + stride, num_outputs, OUTPUTS, IS_GATED)
        next_words = _words(words_ptr, next_O, is_next, at_G, row_words)
        next_scales = _scales(scales_ptr, next_O, is_next, at_G, row_words, GROUP)
        total = tl.sum(_sums(words, scales, planes), 1)
        if IS_GATED:
            _store_gated(total, out_ptr, start, num_outputs, OUTPUTS, BY_PLANES, GROUP)
        else:
            if HAS_BIAS:
                total += tl.load(bias_ptr + at_O, mask=is_out, other=0.0).to(tl.float32)
            tl.store(out_ptr + at_O, total.to(out_ptr.dtype.element_ty), mask=is_out)
        at_O, is_out, words, scales = next_O, is_next, next_words, next_scales


@triton.jit
def _added(
    x_ptr, words_ptr, scales_ptr, bias_ptr, out_ptr, num_inputs, row_words, num_outputs, x_stride,
    HAS_BIAS: tl.constexpr, BY_PLANES: tl.constexpr, GROUP: tl.constexpr, OUTPUTS: tl.constexpr,
    CHUNKS: tl.constexpr, STEPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    at_O = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_out = at_O < num_outputs
    words, scales, x = (), (), ()
    for step in tl.static_range(STEPS):
        at_G = step * CHUNKS + tl.arange(0, CHUNKS)
        words += (_words(words_ptr, at_O, is_out, at_G, row_words),)
        scales += (_scales(scales_ptr, at_O, is_out, at_G, row_words, GROUP),)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + at_O, mask=is_out, other=0.0).to(tl.float32)
    wait_for_last(EARLY)
    x_ptr += tl.program_id(1) * x_stride
    out_ptr += tl.program_id(1) * num_outputs
    so_far = tl.load(out_ptr + at_O, mask=is_out, other=0.0).to(tl.float32)
    for step in tl.static_range(STEPS):
        at_G = step * CHUNKS + tl.arange(0, CHUNKS)
        for number in tl.static_range(8):
            x += (_inputs(x_ptr, at_G, num_inputs, number, BY_PLANES, GROUP),)
    sums = tl.zeros((OUTPUTS, CHUNKS), tl.float32)
    for step in tl.static_range(STEPS):
        planes = ()
        for number in tl.static_range(8):
            planes += (x[step * 8 + number].to(tl.float32),)
        sums += _sums(words[step], scales[step], planes)
    total = tl.sum(sums, 1)
    if HAS_BIAS:
        total += bias
    element = out_ptr.dtype.element_ty
    added = total.to(element).to(tl.float32)
    tl.store(out_ptr + at_O, (so_far + added).to(element), mask=is_out)


def into_heads(
    x_BD: Tensor,
    norm_D: Tensor,
    matrix: Int4Matrix,
    bias_O: Tensor | None,
    *,
    eps: float,
    tile: Tile | None = None,
) -> Tensor:
    """[B, O]: q, k and v of the normed rows, one after the other."""
    out_BO = x_BD.new_empty(len(x_BD), matrix.num_outputs)
    tile = tile or tile_of_heads(matrix)
    _launch_normed(x_BD, norm_D, matrix, bias_O, out_BO, matrix.num_outputs, tile, eps=eps)
    return out_BO


def gated(
    x_BD: Tensor, norm_D: Tensor, matrix: Int4Matrix, *, eps: float, tile: Tile | None = None
) -> Tensor:
    """[B, I]: silu(gate) * up of the normed rows. The matrix has gate's rows, then up's."""
    num_outputs = matrix.num_outputs // 2
    out_BI, tile = x_BD.new_empty(len(x_BD), num_outputs), tile or tile_of_gates(matrix)
    how = {"eps": eps, "is_gated": True}
    _launch_normed(x_BD, norm_D, matrix, None, out_BI, num_outputs, tile, **how)
    return out_BI


def gated_by_planes(
    x_BD: Tensor, norm_D: Tensor, matrix: Int4Matrix, *, eps: float, tile: Tile | None = None
) -> PlaneRows:
    """Return what `gated` does in the order in which `added` reads it."""
    num_outputs, block = matrix.num_outputs // 2, 2 * matrix.group_size
    assert num_outputs % matrix.group_size == 0, (num_outputs, matrix.group_size)
    out_BK = x_BD.new_empty(len(x_BD), triton.cdiv(num_outputs, block) * block)
    how = {"eps": eps, "is_gated": True, "by_planes": True}
    tile = tile or tile_of_gates(matrix)
    _launch_normed(x_BD, norm_D, matrix, None, out_BK, num_outputs, tile, **how)
    return PlaneRows(out_BK)


def added(
    x_BO: Tensor,
    inputs: Tensor | PlaneRows,
    matrix: Int4Matrix,
    bias_O: Tensor | None,
    *,
    tile: Tile | None = None,
) -> None:
    """Compute x += inputs @ weight.T + bias in place."""
    by_planes = isinstance(inputs, PlaneRows)
    inputs_BK = inputs.values_BK if isinstance(inputs, PlaneRows) else inputs
    tile = tile or tile_of_added(matrix)
    row_words = matrix.bytes_OH.shape[1] // 4
    _added[(triton.cdiv(x_BO.shape[1], tile.outputs), len(x_BO))](
        inputs_BK,
        matrix.bytes_OH.view(torch.int32),
        matrix.scales_OG.view(torch.int32),
        x_BO if bias_O is None else bias_O,
        x_BO,
        matrix.num_inputs,
        row_words,
        x_BO.shape[1],
        inputs_BK.stride(0),
        HAS_BIAS=bias_O is not None,
        BY_PLANES=by_planes,
        STEPS=triton.cdiv(row_words // 4, tile.chunks),
        **_options(matrix, tile, x_BO.device),
    )


def tile_of_heads(matrix: Int4Matrix) -> Tile:
    """Few outputs: a program for each tile of them, unless they take more than one wave."""
    chunks = _padded_chunks(matrix)
    if matrix.num_outputs <= _FEW_OUTPUTS:
        return Tile(8, chunks, warps=4)
    return Tile(4, chunks, warps=8, programs=4)


def tile_of_gates(matrix: Int4Matrix) -> Tile:
    """Many outputs: as many programs as are computed at once go through them."""
    chunks = _padded_chunks(matrix)
    return Tile(8, chunks, warps=4, programs=4) if chunks <= 64 else Tile(4, chunks, 8, programs=4)


def tile_of_added(matrix: Int4Matrix) -> Tile:
    """A row that is long is read in several steps, all of them at once."""
    chunks = _padded_chunks(matrix)
    if chunks <= 128:
        return Tile(8, chunks, warps=4)
    is_wide = matrix.num_outputs > _FEW_OUTPUTS
    return Tile(4, 256, warps=8) if is_wide else Tile(4, 128, warps=8)


def _launch_normed(
    x_BD: Tensor,
    norm_D: Tensor,
    matrix: Int4Matrix,
    bias_O: Tensor | None,
    out_BO: Tensor,
    num_outputs: int,
    tile: Tile,
    *,
    eps: float,
    is_gated: bool = False,
    by_planes: bool = False,
) -> None:
    grid = triton.cdiv(num_outputs, tile.outputs // 2 if is_gated else tile.outputs)
    if tile.programs:
        grid = min(grid, tile.programs * (num_programs(out_BO.device) // 8 or 1))
    _normed_product[(grid, len(x_BD))](
        x_BD,
        norm_D,
        matrix.bytes_OH.view(torch.int32),
        matrix.scales_OG.view(torch.int32),
        x_BD if bias_O is None else bias_O,
        out_BO,
        eps,
        matrix.num_inputs,
        matrix.bytes_OH.shape[1] // 4,
        num_outputs,
        out_BO.stride(0),
        HAS_BIAS=bias_O is not None,
        IS_GATED=is_gated,
        BY_PLANES=by_planes,
        WIDTH=triton.next_power_of_2(matrix.num_inputs),
        **_options(matrix, tile, out_BO.device),
    )


def _options(matrix: Int4Matrix, tile: Tile, device: torch.device) -> dict[str, Any]:
    """The flags of a launch that all products have."""
    return {
        "GROUP": matrix.group_size,
        "OUTPUTS": tile.outputs,
        "CHUNKS": tile.chunks,
        "num_warps": tile.warps,
        **early(device),
    }


def _padded_chunks(matrix: Int4Matrix) -> int:
    return triton.next_power_of_2(matrix.bytes_OH.shape[1] // 16)
