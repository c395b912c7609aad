"""Attention of the late halves of rows, joined from its parts as a ring does it."""

from __future__ import annotations

import torch
from torch import Tensor

from homeostat.ops.attention import packed_attention
from homeostat.train.sequence.blocks import BlockKernel, Seen
from homeostat.train.sequence.ring import RingLayout, _merge_


def random_qkv(
    tokens: int, heads: int, *, head_dim: int = 8, seed: int = 0, **place: object
) -> tuple[Tensor, ...]:
    """Queries of so many heads, keys and values of two."""
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(tokens, count, head_dim, generator=generator) for count in (heads, 2, 2))
    return tuple(x.to(**place).requires_grad_() for x in made)


def expected_halves(
    layout: RingLayout, qkv: tuple[Tensor, ...], dout: Tensor, *, scale: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return what the late halves give, and the gradients, by the reference in fp32."""
    wide = tuple(x.detach().float().requires_grad_() for x in qkv)
    out = packed_attention(*wide, layout.whole, scale=scale, kernel="eager")[layout.late_M]
    return out, torch.autograd.grad(out, wide, dout.float())


@torch.no_grad()
def joined_halves(
    block: BlockKernel,
    layout: RingLayout,
    qkv: tuple[Tensor, ...],
    dout: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return output, log-sum-exp and gradients: the early half is seen whole, the late causally."""
    q, k, v = (x[layout.late_M] for x in qkv)
    past = [x[layout.early_M] for x in qkv[1:]]
    own = Seen(layout.half, layout.half, True, scale)
    before = Seen(layout.half, layout.half, False, scale)
    out, lse = block.forward(q, k, v, own)
    out, lse = out.float(), lse.clone()
    _merge_(out, lse, *block.forward(q, *past, before), None)
    narrow = out.to(q.dtype)
    dq, dk, dv = block.backward(dout, q, k, v, narrow, lse, own)
    more, dk_past, dv_past = block.backward(dout, q, *past, narrow, lse, before)
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in qkv]
    for grad, here in zip(grads, (dq.float() + more.float(), dk.float(), dv.float()), strict=True):
        grad[layout.late_M] = here
    for grad, there in zip(grads[1:], (dk_past, dv_past), strict=True):
        grad[layout.early_M] = there.float()
    return out, lse, grads
