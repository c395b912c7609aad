"""Tables of how GGUF files name and store the weights and settings of each architecture.

llama.cpp stores some weights otherwise than the checkpoint that they came from: q and k of Llama
and Granite with their rows permuted, norms of Gemma with 1 added. Settings that a file leaves out
are constants of its architecture in llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from homeostat.errors import ModelError
from homeostat.ops.rope import RopeConfig, inverse_frequencies

# Llama 3.1 and later: the settings that its rope_freqs were computed from, except the factor.
LLAMA3_LENGTH, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0


class Settings(Protocol):
    """Reads metadata of a file, without the architecture's prefix."""

    path: Path

    def optional(self, key: str) -> Any: ...

    def tensor(self, name: str) -> Tensor | None: ...


_LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = _LLAMA_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OLMO_NAMES = _LLAMA_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI_NAMES = _LLAMA_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GLM_NAMES = _LLAMA_NAMES | {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}


def _nothing(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """One architecture. `permuted`: rows of q and k are neighbouring pairs; `centred`: norms have
    1 added; `derived`: names of tensors that are settings; `more`: further keys of config.json."""

    model_type: str
    class_name: str
    names: Mapping[str, str] = field(default_factory=lambda: _LLAMA_NAMES)
    permuted: bool = False
    centred: bool = False
    derived: tuple[str, ...] = ()
    more: Callable[[Settings, Mapping[str, Any]], dict[str, Any]] = _nothing


def _gemma(settings: Settings, config: Mapping[str, Any], *, largest: int) -> dict[str, Any]:
    """The largest model scales scores by its width, all others by the size of a head."""
    is_largest = config["num_hidden_layers"] == largest
    by_width = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": settings.optional("attention.sliding_window"),
        "attn_logit_softcapping": settings.optional("attn_logit_softcapping"),
        "final_logit_softcapping": settings.optional("final_logit_softcapping"),
        "query_pre_attn_scalar": by_width if is_largest else config["head_dim"],
    }


def _gemma2(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    return _gemma(settings, config, largest=46)


def _gemma3(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    everywhere = {**config["rope_parameters"]}
    # A file without the base has that of the family, which is not that of Llama.
    everywhere["rope_theta"] = settings.optional("rope.freq_base") or 1e6
    local = settings.optional("rope.freq_base_swa") or 1e4
    ropes = {
        "full_attention": everywhere,
        "sliding_attention": {"rope_type": "default", "rope_theta": float(local)},
    }
    return {**_gemma(settings, config, largest=62), "rope_parameters": ropes}


def _phi3(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = {**config["rope_parameters"], "partial_rotary_factor": _share(settings, config)}
    found: dict[str, Any] = {"sliding_window": settings.optional("attention.sliding_window")}
    short, long = (settings.tensor(f"rope_factors_{kind}.weight") for kind in ("short", "long"))
    if short is not None and long is not None:
        original = settings.optional("rope.scaling.original_context_length")
        rope.pop("factor", None)
        rope |= {
            "rope_type": "longrope",
            "short_factor": short.tolist(),
            "long_factor": long.tolist(),
            "original_max_position_embeddings": original,
        }
        # transformers infers it from the lengths where it is not given; so does a file.
        factor = settings.optional("rope.scaling.attn_factor")
        rope |= {} if factor is None else {"attention_factor": float(factor)}
        found["original_max_position_embeddings"] = original
    return {**found, "rope_parameters": rope}


def _share(settings: Settings, config: Mapping[str, Any]) -> float:
    """Return the share of a head that is rotated."""
    rotated = settings.optional("rope.dimension_count") or config["head_dim"]
    return rotated / config["head_dim"]


def _granite(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": float(settings.optional("attention.scale") or 1.0),
        "embedding_multiplier": float(settings.optional("embedding_scale") or 1.0),
        "residual_multiplier": float(settings.optional("residual_scale") or 1.0),
        "logits_scaling": float(settings.optional("logit_scale") or 1.0),
    }


def _glm4(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    share = _share(settings, config)
    has_bias = settings.tensor("blk.0.attn_q.bias") is not None
    return {
        "attention_bias": has_bias,
        "partial_rotary_factor": share,
        "rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": share},
    }


def _llama(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"attention_bias": settings.tensor("blk.0.attn_q.bias") is not None}
    factors_F = settings.tensor("rope_freqs.weight")
    if factors_F is None:
        return found
    theta, head_dim = config["rope_parameters"]["rope_theta"], config["head_dim"]
    rope = llama3_settings(factors_F, theta=theta, head_dim=head_dim)
    if rope is None:
        raise ModelError(
            f"model.path: {settings.path}: rope_freqs.weight holds rotary frequencies that are not "
            "scaled as Llama 3.1 scales them. Use the HF checkpoint of this model."
        )
    return {**found, "rope_parameters": rope}


def llama3_settings(factors_F: Tensor, *, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Return the rotary settings that give these divisors of the frequencies; None: none do.

    A file of Llama 3.1 or later holds the divisors without the settings. The largest is the factor;
    in the middle band 1 / divisor is linear in the frequency, which gives the two bounds. Lengths
    and bounds count as multiples of each other, so the lower bound is taken as 1.
    """
    plain_F = inverse_frequencies(RopeConfig(theta), head_dim=head_dim).double()
    factors_F = factors_F.double()
    if factors_F.shape != plain_F.shape:
        return None
    factor = float(factors_F.max())
    candidates = [(LLAMA3_LENGTH, LLAMA3_LOW, LLAMA3_HIGH)]
    inside_F = (factors_F > 1 + 1e-6) & (factors_F < factor * (1 - 1e-6))
    if int(inside_F.sum()) >= 2:
        smooth = (1 / factors_F[inside_F] - 1 / factor) / (1 - 1 / factor)
        turns = plain_F[inside_F] / (2 * math.pi)
        slope, offset = _line(turns, smooth)
        candidates.append((round(-slope / offset), 1.0, 1 - 1 / offset))
    for length, low, high in candidates:
        found = RopeConfig(
            theta,
            "llama3",
            factor=factor,
            original_length=length,
            low_freq_factor=low,
            high_freq_factor=high,
        )
        made_F = plain_F / inverse_frequencies(found, head_dim=head_dim).double()
        if torch.allclose(made_F, factors_F, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    return None


def _line(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return slope and offset of the line through points, by least squares."""
    centred = x - x.mean()
    slope = float((centred * y).sum() / (centred * centred).sum())
    return slope, float(y.mean()) - slope * float(x.mean())


FAMILIES = {
    "llama": GgufFamily(
        "llama", "LlamaForCausalLM", permuted=True, derived=("rope_freqs.weight",), more=_llama
    ),
    "qwen2": GgufFamily("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM"),
    "gemma2": GgufFamily(
        "gemma2", "Gemma2ForCausalLM", names=_GEMMA_NAMES, centred=True, more=_gemma2
    ),
    "gemma3": GgufFamily(
        "gemma3_text", "Gemma3ForCausalLM", names=_GEMMA_NAMES, centred=True, more=_gemma3
    ),
    "phi3": GgufFamily(
        "phi3",
        "Phi3ForCausalLM",
        names=_PHI_NAMES,
        derived=("rope_factors_short.weight", "rope_factors_long.weight"),
        more=_phi3,
    ),
    "granite": GgufFamily("granite", "GraniteForCausalLM", permuted=True, more=_granite),
    "olmo2": GgufFamily("olmo2", "Olmo2ForCausalLM", names=_OLMO_NAMES),
    "glm4": GgufFamily("glm4", "Glm4ForCausalLM", names=_GLM_NAMES, more=_glm4),
}
