"""Settings that correct for tokens to which trainer and engine give different probabilities.

Engine and trainer both compute the log-probs of one policy, and a stale engine computes those of an
older one. So the ratio of a token, trainer over engine at the beginning of the step, is not exactly
1. Each part is optional; the formulas are in `homeostat.algorithms.corrections`, one file each.
Whether a ratio belongs to a token or to a sequence is a type and not a flag, because the
recommended bounds differ by orders of magnitude.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from homeostat.config.base import Settings, key

_LOW = "Lower bound of the weight. Default: none."
_HIGH = "Upper bound of the weight."


class Weight(Settings):
    """Multiply the surrogate by the ratio, within bounds."""

    low: float | None = key(None, gt=0, help=_LOW)
    outside: Literal["truncate", "mask"] = key(
        "truncate",
        help="Treatment of a ratio outside the bounds. truncate: set it to the bound (TIS). mask: "
        "set the weight to 0 (IcePop: token, low=0.5, high=5).",
    )


class TokenWeight(Weight):
    """Use each token's own ratio: low variance, but it ignores the tokens before it."""

    type: Literal["token"] = "token"
    # The value that the authors of TIS use: a difference of 0.69 nats. Rounding stays below it: the
    # largest difference of 1,536 tokens in bf16 was 0.17 (bench/mismatch.py).
    high: float = key(2.0, gt=0, help=_HIGH)


class SequenceWeight(Weight):
    """Use the product over a completion's trained tokens.

    It is unbiased before it is bounded, and has high variance.
    """

    type: Literal["sequence"]
    high: float = key(5.0, gt=0, help=_HIGH)


class GeometricWeight(Weight):
    """Use the geometric mean over a completion's trained tokens; it does not grow with length."""

    type: Literal["geometric"]
    high: float = key(1.01, gt=0, help=_HIGH)


AnyWeight = Annotated[TokenWeight | SequenceWeight | GeometricWeight, Field(discriminator="type")]


class TokenReject(Settings):
    """Leave out tokens whose own ratio is outside the bounds."""

    type: Literal["token"]
    low: float = key(0.5, gt=0, help="Tokens with a smaller ratio are left out.")
    high: float = key(5.0, gt=0, help="Tokens with a larger ratio are left out.")


class SequenceReject(Settings):
    """Leave out completions whose ratio, the product over tokens, is outside the bounds."""

    type: Literal["sequence"]
    low: float = key(0.5, gt=0, help="Completions with a smaller ratio are left out.")
    high: float = key(2.0, gt=0, help="Completions with a larger ratio are left out.")


class GeometricReject(Settings):
    """Leave out completions whose geometric mean of ratios is outside the bounds."""

    type: Literal["geometric"]
    low: float = key(0.99, gt=0, help="Completions with a smaller mean ratio are left out.")
    high: float = key(1.01, gt=0, help="Completions with a larger mean ratio are left out.")


AnyReject = Annotated[TokenReject | SequenceReject | GeometricReject, Field(discriminator="type")]


class CorrectionConfig(Settings):
    """Correct for the mismatch between engine and trainer, and between old and new policy."""

    weight: AnyWeight | None = key(
        TokenWeight(),
        help="Importance weight of the surrogate loss: the ratio of the trainer's to the engine's "
        "probability, within bounds.",
    )
    reject: AnyReject | None = key(
        None,
        help="Do not train on tokens or completions whose ratio is outside these bounds. They are "
        "independent of the bounds of `weight`.",
    )
    veto: float | None = key(
        None,
        gt=0,
        lt=1,
        help="Do not train on a completion if any of its trained tokens has a ratio below this "
        "value, for example 1e-4. Such a ratio means that the engine computed that token from "
        "other inputs than the trainer.",
    )
    off_policy_mask: float | None = key(
        None,
        gt=0,
        help="Do not train on tokens with a negative advantage in completions that the current "
        "policy finds less likely than the engine did, by more than this many nats per token on "
        "average.",
    )
    normalise: bool = key(
        False,
        help="Divide the weights by their mean over the whole update. For this every trained row "
        "is scored before the first update.",
    )


class GspoCorrectionConfig(CorrectionConfig):
    """The same settings with a geometric weight by default, which matches the ratio of GSPO.

    The product of weight and ratio is then the ratio of the new policy to the engine.
    """

    weight: AnyWeight | None = key(
        GeometricWeight(type="geometric"),
        help="Importance weight of the surrogate loss: the ratio of the trainer's to the engine's "
        "probability, within bounds.",
    )
