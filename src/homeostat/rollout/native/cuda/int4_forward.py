"""A decoding step with packed INT4 weights, for models trained for INT4 or exported in it.

Up to `int4_products.MAX_ROWS` rows are multiplied by the packed weights. More rows go through the
decoder's linear modules. In training these hold rounded copies; in a model that holds packed
weights only, they dequantise the weights for the moment.

Maps that are not in INT4 (trainer.int4.skip_layers) and experts are computed as in forward.py,
experts with their rounded copies. So are all layers before the first INT4 step of a run.

Suffixes: `_B` rows, `_D` model dim, `_X` heads, `_K` inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from homeostat.models.blocks import MLP, Attention
from homeostat.models.decoder import Decoder
from homeostat.ops.linear import Linear
from homeostat.rollout.native.cuda import int4_products, rows
from homeostat.rollout.native.cuda.forward import DecodeForward, Layers, fed_forward, maps_of
from homeostat.rollout.native.cuda.int4_weights import Int4Weights, Maps, SwitchWatch
from homeostat.rollout.native.cuda.products import Scaled
from homeostat.rollout.native.cuda.state import DecodeState, Rows


class Int4Forward(DecodeForward):
    """The counterpart of `DecodeForward` for a model with INT4 layers."""

    def __init__(self, model: Decoder, state: DecodeState, *, block_tokens: int) -> None:
        super().__init__(model, state, block_tokens=block_tokens)
        self._watch = SwitchWatch(model)
        self._weights: Int4Weights | None = None
        self._is_stale = False
        self._shares = int4_products.Scratch(state.device)

    def refresh(self) -> bool:
        """Pack weights that have changed. Return whether steps must be captured again.

        They must only if layers switched to INT4 or back: weights are packed into the same memory.
        """
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
        """Make the next `refresh` pack the weights again."""
        self._is_stale = True

    def _layers_for(self, num_rows: int) -> Layers:
        if self._weights is None or num_rows > int4_products.MAX_ROWS:
            return self._wide_layers
        return self._int4_layers

    def _int4_layers(
        self, x_BD: Tensor, turns: list[Tensor], state: Rows
    ) -> tuple[Tensor, Tensor | None]:
        assert self._weights is not None, "chosen with its weights"
        layers, eps = self.model.layers, self.shape.eps
        next_norms = [layer.input_layernorm for layer in layers[1:]] + [self.model.model.norm]
        x = Scaled(rows.add_norm(x_BD, None, layers[0].input_layernorm.weight, eps=eps))
        parts = zip(layers, self._weights.layers, next_norms, strict=True)
        for index, (layer, packed, next_norm) in enumerate(parts):
            attention, mlp = layer.self_attn, layer.mlp
            qkv = self._into_heads(x, x_BD, layer.input_layernorm.weight, attention, packed.qkv)
            mixed_BX = self._attend(index, layer, qkv, turns, state)
            norm_D = layer.post_attention_layernorm.weight
            x = self._added(x_BD, mixed_BX, attention.o_proj, packed.o, norm_D)
            if isinstance(mlp, MLP) and packed.gate_up is not None:
                gated_BI = int4_products.gated(x, packed.gate_up.matrix, self._shares, eps=eps)
                x = self._added(x_BD, gated_BI, mlp.down_proj, packed.down, next_norm.weight)
                continue
            normed_BD = rows.add_norm(x_BD, None, norm_D, eps=eps)
            added_BD = fed_forward(normed_BD, mlp, state)
            x = Scaled(rows.add_norm(x_BD, added_BD, next_norm.weight, eps=eps))
        return x_BD, None

    def _into_heads(
        self, x: Scaled, x_BD: Tensor, norm_D: Tensor, attention: Attention, packed: Maps | None
    ) -> Sequence[Tensor]:
        eps = self.shape.eps
        if packed is None:
            normed_BD = rows.add_norm(x_BD, None, norm_D, eps=eps)
            return maps_of(normed_BD, (attention.q_proj, attention.k_proj, attention.v_proj))
        how = packed.matrix, packed.bias_O, self._shares
        return int4_products.into_heads(x, *how, eps=eps).split(packed.sizes, dim=1)

    def _added(
        self, x_BD: Tensor, inputs_BK: Tensor, linear: Linear, packed: Maps | None, norm_D: Tensor
    ) -> Scaled:
        """Compute x += the linear map of the inputs; return the input of a product after a norm."""
        if packed is None:
            added_BD = linear(inputs_BK)
            return Scaled(rows.add_norm(x_BD, added_BD, norm_D, eps=self.shape.eps))
        how = packed.matrix, packed.bias_O, norm_D, self._shares
        return int4_products.added(x_BD, inputs_BK, *how)
