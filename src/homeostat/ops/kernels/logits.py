"""A tile of logits in one pass: what a log-prob needs of it, and its gradient.

Tiles come from a matrix product and go chunk by chunk over the vocabulary. A row's state is carried
from chunk to chunk, relative to the largest logit so far:

    max_M,  sum_M = sum exp(z - max),  dot_M = sum exp(z - max) (z - max),  target_M = z[target]

so that logsumexp = max + log sum, and entropy = log sum - dot / sum. The gradient by z, in the
dtype that the next matrix products take, is

    g (1[target] - p) - e p (log p + entropy),        p = exp(z - logsumexp)

for upstream gradients g of the log-prob and e of the entropy. Where there is no e, the tile holds
1[target] - p alone, and g goes to the narrow side of the products.

Suffixes: `_M` tokens; a tile is named for its own rows and columns, `_mv`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.ops.kernels import block_of, launches, warps_of

# exp is 0 in fp32 below -104: clamping here changes no probability, and 0 * inf does not arise.
_LOG_ZERO = tl.constexpr(-110.0)


@dataclass(frozen=True, slots=True)
class Running:
    """The state of rows, over the chunks seen so far."""

    max_M: Tensor
    sum_M: Tensor
    dot_M: Tensor
    target_M: Tensor

    @classmethod
    def empty(cls, num_tokens: int, device: torch.device) -> Running:
        # The first chunk sets all but the target's logit, which one chunk adds.
        state = torch.zeros(4, num_tokens, dtype=torch.float32, device=device)
        return cls(*state.unbind())

    def lse(self) -> Tensor:
        return self.max_M + self.sum_M.log()

    def entropy(self) -> Tensor:
        return self.sum_M.log() - self.dot_M / self.sum_M

    def add(
        self, tile_mv: Tensor, targets_M: Tensor, rows: slice, *, first: int, scale: float
    ) -> None:
        """The tile of some rows whose first column is entry `first` of the vocabulary."""
        if not launches(tile_mv):
            return
        height, width = tile_mv.shape
        block = block_of(width)
        _reduce[(height,)](
            tile_mv, targets_M, self.max_M, self.sum_M, self.dot_M, self.target_M,
            rows.start, first, width, scale,
            IS_FIRST=first == 0, BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip


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
    """Into `out_mv`. `upstream`: gradients of log-prob and entropy, and the entropy, of all M."""
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


@triton.jit
def _reduce(
    tile_ptr, targets_ptr, max_ptr, sum_ptr, dot_ptr, target_ptr,
    start, first, width, scale,
    IS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    z = tl.load(tile_ptr + row * width + column, mask=inside, other=float("-inf")) * scale
    top = tl.max(z, 0)
    shifted = z - top
    share = tl.exp(shifted)
    total = tl.sum(share, 0)
    dot = tl.sum(share * tl.maximum(shifted, _LOG_ZERO), 0)
    token = start + row
    column_of_target = tl.load(targets_ptr + token) - first
    if (column_of_target >= 0) & (column_of_target < width):
        logit = tl.load(tile_ptr + row * width + column_of_target) * scale
        tl.store(target_ptr + token, logit)
    if not IS_FIRST:
        old_top = tl.load(max_ptr + token)
        new_top = tl.maximum(old_top, top)
        old_total = tl.load(sum_ptr + token)
        old_factor, factor = tl.exp(old_top - new_top), tl.exp(top - new_top)
        old_dot = tl.load(dot_ptr + token) + old_total * (old_top - new_top)
        dot = old_dot * old_factor + (dot + total * (top - new_top)) * factor
        total = old_total * old_factor + total * factor
        top = new_top
    tl.store(max_ptr + token, top)
    tl.store(sum_ptr + token, total)
    tl.store(dot_ptr + token, dot)


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
