"""A decoding step of a model with layers in FP8.

    narrow   up to `narrow.MAX_ROWS` rows: bound by reading the weights alone (fp8_narrow.py)
    wide     more rows: norm and cast, product, attention, cast, product (fp8_products.py)

A layer has two halves, attention and the block after it. The model's own products compute a half,
as in forward.py, if it is not entirely in FP8 (trainer.fp8.skip_layers) or has adapters, experts or
sizes that the kernels do not support. They also compute everything before the first FP8 version of
the weights.

Suffixes: `_B` rows, `_D` model dim, `_I` the MLP's inner dim, `_X` all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from homeostat.models.blocks import MLP, Layer
from homeostat.models.decoder import Decoder
from homeostat.rollout.native.cuda import fp8_narrow, fp8_products, narrow, rows
from homeostat.rollout.native.cuda.forward import DecodeForward, Layers, fed_forward, maps_of
from homeostat.rollout.native.cuda.fp8_rows import Fp8Rows, cast_normed, cast_rows
from homeostat.rollout.native.cuda.products import Scratch
from homeostat.rollout.native.cuda.state import DecodeState, Rows
from homeostat.rollout.native.fp8_weights import Fp8Maps, Fp8Watch, fp8_maps

Attend = Callable[[Sequence[Tensor]], Tensor]


class Fp8Forward(DecodeForward):
    """The counterpart of `DecodeForward` for a model with layers in FP8."""

    def __init__(self, model: Decoder, state: DecodeState, *, block_tokens: int) -> None:
        super().__init__(model, state, block_tokens=block_tokens)
        self._watch = Fp8Watch(model)
        self._halves = _all_halves(model)

    def refresh(self) -> bool:
        """Update the copies of changed weights. Return whether steps must be captured again.

        They must only if layers switched to FP8: updates are written to the same memory.
        """
        is_switched = self._watch.refresh()
        if is_switched:
            self._halves = _all_halves(self.model)
        for attention, block in self._halves:
            for half in (attention, block):
                if half is not None:
                    half.refresh()
        return is_switched

    def _layers_for(self, num_rows: int) -> Layers:
        return self._fp8_layers if any(map(any, self._halves)) else self._wide_layers

    def _fp8_layers(
        self, x_BD: Tensor, turns: list[Tensor], state: Rows
    ) -> tuple[Tensor, Tensor | None]:
        eps, added_BD = self.shape.eps, None
        is_narrow = len(x_BD) <= narrow.MAX_ROWS and x_BD.shape[1] <= narrow.MAX_WIDTH
        for index, (layer, halves) in enumerate(zip(self.model.layers, self._halves, strict=True)):
            attend = partial(self._attend, index, layer, turns=turns, state=state)
            norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
            plain = partial(_attended, layer, attend), partial(_fed, layer, state)
            for norm_D, half, other in zip(norms, halves, plain, strict=True):
                if half is None:
                    added_BD = other(rows.add_norm(x_BD, added_BD, norm_D, eps=eps))
                elif is_narrow and added_BD is None:
                    half.add_narrow(x_BD, norm_D, attend, eps=eps)
                else:
                    added_BD = half.added(x_BD, added_BD, norm_D, attend, self._sums, eps=eps)
        return x_BD, added_BD


@dataclass(frozen=True, slots=True)
class AttentionHalf:
    """The maps of attention in FP8."""

    heads: Fp8Maps
    out: Fp8Maps

    def refresh(self) -> None:
        """Make the copies of weights that have changed again."""
        self.heads.refresh()
        self.out.refresh()

    def add_narrow(self, x_BD: Tensor, norm_D: Tensor, attend: Attend, *, eps: float) -> None:
        """Add the output of attention to the rows, of which there are few."""
        heads = self.heads
        qkv_BX = fp8_narrow.into_heads(x_BD, norm_D, heads.weight, heads.bias_O, eps=eps)
        mixed_BX = attend(qkv_BX.split(heads.sizes, dim=1))
        fp8_narrow.added(x_BD, mixed_BX, self.out.weight)

    def added(
        self,
        x_BD: Tensor,
        added_BD: Tensor | None,
        norm_D: Tensor,
        attend: Attend,
        scratch: Scratch,
        *,
        eps: float,
    ) -> Tensor:
        """Add `added_BD` to the rows. Return the output of attention, not yet added."""
        scaling = self.heads.weight.scaling
        cast = cast_normed(x_BD, added_BD, norm_D, scaling, eps=eps)
        qkv_BX = _product(cast, self.heads, scratch, like=x_BD)
        mixed_BX = attend(qkv_BX.split(self.heads.sizes, dim=1))
        return _product(cast_rows(mixed_BX, scaling), self.out, scratch, like=x_BD)


@dataclass(frozen=True, slots=True)
class BlockHalf:
    """The maps of a gated block in FP8."""

    gates: Fp8Maps
    down: Fp8Maps

    def refresh(self) -> None:
        """Make the copies of weights that have changed again."""
        self.gates.refresh()
        self.down.refresh()

    def add_narrow(self, x_BD: Tensor, norm_D: Tensor, attend: Attend, *, eps: float) -> None:
        """Add the output of the block to the rows, of which there are few."""
        gated_BI = fp8_narrow.gated(x_BD, norm_D, self.gates.weight, eps=eps)
        fp8_narrow.added(x_BD, gated_BI, self.down.weight)

    def added(
        self,
        x_BD: Tensor,
        added_BD: Tensor | None,
        norm_D: Tensor,
        attend: Attend,
        scratch: Scratch,
        *,
        eps: float,
    ) -> Tensor:
        """Add `added_BD` to the rows. Return the output of the block, not yet added."""
        scaling = self.gates.weight.scaling
        cast = cast_normed(x_BD, added_BD, norm_D, scaling, eps=eps)
        gated = fp8_products.gated(cast, self.gates.weight, dtype=x_BD.dtype)
        if isinstance(gated, Tensor):
            gated = cast_rows(gated, scaling)
        return _product(gated, self.down, scratch, like=x_BD)


Halves = tuple[AttentionHalf | None, BlockHalf | None]


def _all_halves(model: Decoder) -> list[Halves]:
    return [(_attention_half(layer), _block_half(layer)) for layer in model.layers]


def _attention_half(layer: Layer) -> AttentionHalf | None:
    """Return the maps of attention; None if not all are in FP8 or a size is not supported."""
    attention = layer.self_attn
    heads = fp8_maps(attention.q_proj, attention.k_proj, attention.v_proj)
    out = fp8_maps(attention.o_proj)
    if heads is None or out is None or out.bias_O is not None:
        return None
    return AttentionHalf(heads, out)


def _block_half(layer: Layer) -> BlockHalf | None:
    mlp = layer.mlp
    if not isinstance(mlp, MLP):
        return None
    gates, down = fp8_maps(mlp.gate_proj, mlp.up_proj), fp8_maps(mlp.down_proj)
    if gates is None or down is None or gates.bias_O is not None or down.bias_O is not None:
        return None
    return BlockHalf(gates, down)


def _attended(layer: Layer, attend: Attend, normed_BD: Tensor) -> Tensor:
    attention = layer.self_attn
    qkv = maps_of(normed_BD, (attention.q_proj, attention.k_proj, attention.v_proj))
    return attention.o_proj(attend(qkv))


def _fed(layer: Layer, state: Rows, normed_BD: Tensor) -> Tensor:
    return fed_forward(normed_BD, layer.mlp, state)


def _product(x: Fp8Rows, maps: Fp8Maps, scratch: Scratch, *, like: Tensor) -> Tensor:
    return fp8_products.product(x, maps.weight, maps.bias_O, scratch, dtype=like.dtype)
