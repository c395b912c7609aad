"""A decoder layer whose linear maps are in FP8, in a decoding step.

    narrow   up to `narrow.MAX_ROWS` rows: norms and casts belong to the products (fp8_narrow.py)
    wide     more rows: norm and cast, product, attention, cast, product (fp8_products.py)

Suffixes: `_B` rows, `_D` model dim, `_I` the MLP's inner dim, `_X` all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from homeostat.models.decoder import MLP, Layer
from homeostat.rollout.native.cuda import fp8_narrow, fp8_products, rows
from homeostat.rollout.native.cuda.fp8_rows import Fp8Rows, cast_normed, cast_rows
from homeostat.rollout.native.cuda.products import Scratch
from homeostat.rollout.native.fp8_weights import Fp8Maps, fp8_maps

Attend = Callable[[Sequence[Tensor]], Tensor]
# From the normed rows to what is to be added to them.
Feed = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Fp8Layer:
    """The FP8 copies of a layer's weights; of experts none are here."""

    layer: Layer
    heads: Fp8Maps
    out: Fp8Maps
    gates: Fp8Maps | None
    down: Fp8Maps | None

    def refresh(self) -> None:
        """Make the copies of weights that have changed anew."""
        for maps in (self.heads, self.out, self.gates, self.down):
            if maps is not None:
                maps.refresh()

    def attend_narrow(self, x_BD: Tensor, attend: Attend, *, eps: float) -> None:
        """Add what attention makes of few rows to them."""
        norm_D, heads = self.layer.input_layernorm.weight, self.heads
        qkv_BX = fp8_narrow.into_heads(x_BD, norm_D, heads.weight, heads.bias_O, eps=eps)
        mixed_BX = attend(qkv_BX.split(heads.sizes, dim=1))
        fp8_narrow.added(x_BD, mixed_BX, self.out.weight)

    def feed_narrow(self, x_BD: Tensor, *, eps: float) -> None:
        """Add what the gated block makes of few rows to them."""
        assert self.gates is not None, "the block has experts"
        assert self.down is not None, "the block has experts"
        norm_D = self.layer.post_attention_layernorm.weight
        gated_BI = fp8_narrow.gated(x_BD, norm_D, self.gates.weight, eps=eps)
        fp8_narrow.added(x_BD, gated_BI, self.down.weight)

    def added(
        self,
        x_BD: Tensor,
        added_BD: Tensor | None,
        attend: Attend,
        feed: Feed,
        scratch: Scratch,
        *,
        eps: float,
    ) -> Tensor:
        """Return what is to be added to the rows after the layer; `added_BD` is added here.

        `feed` computes a block of experts.
        """
        layer, scaling = self.layer, self.heads.weight.scaling
        cast = cast_normed(x_BD, added_BD, layer.input_layernorm.weight, scaling, eps=eps)
        qkv_BX = _product(cast, self.heads, scratch, like=x_BD)
        mixed_BX = attend(qkv_BX.split(self.heads.sizes, dim=1))
        added_BD = _product(cast_rows(mixed_BX, scaling), self.out, scratch, like=x_BD)
        norm_D = layer.post_attention_layernorm.weight
        if self.gates is None or self.down is None:
            return feed(rows.add_norm(x_BD, added_BD, norm_D, eps=eps))
        cast = cast_normed(x_BD, added_BD, norm_D, scaling, eps=eps)
        gated = fp8_products.gated(cast, self.gates.weight, dtype=x_BD.dtype)
        if isinstance(gated, Tensor):
            gated = cast_rows(gated, scaling)
        return _product(gated, self.down, scratch, like=x_BD)


def fp8_layer(layer: Layer) -> Fp8Layer | None:
    """Return the layer's FP8 copies; None if its maps are not all in FP8, or of odd sizes."""
    attention, mlp = layer.self_attn, layer.mlp
    heads = fp8_maps(attention.q_proj, attention.k_proj, attention.v_proj)
    out = fp8_maps(attention.o_proj)
    gates = down = None
    if isinstance(mlp, MLP):
        gates, down = fp8_maps(mlp.gate_proj, mlp.up_proj), fp8_maps(mlp.down_proj)
        if gates is None or down is None:
            return None
    if heads is None or out is None or out.bias_O is not None or _has_bias(gates, down):
        return None
    return Fp8Layer(layer, heads, out, gates, down)


def _has_bias(*maps: Fp8Maps | None) -> bool:
    return any(one is not None and one.bias_O is not None for one in maps)


def _product(x: Fp8Rows, maps: Fp8Maps, scratch: Scratch, *, like: Tensor) -> Tensor:
    return fp8_products.product(x, maps.weight, maps.bias_O, scratch, dtype=like.dtype)
