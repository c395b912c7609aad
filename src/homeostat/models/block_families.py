"""Families whose block differs from Llama's in more than flags: one function for each.

    config.json (dict) -> values of `BlockForm` and of the rotation -> DecoderConfig

The figures are those of the families' own configs: a key that a config.json leaves out has the
default that transformers gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from homeostat.models.config_fields import Fields, Json
from homeostat.models.decoder_shape import BlockForm, DecoderConfig, NormNames
from homeostat.models.family_fields import (
    common_shape,
    window_of,
    windows_by_type,
    windows_everywhere,
)
from homeostat.models.origin import BadConfigError, UnsupportedConfigError
from homeostat.models.rope_settings import Rotation, rope_config

_GEMMA_NORMS = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_OLMO_NORMS = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
_GLM4_NORMS = NormNames(
    before_attention="input_layernorm",
    after_attention="post_self_attn_layernorm",
    before_mlp="post_attention_layernorm",
    after_mlp="post_mlp_layernorm",
)


def _gemma2(config: Json) -> DecoderConfig:
    block = _gemma_block(config, pattern=2, caps=(50.0, 30.0))
    return _gemma(config, block=BlockForm(**block), qk_norm=False)


def _gemma3(config: Json) -> DecoderConfig:
    head_dim = Fields(config).whole("head_dim", 256)
    ropes = config.get("rope_parameters")
    ropes = ropes if isinstance(ropes, dict) else {}
    theta = config.get("rope_theta") or 1e6, config.get("rope_local_base_freq") or 1e4
    scaling = config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise BadConfigError(f"rope_scaling is {scaling!r}, and must be an object.")
    everywhere = {"rope_theta": theta[0], **scaling, **(ropes.get("full_attention") or {})}
    # transformers looks for this key beside the kinds of layers, never among a kind's settings.
    everywhere["truncate"] = ropes.get("truncate", True)
    local = {"rope_theta": theta[1], **(ropes.get("sliding_attention") or {})}
    plain = {key: value for key, value in config.items() if not key.startswith("rope_")}
    pattern = Fields(config).whole("sliding_window_pattern", 6)
    block = _gemma_block(config, pattern=pattern, caps=(None, None))
    # transformers reads this key of Gemma 3 and never applies it.
    block["attention_cap"] = None
    block["local_rope"] = rope_config({**plain, "rope_parameters": local}, head_dim=head_dim)
    config = {**plain, "rope_parameters": everywhere}
    return _gemma(config, block=BlockForm(**block), qk_norm=True)


def _gemma(config: Json, *, block: BlockForm, qk_norm: bool) -> DecoderConfig:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedConfigError(
            "use_bidirectional_attention is set, and the native decoder is causal."
        )
    fields = Fields(config)
    bias = fields.flag("attention_bias", False)
    filled = {**config, "num_key_value_heads": fields.whole("num_key_value_heads", 4)}
    how = {"head_dim": 256, "tied": True, "block": block}
    return common_shape(filled, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm, **how)


def _gemma_block(
    config: Json, *, pattern: int, caps: tuple[float | None, float | None]
) -> dict[str, Any]:
    """Return the values that Gemma 2 and 3 share; every `pattern`-th layer has no window."""
    fields = Fields(config)
    act = config.get("hidden_activation") or "gelu_pytorch_tanh"
    if act != "gelu_pytorch_tanh":
        raise UnsupportedConfigError(
            f"hidden_activation is {act!r}, and the native decoder has gelu_pytorch_tanh here."
        )
    layers = range(fields.whole("num_hidden_layers"))
    types = config.get("layer_types")
    if types is None:
        types = [f"{'sliding' if (n + 1) % pattern else 'full'}_attention" for n in layers]
    return {
        "norms": _GEMMA_NORMS,
        "centred_norms": True,
        "activation": "gelu_tanh",
        "attention_scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_cap": _cap(config, "attn_logit_softcapping", caps[0]),
        "logit_cap": _cap(config, "final_logit_softcapping", caps[1]),
        "embedding_scale": fields.whole("hidden_size") ** 0.5,
        "windows": windows_by_type(config, types, window=window_of(config, 4096)),
    }


def _cap(config: Json, key: str, default: float | None) -> float | None:
    return None if config.get(key, default) is None else Fields(config).number(key, default)


def _phi3(config: Json) -> DecoderConfig:
    block = BlockForm(
        fused_qkv=True,
        fused_gate_up=True,
        windows=windows_everywhere(config, default=None),
    )
    how = {"eps": 1e-5, "rotation": Rotation(partial=1.0, longrope=("longrope", "su", "yarn"))}
    # transformers reads the original length here alone, and not among the rotary settings.
    original = Fields(config).whole("original_max_position_embeddings", 4096)
    filled = {**config, "original_max_position_embeddings": original}
    return common_shape(filled, block=block, **how)


def _granite(config: Json) -> DecoderConfig:
    fields = Fields(config)
    block = BlockForm(
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    return common_shape(config, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias, block=block)


def _olmo2(config: Json) -> DecoderConfig:
    bias = Fields(config).flag("attention_bias", False)
    how = {"eps": 1e-5, "block": BlockForm(norms=_OLMO_NORMS, wide_qk_norm=True)}
    return common_shape(config, qkv_bias=bias, o_bias=bias, qk_norm=True, **how)


def _glm(config: Json) -> DecoderConfig:
    return _any_glm(config, NormNames())


def _glm4(config: Json) -> DecoderConfig:
    return _any_glm(config, _GLM4_NORMS)


def _any_glm(config: Json, norms: NormNames) -> DecoderConfig:
    fields = Fields(config)
    filled = {**config, "num_key_value_heads": fields.whole("num_key_value_heads", 2)}
    how = {
        "qkv_bias": fields.flag("attention_bias", True),
        "head_dim": 128,
        "eps": 1.5625e-7,
        "rotation": Rotation(partial=0.5, interleaved=True),
        "block": BlockForm(norms=norms, fused_gate_up=True),
    }
    return common_shape(filled, **how)


BLOCK_FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
    "olmo2": _olmo2,
    "glm": _glm,
    "glm4": _glm4,
}
