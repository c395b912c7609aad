"""The layers of the native decoder: attention, feed-forward blocks and their norms.

One block serves all families: how they differ, and what their parameters are called, is written in
`DecoderConfig` and its `BlockForm` (models/decoder_shape.py).

Suffixes: `_N` packed tokens, `_D` model dim, `_H` heads, `_d` head dim, `_O` outputs of a map, `_F`
width of the feed-forward block; of tables, rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial

from torch import Tensor, nn

from homeostat.models.decoder_shape import DecoderConfig
from homeostat.models.moe import Experts, Router
from homeostat.models.norms import RMSNorm
from homeostat.models.routing import Routing
from homeostat.ops.activations import Activation, gated
from homeostat.ops.adapters import outputs_of
from homeostat.ops.attention import AttentionContext
from homeostat.ops.linear import Linear, Numerics
from homeostat.ops.moe_shape import MoeShape
from homeostat.ops.recompute import forgotten
from homeostat.ops.rope import RopeConfig, apply_rope_to_both


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Values that all layers of one forward pass share."""

    attention: AttentionContext
    # Cos and sin of each rotation that the model has.
    tables: Mapping[RopeConfig, tuple[Tensor, Tensor]]
    # The order in which a head's dims are rotated; None: as they are.
    order_d: Tensor | None
    # Norms and gates are recomputed in the backward pass.
    is_selective: bool
    # How the layers with experts choose them; they are numbered among themselves.
    routing: Routing


class Attention(nn.Module):
    """Grouped-query causal attention; q_norm and k_norm exist if the family has them."""

    def __init__(self, config: DecoderConfig, *, layer: int, numerics: Numerics) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        width, kv_width = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        self.widths = (width, kv_width, kv_width)
        flags = {"bias": config.qkv_bias, "numerics": numerics}
        if config.block.fused_qkv:
            self.qkv_proj = Linear(config.hidden_size, sum(self.widths), **flags)
        else:
            self.q_proj = Linear(config.hidden_size, width, **flags)
            self.k_proj = Linear(config.hidden_size, kv_width, **flags)
            self.v_proj = Linear(config.hidden_size, kv_width, **flags)
        self.o_proj = Linear(width, config.hidden_size, bias=config.o_bias, numerics=numerics)
        self.is_wide = config.block.wide_qk_norm
        normed = self.widths if self.is_wide else (config.head_dim, config.head_dim)
        how = {"centred": config.block.centred_norms}
        self.q_norm = RMSNorm(normed[0], config.rms_norm_eps, **how) if config.qk_norm else None
        self.k_norm = RMSNorm(normed[1], config.rms_norm_eps, **how) if config.qk_norm else None
        self.rope, self.limits = config.rope_of(layer), config.limits(layer)
        self.scale = config.attention_scale

    @property
    def into_heads(self) -> tuple[Linear, ...]:
        """Return the maps into queries, keys and values, or the one map into all of them."""
        if hasattr(self, "qkv_proj"):
            return (self.qkv_proj,)
        return self.q_proj, self.k_proj, self.v_proj

    def forward(self, x_ND: Tensor, context: LayerContext) -> Tensor:
        made = outputs_of(x_ND, self.into_heads)
        q_NO, k_NO, v_NO = made if len(made) == 3 else made[0].split(self.widths, dim=1)
        if self.is_wide:
            q_NO, k_NO = self._normed(q_NO, k_NO)
        q_NHd, k_NHd, v_NHd = (
            x_NO.unflatten(1, (-1, self.head_dim)) for x_NO in (q_NO, k_NO, v_NO)
        )
        if not self.is_wide:
            # Per head and before the rotation, as in Qwen3.
            q_NHd, k_NHd = self._normed(q_NHd, k_NHd)
        if context.order_d is not None:
            q_NHd, k_NHd = (x_NHd.index_select(2, context.order_d) for x_NHd in (q_NHd, k_NHd))
        q_NHd, k_NHd = apply_rope_to_both(q_NHd, k_NHd, *context.tables[self.rope])
        out_NHd = context.attention.attend(
            self.layer, q_NHd, k_NHd, v_NHd, scale=self.scale, limits=self.limits
        )
        return self.o_proj(out_NHd.flatten(1))

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)


class MLP(nn.Module):
    """The gated feed-forward block, `size` wide."""

    def __init__(self, config: DecoderConfig, *, size: int, numerics: Numerics) -> None:
        super().__init__()
        self.numerics: Numerics = numerics
        self.activation: Activation = config.block.activation
        sizes = (config.hidden_size, size)
        flags = {"bias": config.mlp_bias, "numerics": numerics}
        if config.block.fused_gate_up:
            self.gate_up_proj = Linear(config.hidden_size, 2 * size, **flags)
        else:
            self.gate_proj = Linear(*sizes, **flags)
            self.up_proj = Linear(*sizes, **flags)
        self.down_proj = Linear(*reversed(sizes), **flags)

    @property
    def into_gates(self) -> tuple[Linear, ...]:
        """Return the maps into gate and up, or the one map into both."""
        if hasattr(self, "gate_up_proj"):
            return (self.gate_up_proj,)
        return self.gate_proj, self.up_proj

    def forward(self, x_ND: Tensor, context: LayerContext) -> Tensor:
        made = outputs_of(x_ND, self.into_gates)
        gate_NF, up_NF = made if len(made) == 2 else made[0].chunk(2, dim=1)
        how = {"activation": self.activation, "numerics": self.numerics}
        again = partial(gated, gate_NF, up_NF, **how)
        # One of the widest activations of a layer, and cheap to recompute from gate and up.
        gated_NF = again()
        with forgotten(gated_NF, again, enabled=context.is_selective):
            return self.down_proj(gated_NF)


class MoeBlock(nn.Module):
    """A feed-forward block of experts. `number`: its place among the layers that have them."""

    def __init__(
        self, config: DecoderConfig, shape: MoeShape, *, number: int, numerics: Numerics
    ) -> None:
        super().__init__()
        self.number = number
        self.gate = Router(shape, config.hidden_size, numerics=numerics)
        self.experts = Experts(shape, config.hidden_size, numerics=numerics)
        self.shared_experts = (
            MLP(config, size=shape.shared_size, numerics=numerics) if shape.shared_size else None
        )

    def forward(self, x_ND: Tensor, context: LayerContext) -> Tensor:
        ids_NK, weights_NK = self.gate(x_ND, self.number, context.routing)
        out_ND = self.experts(x_ND, ids_NK, weights_NK)
        if self.shared_experts is None:
            return out_ND
        return out_ND + self.shared_experts(x_ND, context)


class Layer(nn.Module):
    """One decoder layer: attention and MLP, or experts, with their norms.

    Norms are attributes under the names that the family gives them; these are Llama's.
    """

    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm

    def __init__(self, config: DecoderConfig, *, layer: int, numerics: Numerics) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer=layer, numerics=numerics)
        self.mlp = _feed_forward(config, layer=layer, numerics=numerics)
        self.names = config.block.norms
        self.residual_scale = config.block.residual_scale
        for field in fields(self.names):
            name = getattr(self.names, field.name)
            if name is not None:
                setattr(self, name, norm_of(config))

    def norm(self, name: str | None) -> RMSNorm | None:
        """Return one of its norms by its name; None if the family has none there."""
        return None if name is None else getattr(self, name)

    def forward(
        self, x_ND: Tensor, update_ND: Tensor | None, context: LayerContext
    ) -> tuple[Tensor, Tensor]:
        """Return x and the update still to be added to it; takes the same from the layer before."""
        names = self.names
        x_ND, update_ND = self._block(
            self.self_attn, names.before_attention, x_ND, update_ND, context
        )
        update_ND = self._update(names.after_attention, update_ND)
        # The sum is delayed until the next norm, so that one kernel can do both.
        x_ND, update_ND = self._block(self.mlp, names.before_mlp, x_ND, update_ND, context)
        return x_ND, self._update(names.after_mlp, update_ND)

    def _block(
        self,
        block: Attention | MLP | MoeBlock,
        name: str | None,
        x_ND: Tensor,
        update_ND: Tensor | None,
        context: LayerContext,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream before a block, and what the block makes of its norm."""
        norm = self.norm(name)
        if norm is None:
            x_ND = summed(x_ND, update_ND)
            return x_ND, block(x_ND, context)
        if update_ND is None:
            normed_ND = norm(x_ND)
        else:
            x_ND, normed_ND = norm(x_ND, update_ND)
        # x_ND is kept anyway for the residual stream, so the norm is cheap to recompute.
        with forgotten(normed_ND, partial(norm, x_ND), enabled=context.is_selective):
            return x_ND, block(normed_ND, context)

    def _update(self, name: str | None, made_ND: Tensor) -> Tensor:
        """Return what a block adds to the residual stream."""
        norm = self.norm(name)
        update_ND = made_ND if norm is None else norm(made_ND)
        return update_ND if self.residual_scale == 1.0 else update_ND * self.residual_scale


def norm_of(config: DecoderConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, centred=config.block.centred_norms)


def _feed_forward(config: DecoderConfig, *, layer: int, numerics: Numerics) -> MLP | MoeBlock:
    moe = config.moe
    if moe is None or layer not in moe.layers:
        return MLP(config, size=config.intermediate_size, numerics=numerics)
    return MoeBlock(config, moe, number=moe.layers.index(layer), numerics=numerics)


def summed(x_ND: Tensor, update_ND: Tensor | None) -> Tensor:
    """Return the residual stream with the update that is still to be added to it."""
    return x_ND if update_ND is None else x_ND + update_ND
