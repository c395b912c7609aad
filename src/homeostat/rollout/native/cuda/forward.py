"""One decoding step over the device's state: from each row's last token to its next one.

    enter -> layers (norm, q k v, attention, sum; norm, gate, sum) -> norm -> logits -> draw

In layers with experts (experts.py) these take the place of the gate.

A step uses the weights of the decoder's own forward, but takes fewer launches. There are three
paths through the layers:

    narrow   up to `narrow.MAX_ROWS` rows: bound by reading the weights alone
    tiled    more rows, as long as our own products are faster than a library's
    wide     the decoder's linear modules

All of them apply adapters, unmerged (low_rank.py).

Suffixes: `_B` rows, `_D` model dim, `_V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional

from homeostat.models.blocks import MLP, Layer, MoeBlock
from homeostat.models.decoder import Decoder
from homeostat.models.lora_layers import LoraLinear
from homeostat.models.side_by_side import adapted_maps, joined, neighbours
from homeostat.ops.linear import Linear, is_plain
from homeostat.precision.int4_rewrite import Int4Linear
from homeostat.rollout.native.cuda import narrow, products, rows
from homeostat.rollout.native.cuda.attention import (
    AttentionScratch,
    AttentionShape,
    decode_attention,
    shares_for,
)
from homeostat.rollout.native.cuda.candidates import sums_of_tiles
from homeostat.rollout.native.cuda.cutting import draw_kept
from homeostat.rollout.native.cuda.experts import ExpertScratch, narrow_experts, wide_experts
from homeostat.rollout.native.cuda.low_rank import LowRank, LowRankRoom
from homeostat.rollout.native.cuda.sampling import (
    can_draw_from_hidden,
    draw_from_hidden,
    draw_from_logits,
    multiplied_sums,
)
from homeostat.rollout.native.cuda.state import DecodeState, Rows

# A function of the rows that enter and their rotations. It returns the rows after all layers, and
# what must still be added to them.
Layers = Callable[[Tensor, list[Tensor], Rows], tuple[Tensor, Tensor | None]]


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
        self._adapters = Adapters(model, max_rows=products.MAX_ROWS)
        self.can_be_narrow = _is_plain(model) and self._adapters.are_fused
        self.can_be_tiled = self.can_be_narrow and _can_be_tiled(model)
        self._num_gates = max(
            (mlp.gate_proj.out_features for mlp in _dense_blocks(model)), default=0
        )
        self._scratch: dict[int, AttentionScratch] = {}
        self._sums = products.Scratch(state.device)
        self._experts = None
        if config.moe is not None:
            rows, device = narrow.MAX_ROWS, state.device
            self._experts = ExpertScratch(config.moe.num_experts, max_rows=rows, device=device)

    @property
    def vocabulary(self) -> int:
        return self.model.config.vocab_size

    def refresh(self) -> bool:
        """Update copies of changed weights, and return whether steps must be captured again.

        Here there are no copies: steps read the model's own weights, which are written in place.
        """
        return False

    def weights_changed(self) -> None:
        """Do nothing: there are no copies of the weights."""

    def step(self, num_rows: int, *, is_cut: bool) -> None:
        """Sample one more token for the first `num_rows` rows of the state.

        `is_cut`: top-k, top-p or min-p may apply to some of them.
        """
        state = self.state.rows(num_rows)
        trunk, eps = self.model.model, self.model.config.rms_norm_eps
        factor = self.model.config.rope.attention_factor
        table_VD = trunk.embed_tokens.weight
        x_BD, *turns = rows.enter(
            state.tokens_B, state.positions_B, table_VD, self.frequencies_F, factor
        )
        x_BD, added_BD = self._layers_for(num_rows)(x_BD, turns, state)
        hidden_BD = rows.add_norm(x_BD, added_BD, trunk.norm.weight, eps=eps)
        weight_VD = self.model.output_weight()
        if is_cut:
            _draw_cut(hidden_BD, weight_VD, state)
        elif can_draw_from_hidden(num_rows, weight_VD):
            draw_from_hidden(hidden_BD, weight_VD, state)
        else:
            draw_from_logits(_logits(hidden_BD, weight_VD), state)

    def _layers_for(self, num_rows: int) -> Layers:
        if self.can_be_narrow and num_rows <= narrow.MAX_ROWS:
            return self._narrow_layers
        has_adapters = self._adapters.are_present
        if self.can_be_tiled and products.are_better(
            num_rows, self._num_gates, has_adapters=has_adapters
        ):
            return self._tiled_layers
        return self._wide_layers

    def _wide_layers(
        self, x_BD: Tensor, turns: list[Tensor], state: Rows
    ) -> tuple[Tensor, Tensor | None]:
        eps, added_BD = self.model.config.rms_norm_eps, None
        for index, layer in enumerate(self.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            normed_BD = rows.add_norm(x_BD, added_BD, layer.input_layernorm.weight, eps=eps)
            qkv = maps_of(normed_BD, (attention.q_proj, attention.k_proj, attention.v_proj))
            added_BD = attention.o_proj(self._attend(index, layer, qkv, turns, state))
            norm_D = layer.post_attention_layernorm.weight
            normed_BD = rows.add_norm(x_BD, added_BD, norm_D, eps=eps)
            added_BD = fed_forward(normed_BD, mlp, state)
        return x_BD, added_BD

    def _narrow_layers(
        self, x_BD: Tensor, turns: list[Tensor], state: Rows
    ) -> tuple[Tensor, Tensor | None]:
        eps = self.model.config.rms_norm_eps
        for index, layer in enumerate(self.model.layers):
            attention, (heads, out, *inner) = layer.self_attn, self._adapters.of_layer(index)
            norm_D = layer.input_layernorm.weight
            qkv = narrow.into_heads(x_BD, norm_D, _head_maps(layer), eps=eps, adapter=heads)
            mixed_BX = self._attend(index, layer, qkv, turns, state)
            narrow.added(x_BD, mixed_BX, attention.o_proj.weight, adapter=out)
            self._feed_narrow(x_BD, layer, state, inner)
        return x_BD, None

    def _feed_narrow(
        self, x_BD: Tensor, layer: Layer, state: Rows, adapters: Sequence[LowRank | None]
    ) -> None:
        """Add the output of the block after attention (an MLP or experts) to the rows."""
        eps, norm_D, mlp = (
            layer.input_layernorm.eps,
            layer.post_attention_layernorm.weight,
            layer.mlp,
        )
        if isinstance(mlp, MoeBlock):
            assert self._experts is not None, "the model has experts"
            normed_BD = narrow_experts(x_BD, norm_D, mlp, state, self._experts, eps=eps)
            shared = mlp.shared_experts
            if shared is not None and is_plain(shared.down_proj):
                gates = maps_of(normed_BD, (shared.gate_proj, shared.up_proj))
                narrow.added(x_BD, rows.gate(*gates), shared.down_proj.weight)
            elif shared is not None:
                x_BD += fed_forward(normed_BD, shared, state)
            return
        weights = mlp.gate_proj.weight, mlp.up_proj.weight
        gated_BI = narrow.gated(x_BD, norm_D, *weights, eps=eps, adapter=adapters[0])
        narrow.added(x_BD, gated_BI, mlp.down_proj.weight, adapter=adapters[1])

    def _tiled_layers(
        self, x_BD: Tensor, turns: list[Tensor], state: Rows
    ) -> tuple[Tensor, Tensor | None]:
        eps, layers = self.model.config.rms_norm_eps, self.model.layers
        scaled = products.Scaled(
            rows.add_norm(x_BD, None, layers[0].input_layernorm.weight, eps=eps)
        )
        next_norms = [layer.input_layernorm for layer in layers[1:]] + [self.model.model.norm]
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            attention, mlp = layer.self_attn, layer.mlp
            maps = (attention.q_proj, attention.k_proj, attention.v_proj)
            weight_OD, bias_O = _side_by_side(maps)
            assert weight_OD is not None, "can_be_tiled has looked"
            heads, out, *inner = self._adapters.of_layer(index)
            out_BX = products.into_heads(scaled, weight_OD, bias_O, eps=eps, adapter=heads)
            qkv = out_BX.split([linear.weight.shape[0] for linear in maps], dim=1)
            mixed_BX = self._attend(index, layer, qkv, turns, state)
            norm_D = layer.post_attention_layernorm.weight
            weight_DX = attention.o_proj.weight
            scaled = products.added(x_BD, mixed_BX, weight_DX, norm_D, self._sums, adapter=out)
            if isinstance(mlp, MoeBlock):
                normed_BD = rows.add_norm(x_BD, None, norm_D, eps=eps)
                added_BD = fed_forward(normed_BD, mlp, state)
                scaled = products.Scaled(rows.add_norm(x_BD, added_BD, next_norm.weight, eps=eps))
                continue
            weight_OD, _ = _side_by_side((mlp.gate_proj, mlp.up_proj))
            assert weight_OD is not None, "can_be_tiled has looked"
            gated_BI = products.gated(scaled, weight_OD, eps=eps, adapter=inner[0])
            weights = mlp.down_proj.weight, next_norm.weight
            scaled = products.added(x_BD, gated_BI, *weights, self._sums, adapter=inner[1])
        return x_BD, None

    def _attend(
        self,
        index: int,
        layer: Layer,
        qkv: Sequence[Tensor],
        turns: list[Tensor],
        state: Rows,
    ) -> Tensor:
        attention = layer.self_attn
        norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = attention.q_norm.weight, attention.k_norm.weight
        return decode_attention(
            *qkv,
            norms=norms,
            cos_BF=turns[0],
            sin_BF=turns[1],
            stores=self.state.stores_LA[index],
            fp8_cache=self.state.fp8_cache,
            tables_BK=state.tables_BK,
            positions_B=state.positions_B,
            shape=self.shape,
            scratch=self._scratch_for(len(state.tokens_B)),
            scale=attention.head_dim**-0.5,
        )

    def _scratch_for(self, num_rows: int) -> AttentionScratch:
        """Return the scratch memory for so many rows. Layers share it, since they run in turn."""
        if num_rows not in self._scratch:
            max_keys = self.state.num_blocks * self.shape.block_tokens
            shares = shares_for(self.shape, num_rows, max_keys=max_keys)
            self._scratch[num_rows] = AttentionScratch(
                self.shape, num_rows=num_rows, shares=shares, device=self.state.device
            )
        return self._scratch[num_rows]


class Adapters:
    """The adapters of a step's products. Each layer has four: q, k and v; o; gate and up; down."""

    def __init__(self, model: Decoder, *, max_rows: int) -> None:
        found = [[adapted_maps(maps) for maps in _fused_maps(layer)] for layer in model.layers]
        present = [maps for layer in found for maps in layer if maps is not None]
        self._layers: list[list[LowRank | None]] = [[None] * 4 for _ in found]
        # A product empties the room of the next one, so that it takes two (low_rank.py).
        self.are_present, self.are_fused = len(present) > 0, len(present) != 1
        if len(present) < 2:
            return
        width, like = max(maps.ahead for maps in present), present[0].whole_PK
        room = LowRankRoom(len(present), max_rows=max_rows, width=width, like=like)
        numbers = iter(range(len(present)))
        for layer, groups in zip(self._layers, found, strict=True):
            for index, maps in enumerate(groups):
                layer[index] = None if maps is None else room.at(next(numbers), maps)

    def of_layer(self, index: int) -> list[LowRank | None]:
        """Return the four adapters of a layer; None for a product without one."""
        return self._layers[index]


def _fused_maps(layer: Layer) -> Iterator[tuple[nn.Linear, ...]]:
    """Yield the groups of maps that the narrow and tiled paths compute as one product.

    The maps of shared experts are not among them.
    """
    yield from islice(neighbours(layer), 2 if isinstance(layer.mlp, MoeBlock) else 4)


def _draw_cut(hidden_BD: Tensor, weight_VD: Tensor, state: Rows) -> None:
    """Draw tokens where a cut applies. It needs all logits, so they are kept in memory."""
    num_rows = len(hidden_BD)
    if can_draw_from_hidden(num_rows, weight_VD):
        shape = (num_rows, weight_VD.shape[0])
        logits_BV = torch.empty(shape, dtype=torch.float32, device=hidden_BD.device)
        sums = multiplied_sums(hidden_BD, weight_VD, state.scale_B, logits_BV=logits_BV)
    else:
        logits_BV = _logits(hidden_BD, weight_VD)
        sums = sums_of_tiles(logits_BV, state.scale_B)
    draw_kept(logits_BV, *sums, state)


def _logits(hidden_BD: Tensor, weight_VD: Tensor) -> Tensor:
    """Return fp32 logits [B, V], summed in fp32 as the trainer does."""
    if hidden_BD.is_cuda and weight_VD.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden_BD, weight_VD.t(), out_dtype=torch.float32)
    return hidden_BD.float() @ weight_VD.float().t()


def fed_forward(normed_BD: Tensor, mlp: MLP | MoeBlock, state: Rows) -> Tensor:
    """Return the output [B, D] of an MLP or experts for normed rows; it is not yet added to x."""
    if isinstance(mlp, MoeBlock):
        added_BD = wide_experts(normed_BD, mlp, state)
        if mlp.shared_experts is None:
            return added_BD
        return added_BD + fed_forward(normed_BD, mlp.shared_experts, state)
    return mlp.down_proj(rows.gate(*maps_of(normed_BD, (mlp.gate_proj, mlp.up_proj))))


def maps_of(x_BD: Tensor, maps: Sequence[Linear]) -> Sequence[Tensor]:
    """Apply several linear maps to the same rows, in one product if their weights are adjacent."""
    if not _are_joined(maps):
        return [linear(x_BD) for linear in maps]
    weight_OD, bias_O = _side_by_side(maps)
    if weight_OD is None or (bias_O is None and maps[0].bias is not None):
        return [linear(x_BD) for linear in maps]
    sizes = [linear.weight.shape[0] for linear in maps]
    parts = functional.linear(x_BD, weight_OD, bias_O).split(sizes, dim=1)
    adapter = adapted_maps(maps)
    if adapter is None:
        return parts
    lows = (x_BD @ adapter.whole_PK[: len(maps) * adapter.rank].t()).split(adapter.rank, dim=1)
    for part, low_BR, b_OR in zip(parts, lows, adapter.b_OR.split(sizes), strict=True):
        part.addmm_(low_BR, b_OR.t(), alpha=adapter.scale)
    return parts


def _are_joined(maps: Sequence[Linear]) -> bool:
    """Return whether the maps are plain, rounded, or have adapters beside their weights."""
    if all(is_plain(linear) or isinstance(linear.product, Int4Linear) for linear in maps):
        return True
    kinds = Linear, LoraLinear
    return all(type(linear) in kinds for linear in maps) and adapted_maps(maps) is not None


def _side_by_side(maps: Sequence[Linear]) -> tuple[Tensor | None, Tensor | None]:
    """Return all weights and all biases, each as one tensor; None if they are not adjacent."""
    weight_OD, biases = joined(list(map(_weight, maps))), [linear.bias for linear in maps]
    return weight_OD, None if biases[0] is None else joined(biases)


def _weight(linear: Linear) -> Tensor:
    """Return the weight that a linear map multiplies by: with INT4 training, the rounded copy."""
    product = linear.product
    return product.weight(linear.weight) if isinstance(product, Int4Linear) else linear.weight


def _dense_blocks(model: Decoder) -> list[MLP]:
    """Yield the dense gated blocks, including shared experts."""
    return [module for module in model.modules() if isinstance(module, MLP)]


def _is_plain(model: Decoder) -> bool:
    """Return whether the narrow kernels can compute all linear maps.

    They can if nothing but adapters was added to the maps, and if there is no bias that the kernels
    would leave out.
    """
    config = model.config
    sizes = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return (
        all(_are_joined(maps) for layer in model.layers for maps in neighbours(layer))
        and not (config.o_bias or config.mlp_bias)
        and config.hidden_size <= narrow.MAX_WIDTH
        and all(size % narrow.OUTPUTS == 0 for size in sizes)
    )


def _can_be_tiled(model: Decoder) -> bool:
    """Return whether weights and biases are adjacent and the device can copy tiles of them."""
    return all(_has_tiles(layer) for layer in model.layers)


def _has_tiles(layer: Layer) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    heads_OD, bias_O = _side_by_side((attention.q_proj, attention.k_proj, attention.v_proj))
    weights = [heads_OD, attention.o_proj.weight]
    if isinstance(mlp, MLP):
        gates_OD, _ = _side_by_side((mlp.gate_proj, mlp.up_proj))
        weights += [gates_OD, mlp.down_proj.weight]
    has_bias = attention.q_proj.bias is not None
    return all(map(products.can_multiply, weights)) and has_bias == (bias_O is not None)


def _head_maps(layer: Layer) -> narrow.HeadMaps:
    q, k, v = layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj
    biases = None if q.bias is None else (q.bias, k.bias, v.bias)
    return narrow.HeadMaps((q.weight, k.weight, v.weight), biases)
