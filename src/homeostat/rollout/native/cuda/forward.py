"""One decoding step over the device's state: from each row's last token to its next one.

    enter -> layers (norm, q k v, attention, sum; norm, gate, sum) -> norm -> logits -> draw

The same weights as in the decoder's own forward, by fewer launches. Up to `narrow.MAX_ROWS` rows go
through kernels that are bound by reading the weights alone; more go through the decoder's linear
modules, adapters included.

Suffixes: `_B` rows, `_D` model dim, `_V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from homeostat.models.decoder import Decoder, Layer
from homeostat.ops.linear import Linear
from homeostat.rollout.native.cuda import narrow, rows
from homeostat.rollout.native.cuda.attention import (
    AttentionScratch,
    AttentionShape,
    decode_attention,
)
from homeostat.rollout.native.cuda.sampling import draw_and_move
from homeostat.rollout.native.cuda.state import DecodeState

# Programs that keep the whole device busy; with fewer sequences, keys are shared out.
_PROGRAMS = 256
_MAX_SHARES = 16


class DecodeForward:
    def __init__(self, model: Decoder, state: DecodeState, *, block_tokens: int) -> None:
        config = model.config
        self.model = model
        self.state = state
        self.frequencies_F = model.inv_freq_F.to(state.device)
        self.shape = AttentionShape(
            num_kv_heads=config.num_kv_heads,
            group=config.num_heads // config.num_kv_heads,
            head_dim=config.head_dim,
            block_tokens=block_tokens,
            eps=config.rms_norm_eps,
        )
        self.can_be_narrow = _is_plain(model)
        self._scratch: dict[int, AttentionScratch] = {}

    def step(self, num_rows: int) -> None:
        state, trunk, eps = self.state, self.model.model, self.model.config.rms_norm_eps
        tokens_B, positions_B = state.tokens_B[:num_rows], state.positions_B[:num_rows]
        factor = self.model.config.rope.attention_factor
        table_VD = trunk.embed_tokens.weight
        x_BD, *turns = rows.enter(tokens_B, positions_B, table_VD, self.frequencies_F, factor)
        is_narrow = self.can_be_narrow and num_rows <= narrow.MAX_ROWS
        layers = self._narrow_layers if is_narrow else self._wide_layers
        x_BD, added_BD = layers(x_BD, turns)
        hidden_BD = rows.add_norm(x_BD, added_BD, trunk.norm.weight, eps=eps)
        draw_and_move(
            self._logits(hidden_BD),
            scale_B=state.scale_B,
            greedy_B=state.greedy_B,
            noise_SB=state.noise_SB,
            tokens_B=tokens_B,
            positions_B=positions_B,
            starts_B=state.starts_B,
            moves_B=state.moves_B,
            drawn_SB=state.drawn_SB,
            logps_SB=state.logps_SB,
        )

    def _wide_layers(self, x_BD: Tensor, turns: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        eps, added_BD = self.model.config.rms_norm_eps, None
        for index, layer in enumerate(self.model.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            normed_BD = rows.add_norm(x_BD, added_BD, layer.input_layernorm.weight, eps=eps)
            qkv = (attention.q_proj(normed_BD), attention.k_proj(normed_BD))
            mixed_BX = self._attend(index, layer, (*qkv, attention.v_proj(normed_BD)), turns)
            added_BD = attention.o_proj(mixed_BX)
            norm_D = layer.post_attention_layernorm.weight
            normed_BD = rows.add_norm(x_BD, added_BD, norm_D, eps=eps)
            gated_BI = rows.gate(mlp.gate_proj(normed_BD), mlp.up_proj(normed_BD))
            added_BD = mlp.down_proj(gated_BI)
        return x_BD, added_BD

    def _narrow_layers(self, x_BD: Tensor, turns: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        eps = self.model.config.rms_norm_eps
        for index, layer in enumerate(self.model.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            norm_D = layer.input_layernorm.weight
            qkv = narrow.into_heads(x_BD, norm_D, _head_maps(layer), eps=eps)
            mixed_BX = self._attend(index, layer, qkv, turns)
            narrow.added(x_BD, mixed_BX, attention.o_proj.weight)
            norm_D = layer.post_attention_layernorm.weight
            weights = mlp.gate_proj.weight, mlp.up_proj.weight
            gated_BI = narrow.gated(x_BD, norm_D, *weights, eps=eps)
            narrow.added(x_BD, gated_BI, mlp.down_proj.weight)
        return x_BD, None

    def _attend(
        self, index: int, layer: Layer, qkv: tuple[Tensor, ...], turns: list[Tensor]
    ) -> Tensor:
        attention, num_rows = layer.self_attn, qkv[0].shape[0]
        norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = attention.q_norm.weight, attention.k_norm.weight
        return decode_attention(
            *qkv,
            norms=norms,
            cos_BF=turns[0],
            sin_BF=turns[1],
            stores=self.state.stores_L2[index],
            tables_BK=self.state.tables_BK,
            positions_B=self.state.positions_B,
            shape=self.shape,
            scratch=self._scratch_for(num_rows),
            scale=attention.head_dim**-0.5,
        )

    def _scratch_for(self, num_rows: int) -> AttentionScratch:
        """One for all layers: they run one after the other."""
        if num_rows not in self._scratch:
            busy = num_rows * self.shape.num_kv_heads
            shares = min(max(_PROGRAMS // busy, 1), _MAX_SHARES)
            self._scratch[num_rows] = AttentionScratch(
                self.shape, num_rows=num_rows, shares=shares, device=self.state.device
            )
        return self._scratch[num_rows]

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        """fp32 [B, V], summed in fp32 as the trainer's are."""
        weight_VD = self.model.output_weight()
        if hidden_BD.is_cuda and weight_VD.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(hidden_BD, weight_VD.t(), out_dtype=torch.float32)
        return hidden_BD.float() @ weight_VD.float().t()


def _is_plain(model: Decoder) -> bool:
    """No adapters, and no bias where the narrow kernels have none."""
    layers = [module for layer in model.model.layers for module in layer.modules()]
    linear = [m for m in layers if hasattr(m, "in_features")]
    config = model.config
    sizes = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return (
        all(type(module) is Linear for module in linear)
        and len(linear) == 7 * config.num_layers
        and not (config.o_bias or config.mlp_bias)
        and all(size % narrow.OUTPUTS == 0 for size in sizes)
    )


def _head_maps(layer: Layer) -> narrow.HeadMaps:
    q, k, v = layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj
    biases = None if q.bias is None else (q.bias, k.bias, v.bias)
    return narrow.HeadMaps((q.weight, k.weight, v.weight), biases)
