"""Compute prompts that several rows of a packed batch share only once.

The samples of a group begin with the same tokens at the same positions, so all layers compute the
same for them. Work that is done per token (projections, norms, MLP: nearly all of it) is done for
the U distinct tokens. Only for attention are queries, keys and values copied to all N positions,
and the results of the distinct tokens gathered again.

    tokens_N -> tokens_U -> layers (attention: _U -> _N -> _U) -> hidden_U -> hidden_N

Results and gradients are those of the whole batch, up to rounding. Most tokens have no copies:
their gradients are copied, and only those of copies are added up.

Suffixes: `_N` packed tokens, `_U` distinct ones, `_C` copies of those, `_B` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from homeostat.ops.attention import NO_LIMITS, AttentionContext, Limits, PackedLayout
from homeostat.ops.transfer import to_device

# Below this share the copies for attention cost more than sharing saves.
MIN_SPARED_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """The distinct tokens of a batch and their copies.

    `unique_U` are the positions of the distinct tokens, `place_N` says which of them each token is,
    and `copies_C` are the positions of the copies.
    """

    unique_U: Tensor
    place_N: Tensor
    copies_C: Tensor

    @classmethod
    def find(
        cls,
        tokens_N: np.ndarray,
        lengths_B: np.ndarray,
        prompt_lengths_B: np.ndarray,
        *,
        device: torch.device,
        alike: Sequence[np.ndarray] = (),
    ) -> SharedPrompts | None:
        """Find shared prompts; None if too little is shared.

        A prompt is shared as a whole or not. `alike` holds values of all tokens ([N, ...]) that
        decide what is computed, as replayed routes do: they must be equal, too.
        """
        starts_B = np.cumsum(lengths_B) - lengths_B
        first_with: dict[bytes, int] = {}
        is_copy_N = np.zeros(len(tokens_N), dtype=bool)
        source_N = np.arange(len(tokens_N))
        for start, length in zip(starts_B.tolist(), prompt_lengths_B.tolist(), strict=True):
            span = slice(start, start + length)
            # Rows share a prompt only if all of its tokens are equal, so compare the raw bytes.
            raw = b"".join(values_N[span].tobytes() for values_N in (tokens_N, *alike))
            first = first_with.setdefault(raw, start)
            if first != start:
                is_copy_N[span] = True
                source_N[span] = np.arange(first, first + length)
        if is_copy_N.mean() < MIN_SPARED_SHARE:
            return None
        # Index of each distinct token among the distinct ones; copies look it up through their
        # source.
        number_N = np.cumsum(~is_copy_N) - 1
        return cls(
            to_device(torch.from_numpy(np.flatnonzero(~is_copy_N)), device),
            to_device(torch.from_numpy(number_N[source_N]), device),
            to_device(torch.from_numpy(np.flatnonzero(is_copy_N)), device),
        )

    def reordered(self, order_N: Tensor) -> SharedPrompts:
        """Return the same sharing for a batch whose packed tokens were reordered."""
        now_at_N = order_N.argsort()
        return SharedPrompts(
            now_at_N[self.unique_U], self.place_N[order_N], now_at_N[self.copies_C]
        )

    def attention(
        self,
        layout: PackedLayout,
        *,
        kernel: str,
        packed: Callable[[PackedLayout], AttentionContext],
    ) -> SharedAttention:
        """Return the attention over distinct tokens; `packed` makes that over all tokens."""
        if kernel != "sdpa":
            return SharedAttention(packed(layout), self)
        layout, order_N = layout.by_length()
        return SharedAttention(packed(layout), self.reordered(order_N))

    def spread(self, x_U: Tensor) -> Tensor:
        """Copy values of distinct tokens to all positions."""
        return _Spread.apply(x_U, self)

    def gather(self, x_N: Tensor) -> Tensor:
        """Return the values at the positions of the distinct tokens."""
        return _Gather.apply(x_N, self)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_U: Tensor, sharing: SharedPrompts) -> Tensor:
        ctx.sharing = sharing
        return x_U.index_select(0, sharing.place_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (grad_N,), sharing = grads, ctx.sharing
        # Copy the gradients of the distinct tokens and add only those of the copies, because
        # index_add over all tokens would be slower.
        grad_U = grad_N.index_select(0, sharing.unique_U)
        place_C = sharing.place_N.index_select(0, sharing.copies_C)
        return grad_U.index_add_(0, place_C, grad_N.index_select(0, sharing.copies_C)), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N: Tensor, sharing: SharedPrompts) -> Tensor:
        ctx.sharing = sharing
        return x_N.index_select(0, sharing.unique_U)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (grad_U,), sharing = grads, ctx.sharing
        grad_N = grad_U.new_zeros((sharing.place_N.shape[0], *grad_U.shape[1:]))
        return grad_N.index_copy_(0, sharing.unique_U, grad_U), None


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """An attention context over distinct tokens; `inner` sees all tokens in their positions."""

    inner: AttentionContext
    sharing: SharedPrompts

    def attend(
        self,
        layer: int,
        q_UHd: Tensor,
        k_UHd: Tensor,
        v_UHd: Tensor,
        *,
        scale: float,
        limits: Limits = NO_LIMITS,
    ) -> Tensor:
        qkv = (self.sharing.spread(x_UHd) for x_UHd in (q_UHd, k_UHd, v_UHd))
        return self.sharing.gather(self.inner.attend(layer, *qkv, scale=scale, limits=limits))
