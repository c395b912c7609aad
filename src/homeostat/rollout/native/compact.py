"""A decoding step on the CPU with few calls: the decoder's function, over rearranged weights.

A step of a small batch is bound by the number of calls and by the order in which weights lie in
memory, not by arithmetic. So it computes with copies: q, k and v are one matrix, gate and up are
one, a norm's weight is multiplied into the matrix that follows it, and all are stored input by
input, so that no product has to reorder them first.

Invariants: it is the function of `Decoder.hidden_in`, to rounding (the decoder stays the reference,
and computes prompts and training); copies are always of the current weights: they are dropped at
every commit (a fused optimizer leaves no trace of its writes), and the version counters of the
decoder's tensors, checked before each step, reveal any other write; what copies cannot replace
(hooks, `invariant` numerics, other precisions) is left to the decoder. Adapters stay unmerged.

Suffixes: `_B` sequences, `_D` model dim, `_H` heads, `_d` head dim, `_K` inputs, `_O` outputs; of
experts, those of ops/experts.py: there `_K` are slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from homeostat.models.blocks import MLP, Attention, Layer, MoeBlock
from homeostat.models.decoder import Decoder, Trunk
from homeostat.models.lora_layers import LoraLinear
from homeostat.models.moe import Experts, Router
from homeostat.models.norms import Embedding, RMSNorm
from homeostat.models.routing import Routing
from homeostat.models.side_by_side import joined_adapters
from homeostat.ops.attention import AttentionContext
from homeostat.ops.expert_rows import combined
from homeostat.ops.experts import experts_of
from homeostat.ops.linear import Linear, is_plain_product
from homeostat.ops.moe_shape import MoeShape
from homeostat.ops.norms import unit_rms
from homeostat.ops.rope import rope_tables, rotate
from homeostat.ops.routing import best_experts, expert_weights, scores_of

_PLAIN = frozenset(
    (
        *(Decoder, Trunk, Layer, Attention, MLP, RMSNorm, Linear, Embedding, nn.ModuleList),
        *(MoeBlock, Router, Experts, LoraLinear),
    )
)


# Floats of experts' matrices that are copied rather than multiplied expert by expert.
_MOST_COPIED = 1 << 18


def can_be_copied(model: Decoder) -> bool:
    """Return whether copies of its weights can stand for the model: fp32 on a CPU, nothing else."""
    weight = model.output_weight()
    return (
        model.numerics == "fast"
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and all(
            _is_plain(module) and not (module._forward_hooks or module._forward_pre_hooks)
            for module in model.modules()
        )
    )


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module computes what its class does: no other product in its place."""
    if isinstance(module, Experts) and module.product is not experts_of:
        return False
    is_own = is_plain_product(module.product) if isinstance(module, Linear) else True
    return type(module) in _PLAIN and is_own


def compact_of(model: Decoder) -> CompactDecoder | None:
    """Copy the weights; None if copies would not compute what the model does."""
    return CompactDecoder(model) if can_be_copied(model) else None


@dataclass(frozen=True, slots=True)
class _Map:
    """Linear maps of the same input, joined into one.

    With adapters, `a_KR` and `b_RO` are those of all maps.
    """

    weight_KO: Tensor
    bias_O: Tensor | None
    a_KR: Tensor | None = None
    b_RO: Tensor | None = None

    @classmethod
    def of(cls, *maps: Linear, norm: RMSNorm | None = None) -> _Map:
        weight_KO = torch.cat([linear.weight.detach() for linear in maps]).t().contiguous()
        if norm is not None:
            weight_KO *= norm.weight.detach()[:, None]
        biases = [linear.bias.detach() for linear in maps if linear.bias is not None]
        bias_O = torch.cat(biases) if biases else None
        if not any(isinstance(linear, LoraLinear) for linear in maps):
            return cls(weight_KO, bias_O)
        a_RK, b_OR = joined_adapters(maps)
        a_KR = a_RK.t().contiguous()
        if norm is not None:
            a_KR *= norm.weight.detach()[:, None]
        return cls(weight_KO, bias_O, a_KR, b_OR.t().contiguous())

    def of_rows(self, x_BK: Tensor) -> Tensor:
        if self.bias_O is None:
            out_BO = torch.mm(x_BK, self.weight_KO)
        else:
            out_BO = torch.addmm(self.bias_O, x_BK, self.weight_KO)
        return self._adapted(out_BO, x_BK)

    def add_to(self, x_BO: Tensor, x_BK: Tensor) -> None:
        x_BO.addmm_(x_BK, self.weight_KO)
        if self.bias_O is not None:
            x_BO += self.bias_O
        self._adapted(x_BO, x_BK)

    def _adapted(self, out_BO: Tensor, x_BK: Tensor) -> Tensor:
        """Add the update of the adapters in place."""
        if self.a_KR is None or self.b_RO is None:
            return out_BO
        return out_BO.addmm_(torch.mm(x_BK, self.a_KR), self.b_RO)


@dataclass(frozen=True, slots=True)
class _Mlp:
    """The copies of a feed-forward block."""

    gate_up: _Map
    down: _Map

    @classmethod
    def of(cls, mlp: MLP, norm: RMSNorm) -> _Mlp:
        return cls(_Map.of(mlp.gate_proj, mlp.up_proj, norm=norm), _Map.of(mlp.down_proj))

    def add_to(self, x_BD: Tensor, unit_BD: Tensor, routing: Routing) -> None:
        """Add the module's output to x. `unit_BD`: x, normed except for the norm's weight."""
        del routing
        gate_BO, up_BO = self.gate_up.of_rows(unit_BD).chunk(2, dim=1)
        self.down.add_to(x_BD, functional.silu(gate_BO).mul_(up_BO))


@dataclass(frozen=True, slots=True)
class _Moe:
    """A block of experts. Their matrices are the decoder's own: an expert has a row or two in a
    step, for which the order of a copy would gain nothing."""

    shape: MoeShape
    number: int
    norm_D: Tensor
    router_ED: Tensor
    bias_E: Tensor | None
    gate_up_EJD: Tensor
    down_EDI: Tensor
    shared: _Mlp | None

    @classmethod
    def of(cls, block: MoeBlock, norm: RMSNorm) -> _Moe:
        bias_E = block.gate.e_score_correction_bias
        return cls(
            block.gate.shape,
            block.number,
            norm.weight.detach(),
            block.gate.weight.detach(),
            None if bias_E is None else bias_E.detach(),
            block.experts.gate_up_proj.detach(),
            block.experts.down_proj.detach(),
            None if block.shared_experts is None else _Mlp.of(block.shared_experts, norm),
        )

    def add_to(self, x_BD: Tensor, unit_BD: Tensor, routing: Routing) -> None:
        """Add the module's output to x. `unit_BD`: x, normed except for the norm's weight."""
        normed_BD = unit_BD * self.norm_D
        scores_BE = scores_of(functional.linear(normed_BD, self.router_ED), self.shape)
        ids_BK = routing.experts(
            self.number, lambda: best_experts(scores_BE, self.bias_E, self.shape)
        )
        own_BK = expert_weights(scores_BE, ids_BK, self.shape)
        weights_BK = routing.weights(self.number, own_BK)
        if ids_BK.numel() * self.gate_up_EJD[0].numel() <= _MOST_COPIED:
            x_BD += combined(self._at_once(normed_BD, ids_BK), weights_BK)
        else:
            x_BD += experts_of(normed_BD, ids_BK, weights_BK, self.gate_up_EJD, self.down_EDI)
        if self.shared is not None:
            self.shared.add_to(x_BD, unit_BD, routing)

    def _at_once(self, normed_BD: Tensor, ids_BK: Tensor) -> Tensor:
        """[B, K, D]: one product over copies of the matrices, which saves calls."""
        ids_S, num_slots = ids_BK.flatten(), ids_BK.shape[1]
        x_SD1 = normed_BD.repeat_interleave(num_slots, dim=0)[..., None]
        gate_SI1, up_SI1 = torch.bmm(self.gate_up_EJD.index_select(0, ids_S), x_SD1).chunk(2, dim=1)
        gated_SI1 = functional.silu(gate_SI1).mul_(up_SI1)
        out_SD1 = torch.bmm(self.down_EDI.index_select(0, ids_S), gated_SI1)
        return out_SD1.view(*ids_BK.shape, -1)


def _mlp_of(block: MLP | MoeBlock, norm: RMSNorm) -> _Mlp | _Moe:
    return _Moe.of(block, norm) if isinstance(block, MoeBlock) else _Mlp.of(block, norm)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The copies of one layer. `norm_Hd` is the norm of queries and keys, if the family has one."""

    qkv: _Map
    o: _Map
    mlp: _Mlp | _Moe
    norm_Hd: Tensor | None

    @classmethod
    def of(cls, layer: Layer, *, num_heads: int, num_kv_heads: int) -> _Layer:
        attention = layer.self_attn
        norm_Hd = None
        if attention.q_norm is not None and attention.k_norm is not None:
            weights = (attention.q_norm.weight.detach(), attention.k_norm.weight.detach())
            counts = (num_heads, num_kv_heads)
            norm_Hd = torch.cat([w.expand(n, -1) for w, n in zip(weights, counts, strict=True)])
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        return cls(
            _Map.of(*qkv, norm=layer.input_layernorm),
            _Map.of(attention.o_proj),
            _mlp_of(layer.mlp, layer.post_attention_layernorm),
            norm_Hd,
        )


class CompactDecoder:
    """Computes with copies of the weights that `model` had when it was made."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._tensors = list(model.parameters())
        self._versions = self._now()
        sizes = {
            "num_heads": model.config.num_heads,
            "num_kv_heads": model.config.num_kv_heads,
        }
        self._layers = [_Layer.of(layer, **sizes) for layer in model.layers]

    def is_of(self, model: Decoder) -> bool:
        """Return whether the model is the one it was made of, with unchanged weights."""
        return model is self.model and self._now() == self._versions

    def hidden_in(
        self,
        tokens_B: Tensor,
        positions_B: Tensor,
        attention: AttentionContext,
        *,
        routing: Routing | None = None,
    ) -> Tensor:
        """Return [B, D] after the final norm, in the context of tokens computed before."""
        routing = routing or Routing()
        eps, trunk = self.model.config.rms_norm_eps, self.model.model
        tables = rope_tables(positions_B, self.model.inv_freq_F, self.model.config.rope)
        x_BD = trunk.embed_tokens.weight.index_select(0, tokens_B)
        for number, layer in enumerate(self._layers):
            qkv_BO = layer.qkv.of_rows(unit_rms(x_BD, eps=eps))
            layer.o.add_to(x_BD, self._attend(number, qkv_BO, layer.norm_Hd, tables, attention))
            layer.mlp.add_to(x_BD, unit_rms(x_BD, eps=eps), routing)
        return trunk.norm(x_BD)

    def _attend(
        self,
        number: int,
        qkv_BO: Tensor,
        norm_Hd: Tensor | None,
        tables: tuple[Tensor, Tensor],
        attention: AttentionContext,
    ) -> Tensor:
        config = self.model.config
        qkv_BHd = qkv_BO.unflatten(1, (-1, config.head_dim))
        num_rotated = config.num_heads + config.num_kv_heads
        qk_BHd = qkv_BHd[:, :num_rotated]
        if norm_Hd is not None:
            qk_BHd = unit_rms(qk_BHd, eps=config.rms_norm_eps).mul_(norm_Hd)
        qk_BHd = rotate(qk_BHd, *tables)
        q_BHd, k_BHd = qk_BHd[:, : config.num_heads], qk_BHd[:, config.num_heads :]
        v_BHd = qkv_BHd[:, num_rotated:]
        how = {"scale": config.attention_scale, "limits": config.limits(number)}
        return attention.attend(number, q_BHd, k_BHd, v_BHd, **how).flatten(1)

    def _now(self) -> list[tuple[int, int]]:
        return [(tensor.data_ptr(), tensor._version) for tensor in self._tensors]
