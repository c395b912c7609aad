"""A readable decoder in float64: the reference for log-probs.

It uses nothing of `ops` except the rotary frequencies, which are part of a checkpoint's meaning: no
packing, no tiles, no kernels, one row at a time, every intermediate in float64. Weights are
converted layer by layer, so memory holds one layer twice, not the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from homeostat.arrays import FloatArray64, IntArray
from homeostat.columns import Ragged
from homeostat.models.decoder_shape import DecoderConfig
from homeostat.ops.moe_shape import MoeShape
from homeostat.ops.rope import RopeConfig, inverse_frequencies


@torch.no_grad()
def reference_logprobs(
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    tokens_T: IntArray,
    *,
    temperature: float = 1.0,
    routes_TLK: NDArray[Any] | None = None,
    shares_TLK: NDArray[Any] | None = None,
    kept_T: Ragged | None = None,
) -> FloatArray64:
    """Return the log-prob of every token except the first, given those before it.

    `routes_TLK`: the experts that the tokens go to; without them, each goes to its best ones.
    `shares_TLK`: the weights of those experts; without them, they follow from the router.
    `kept_T`: the ids that each token was drawn from; the whole vocabulary where there are none.
    """
    tokens = torch.from_numpy(np.ascontiguousarray(tokens_T))
    head = weights["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    hidden_TD = _hidden(config, weights, tokens, routes_TLK, shares_TLK)[:-1]
    logits_TV = hidden_TD @ head.double().cpu().T * config.block.logit_scale
    if config.block.logit_cap is not None:
        logits_TV = _capped(logits_TV, config.block.logit_cap)
    logits_TV = logits_TV / temperature
    for place in range(len(tokens) - 1) if kept_T is not None else ():
        kept = torch.from_numpy(kept_T[place + 1].astype(np.int64))
        if len(kept):
            is_cut_V = torch.ones(logits_TV.shape[1], dtype=torch.bool)
            is_cut_V[kept] = False
            logits_TV[place, is_cut_V] = -torch.inf
    logp_TV = logits_TV - logits_TV.logsumexp(dim=1, keepdim=True)
    return logp_TV.gather(1, tokens[1:, None])[:, 0].numpy()


def _hidden(
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    tokens: Tensor,
    routes_TLK: NDArray[Any] | None,
    shares_TLK: NDArray[Any] | None,
) -> Tensor:
    block = config.block
    x_TD = weights["model.embed_tokens.weight"].cpu()[tokens].double() * block.embedding_scale
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        own = {
            name.removeprefix(prefix): tensor.double().cpu()
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }
        names = block.norms
        made_TD = _attention(config, own, _named(config, own, names.before_attention, x_TD), layer)
        x_TD = x_TD + _named(config, own, names.after_attention, made_TD) * block.residual_scale
        normed_TD = _named(config, own, names.before_mlp, x_TD)
        if config.moe is not None and layer in config.moe.layers:
            number = config.moe.layers.index(layer)
            routes_TK = None if routes_TLK is None else routes_TLK[:, number].tolist()
            shares_TK = None if shares_TLK is None else shares_TLK[:, number].tolist()
            made_TD = _experts(config.moe, own, normed_TD, routes_TK, shares_TK)
        else:
            made_TD = _mlp(own, "mlp", normed_TD, gelu=block.activation == "gelu_tanh")
        x_TD = x_TD + _named(config, own, names.after_mlp, made_TD) * block.residual_scale
    return _norm(config, x_TD, weights["model.norm.weight"].double().cpu())


def _attention(
    config: DecoderConfig, own: Mapping[str, Tensor], x_TD: Tensor, layer: int
) -> Tensor:
    widths = [config.head_dim * n for n in (config.num_heads, *[config.num_kv_heads] * 2)]
    if config.block.fused_qkv:
        made = _linear(own, "self_attn.qkv_proj", x_TD).split(widths, dim=1)
    else:
        made = tuple(_linear(own, f"self_attn.{name}_proj", x_TD) for name in "qkv")

    def heads(name: str) -> Tensor:
        x_TW = made["qkv".index(name)]
        is_normed = config.qk_norm and name != "v"
        if is_normed and config.block.wide_qk_norm:
            x_TW = _norm(config, x_TW, own[f"self_attn.{name}_norm.weight"])
        x_HTd = x_TW.unflatten(1, (-1, config.head_dim)).transpose(0, 1)
        if is_normed and not config.block.wide_qk_norm:
            x_HTd = _norm(config, x_HTd, own[f"self_attn.{name}_norm.weight"])
        return x_HTd if name == "v" else _turned(x_HTd, config.rope_of(layer))

    limits = config.limits(layer)
    group = config.num_heads // config.num_kv_heads
    q_HTd, k_HTd, v_HTd = heads("q"), heads("k"), heads("v")
    k_HTd, v_HTd = (kept.repeat_interleave(group, dim=0) for kept in (k_HTd, v_HTd))
    scores_HTT = q_HTd @ k_HTd.transpose(1, 2) * config.attention_scale
    if limits.soft_cap is not None:
        scores_HTT = _capped(scores_HTT, limits.soft_cap)
    hidden_TT = torch.ones(scores_HTT.shape[1:], dtype=torch.bool).triu(1)
    if limits.window is not None:
        hidden_TT |= torch.ones_like(hidden_TT).tril(-limits.window)
    mixed_HTd = scores_HTT.masked_fill(hidden_TT, -torch.inf).softmax(dim=-1) @ v_HTd
    return _linear(own, "self_attn.o_proj", mixed_HTd.transpose(0, 1).flatten(1))


def _mlp(own: Mapping[str, Tensor], name: str, x_TD: Tensor, *, gelu: bool = False) -> Tensor:
    if f"{name}.gate_up_proj.weight" in own:
        gate_TF, up_TF = _linear(own, f"{name}.gate_up_proj", x_TD).chunk(2, dim=1)
    else:
        gate_TF, up_TF = (_linear(own, f"{name}.{part}_proj", x_TD) for part in ("gate", "up"))
    if gelu:
        inner_TF = (2 / math.pi) ** 0.5 * (gate_TF + 0.044715 * gate_TF**3)
        active_TF = gate_TF / 2 * (1 + inner_TF.tanh())
    else:
        active_TF = gate_TF * gate_TF.sigmoid()
    return _linear(own, f"{name}.down_proj", active_TF * up_TF)


def _experts(
    moe: MoeShape,
    own: Mapping[str, Tensor],
    x_TD: Tensor,
    routes_TK: list[list[int]] | None = None,
    shares_TK: list[list[float]] | None = None,
) -> Tensor:
    """Experts under the decoder's names, one token and one expert at a time."""
    logits_TE = _linear(own, "mlp.gate", x_TD)
    scores_TE = logits_TE.softmax(dim=-1) if moe.scoring == "softmax" else logits_TE.sigmoid()
    bias_E = own.get("mlp.gate.e_score_correction_bias", torch.zeros(moe.num_experts).double())
    out_TD = torch.zeros_like(x_TD)
    for token, (scores_E, x_D) in enumerate(zip(scores_TE, x_TD, strict=True)):
        chosen = _best(moe, (scores_E + bias_E).tolist()) if routes_TK is None else routes_TK[token]
        total = scores_E[chosen].sum() if moe.normalised else 1.0
        shares = scores_E[chosen] / total * moe.scaling if shares_TK is None else shares_TK[token]
        for expert, share in zip(chosen, shares, strict=True):
            gate_F, up_F = (own["mlp.experts.gate_up_proj"][expert] @ x_D).chunk(2)
            made_D = own["mlp.experts.down_proj"][expert] @ (gate_F * gate_F.sigmoid() * up_F)
            out_TD[token] += made_D * share
    return out_TD + _mlp(own, "mlp.shared_experts", x_TD) if moe.shared_size else out_TD


def _best(moe: MoeShape, wanted: list[float]) -> list[int]:
    """The chosen experts of one token. Of equal ones the lower number is better."""
    size = moe.num_experts // moe.num_groups
    groups = [range(start, start + size) for start in range(0, moe.num_experts, size)]
    if moe.num_groups > 1:
        best_two = [sum(sorted(wanted[e] for e in group)[-2:]) for group in groups]
        ranked = sorted(range(len(groups)), key=lambda number: (-best_two[number], number))
        groups = [groups[number] for number in ranked[: moe.num_groups_kept]]
    allowed = [expert for group in groups for expert in group]
    return sorted(allowed, key=lambda expert: (-wanted[expert], expert))[: moe.top_k]


def _linear(own: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    out = x @ own[f"{name}.weight"].T
    bias = own.get(f"{name}.bias")
    return out if bias is None else out + bias


def _norm(config: DecoderConfig, x: Tensor, weight: Tensor) -> Tensor:
    weight = weight + 1 if config.block.centred_norms else weight
    return x / (x.square().mean(dim=-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight


def _named(
    config: DecoderConfig, own: Mapping[str, Tensor], name: str | None, x_TD: Tensor
) -> Tensor:
    return x_TD if name is None else _norm(config, x_TD, own[f"{name}.weight"])


def _capped(x: Tensor, cap: float) -> Tensor:
    return (x / cap).tanh() * cap


def _turned(x_HTd: Tensor, rope: RopeConfig) -> Tensor:
    """Turn pairs of the rotated dims, which are halves or neighbours, and leave the others."""
    rotated = rope.rotated or x_HTd.shape[2]
    plain = replace(rope, rotated=None)
    places_T1 = torch.arange(x_HTd.shape[1]).double()[:, None]
    angles_TF = places_T1 * inverse_frequencies(plain, head_dim=rotated).double()
    cos_TF, sin_TF = (f(angles_TF) * rope.attention_factor for f in (torch.cos, torch.sin))
    part, rest = x_HTd[..., :rotated], x_HTd[..., rotated:]
    left, right = (part[..., ::2], part[..., 1::2]) if rope.interleaved else part.chunk(2, dim=-1)
    turned = (left * cos_TF - right * sin_TF, right * cos_TF + left * sin_TF)
    joined = torch.stack(turned, dim=-1).flatten(2) if rope.interleaved else torch.cat(turned, -1)
    return torch.cat((joined, rest), dim=-1)
