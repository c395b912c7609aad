"""The native decoder: Llama, Mistral, Qwen2, Qwen3 and models with experts in one packed pass.

    tokens_N -> embed -> layers (attention, MLP or experts) -> norm -> hidden_ND

One forward pass serves training, prefill and decoding; the attention context decides which tokens,
of this pass and of earlier ones, a token attends to.

Invariants: documents are concatenated and never attend to each other; logits are not computed here
(the log-prob function takes `hidden` and `output_weight`); parameter names are the Hugging Face
names, so `state_dict` is canonical, except for experts (models/hub_names.py). In `invariant`
numerics a token's hidden state has the same bits whatever it is computed with: linear maps, gating
and attention use fixed tiles, and everything else (embedding, norms, rotations, sums) works on each
row separately.

Suffixes: `_N` packed tokens, `_D` model dim, `_H` heads, `_d` head dim, `_F` rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from homeostat.config.moe import GroupedKernel
from homeostat.config.trainer import Checkpointing
from homeostat.models.expert_load import LoadWatch
from homeostat.models.families import DecoderConfig
from homeostat.models.hidden_states import HiddenStates
from homeostat.models.moe import Experts, Router
from homeostat.models.norms import Embedding, RMSNorm
from homeostat.models.routing import Routing
from homeostat.ops.activations import gated_silu
from homeostat.ops.attention import AttentionContext, PackedAttention, PackedLayout
from homeostat.ops.branches import Branches
from homeostat.ops.dropout import DropoutKeys
from homeostat.ops.linear import Linear, Numerics
from homeostat.ops.moe_shape import MoeShape
from homeostat.ops.recompute import forgotten
from homeostat.ops.rope import apply_rope_to_both, inverse_frequencies, rope_tables
from homeostat.ops.sharing import SharedPrompts
from homeostat.ops.tiled_attention import TiledAttention


@dataclass(frozen=True, slots=True)
class _Context:
    """Values that all layers of one forward pass share."""

    attention: AttentionContext
    cos_N1d: Tensor
    sin_N1F: Tensor
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
        flags = {"bias": config.qkv_bias, "numerics": numerics}
        self.q_proj = Linear(config.hidden_size, width, **flags)
        self.k_proj = Linear(config.hidden_size, kv_width, **flags)
        self.v_proj = Linear(config.hidden_size, kv_width, **flags)
        self.o_proj = Linear(width, config.hidden_size, bias=config.o_bias, numerics=numerics)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x_ND: Tensor, context: _Context) -> Tensor:
        heads = (-1, self.head_dim)
        q_NHd = self.q_proj(x_ND).unflatten(1, heads)
        k_NHd = self.k_proj(x_ND).unflatten(1, heads)
        v_NHd = self.v_proj(x_ND).unflatten(1, heads)
        if self.q_norm is not None and self.k_norm is not None:
            # Per head and before the rotation, as in Qwen3.
            q_NHd, k_NHd = self.q_norm(q_NHd), self.k_norm(k_NHd)
        q_NHd, k_NHd = apply_rope_to_both(q_NHd, k_NHd, context.cos_N1d, context.sin_N1F)
        out_NHd = context.attention.attend(
            self.layer, q_NHd, k_NHd, v_NHd, scale=self.head_dim**-0.5
        )
        return self.o_proj(out_NHd.flatten(1))


class MLP(nn.Module):
    """The gated feed-forward block, `size` wide."""

    def __init__(self, config: DecoderConfig, *, size: int, numerics: Numerics) -> None:
        super().__init__()
        self.numerics: Numerics = numerics
        sizes = (config.hidden_size, size)
        flags = {"bias": config.mlp_bias, "numerics": numerics}
        self.gate_proj = Linear(*sizes, **flags)
        self.up_proj = Linear(*sizes, **flags)
        self.down_proj = Linear(*reversed(sizes), **flags)

    def forward(self, x_ND: Tensor, context: _Context) -> Tensor:
        gate_NF, up_NF = self.gate_proj(x_ND), self.up_proj(x_ND)
        gated = partial(gated_silu, gate_NF, up_NF, numerics=self.numerics)
        # One of the widest activations of a layer, and cheap to recompute from gate and up.
        gated_NF = gated()
        with forgotten(gated_NF, gated, enabled=context.is_selective):
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

    def forward(self, x_ND: Tensor, context: _Context) -> Tensor:
        ids_NK, weights_NK = self.gate(x_ND, self.number, context.routing)
        out_ND = self.experts(x_ND, ids_NK, weights_NK)
        if self.shared_experts is None:
            return out_ND
        return out_ND + self.shared_experts(x_ND, context)


class Layer(nn.Module):
    """One decoder layer: attention and MLP, or experts, with their norms."""

    def __init__(self, config: DecoderConfig, *, layer: int, numerics: Numerics) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer=layer, numerics=numerics)
        self.mlp = _feed_forward(config, layer=layer, numerics=numerics)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_ND: Tensor, update_ND: Tensor | None, context: _Context
    ) -> tuple[Tensor, Tensor]:
        """Return x and the update still to be added to it; takes the same from the layer before."""
        if update_ND is None:
            normed_ND = self.input_layernorm(x_ND)
        else:
            x_ND, normed_ND = self.input_layernorm(x_ND, update_ND)
        # x_ND is kept anyway for the residual stream, so the norm is cheap to recompute.
        again = partial(self.input_layernorm, x_ND)
        with forgotten(normed_ND, again, enabled=context.is_selective):
            update_ND = self.self_attn(normed_ND, context)
        # The sum is delayed until the next norm, so that one kernel can do both.
        x_ND, normed_ND = self.post_attention_layernorm(x_ND, update_ND)
        again = partial(self.post_attention_layernorm, x_ND)
        with forgotten(normed_ND, again, enabled=context.is_selective):
            return x_ND, self.mlp(normed_ND, context)


def _feed_forward(config: DecoderConfig, *, layer: int, numerics: Numerics) -> MLP | MoeBlock:
    moe = config.moe
    if moe is None or layer not in moe.layers:
        return MLP(config, size=config.intermediate_size, numerics=numerics)
    return MoeBlock(config, moe, number=moe.layers.index(layer), numerics=numerics)


class Trunk(nn.Module):
    """Everything except the output head: the part that HF checkpoints name `model`."""

    def __init__(self, config: DecoderConfig, *, numerics: Numerics) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, layer=layer, numerics=numerics) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal LM. With tied embeddings it has no `lm_head`, so the matrix has one name."""

    packs = True

    def __init__(
        self,
        config: DecoderConfig,
        *,
        kernel: str,
        gradient_checkpointing: Checkpointing = False,
        numerics: Numerics = "fast",
        grouped_kernel: GroupedKernel = "auto",
    ) -> None:
        super().__init__()
        self.config = config
        self.kernel = kernel
        self.numerics: Numerics = numerics
        self.gradient_checkpointing = gradient_checkpointing
        self.dropout_keys = DropoutKeys()
        self.model = Trunk(config, numerics=numerics)
        for block in self.moe_blocks:
            block.experts.kernel = grouped_kernel
        if not config.tie_embeddings:
            sizes = config.hidden_size, config.vocab_size
            self.lm_head = Linear(*sizes, bias=False, numerics=numerics)
        # A value head in place of the output matrix (models/value_head.py).
        self.score: Linear | None = None
        # Not a buffer: it must survive construction on the meta device, and casts to bf16.
        self.inv_freq_F = inverse_frequencies(config.rope, head_dim=config.head_dim)

    @property
    def causal_lm(self) -> nn.Module:
        """Return the module whose parameter names are the Hugging Face names."""
        return self

    @property
    def moe(self) -> MoeShape | None:
        """Return the shape of its experts; None in a dense model."""
        return self.config.moe

    @property
    def hub_experts(self) -> MoeShape | None:
        """Return the shape of stacked experts that are exported under the hub's names."""
        return self.config.moe

    @property
    def layers(self) -> list[Layer]:
        """The layers in order, typed: nn.ModuleList does not know what it holds."""
        return cast(list[Layer], list(self.model.layers))

    @property
    def moe_blocks(self) -> list[MoeBlock]:
        """The blocks of experts, in order."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeBlock)]

    def output_weight(self) -> Tensor:
        """Return [V, D]: logits would be hidden @ output_weight.T; [1, D] of a value head."""
        if self.score is not None:
            return self.score.weight
        head = self.model.embed_tokens if self.config.tie_embeddings else self.lm_head
        return head.weight

    def hidden(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        layout: PackedLayout,
        *,
        dropout_keys_N: Tensor | None = None,
        sharing: SharedPrompts | Branches | None = None,
        states: HiddenStates | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Return [N, D] after the final norm. Without dropout keys there is no dropout.

        `sharing` computes equal prompts once. It excludes dropout, whose mask differs between
        copies. With `Branches` the result is that of the distinct tokens, [U, D]: there may be many
        more copies than memory has room for. `states` collects the hidden states of layers, with
        `sharing` those of the distinct tokens. `routing` records or replays the
        choice of experts; without one, layers choose and nothing is recorded.
        """
        routing = routing or Routing()
        if sharing is not None:
            assert dropout_keys_N is None, "dropout tells the copies of a prompt apart"
            return self._hidden_shared(tokens_N, positions_N, layout, sharing, routing, states)
        order_N, chosen = None, routing
        if self.kernel == "sdpa" and len(layout.lengths) > 1:
            layout, order_N = layout.by_length()
            chosen = routing.at(order_N)
            chosen.load = _load_at(routing, order_N, order_N.argsort())
            tokens_N, positions_N = tokens_N[order_N], positions_N[order_N]
            dropout_keys_N = None if dropout_keys_N is None else dropout_keys_N[order_N]
        with self.dropout_keys.use(dropout_keys_N):
            attention = self.packed_attention(layout)
            hidden_ND = self.hidden_in(
                tokens_N, positions_N, attention, states=states, routing=chosen
            )
        if order_N is None:
            return hidden_ND
        back_N = order_N.argsort()
        routing.take_record(chosen, back_N)
        if states is not None:
            states.reorder(back_N)
        return hidden_ND[back_N]

    def _hidden_shared(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        layout: PackedLayout,
        sharing: SharedPrompts | Branches,
        routing: Routing,
        states: HiddenStates | None,
    ) -> Tensor:
        attention = sharing.attention(layout, kernel=self.kernel, packed=self.packed_attention)
        chosen_U = sharing.unique_U
        inner = routing.at(chosen_U)
        inner.load = _load_at(routing, chosen_U, sharing.place_N)
        hidden_UD = self.hidden_in(
            tokens_N[chosen_U], positions_N[chosen_U], attention, states=states, routing=inner
        )
        routing.take_record(inner, sharing.place_N)
        return hidden_UD if isinstance(sharing, Branches) else sharing.spread(hidden_UD)

    def hidden_part(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        attention: AttentionContext,
        *,
        dropout_keys_N: Tensor | None = None,
        states: HiddenStates | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Return [N, D] after the final norm of some tokens of a batch.

        The others are on other ranks: `attention` reaches them.
        """
        with self.dropout_keys.use(dropout_keys_N):
            return self.hidden_in(tokens_N, positions_N, attention, states=states, routing=routing)

    def hidden_in(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        attention: AttentionContext,
        *,
        states: HiddenStates | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Return [N, D] after the final norm, in the context of tokens computed before."""
        self.inv_freq_F = self.inv_freq_F.to(tokens_N.device)
        tables = rope_tables(positions_N, self.inv_freq_F, self.config.rope)
        is_selective = self.gradient_checkpointing == "selective"
        context = _Context(attention, *tables, is_selective, routing or Routing())
        x_ND, update_ND = self.model.embed_tokens(tokens_N), None
        for number, layer in enumerate(self.layers):
            if states is not None:
                states.add(number, _sum(x_ND, update_ND))
            if self.gradient_checkpointing is True and torch.is_grad_enabled():
                # Sum here, so that one tensor is kept for the layer and not two.
                x_ND, update_ND = checkpoint(
                    layer,
                    _sum(x_ND, update_ND),
                    None,
                    context,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=partial(self._checkpoint_contexts, layer, context.routing),
                )
            else:
                x_ND, update_ND = layer(x_ND, update_ND, context)
        hidden_ND = self.model.norm(_sum(x_ND, update_ND))
        if states is not None:
            states.add(len(self.model.layers), hidden_ND)
        return hidden_ND

    def _checkpoint_contexts(
        self, layer: Layer, routing: Routing
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return `context_fn` of torch's checkpoint: dropout and routing see the pass repeated."""
        forward, keys_again = self.dropout_keys.checkpoint_contexts()
        number = layer.mlp.number if isinstance(layer.mlp, MoeBlock) else None

        @contextmanager
        def again() -> Iterator[None]:
            with keys_again, routing.recomputation(number):
                yield

        return forward, again()

    def packed_attention(
        self, layout: PackedLayout, *, num_kv_heads: int | None = None
    ) -> AttentionContext:
        """Return the attention of whole documents; `num_kv_heads` if some heads are elsewhere."""
        if self.numerics == "invariant":
            heads = num_kv_heads or self.config.num_kv_heads
            return TiledAttention.of(layout, num_kv_heads=heads, kernel=self.kernel)
        return PackedAttention(layout, self.kernel)


def _sum(x_ND: Tensor, update_ND: Tensor | None) -> Tensor:
    return x_ND if update_ND is None else x_ND + update_ND


def _load_at(routing: Routing, index_M: Tensor, place_N: Tensor) -> LoadWatch | None:
    """Watch the load of a pass whose token m was index_M[m]; token n is at place_N[n]."""
    return None if routing.load is None else routing.load.at(index_M, place_N)
