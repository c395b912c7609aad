"""Read the native decoder's settings from a checkpoint's config.json.

    config.json (dict) -> family function by `model_type` -> DecoderConfig

Invariant: a config that the native decoder would compute differently from transformers is refused,
with the reason and the remedy. Both spellings of the rotary settings are understood: `rope_theta`
with `rope_scaling`, and `rope_parameters`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from homeostat.config.cluster import OnHost
from homeostat.models.config_fields import Fields, Json
from homeostat.models.origin import BadConfigError, ConfigOrigin, UnsupportedConfigError
from homeostat.models.rope_settings import rope_config
from homeostat.ops.moe_shape import MoeShape
from homeostat.ops.rope import RopeConfig

CONFIG_JSON = ConfigOrigin()

# Well beyond the largest existing models.
MAX_LAYERS = 2048
MAX_SIZE = 2**24
MAX_PARAMS = 10**14
_SIZE_KEY = re.compile(r"layer|size$|head|dim$|embd|inner|expert|position|rank")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of a native decoder; the flags are the differences between families."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    initializer_range: float
    # None in a dense model.
    moe: MoeShape | None = None

    @property
    def num_params(self) -> int:
        """Return the number of parameters, computed from the sizes alone."""
        return self._num_params(lambda moe: moe.num_params(self.hidden_size))

    @property
    def num_routed_params(self) -> int:
        """Return the number of parameters of experts that tokens are routed to."""
        moe = self.moe
        return 0 if moe is None else len(moe.layers) * moe.num_routed_params(self.hidden_size)

    def num_on_host(self, part: OnHost | None) -> int:
        """Return the number of parameters that are kept in host memory."""
        if part == "layers":
            return self.num_params - self._num_outer_params
        return self.num_routed_params if part == "experts" else 0

    @property
    def _num_outer_params(self) -> int:
        """Return the number of parameters of embedding, output matrix and final norm."""
        matrices = 1 if self.tie_embeddings else 2
        return matrices * self.vocab_size * self.hidden_size + self.hidden_size

    @property
    def num_active_params(self) -> int:
        """Return the number of parameters that one token is multiplied by."""
        return self._num_params(lambda moe: moe.num_active_params(self.hidden_size))

    def _num_params(self, of_experts: Callable[[MoeShape], int]) -> int:
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (q_width + kv_width)
        biases = self.qkv_bias * (q_width + 2 * kv_width) + self.o_bias * self.hidden_size
        norms = 2 * self.hidden_size + 2 * self.qk_norm * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        all_mlp = self.num_layers * mlp
        if self.moe is not None:
            num_moe = len(self.moe.layers)
            all_mlp = (self.num_layers - num_moe) * mlp + num_moe * of_experts(self.moe)
        return self._num_outer_params + self.num_layers * (attention + biases + norms) + all_mlp


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
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedConfigError(
            f"the native decoder does not know model_type {model_type!r}; "
            f"it knows {', '.join(FAMILIES)}."
        )
    _refuse_absurd_sizes(config)
    _refuse_unknown_maths(config)
    shape = FAMILIES[model_type](config)
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
    return _common(config, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def _mistral(config: Json) -> DecoderConfig:
    # If the config does not mention it, transformers uses a window of 4096.
    if config.get("sliding_window", 4096) is not None:
        raise _windowed()
    return _common(config)


def _qwen2(config: Json) -> DecoderConfig:
    _refuse_sliding_window(config)
    return _common(config, qkv_bias=True)


def _qwen3(config: Json) -> DecoderConfig:
    _refuse_sliding_window(config)
    bias = Fields(config).flag("attention_bias", False)
    return _common(config, qkv_bias=bias, o_bias=bias, qk_norm=True, head_dim=128)


def _mixtral(config: Json) -> DecoderConfig:
    if config.get("sliding_window") is not None:
        raise _windowed()
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
    return _with_experts(_common(config), moe)


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
    _refuse_sliding_window(config)
    bias = fields.flag("attention_bias", False)
    shape = _common(config, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return _with_experts(shape, moe)


def _dots1(config: Json) -> DecoderConfig:
    fields = Fields(config)
    first = fields.count("max_window_layers", 62)
    has_window = config.get("sliding_window", 4096) is not None
    types = config.get("layer_types")
    if types is None:
        is_windowed = has_window and first < fields.whole("num_hidden_layers")
        types = ["sliding_attention"] if is_windowed else []
    _require_full_attention(types)
    bias = fields.flag("attention_bias", False)
    shape = _common(config, qkv_bias=bias, o_bias=bias, qk_norm=True)
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
}


def _common(
    config: Json,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
) -> DecoderConfig:
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
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope_config(config),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        initializer_range=fields.number("initializer_range", 0.02),
    )


def _refuse_unknown_maths(config: Json) -> None:
    if config.get("quantization_config"):
        raise BadConfigError(
            "the weights are quantised (quantization_config), and the native decoder "
            "trains plain ones. Name an unquantised checkpoint in model.path."
        )
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedConfigError(
            f"hidden_act is {config['hidden_act']!r}, and the native decoder has silu."
        )
    if config.get("attention_dropout"):
        raise UnsupportedConfigError(
            f"attention_dropout is {config['attention_dropout']!r}, and the native decoder has "
            "none. Set it to 0 there, or:"
        )


def _refuse_sliding_window(config: Json) -> None:
    fields = Fields(config)
    num_layers = fields.whole("num_hidden_layers")
    windowed = fields.flag("use_sliding_window", False)
    window = config.get("sliding_window", 4096) if windowed else None
    first = fields.whole("max_window_layers", 28) if config.get("max_window_layers") != 0 else 0
    types = config.get("layer_types")
    if types is None:
        types = ["sliding_attention"] if window is not None and first < num_layers else []
    _require_full_attention(types)


def _require_full_attention(types: Any) -> None:
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        raise _windowed()


def _windowed() -> UnsupportedConfigError:
    return UnsupportedConfigError(
        "some layers attend over a sliding window only, and the native decoder attends over the "
        "whole document."
    )
