"""The native decoder: all families of models/families.py by one block, in one packed pass.

    tokens_N -> embed -> layers (attention, MLP or experts) -> norm -> hidden_ND

One forward pass serves training, prefill and decoding; the attention context decides which tokens,
of this pass and of earlier ones, a token attends to. How families differ is written in
`DecoderConfig` and its `BlockForm` (models/decoder_shape.py).

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
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from homeostat.config.moe import GroupedKernel
from homeostat.config.trainer import Checkpointing
from homeostat.errors import ModelError
from homeostat.models.blocks import Layer, LayerContext, MoeBlock, norm_of, summed
from homeostat.models.decoder_shape import DecoderConfig
from homeostat.models.expert_load import LoadWatch
from homeostat.models.hidden_states import HiddenStates
from homeostat.models.norms import Embedding
from homeostat.models.routing import Routing
from homeostat.ops.attention import AttentionContext, PackedAttention, PackedLayout
from homeostat.ops.branches import Branches
from homeostat.ops.dropout import DropoutKeys
from homeostat.ops.linear import Linear, Numerics
from homeostat.ops.moe_shape import MoeShape
from homeostat.ops.rope import (
    RopeConfig,
    head_order,
    inverse_frequencies,
    rope_tables,
)
from homeostat.ops.sharing import SharedPrompts
from homeostat.ops.tiled_attention import TiledAttention


class Trunk(nn.Module):
    """Everything except the output head: the part that HF checkpoints name `model`."""

    def __init__(self, config: DecoderConfig, *, numerics: Numerics) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, layer=layer, numerics=numerics) for layer in range(config.num_layers)
        )
        self.norm = norm_of(config)


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
        self.local_freq_F: Tensor | None = None
        if config.block.local_rope is not None:
            self.local_freq_F = inverse_frequencies(
                config.block.local_rope, head_dim=config.head_dim
            )
        order = head_order(config.rope, head_dim=config.head_dim)
        self.order_d = None if order is None else torch.tensor(order, device="cpu")

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

    @property
    def logit_cap(self) -> float | None:
        """Return the soft cap of its logits; None if they have none."""
        return self.config.block.logit_cap

    def output_weight(self) -> Tensor:
        """Return [V, D]: logits would be hidden @ output_weight.T, before a cap; [1, D] of a value
        head.
        """
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
        self._require_length(layout.max_length)
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

    def _require_length(self, length: int) -> None:
        longest = self.config.rope.max_length
        if longest is not None and length > longest:
            raise ModelError(
                f"a row has {length} tokens, and the native decoder computes up to {longest} "
                "(original_max_position_embeddings): beyond it longrope changes all frequencies. "
                "Lower data.max_length."
            )

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
        inner.copies_N = routing.copies(sharing.place_N, count=len(chosen_U))
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
        tables = self._rope_tables(positions_N)
        is_selective = self.gradient_checkpointing == "selective"
        context = LayerContext(attention, tables, self.order_d, is_selective, routing or Routing())
        x_ND, update_ND = self._embedded(tokens_N), None
        for number, layer in enumerate(self.layers):
            if states is not None:
                states.add(number, summed(x_ND, update_ND))
            if self.gradient_checkpointing is True and torch.is_grad_enabled():
                # Sum here, so that one tensor is kept for the layer and not two.
                x_ND, update_ND = checkpoint(
                    layer,
                    summed(x_ND, update_ND),
                    None,
                    context,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=partial(self._checkpoint_contexts, layer, context.routing),
                )
            else:
                x_ND, update_ND = layer(x_ND, update_ND, context)
        hidden_ND = self.model.norm(summed(x_ND, update_ND))
        if states is not None:
            states.add(len(self.model.layers), hidden_ND)
        return self._scaled(hidden_ND)

    def _embedded(self, tokens_N: Tensor) -> Tensor:
        x_ND, scale = self.model.embed_tokens(tokens_N), self.config.block.embedding_scale
        # Rounded to the dtype first, as the families that scale embeddings define it.
        return x_ND if scale == 1.0 else x_ND * torch.tensor(scale, dtype=x_ND.dtype)

    def _scaled(self, hidden_ND: Tensor) -> Tensor:
        """Apply the scale of the logits, which a value head does not have."""
        scale = self.config.block.logit_scale
        return hidden_ND if scale == 1.0 or self.score is not None else hidden_ND * scale

    def _rope_tables(self, positions_N: Tensor) -> dict[RopeConfig, tuple[Tensor, Tensor]]:
        device, rope = positions_N.device, self.config.rope
        self.inv_freq_F = self.inv_freq_F.to(device)
        if self.order_d is not None:
            self.order_d = self.order_d.to(device)
        tables = {rope: rope_tables(positions_N, self.inv_freq_F, rope)}
        local = self.config.block.local_rope
        if local is not None and self.local_freq_F is not None:
            self.local_freq_F = self.local_freq_F.to(device)
            tables[local] = rope_tables(positions_N, self.local_freq_F, local)
        return tables

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


def _load_at(routing: Routing, index_M: Tensor, place_N: Tensor) -> LoadWatch | None:
    """Watch the load of a pass whose token m was index_M[m]; token n is at place_N[n]."""
    return None if routing.load is None else routing.load.at(index_M, place_N)
