"""Ring attention: queries stay, keys and values go around the ranks that share a document.

    every document, padded to 2 x cp chunks -> rank r holds chunks r and 2 cp - 1 - r (zigzag)
    step s: queries meet the keys and values of rank r - s; what they give is merged by the
            log-sum-exp, in fp32; the next keys and values are being sent meanwhile

Causal attention is a triangle, so that a rank with the last part of a document would have most to
do. With an early and a late chunk each, every rank has the same work in every step (Brandon et al.
2023, arXiv:2311.09431; Liu et al. 2023, arXiv:2310.01889):

    its own keys          causal over [early, late]: the late chunk sees all of the early one
    keys of a rank before all queries see the early chunk, and none the late one
    keys of a rank behind the late queries see both chunks, and the early ones none

Padding is at the end of a document, where no query before it sees it. The backward pass goes around
once more, with the gradients of keys and values travelling along until they are home.

Suffixes: `_N` tokens of this rank, `_M` tokens of a block, `_H` heads, `_d` head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from homeostat.ops.attention import NO_LIMITS, Limits, PackedLayout
from homeostat.ops.transfer import to_device
from homeostat.train.sequence.blocks import BlockKernel, Seen
from homeostat.train.sequence.links import Link

# Messages that are under way at the same time.
KEYS, GRADIENTS = 0, 1


@dataclass(frozen=True, slots=True)
class RingLayout:
    """A rank's documents, each [early chunk, late chunk], and the places of both chunks."""

    whole: PackedLayout
    half: PackedLayout
    early_M: Tensor
    late_M: Tensor

    @classmethod
    def of(cls, chunks: Sequence[int], device: torch.device) -> RingLayout:
        """Lay out documents whose chunks have these lengths."""
        chunk_B = torch.tensor(chunks)
        is_late = torch.tensor([False, True]).repeat(len(chunks))
        is_late_N = is_late.repeat_interleave(chunk_B.repeat_interleave(2))
        places = ((~is_late_N).nonzero().squeeze(1), is_late_N.nonzero().squeeze(1))
        return cls(
            PackedLayout.of([2 * chunk for chunk in chunks], device),
            PackedLayout.of(list(chunks), device),
            *(to_device(place_M, device) for place_M in places),
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """The queries and keys of one step of the ring; None means all of them."""

    queries_M: Tensor | None
    keys_M: Tensor | None
    seen: Seen


@dataclass(frozen=True, slots=True)
class RingAttention:
    """The attention context of a rank that holds two chunks of every document."""

    layout: RingLayout
    link: Link
    kernel: BlockKernel

    def attend(
        self,
        layer: int,
        q_NHd: Tensor,
        k_NHd: Tensor,
        v_NHd: Tensor,
        *,
        scale: float,
        limits: Limits = NO_LIMITS,
    ) -> Tensor:
        # train/sequence/heads.py refuses models with such layers before anything is computed.
        assert limits == NO_LIMITS, limits
        return _Ring.apply(q_NHd, k_NHd, v_NHd, self, scale)

    def steps(self, scale: float) -> list[_Step]:
        """Return the blocks of this rank, by the number of hops that the keys have made."""
        layout, here = self.layout, self.link.place
        found = [_Step(None, None, Seen(layout.whole, layout.whole, True, scale))]
        for hops in range(1, self.link.size):
            if hops <= here:
                seen = Seen(layout.whole, layout.half, False, scale)
                found.append(_Step(None, layout.early_M, seen))
            else:
                seen = Seen(layout.half, layout.whole, False, scale)
                found.append(_Step(layout.late_M, None, seen))
        return found


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor, ring: RingAttention, scale: float
    ) -> Tensor:
        kv = torch.stack([k_NHd, v_NHd])
        out_NHd, lse_NH = q_NHd.new_empty(0), q_NHd.new_empty(0)
        steps = ring.steps(scale)
        for hops, step in enumerate(steps):
            coming = ring.link.shift(kv, tag=KEYS) if hops + 1 < len(steps) else None
            q, k, v = _at(q_NHd, step.queries_M), *(_at(x, step.keys_M) for x in kv)
            out, lse = ring.kernel.forward(q, k, v, step.seen)
            if hops == 0:
                out_NHd, lse_NH = out.float(), lse.clone()
            else:
                _merge_(out_NHd, lse_NH, out, lse, step.queries_M)
            kv = kv if coming is None else coming.wait()
        out_NHd = out_NHd.to(q_NHd.dtype)
        ctx.save_for_backward(q_NHd, k_NHd, v_NHd, out_NHd, lse_NH)
        ctx.ring, ctx.scale = ring, scale
        return out_NHd

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        q_NHd, k_NHd, v_NHd, out_NHd, lse_NH = ctx.saved_tensors
        ring, dout_NHd = ctx.ring, grads[0].contiguous()
        dq_NHd = torch.zeros_like(q_NHd, dtype=torch.float32)
        kv, homeward = torch.stack([k_NHd, v_NHd]), None
        steps = ring.steps(ctx.scale)
        for hops, step in enumerate(steps):
            coming = ring.link.shift(kv, tag=KEYS) if hops + 1 < len(steps) else None
            of_queries = (_at(x, step.queries_M) for x in (dout_NHd, q_NHd, out_NHd, lse_NH))
            dout, q, out, lse = of_queries
            k, v = (_at(x, step.keys_M) for x in kv)
            dq, dk, dv = ring.kernel.backward(dout, q, k, v, out, lse, step.seen)
            _add_(dq_NHd, dq, step.queries_M)
            # The gradients that earlier ranks computed for these keys.
            dkv = torch.zeros_like(kv, dtype=torch.float32) if homeward is None else homeward.wait()
            for total, grad in zip(dkv, (dk, dv), strict=True):
                _add_(total, grad, step.keys_M)
            homeward = ring.link.shift(dkv, tag=GRADIENTS)
            kv = kv if coming is None else coming.wait()
        assert homeward is not None, "a ring has at least two ranks"
        dk_NHd, dv_NHd = homeward.wait()
        found = zip((dq_NHd, dk_NHd, dv_NHd), (q_NHd, k_NHd, v_NHd), strict=True)
        return *(grad.to(x.dtype) for grad, x in found), None, None


def _at(x_NHd: Tensor, chosen_M: Tensor | None) -> Tensor:
    return x_NHd if chosen_M is None else x_NHd.index_select(0, chosen_M)


def _add_(total_NHd: Tensor, x_MHd: Tensor, chosen_M: Tensor | None) -> None:
    if chosen_M is None:
        total_NHd.add_(x_MHd)
    else:
        total_NHd.index_add_(0, chosen_M, x_MHd.to(total_NHd.dtype))


def _merge_(
    out_NHd: Tensor, lse_NH: Tensor, out_MHd: Tensor, lse_MH: Tensor, chosen_M: Tensor | None
) -> None:
    """Merge the output over more keys into the output so far, weighted by softmax mass."""
    before_MHd, before_MH = _at(out_NHd, chosen_M), _at(lse_NH, chosen_M)
    total_MH = torch.logaddexp(before_MH, lse_MH)
    share, more = ((lse - total_MH).exp()[..., None] for lse in (before_MH, lse_MH))
    joined_MHd = before_MHd * share + out_MHd.float() * more
    if chosen_M is None:
        out_NHd.copy_(joined_MHd)
        lse_NH.copy_(total_MH)
    else:
        out_NHd.index_copy_(0, chosen_M, joined_MHd)
        lse_NH.index_copy_(0, chosen_M, total_MH)
