"""Attention of queries to some of their keys, with the log-sum-exp that parts are joined by.

    forward   (q, k, v) -> out, lse            lse[n, h] = log sum over these keys of exp(score)
    backward  (dout, q, k, v, out, lse) -> dq, dk, dv

`out` and `lse` of the backward pass are those over all keys of a query, not of these alone: with
them the gradient of any part of the keys is computed without the others (Dao et al. 2022,
arXiv:2205.14135, section 3.1).

Queries and keys are packed documents; document b of the queries sees document b of the keys, all of
it or, if `is_causal`, up to its own position (they are equally long then). Kernels:

    varlen     torch's flash attention over all documents in one call (CUDA, bf16 or fp16)
    efficient  torch's memory-efficient attention, for fp32 on CUDA
    cpu        torch's flash attention on a CPU
    plain      products and exponentials: the reference, quadratic in memory

Suffixes: `_N` queries, `_M` keys, `_H` heads (fewer for keys: grouped queries), `_d` head dim; the
batched kernels have [documents, heads, tokens, dim].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from homeostat.ops.attention import PackedLayout


@dataclass(frozen=True, slots=True)
class Seen:
    """The documents of queries and keys, and whether a query sees keys up to itself alone."""

    queries: PackedLayout
    keys: PackedLayout
    is_causal: bool
    scale: float


class BlockKernel(Protocol):
    """One of the kernels. All tensors are [tokens, heads, dim]; `lse_NH` is fp32."""

    def forward(
        self, q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        """Return the attention to these keys, and its log-sum-exp."""
        ...

    def backward(
        self,
        dout_NHd: Tensor,
        q_NHd: Tensor,
        k_MHd: Tensor,
        v_MHd: Tensor,
        out_NHd: Tensor,
        lse_NH: Tensor,
        seen: Seen,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values from these keys."""
        ...


def block_kernel(kernel: str, *, device_type: str) -> BlockKernel:
    """Return the block kernel that belongs to a kernel of ops/attention.py."""
    if kernel in ("varlen", "rows"):
        return Varlen()
    if kernel == "eager":
        return Batched(_plain_forward, _plain_backward)
    if device_type == "cuda":
        return Batched(_efficient_forward, _efficient_backward)
    return Batched(_cpu_forward, _cpu_backward)


class Varlen:
    """All documents in one call. Grouped queries need no copies."""

    def forward(
        self, q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        queries, keys = seen.queries, seen.keys
        out_NHd, lse_HN, *_ = torch.ops.aten._flash_attention_forward(
            q_NHd,
            k_MHd,
            v_MHd,
            queries.cu_seqlens,
            keys.cu_seqlens,
            queries.max_length,
            keys.max_length,
            0.0,
            seen.is_causal,
            False,
            scale=seen.scale,
        )
        return out_NHd, lse_HN.transpose(0, 1)

    def backward(
        self,
        dout_NHd: Tensor,
        q_NHd: Tensor,
        k_MHd: Tensor,
        v_MHd: Tensor,
        out_NHd: Tensor,
        lse_NH: Tensor,
        seen: Seen,
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = seen.queries, seen.keys
        # The state of a random generator, which only dropout reads.
        unused = torch.zeros(2, dtype=torch.uint64, device=q_NHd.device)
        return torch.ops.aten._flash_attention_backward(
            dout_NHd,
            q_NHd,
            k_MHd,
            v_MHd,
            out_NHd,
            lse_NH.transpose(0, 1).contiguous(),
            queries.cu_seqlens,
            keys.cu_seqlens,
            queries.max_length,
            keys.max_length,
            0.0,
            seen.is_causal,
            unused,
            torch.zeros((), dtype=torch.uint64, device=q_NHd.device),
            scale=seen.scale,
        )


_Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
_Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor, Tensor]
]


@dataclass(frozen=True, slots=True)
class Batched:
    """Neighbouring documents of equal length in one call; key heads are repeated for queries."""

    dense_forward: _Forward
    dense_backward: _Backward

    def forward(
        self, q_NHd: Tensor, k_MHd: Tensor, v_MHd: Tensor, seen: Seen
    ) -> tuple[Tensor, Tensor]:
        more = q_NHd.shape[1] // k_MHd.shape[1]
        outs, sums = [], []
        for q, k, v in _runs(seen, (q_NHd,), (k_MHd, v_MHd)):
            k, v = (x.repeat_interleave(more, dim=1) for x in (k, v))
            out, lse = self.dense_forward(q, k, v, seen.is_causal, seen.scale)
            outs.append(out.transpose(1, 2).flatten(0, 1))
            sums.append(lse.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs), torch.cat(sums)

    def backward(
        self,
        dout_NHd: Tensor,
        q_NHd: Tensor,
        k_MHd: Tensor,
        v_MHd: Tensor,
        out_NHd: Tensor,
        lse_NH: Tensor,
        seen: Seen,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_keys = k_MHd.shape[1]
        more = q_NHd.shape[1] // num_keys
        found: list[list[Tensor]] = [[], [], []]
        of_queries = (dout_NHd, q_NHd, out_NHd, lse_NH[..., None])
        for dout, q, out, lse, k, v in _runs(seen, of_queries, (k_MHd, v_MHd)):
            k, v = (x.repeat_interleave(more, dim=1) for x in (k, v))
            how = (seen.is_causal, seen.scale)
            grads = self.dense_backward(dout, q, k, v, out, lse.squeeze(-1), *how)
            for parts, grad in zip(found, grads, strict=True):
                parts.append(grad.transpose(1, 2).flatten(0, 1))
        dq_NHd, *of_keys = (torch.cat(parts) for parts in found)
        dk_MHd, dv_MHd = (x.unflatten(1, (num_keys, more)).sum(2) for x in of_keys)
        return dq_NHd, dk_MHd, dv_MHd


def _runs(
    seen: Seen, of_queries: tuple[Tensor, ...], of_keys: tuple[Tensor, ...]
) -> Iterator[list[Tensor]]:
    """Yield the tensors of neighbouring documents of equal length, as batches."""
    runs = list(zip(seen.queries.runs(), seen.keys.runs(), strict=True))
    sides = ((of_queries, 0), (of_keys, 1))
    split = [
        x.split([run[side][0] * run[side][1] for run in runs]) for xs, side in sides for x in xs
    ]
    owner = [side for xs, side in sides for _ in xs]
    for number, run in enumerate(runs):
        assert run[0][0] == run[1][0], f"{run}: documents of queries and keys"
        pairs = zip(split, owner, strict=True)
        yield [parts[number].unflatten(0, run[side]).transpose(1, 2) for parts, side in pairs]


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, scale=scale
    )


def _cpu_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, is_causal, scale=scale
    )


# Row lengths of the log-sum-exp are multiples of this, so that rows begin at aligned addresses.
_ALIGNED = 32


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, is_causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % _ALIGNED), value=torch.inf)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        dout,
        q,
        k,
        v,
        None,
        out,
        lse.contiguous(),
        unused,
        unused,
        0.0,
        [True, True, True, False],
        is_causal,
        scale=scale,
    )
    return dq, dk, dv


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _plain_scores(q, k, is_causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.float()).to(q.dtype), lse


def _plain_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    p = (_plain_scores(q, k, is_causal, scale) - lse[..., None]).exp()
    dout, out = dout.float(), out.float()
    dv = p.transpose(-1, -2) @ dout
    dscores = p * (dout @ v.float().transpose(-1, -2) - (dout * out).sum(-1, keepdim=True))
    dq, dk = dscores @ k.float() * scale, dscores.transpose(-1, -2) @ q.float() * scale
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _plain_scores(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if not is_causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf)
