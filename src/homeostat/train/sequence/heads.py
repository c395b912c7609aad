"""Ulysses: ranks that hold different tokens exchange them for heads around attention.

    q, k, v of own tokens, all heads -> all-to-all -> all tokens, own heads -> attention
                                     -> all-to-all -> own tokens, all heads

Attention works on each head by itself, so a rank that has all tokens of some heads computes what
one device would for these (Jacobs et al. 2023, arXiv:2309.14509). Everything else in a layer works
on each token by itself.

The number of ranks divides the query heads. Key and value heads are repeated as often as it takes
for the ranks to divide them, too: 2 of them over 4 ranks are sent twice each. A query head finds
its own key head, because repeated heads stand next to each other.

Suffixes: `_N` tokens of this rank, `_T` tokens of all ranks, `_H` heads, `_d` head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from homeostat.config.mesh import Mesh
from homeostat.config.model import ModelConfig
from homeostat.errors import ModelError
from homeostat.models.build import config_origin, open_source, read_configs
from homeostat.models.decoder_shape import DecoderConfig
from homeostat.models.families import decoder_config
from homeostat.ops.attention import NO_LIMITS, AttentionContext, Limits
from homeostat.train.sequence.links import Link


def require_sequence_of(model: ModelConfig, mesh: Mesh) -> None:
    """Raise ModelError if ranks cannot share the micro-batches of what model.path names."""
    source = open_source(model)
    require_sequence(decoder_config(read_configs(source)[0], origin=config_origin(source)), mesh)


def require_sequence(config: DecoderConfig, mesh: Mesh) -> None:
    """Raise ModelError if the ranks of a mesh cannot share the micro-batches of a model."""
    require_heads(config, mesh.sp)
    require_ring(config, mesh.cp)


def require_ring(config: DecoderConfig, size: int) -> None:
    """Raise ModelError if the attention of a model cannot go around so many ranks."""
    has_cap = config.block.attention_cap is not None
    if size > 1 and (has_cap or config.block.is_windowed):
        what = "soft-capped scores" if has_cap else "sliding windows"
        raise ModelError(
            f"trainer.backend.context_parallel_size is {size}, and the model has {what}, which "
            "ring attention does not compute. Set it to 1; sequence_parallel_size works with them."
        )


def require_heads(config: DecoderConfig, size: int) -> None:
    """Raise ModelError if so many ranks cannot divide the query heads of a model."""
    heads = config.num_heads
    if heads % size:
        fitting = [str(one) for one in range(1, heads + 1) if heads % one == 0]
        raise ModelError(
            f"trainer.backend.sequence_parallel_size is {size}, and the model has {heads} query "
            f"heads ({heads} = {heads // size} x {size} + {heads % size}): each rank must compute "
            f"the same number of heads. It may be {', '.join(fitting)}; "
            "trainer.backend.context_parallel_size does not depend on heads."
        )


def repeats(num_kv_heads: int, size: int) -> int:
    """Return how often key and value heads are repeated, so that `size` ranks can divide them."""
    return size // math.gcd(num_kv_heads, size)


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """The attention of a rank's own tokens; `inner` is that of `num_tokens` tokens in its heads.

    Ranks hold equally many tokens, the last ones of which may be padding behind `num_tokens`.
    """

    inner: AttentionContext
    link: Link
    num_tokens: int

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
        size = self.link.size
        more = repeats(k_NHd.shape[1], size)
        if more > 1:
            k_NHd, v_NHd = (x.repeat_interleave(more, dim=1) for x in (k_NHd, v_NHd))
        by_rank = [x.unflatten(1, (size, -1)) for x in (q_NHd, k_NHd, v_NHd)]
        widths = [x.shape[2] for x in by_rank]
        # One message for all three: its latency is what short rows pay.
        received = _Exchange.apply(torch.cat(by_rank, dim=2).movedim(1, 0), self.link)
        parts = received.flatten(0, 1)[: self.num_tokens].split(widths, dim=1)
        own = (x.contiguous() for x in parts)
        out_THd = self.inner.attend(layer, *own, scale=scale, limits=limits)
        added = size * q_NHd.shape[0] - self.num_tokens
        out_THd = functional.pad(out_THd, (0, 0, 0, 0, 0, added))
        back = _Exchange.apply(out_THd.unflatten(0, (size, -1)), self.link)
        return back.movedim(0, 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """An all-to-all, whose gradient is one, too."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return link.exchange(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return ctx.link.exchange(grads[0]), None
