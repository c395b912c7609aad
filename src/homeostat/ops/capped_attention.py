"""Attention whose scores have a soft cap: cap * tanh(score / cap), as in Gemma 2.

No fused kernel of torch computes it, so scores are stored here, for as many queries at a time as
fit into `SCORE_BYTES` in fp32. With gradients they are computed again in the backward pass.

Suffixes: `_B` documents, `_H` query heads, `_K` key heads, `_T` queries, `_S` keys, `_d` head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Largest size of the scores that exist at a time.
SCORE_BYTES = 64 * 2**20


def soft_capped(scores: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(scores / cap)."""
    return (scores / cap).tanh() * cap


def capped_attention(
    q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, *, sees: Tensor, scale: float, soft_cap: float
) -> Tensor:
    """Return [B, H, T, d]. `sees` is bool, [T, S] or [B, 1, T, S]; every query sees a key."""
    num_rows, num_heads, num_queries, _ = q_BHTd.shape
    row_bytes = 4 * num_rows * num_heads * k_BKSd.shape[2]
    some = max(1, SCORE_BYTES // row_bytes)
    outputs = []
    for first in range(0, num_queries, some):
        part = slice(first, first + some)
        inputs = (q_BHTd[:, :, part], k_BKSd, v_BKSd, sees[..., part, :], scale, soft_cap)
        if torch.is_grad_enabled() and some < num_queries:
            how = {"use_reentrant": False, "preserve_rng_state": False}
            outputs.append(checkpoint(_attend, *inputs, **how))
        else:
            outputs.append(_attend(*inputs))
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]


def _attend(
    q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, sees: Tensor, scale: float, soft_cap: float
) -> Tensor:
    # Query heads that share a key head are rows of one product.
    q_BKgTd = q_BHTd.unflatten(1, (k_BKSd.shape[1], -1)).float() * scale
    scores = q_BKgTd @ k_BKSd.float().mT[:, :, None]
    seen = sees if sees.ndim == 2 else sees[:, :, None]
    weights = soft_capped(scores, soft_cap).masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ v_BKSd.float()[:, :, None]).flatten(1, 2).to(q_BHTd.dtype)
