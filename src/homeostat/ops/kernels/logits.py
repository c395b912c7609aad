"""Process a tile of logits in one pass: the sums that a log-prob needs, and its gradient.

Tiles come from a matrix product, in chunks of the vocabulary. The sums of a chunk are relative to
its own largest logit:

    max,  sum = sum exp(z - max),  dot = sum exp(z - max) (z - max),  and z[target], if it is there

Chunks are then added in order, so that logsumexp = max + log sum, and entropy = log sum - dot /
sum. The result has the same bits whether chunks came in one tile or in many. The gradient with
respect to z, in the dtype of the next matrix products, is

    g (1[target] - p) - e p (log p + entropy),        p = exp(z - logsumexp)

for upstream gradients g of the log-prob and e of the entropy. Without e, the tile holds only
1[target] - p, and g is applied to the smaller operand of the products.

Suffixes: `_M` tokens, `_C` chunks; a tile is named for its own rows and columns, `_mv`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from homeostat.ops.kernels import block_of, launches, warps_of
from homeostat.ops.logit_tiles import VOCAB_CHUNK

# exp is 0 in fp32 below -104, so clamping here changes no probability and avoids 0 * inf.
_LOG_ZERO = tl.constexpr(-110.0)
# Rows that begin at multiples of this are read in the same way whatever the tile.
_ALIGNED = 16
_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the whole vocabulary."""

    max_M: Tensor
    sum_M: Tensor
    dot_M: Tensor

    def lse(self) -> Tensor:
        return self.max_M + self.sum_M.log()

    def entropy(self) -> Tensor:
        return self.sum_M.log() - self.dot_M / self.sum_M


@dataclass(frozen=True, slots=True)
class Chunks:
    """The sums of each chunk, and the logits of the targets. `scale_M` is 1 / temperature."""

    vocabulary: int
    scale_M: Tensor
    max_CM: Tensor
    sum_CM: Tensor
    dot_CM: Tensor
    target_M: Tensor

    @classmethod
    def of(cls, vocabulary: int, scale_M: Tensor) -> Chunks:
        num_chunks, num_tokens = -(-vocabulary // VOCAB_CHUNK), len(scale_M)
        parts_3CM = scale_M.new_empty(3, num_chunks, num_tokens)
        return cls(vocabulary, scale_M, *parts_3CM.unbind(), torch.zeros_like(scale_M))

    def add(self, tile_mv: Tensor, targets_M: Tensor, rows: slice, *, first: int) -> None:
        """Add a tile of some rows and one or more chunks, starting at vocabulary entry `first`."""
        if not launches(tile_mv):
            return
        height, width = tile_mv.shape
        if width % _ALIGNED:
            tile_mv = functional.pad(tile_mv, (0, -width % _ALIGNED))
        block = block_of(min(VOCAB_CHUNK, self.vocabulary))
        _reduce[(height, triton.cdiv(width, VOCAB_CHUNK))](
            tile_mv, targets_M, self.scale_M, self.max_CM, self.sum_CM, self.dot_CM, self.target_M,
            rows.start, first, self.vocabulary, tile_mv.stride(0), len(targets_M),
            CHUNK=VOCAB_CHUNK, IS_ALIGNED=self.vocabulary % _ALIGNED == 0,
            BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip

    def totals(self) -> Totals:
        num_chunks, num_tokens = self.max_CM.shape
        totals_3M = self.scale_M.new_empty(3, num_tokens)
        if launches(totals_3M):
            _sum_up[(triton.cdiv(num_tokens, _TOKENS),)](
                self.max_CM, self.sum_CM, self.dot_CM, totals_3M, num_tokens,
                CHUNKS=num_chunks, TOKENS=_TOKENS,
            )  # fmt: skip
        return Totals(*totals_3M.unbind())


def logit_gradients(
    tile_mv: Tensor,
    targets_M: Tensor,
    lse_M: Tensor,
    upstream: tuple[Tensor, Tensor, Tensor] | None,
    out_mv: Tensor,
    rows: slice,
    *,
    first: int,
    scale: float,
) -> None:
    """Write the gradients of a tile of logits into `out_mv`.

    `upstream` holds the gradients of log-prob and entropy, and the entropy, of all M tokens.
    """
    if not launches(tile_mv):
        return
    height, width = tile_mv.shape
    block = block_of(width)
    grad_M, entropy_grad_M, entropy_M = upstream or (lse_M, lse_M, lse_M)
    _gradients[(height,)](
        tile_mv, targets_M, lse_M, grad_M, entropy_grad_M, entropy_M, out_mv,
        rows.start, first, width, scale,
        HAS_ENTROPY=upstream is not None, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip


@triton.jit(do_not_specialize=["start", "num_tokens"])
def _reduce(
    tile_ptr, targets_ptr, scale_ptr, max_ptr, sum_ptr, dot_ptr, target_ptr,
    start, first, vocabulary, stride, num_tokens,
    CHUNK: tl.constexpr, IS_ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, nth = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first += nth * CHUNK
    width = tl.minimum(vocabulary - first, CHUNK)
    if IS_ALIGNED:
        width = tl.multiple_of(width, 16)
    column = tl.arange(0, BLOCK)
    inside = column < width
    token = start + row
    scale = tl.load(scale_ptr + token)
    at_row = tile_ptr + row * stride + nth * CHUNK
    z = tl.load(at_row + column, mask=inside, other=float("-inf")) * scale
    top = tl.max(z, 0)
    shifted = z - top
    share = tl.exp(shifted)
    column_of_target = tl.load(targets_ptr + token) - first
    if (column_of_target >= 0) & (column_of_target < width):
        tl.store(target_ptr + token, tl.load(at_row + column_of_target) * scale)
    at = (first // CHUNK).to(tl.int64) * num_tokens + token
    tl.store(max_ptr + at, top)
    tl.store(sum_ptr + at, tl.sum(share, 0))
    tl.store(dot_ptr + at, tl.sum(share * tl.maximum(shifted, _LOG_ZERO), 0))


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_up(
    max_ptr, sum_ptr, dot_ptr, totals_ptr, num_tokens, CHUNKS: tl.constexpr, TOKENS: tl.constexpr
):
    """Add the chunks in order, for each token separately."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens
    top = tl.load(max_ptr + token, mask=inside, other=0.0)
    total = tl.load(sum_ptr + token, mask=inside, other=1.0)
    dot = tl.load(dot_ptr + token, mask=inside, other=0.0)
    for chunk in range(1, CHUNKS):
        at = chunk * num_tokens.to(tl.int64) + token
        its_top = tl.load(max_ptr + at, mask=inside, other=0.0)
        its_total = tl.load(sum_ptr + at, mask=inside, other=1.0)
        its_dot = tl.load(dot_ptr + at, mask=inside, other=0.0)
        new_top = tl.maximum(top, its_top)
        factor, its_factor = tl.exp(top - new_top), tl.exp(its_top - new_top)
        dot = (dot + total * (top - new_top)) * factor
        dot += (its_dot + its_total * (its_top - new_top)) * its_factor
        total = total * factor + its_total * its_factor
        top = new_top
    tl.store(totals_ptr + token, top, mask=inside)
    tl.store(totals_ptr + num_tokens + token, total, mask=inside)
    tl.store(totals_ptr + 2 * num_tokens + token, dot, mask=inside)


@triton.jit
def _gradients(
    tile_ptr, targets_ptr, lse_ptr, grad_ptr, entropy_grad_ptr, entropy_ptr, out_ptr,
    start, first, width, scale,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    token = start + row
    z = tl.load(tile_ptr + row * width + column, mask=inside, other=float("-inf")) * scale
    log_p = z - tl.load(lse_ptr + token)
    p = tl.exp(log_p)
    is_target = (column == tl.load(targets_ptr + token) - first).to(tl.float32)
    out = is_target - p
    if HAS_ENTROPY:
        slope = tl.load(entropy_grad_ptr + token)
        entropy = tl.load(entropy_ptr + token)
        out = out * tl.load(grad_ptr + token)
        out -= slope * p * (tl.maximum(log_p, _LOG_ZERO) + entropy)
    at = out_ptr + row * width + column
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside)
