"""Read the native decoder's settings from a checkpoint's config.json.

    config.json (dict) -> family function by `model_type` -> DecoderConfig

Invariant: a config that the native decoder would compute differently from transformers is refused,
with the reason and the remedy. Both spellings of the rotary settings are understood: `rope_theta`
with `rope_scaling`, and `rope_parameters`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from homeostat.models.block_families import BLOCK_FAMILIES
from homeostat.models.config_fields import Fields, Json
from homeostat.models.decoder_shape import BlockForm, DecoderConfig
from homeostat.models.family_fields import (
    Windows,
    common_shape,
    window_of,
    windows_by_type,
    windows_everywhere,
)
from homeostat.models.origin import BadConfigError, ConfigOrigin, UnsupportedConfigError
from homeostat.models.rope_settings import Rotation
from homeostat.ops.moe_shape import MoeShape

CONFIG_JSON = ConfigOrigin()

# Well beyond the largest existing models.
MAX_LAYERS = 2048
MAX_SIZE = 2**24
MAX_PARAMS = 10**14
_SILU = ("silu", "swish")
_SIZE_KEY = re.compile(r"layer|size$|head|dim$|embd|inner|expert|position|rank")


def decoder_config(config: Json, *, origin: ConfigOrigin = CONFIG_JSON) -> DecoderConfig:
    """Return the native decoder's config, or raise a ModelError that names `origin`."""
    try:
        return _decoder_config(config)
    except BadConfigError as fault:
        raise origin.error(fault) from None


def require_usual_sizes(config: Json, *, origin: ConfigOrigin = CONFIG_JSON) -> None:
    """Raise ModelError, which names `origin`, for sizes beyond any model."""
    try:
        _refuse_absurd_sizes(config)
    except BadConfigError as fault:
        raise origin.error(fault) from None


def _decoder_config(config: Json) -> DecoderConfig:
    model_type = config.get("model_type")
    if model_type == "gemma3":
        raise BadConfigError(
            "model_type gemma3 is the model with images, and text alone is trained here. Save its "
            "text part (Gemma3ForCausalLM of transformers: model_type gemma3_text), and name that."
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedConfigError(
            f"the native decoder does not know model_type {model_type!r}; "
            f"it knows {', '.join(FAMILIES)}."
        )
    _refuse_absurd_sizes(config)
    _refuse_unknown_maths(config)
    shape = FAMILIES[model_type](config)
    if shape.block.activation == "silu" and config.get("hidden_act", "silu") not in _SILU:
        raise UnsupportedConfigError(
            f"hidden_act is {config['hidden_act']!r}, and the native decoder has silu here."
        )
    if shape.num_params > MAX_PARAMS:
        raise BadConfigError(
            f"hidden_size {shape.hidden_size}, intermediate_size "
            f"{shape.intermediate_size}, vocab_size {shape.vocab_size} and the heads come to "
            f"{shape.num_params:.1e} parameters, more than any model has."
        )
    return shape


def _refuse_absurd_sizes(config: Json, *, inside: str = "") -> None:
    """Refuse sizes beyond any model: a typo, which would exhaust the machine's memory."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            _refuse_absurd_sizes(value, inside=f"{inside}{name}.")
        elif _SIZE_KEY.search(str(name)) and isinstance(value, int):
            limit = MAX_LAYERS if "layer" in str(name) else MAX_SIZE
            if value > limit:
                # A number above the largest float cannot be formatted as one.
                shown = f"{value:.3g}" if value < 1e300 else f"a number of {len(str(value))} digits"
                raise BadConfigError(
                    f"{inside}{name} is {shown}, more than any model has ({limit})."
                )


def _llama(config: Json) -> DecoderConfig:
    bias = Fields(config).flag("attention_bias", False)
    mlp_bias = Fields(config).flag("mlp_bias", False)
    return common_shape(config, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def _mistral(config: Json) -> DecoderConfig:
    # If the config does not mention it, transformers uses a window of 4096.
    return common_shape(config, block=BlockForm(windows=windows_everywhere(config, default=4096)))


def _qwen2(config: Json) -> DecoderConfig:
    return common_shape(config, qkv_bias=True, block=_windowed_block(config))


def _qwen3(config: Json) -> DecoderConfig:
    bias = Fields(config).flag("attention_bias", False)
    how = {"head_dim": 128, "block": _windowed_block(config)}
    return common_shape(config, qkv_bias=bias, o_bias=bias, qk_norm=True, **how)


def _windowed_block(config: Json) -> BlockForm:
    """Return the windows of Qwen2 and Qwen3: those of the later layers, if use_sliding_window."""
    fields = Fields(config)
    is_windowed = fields.flag("use_sliding_window", False)
    window = window_of(config, 4096) if is_windowed else None
    first = fields.count("max_window_layers", 28)
    return BlockForm(windows=_windows_from(config, first=first, window=window))


def _windows_from(config: Json, *, first: int, window: int | None) -> Windows:
    """Return windows by layer_types; without these, of the layers from `first` on."""
    types = config.get("layer_types")
    if types is None:
        layers = range(Fields(config).whole("num_hidden_layers"))
        types = [f"{'sliding' if n >= first else 'full'}_attention" for n in layers]
    return windows_by_type(config, types, window=window)


def _mixtral(config: Json) -> DecoderConfig:
    if config.get("router_jitter_noise"):
        raise UnsupportedConfigError(
            f"router_jitter_noise is {config['router_jitter_noise']!r}, and the native decoder's "
            "router has no noise. Set it to 0 there, or:"
        )
    fields = Fields(config)
    moe = MoeShape(
        num_experts=fields.whole("num_local_experts", 8),
        top_k=fields.whole("num_experts_per_tok", 2),
        expert_size=fields.whole("intermediate_size"),
        layers=tuple(range(fields.whole("num_hidden_layers"))),
        names="mixtral",
    )
    block = BlockForm(windows=windows_everywhere(config, default=None))
    how = {"eps": 1e-5, "rotation": Rotation(theta=1e6), "block": block}
    return _with_experts(common_shape(config, **how), moe)


def _qwen3_moe(config: Json) -> DecoderConfig:
    fields = Fields(config)
    stride, dense = fields.whole("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise BadConfigError(f"mlp_only_layers is {dense!r}, and must be a list of layers.")
    layers = range(fields.whole("num_hidden_layers"))
    moe = MoeShape(
        # Checkpoints say num_experts; transformers 5 also writes num_local_experts.
        num_experts=fields.whole("num_experts", config.get("num_local_experts", 128)),
        top_k=fields.whole("num_experts_per_tok", 8),
        expert_size=fields.whole("moe_intermediate_size", 768),
        layers=tuple(n for n in layers if n not in dense and (n + 1) % stride == 0),
        normalised=fields.flag("norm_topk_prob", False),
    )
    bias = fields.flag("attention_bias", False)
    is_windowed = fields.flag("use_sliding_window", False)
    block = BlockForm(windows=windows_everywhere(config, default=4096) if is_windowed else ())
    shape = common_shape(config, qkv_bias=bias, o_bias=bias, qk_norm=True, block=block)
    return _with_experts(shape, moe)


def _dots1(config: Json) -> DecoderConfig:
    fields = Fields(config)
    first, window = fields.count("max_window_layers", 62), window_of(config, 4096)
    block = BlockForm(windows=_windows_from(config, first=first, window=window))
    bias = fields.flag("attention_bias", False)
    shape = common_shape(config, qkv_bias=bias, o_bias=bias, qk_norm=True, block=block)
    return _with_experts(shape, _sigmoid_experts(config))


def _sigmoid_experts(config: Json) -> MoeShape:
    """The block of DeepSeek-V3: sigmoid scores, a bias for the choice, groups, shared experts."""
    fields = Fields(config)
    size = fields.whole("moe_intermediate_size", 1408)
    first = fields.count("first_k_dense_replace", 0)
    return MoeShape(
        num_experts=fields.whole("n_routed_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        expert_size=size,
        layers=tuple(range(first, fields.whole("num_hidden_layers"))),
        scoring="sigmoid",
        normalised=fields.flag("norm_topk_prob", False),
        scaling=fields.number("routed_scaling_factor", 1.0),
        num_groups=fields.whole("n_group", 1),
        num_groups_kept=fields.whole("topk_group", 1),
        has_bias=True,
        shared_size=size * fields.whole("n_shared_experts"),
    )


def _with_experts(shape: DecoderConfig, moe: MoeShape) -> DecoderConfig:
    why = moe.why_odd()
    if why:
        raise BadConfigError(why)
    return replace(shape, moe=moe if moe.layers else None)


FAMILIES: dict[str, Callable[[Json], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "dots1": _dots1,
    **BLOCK_FAMILIES,
}


def _refuse_unknown_maths(config: Json) -> None:
    if config.get("quantization_config"):
        raise BadConfigError(
            "the weights are quantised (quantization_config), and the native decoder "
            "trains plain ones. Name an unquantised checkpoint in model.path."
        )
    if not config.get("is_causal", True):
        raise BadConfigError(
            f"is_causal is {config['is_causal']!r}: its tokens attend to those after them, and a "
            "model that is to write texts must not. Name a causal model in model.path."
        )
    for key in ("attention_dropout", "resid_pdrop", "embd_pdrop"):
        if config.get(key):
            raise UnsupportedConfigError(
                f"{key} is {config[key]!r}, and the native decoder has none. Set it to 0 there, or:"
            )
