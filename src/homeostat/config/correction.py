"""What is done about tokens that the trainer finds more or less likely than the engine did.

Engine and trainer compute one policy twice, and a stale engine computes an older one: a token's
ratio, trainer over engine at the beginning of the step, is not 1. Each part here is optional; the
formulae stand in `homeostat.algorithms.corrections`, one file each. What a ratio belongs to, a
token or a sequence, is a type, because its vetted bounds differ by orders of magnitude.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from homeostat.config.base import Settings, key

_LOW = "The weight's lower bound. Default: none."
_HIGH = "The weight's upper bound."


class Weight(Settings):
    """The surrogate is multiplied by the ratio, within bounds."""

    low: float | None = key(None, gt=0, help=_LOW)
    outside: Literal["truncate", "mask"] = key(
        "truncate",
        help="What becomes of a ratio outside the bounds. truncate: it is set to the bound (TIS). "
        "mask: the weight is 0 (IcePop: token, low=0.5, high=5).",
    )


class TokenWeight(Weight):
    """Each token's own ratio: low variance, and blind to what came before the token."""

    type: Literal["token"] = "token"
    # What the authors of TIS use: a difference of 0.69 nats. Rounding stays below it: the largest
    # of 1,536 tokens in bf16 was 0.17 (bench/mismatch.py).
    high: float = key(2.0, gt=0, help=_HIGH)


class SequenceWeight(Weight):
    """The product over a completion's trained tokens: unbiased before it is bounded, of high
    variance."""

    type: Literal["sequence"]
    high: float = key(5.0, gt=0, help=_HIGH)


class GeometricWeight(Weight):
    """The geometric mean over a completion's trained tokens: does not grow with length."""

    type: Literal["geometric"]
    high: float = key(1.01, gt=0, help=_HIGH)


AnyWeight = Annotated[TokenWeight | SequenceWeight | GeometricWeight, Field(discriminator="type")]


class TokenReject(Settings):
    """Tokens whose own ratio is outside the bounds are left out."""

    type: Literal["token"]
    low: float = key(0.5, gt=0, help="Left out below this ratio.")
    high: float = key(5.0, gt=0, help="Left out above this ratio.")


class SequenceReject(Settings):
    """Completions whose ratio, a product over tokens, is outside the bounds are left out."""

    type: Literal["sequence"]
    low: float = key(0.5, gt=0, help="Left out below this ratio.")
    high: float = key(2.0, gt=0, help="Left out above this ratio.")


class GeometricReject(Settings):
    """Completions whose geometric mean of ratios is outside the bounds are left out."""

    type: Literal["geometric"]
    low: float = key(0.99, gt=0, help="Left out below this ratio.")
    high: float = key(1.01, gt=0, help="Left out above this ratio.")


AnyReject = Annotated[TokenReject | SequenceReject | GeometricReject, Field(discriminator="type")]


class CorrectionConfig(Settings):
    """How the mismatch of engine and trainer, and of old and new policy, is corrected."""

    weight: AnyWeight | None = key(
        TokenWeight(),
        help="Importance weight of the surrogate: ratio of trainer to engine, within bounds.",
    )
    reject: AnyReject | None = key(
        None, help="Leave out what is outside bounds of its own, whatever the weight."
    )
    veto: float | None = key(
        None,
        gt=0,
        lt=1,
        help="Leave out a completion with any trained token whose ratio is below this (1e-4, say): "
        "the engine saw something there that the trainer does not.",
    )
    off_policy_mask: float | None = key(
        None,
        gt=0,
        help="Leave out tokens with a negative advantage in completions that the policy of now "
        "finds less likely than the engine did, by more than this per token (nats, mean).",
    )
    normalise: bool = key(
        False,
        help="Divide the weights by their mean over the whole update. Every trained row is scored "
        "before the first update.",
    )


class GspoCorrectionConfig(CorrectionConfig):
    """The same with a weight of the kind of GSPO's ratio: their product is the ratio of new policy
    to engine."""

    weight: AnyWeight | None = key(
        GeometricWeight(type="geometric"),
        help="Importance weight of the surrogate: ratio of trainer to engine, within bounds.",
    )
