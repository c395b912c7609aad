"""Read the rotary settings of a checkpoint's config.json, in both of their spellings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from homeostat.models.config_fields import Fields, Json
from homeostat.models.origin import BadConfigError, UnsupportedConfigError
from homeostat.ops.rope import RopeConfig, yarn_attention_factor

# Rotary settings that older configs store next to `rope_scaling`.
_ROPE_OUTSIDE = ("rope_theta", "partial_rotary_factor")


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of a family's heads.

    `partial`: the share of a head that is rotated if the config does not say; None: the family
    rotates whole heads only. `longrope`: the names of its longrope; none if it has none. `theta`:
    the base if the config does not say.
    """

    partial: float | None = None
    interleaved: bool = False
    longrope: tuple[str, ...] = ()
    theta: float = 10_000.0


WHOLE_HEADS = Rotation()


def rope_config(
    config: Json, *, head_dim: int | None = None, rotation: Rotation = WHOLE_HEADS
) -> RopeConfig:
    """Return the rotary settings of a config.json. `head_dim`: for a part of a head."""
    # If both are present, the old key wins in transformers.
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise BadConfigError(f"rope_parameters is {scaling!r}, and must be an object.")
    merged = {**{key: config.get(key) for key in _ROPE_OUTSIDE if config.get(key)}, **scaling}
    fields = Fields(merged)
    is_partial = merged.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0)
    if rotation.partial is None and is_partial:
        raise UnsupportedConfigError(
            f"partial_rotary_factor is {merged['partial_rotary_factor']!r}, and the native decoder "
            "rotates whole heads here."
        )
    kind = merged.get("rope_type") or merged.get("type") or "default"
    if kind in (*rotation.longrope, "longrope"):
        kind = "longrope" if rotation.longrope else "longrope (of another family)"
    theta = fields.number("rope_theta", rotation.theta)
    if not isinstance(kind, str) or kind not in _ROPES:
        raise UnsupportedConfigError(
            f"rope_type is {kind!r}; the native decoder knows {', '.join(_ROPES)}."
        )
    original = config.get("original_max_position_embeddings")
    if original is not None:
        merged["original_max_position_embeddings"] = original
    found = _ROPES[kind](Fields(merged), theta, config)
    if rotation.partial is not None:
        assert head_dim is not None, "a part of a head needs its size"
        share = fields.number("partial_rotary_factor", rotation.partial)
        found = _of_part(found, share, head_dim, rotation)
    if found.factors and len(found.factors) != (found.rotated or head_dim or 0) // 2:
        raise BadConfigError(
            f"short_factor has {len(found.factors)} numbers, and heads of {head_dim} need one for "
            "every pair of dims that is rotated."
        )
    return found


def _of_part(rope: RopeConfig, share: float, head_dim: int, rotation: Rotation) -> RopeConfig:
    rotated = int(head_dim * share)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise BadConfigError(
            f"partial_rotary_factor is {share}, which rotates {rotated} of {head_dim} dims of a "
            "head; an even number of them is needed."
        )
    return replace(
        rope,
        rotated=rotated if rotated < head_dim else None,
        interleaved=rotation.interleaved,
    )


def _default_rope(fields: Fields, theta: float, config: Json) -> RopeConfig:
    return RopeConfig(theta)


def _linear_rope(fields: Fields, theta: float, config: Json) -> RopeConfig:
    return RopeConfig(theta, "linear", factor=fields.number("factor"))


def _original_length(fields: Fields, config: Json) -> int:
    default = config.get("max_position_embeddings")
    return fields.whole("original_max_position_embeddings", default)


def _llama3_rope(fields: Fields, theta: float, config: Json) -> RopeConfig:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if not low < high:
        raise BadConfigError(f"low_freq_factor {low} must be below high_freq_factor {high}.")
    return RopeConfig(
        theta,
        "llama3",
        factor=fields.number("factor"),
        original_length=_original_length(fields, config),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn_rope(fields: Fields, theta: float, config: Json) -> RopeConfig:
    if theta <= 1:
        # The ramp uses the logarithm of the base.
        raise BadConfigError(f"rope_theta is {theta}, and must be above 1 with rope_type yarn.")
    original = _original_length(fields, config)
    longest = config.get("max_position_embeddings")
    factor = fields.number("factor", longest / original if isinstance(longest, int) else None)
    inferred = yarn_attention_factor(
        factor,
        mscale=fields.number("mscale") if fields.values.get("mscale") else 0.0,
        mscale_all_dim=(
            fields.number("mscale_all_dim") if fields.values.get("mscale_all_dim") else 0.0
        ),
    )
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_length=original,
        attention_factor=fields.number("attention_factor", inferred),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        truncate=fields.flag("truncate", True),
    )


def _longrope(fields: Fields, theta: float, config: Json) -> RopeConfig:
    original = _original_length(fields, config)
    longest = config.get("max_position_embeddings")
    factor = fields.number("factor", longest / original if isinstance(longest, int) else None)
    inferred = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    factors = fields.values.get("short_factor")
    if not isinstance(factors, list) or not all(isinstance(x, int | float) for x in factors):
        raise BadConfigError(f"short_factor is {factors!r:.80}, and must be a list of numbers.")
    return RopeConfig(
        theta,
        "longrope",
        factor=factor,
        original_length=original,
        attention_factor=fields.number("attention_factor", inferred),
        factors=tuple(float(x) for x in factors),
    )


_ROPES: dict[str, Callable[[Fields, float, Json], RopeConfig]] = {
    "default": _default_rope,
    "linear": _linear_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
    "longrope": _longrope,
}
