"""The parts of a config.json that all families of the native decoder share."""

from __future__ import annotations

from typing import Any

from homeostat.models.config_fields import Fields, Json
from homeostat.models.decoder_shape import LLAMA_BLOCK, BlockForm, DecoderConfig
from homeostat.models.origin import BadConfigError
from homeostat.models.rope_settings import WHOLE_HEADS, Rotation, rope_config

Windows = tuple[int | None, ...]


def common_shape(
    config: Json,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
    eps: float = 1e-6,
    tied: bool = False,
    rotation: Rotation = WHOLE_HEADS,
    block: BlockForm = LLAMA_BLOCK,
) -> DecoderConfig:
    """Read what all families have in common; arguments are a family's own values and defaults."""
    fields = Fields(config)
    hidden_size, num_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    num_kv_heads = fields.whole("num_key_value_heads", num_heads)
    head_dim = fields.whole("head_dim", head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise BadConfigError(
            f"num_attention_heads is {num_heads} and num_key_value_heads {num_kv_heads}: the first "
            "must be a multiple of the second."
        )
    if head_dim % 2:
        raise BadConfigError(f"head_dim is {head_dim}; rotary embeddings need it even.")
    return DecoderConfig(
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=fields.whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", eps),
        rope=rope_config(config, head_dim=head_dim, rotation=rotation),
        tie_embeddings=fields.flag("tie_word_embeddings", tied),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        initializer_range=fields.number("initializer_range", 0.02),
        block=block,
    )


def window_of(config: Json, default: int | None) -> int | None:
    """Return sliding_window; `default` if the config does not mention it."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return None
    if default is None and "sliding_window" not in config:
        return None
    return Fields(config).whole("sliding_window", default)


def windows_everywhere(config: Json, *, default: int | None) -> Windows:
    """Return the windows of a family whose layers all have the same one."""
    window = window_of(config, default)
    return () if window is None else (window,) * Fields(config).whole("num_hidden_layers")


def windows_by_type(config: Json, types: Any, *, window: int | None) -> Windows:
    """Return the windows of layers by `layer_types`."""
    num_layers = Fields(config).whole("num_hidden_layers")
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or any(kind not in known for kind in types):
        raise BadConfigError(f"layer_types is {types!r:.80}, and must be a list of {known}.")
    if len(types) != num_layers:
        raise BadConfigError(
            f"layer_types has {len(types)} entries, and num_hidden_layers is {num_layers}."
        )
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    return windows if any(windows) else ()
