"""A decoding step by packed INT4 weights, for models that are trained for them or exported in them.

    narrow   up to `int4_narrow.MAX_ROWS` rows: bound by reading the weights alone
    tiled    more rows, on tensor cores

Maps that are not in INT4 (trainer.int4.skip_layers) and experts are computed as in forward.py;
experts by their rounded copies. Before the first INT4 step of a run all layers are.

Suffixes: `_B` rows, `_D` model dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from homeostat.models.decoder import MLP, Attention, Decoder, Layer
from homeostat.ops.linear import Linear
from homeostat.rollout.native.cuda import int4_narrow, int4_tiled, products, rows
from homeostat.rollout.native.cuda.forward import DecodeForward, Layers, fed_forward, maps_of
from homeostat.rollout.native.cuda.int4_weights import Int4Layer, Int4Weights, Maps, SwitchWatch
from homeostat.rollout.native.cuda.state import DecodeState, Rows


class Int4Forward(DecodeForward):
    """The counterpart of `DecodeForward` for a model with INT4 layers."""

    def __init__(self, model: Decoder, state: DecodeState, *, block_tokens: int) -> None:
        super().__init__(model, state, block_tokens=block_tokens)
        self._watch = SwitchWatch(model)
        self._weights: Int4Weights | None = None
        self._is_stale = False
        self._shares = products.Scratch(state.device)

    def refresh(self) -> bool:
        """Pack weights that have changed. Return whether steps must be captured anew: only if the
        layers began or ceased to be rounded, because weights are packed into the same memory."""
        is_switched = self._watch.take_switch()
        if not self._watch.is_rounded:
            self._weights = None
        elif self._weights is None:
            self._weights = Int4Weights(self.model)
        elif self._is_stale:
            self._weights.refresh()
        self._is_stale = False
        return is_switched

    def weights_changed(self) -> None:
        """The next `refresh` packs the weights anew."""
        self._is_stale = True

    def _layers_for(self, num_rows: int) -> Layers:
        return self._wide_layers if self._weights is None else self._int4_layers

    def _int4_layers(
        self, x_BD: Tensor, turns: list[Tensor], state: Rows
    ) -> tuple[Tensor, Tensor | None]:
        assert self._weights is not None, "chosen with its weights"
        for index, (layer, packed) in enumerate(
            zip(self.model.layers, self._weights.layers, strict=True)
        ):
            norm_D = layer.input_layernorm.weight
            qkv = self._into_heads(x_BD, norm_D, layer.self_attn, packed.qkv)
            mixed_BX = self._attend(index, layer, qkv, turns, state)
            self._add(x_BD, mixed_BX, layer.self_attn.o_proj, packed.o)
            self._feed(x_BD, layer, packed, state)
        return x_BD, None

    def _into_heads(
        self, x_BD: Tensor, norm_D: Tensor, attention: Attention, packed: Maps | None
    ) -> Sequence[Tensor]:
        if packed is None:
            normed_BD = rows.add_norm(x_BD, None, norm_D, eps=self.shape.eps)
            return maps_of(normed_BD, (attention.q_proj, attention.k_proj, attention.v_proj))
        if len(x_BD) <= int4_narrow.MAX_ROWS:
            how = {"eps": self.shape.eps}
            out_BO = int4_narrow.into_heads(x_BD, norm_D, packed.matrix, packed.bias_O, **how)
        else:
            normed_BD = rows.add_norm(x_BD, None, norm_D, eps=self.shape.eps)
            how = packed.matrix, packed.bias_O, self._shares
            out_BO = int4_tiled.into_heads(normed_BD, *how)
        return out_BO.split(packed.sizes, dim=1)

    def _feed(self, x_BD: Tensor, layer: Layer, packed: Int4Layer, state: Rows) -> None:
        """Add what the block after attention makes of the rows to them."""
        norm_D, eps, mlp = layer.post_attention_layernorm.weight, self.shape.eps, layer.mlp
        if not isinstance(mlp, MLP) or packed.gate_up is None:
            normed_BD = rows.add_norm(x_BD, None, norm_D, eps=eps)
            x_BD += fed_forward(normed_BD, mlp, state)
            return
        matrix = packed.gate_up.matrix
        if len(x_BD) <= int4_narrow.MAX_ROWS:
            gated_BI = int4_narrow.gated(x_BD, norm_D, matrix, eps=eps)
        else:
            normed_BD = rows.add_norm(x_BD, None, norm_D, eps=eps)
            gated_BI = int4_tiled.gated(normed_BD, matrix, self._shares)
        self._add(x_BD, gated_BI, mlp.down_proj, packed.down)

    def _add(self, x_BO: Tensor, inputs_BK: Tensor, linear: Linear, packed: Maps | None) -> None:
        """Compute x += the linear map of the inputs, in place."""
        if packed is None:
            x_BO += linear(inputs_BK)
        elif len(x_BO) <= int4_narrow.MAX_ROWS:
            int4_narrow.added(x_BO, inputs_BK, packed.matrix, packed.bias_O)
        else:
            int4_tiled.added(x_BO, inputs_BK, packed.matrix, packed.bias_O, self._shares)
