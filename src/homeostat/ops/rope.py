"""Rotary position embeddings, with the scalings that checkpoints use.

Invariant: frequencies depend only on the config. They are never stored in a checkpoint or a buffer,
so a model that was built on the meta device cannot have stale ones.

    config -> inverse_frequencies (once) -> rope_tables (once per forward) -> apply_rope (per layer)

Scalings: `linear` divides every frequency; `llama3` divides low frequencies and blends the middle
band; `yarn` (Peng et al. 2023, arXiv:2309.00071) blends by the number of rotations over the
original context and multiplies cos and sin by an attention factor; `longrope` (Ding et al. 2024,
arXiv:2402.13753) divides every frequency by its own factor. Its second set of factors, for texts
beyond the original context, is not used: such texts are refused.

A rotation may leave a part of a head as it is, or turn neighbouring pairs instead of halves. Scores
do not depend on the order of a head's dims, so queries and keys are brought into an order
(`head_order`) in which the pairs are halves, and dims that are not rotated have frequency 0.

The rotation of a token has the same bits wherever the token is among others, in both numerics:
products and sums are separate calls, whose rounding IEEE 754 fixes. A fused call (addcmul) rounds
once or twice, as the compiler chose, and not always alike in the body and in the tail of a loop.
cos and sin are computed of angles within one turn: see `_within_one_turn` and ops/activations.py.

Suffixes: `_N` packed tokens, `_H` heads, `_d` head dim, `_F` frequencies (half the head dim).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from homeostat.ops import kernels

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Settings of the rotation. `original_length` is the context length of pre-training.

    `factors`: those of longrope. `rotated`: how many dims of a head are rotated (None: all).
    `interleaved`: pairs are neighbours, not halves.
    """

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()
    rotated: int | None = None
    interleaved: bool = False

    @property
    def is_unusual(self) -> bool:
        """Return whether it rotates anything else than the halves of a whole head."""
        return self.rotated is not None or self.interleaved

    @property
    def max_length(self) -> int | None:
        """Return the longest text that these frequencies are for; None: any."""
        return self.original_length if self.type == "longrope" else None


def head_order(rope: RopeConfig, *, head_dim: int) -> list[int] | None:
    """Return the order of a head's dims in which pairs are halves; None: as they are."""
    if not rope.is_unusual:
        return None
    rotated = rope.rotated or head_dim
    rest = list(range(rotated, head_dim))
    half, dims = len(rest) // 2, list(range(rotated))
    left, right = dims[: rotated // 2], dims[rotated // 2 :]
    if rope.interleaved:
        left, right = dims[::2], dims[1::2]
    return [*left, *rest[:half], *right, *rest[half:]]


def inverse_frequencies(rope: RopeConfig, *, head_dim: int) -> Tensor:
    """Return fp32 [head_dim / 2] on the CPU, 0 for dims that are not rotated."""
    if rope.rotated is None:
        return _frequencies(rope, head_dim=head_dim)
    found_F = _frequencies(rope, head_dim=rope.rotated)
    return torch.cat([found_F, found_F.new_zeros((head_dim - rope.rotated) // 2)])


def _frequencies(rope: RopeConfig, *, head_dim: int) -> Tensor:
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    wave_F = rope.theta**exponents_F
    if rope.type == "linear":
        return 1.0 / wave_F / rope.factor
    if rope.type == "longrope":
        return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32, device="cpu") * wave_F)
    if rope.type == "llama3":
        return _llama3(1.0 / wave_F, rope)
    if rope.type == "yarn":
        return _yarn(wave_F, rope, head_dim=head_dim)
    return 1.0 / wave_F


def rope_tables(positions_N: Tensor, inv_freq_F: Tensor, rope: RopeConfig) -> tuple[Tensor, Tensor]:
    """Return fp32 tables for all heads: cos [N, 1, d], each value twice, and sin [N, 1, F]."""
    # fp32, as in transformers: a position in bf16 would be rounded beyond 256.
    angles_N1F = positions_N[:, None, None].float() * inv_freq_F
    if angles_N1F.device.type == "cpu":
        angles_N1F = _within_one_turn(angles_N1F)
    factor: float | Tensor = rope.attention_factor
    if rope.rotated is not None and factor != 1.0:
        # What is not rotated is not scaled either.
        factor = torch.where(inv_freq_F > 0, factor, 1.0)
    cos_N1F = angles_N1F.cos().float() * factor
    return torch.cat((cos_N1F, cos_N1F), dim=-1), angles_N1F.sin().float() * factor


def _within_one_turn(angles: Tensor) -> Tensor:
    """Return angles in float64 from -pi to pi.

    A vector routine of sin and cos takes another path for all of its elements if one of them is
    large. If none is, an element does not depend on its neighbours.
    """
    wide = angles.double()
    return wide - (wide / (2 * math.pi)).round_() * (2 * math.pi)


def apply_rope(x_NHd: Tensor, cos_N1d: Tensor, sin_N1F: Tensor) -> Tensor:
    """Rotate (x[i], x[i + d/2]) by the token's angles, in fp32, and return the input dtype."""
    return _Rotation.apply(x_NHd, cos_N1d, sin_N1F)


def apply_rope_to_both(
    q_NHd: Tensor, k_NHd: Tensor, cos_N1d: Tensor, sin_N1F: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, without gradients in one pass, because decoding is call-bound."""
    if kernels.fused(q_NHd):
        from homeostat.ops.kernels import rope

        if torch.is_grad_enabled():
            return rope.RotateBoth.apply(q_NHd, k_NHd, cos_N1d, sin_N1F)
        return rope.rotate_both(q_NHd, k_NHd, cos_N1d, sin_N1F, sign=1)
    if torch.is_grad_enabled():
        return apply_rope(q_NHd, cos_N1d, sin_N1F), apply_rope(k_NHd, cos_N1d, sin_N1F)
    both_NHd = torch.cat((q_NHd, k_NHd), dim=1)
    out_NHd = rotate(both_NHd, cos_N1d, sin_N1F)
    return out_NHd[:, : q_NHd.shape[1]], out_NHd[:, q_NHd.shape[1] :]


class _Rotation(torch.autograd.Function):
    """A rotation whose gradient is the inverse rotation, so only the angles are kept."""

    @staticmethod
    def forward(ctx: Any, x_NHd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x_NHd, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return rotate(grads[0], *ctx.saved_tensors, sign=-1), None, None


def rotate(x_NHd: Tensor, cos: Tensor, sin: Tensor, *, sign: int = 1) -> Tensor:
    """Apply the rotation, or its inverse for `sign` -1. Not differentiable."""
    # Rotate in at least fp32 and round once at the end; float64 inputs stay float64.
    wide_NHd = x_NHd.to(torch.promote_types(x_NHd.dtype, torch.float32))
    out_NHd = wide_NHd * cos
    left, right = wide_NHd.chunk(2, dim=-1)
    out_left, out_right = out_NHd.chunk(2, dim=-1)
    if sign < 0:
        left, right, out_left, out_right = right, left, out_right, out_left
    # A product and a sum as separate calls: a fused one may round differently in a loop's tail.
    out_left.sub_(right * sin)
    out_right.add_(left * sin)
    return out_NHd.to(x_NHd.dtype)


def yarn_attention_factor(factor: float, *, mscale: float, mscale_all_dim: float) -> float:
    """Return the factor of cos and sin if the config does not give one."""

    def grow(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return grow(mscale) / grow(mscale_all_dim)
    return grow(1.0)


def _llama3(inv_freq_F: Tensor, rope: RopeConfig) -> Tensor:
    wavelength_F = 2 * math.pi / inv_freq_F
    longest = rope.original_length / rope.low_freq_factor
    shortest = rope.original_length / rope.high_freq_factor
    share_F = (rope.original_length / wavelength_F - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended_F = (1 - share_F) * inv_freq_F / rope.factor + share_F * inv_freq_F
    scaled_F = torch.where(wavelength_F > longest, inv_freq_F / rope.factor, blended_F)
    return torch.where(wavelength_F < shortest, inv_freq_F, scaled_F)


def _yarn(wave_F: Tensor, rope: RopeConfig, *, head_dim: int) -> Tensor:
    def dim_of(rotations: float) -> float:
        turns = rope.original_length / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # A ramp of zero width would divide by zero.
    width = high - low if high != low else 0.001
    steps_F = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    keep_F = 1 - ((steps_F - low) / width).clamp(0, 1)
    return (1 - keep_F) / (rope.factor * wave_F) + keep_F / wave_F
