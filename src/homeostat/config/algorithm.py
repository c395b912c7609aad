"""What is trained, and by which loss. One class per algorithm; its defaults are the vetted setting.

The policy-gradient algorithms share their parts: a surrogate (how the ratio of new to old policy is
clipped), an advantage (what a sample is compared with), a normalisation over the whole update, and
what may be added to either. The formulae stand in `homeostat.algorithms`, one file each.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from homeostat.config.base import Settings, key
from homeostat.config.correction import CorrectionConfig, GspoCorrectionConfig


class SftConfig(Settings):
    """Supervised fine-tuning: cross-entropy on the trained tokens."""

    type: Literal["sft"] = "sft"
    normalise: Literal["token", "row"] = key(
        "token",
        help="token: every trained token of an update counts the same. row: every row does.",
    )


class KlConfig(Settings):
    """A penalty for leaving the reference model."""

    coefficient: float = key(0.001, gt=0, help="Weight of the penalty; with `target`, at first.")
    estimator: Literal["k1", "k2", "k3"] = key(
        "k3",
        help="k1: log-ratio. k2: half its square. k3: exp(-x) - 1 + x, never negative and of low "
        "variance.",
    )
    place: Literal["loss", "reward"] = key(
        "loss", help="loss: a term of the loss. reward: taken off the rewards before advantages."
    )
    importance_weighted: bool = key(
        False,
        help="Weight the loss term by the ratio of new to old policy: an unbiased gradient also "
        "after the first update, and the only way in which k1 in the loss has one at all.",
    )
    target: float | None = key(
        None, gt=0, help="Adapt the coefficient so that the KL per token stays near this."
    )
    horizon: int = key(
        10_000, ge=1, help="Samples over which the coefficient may change by a fifth (target)."
    )


class DynamicSamplingConfig(Settings):
    """Groups whose samples all have one reward teach nothing: draw other prompts for them."""

    max_rounds: int = key(
        8, ge=2, help="Rounds of sampling in a step, at most; then it goes on with what it has."
    )


class KeepOverlong(Settings):
    """Completions that reach max_new_tokens are trained like any other."""

    type: Literal["keep"] = "keep"


class MaskOverlong(Settings):
    """Completions that reach max_new_tokens are not trained; their reward still counts."""

    type: Literal["mask"]


class ShapeOverlong(Settings):
    """A penalty that grows linearly over the last `buffer_tokens` before max_new_tokens."""

    type: Literal["shape"]
    buffer_tokens: int | None = key(
        None,
        ge=1,
        help="Tokens before the limit over which it grows. Default: a fifth of max_new_tokens.",
    )
    penalty: float = key(1.0, gt=0, help="The penalty at the limit.")

    def buffer(self, max_new_tokens: int) -> int:
        return self.buffer_tokens or max(1, max_new_tokens // 5)


AnyOverlong = Annotated[KeepOverlong | MaskOverlong | ShapeOverlong, Field(discriminator="type")]


class PolicyGradientConfig(Settings):
    """What all policy-gradient algorithms share."""

    clip_low: float = key(0.2, ge=0, help="The ratio is clipped below 1 - clip_low.")
    clip_high: float = key(0.2, ge=0, help="The ratio is clipped above 1 + clip_high.")
    dual_clip: float | None = key(
        None,
        gt=1,
        help="For negative advantages the ratio is bounded by this, too (3, say): a token that "
        "became much more likely since it was sampled no longer outweighs all others.",
    )
    normalise: Literal["token", "sequence", "fixed"] = key(
        "token",
        help="Over the whole update. token: every token counts the same. sequence: every "
        "completion does. fixed: the sum divided by completions times fixed_length, so that "
        "length earns nothing.",
    )
    fixed_length: int | None = key(
        None, ge=1, help="Length for normalise=fixed. Default: rollout.max_new_tokens."
    )
    scale: Literal["group", "batch", "none"] = key(
        "group",
        help="Advantages are divided by the rewards' deviation (unbiased, plus 1e-4) in the group "
        "or the batch.",
    )
    whiten: bool = key(
        False, help="Advantages get mean 0 and deviation 1 over all trained tokens of the batch."
    )
    advantage_clip: float | None = key(None, gt=0, help="Bound of an advantage's size.")
    kl: KlConfig | None = key(None, help="Penalty for leaving the reference model.")
    correction: CorrectionConfig | None = key(
        CorrectionConfig(),
        help="What is done where the trainer finds a token more or less likely than the engine "
        "did. null: nothing.",
    )
    entropy_bonus: float = key(0.0, ge=0, help="Weight of the policy's entropy in the objective.")
    dynamic_sampling: DynamicSamplingConfig | None = key(
        None, help="Replace groups without any difference in reward."
    )
    overlong: AnyOverlong = key(
        KeepOverlong(), help="What becomes of completions that reach max_new_tokens."
    )
    skip_zero_advantage: bool = key(
        True,
        help="Leave out rows whose advantage is 0 where nothing else of them has a gradient: the "
        "same gradient for less work. An update without any row is skipped.",
    )


class GrpoConfig(PolicyGradientConfig):
    """Group-relative policy optimisation (arXiv:2402.03300)."""

    type: Literal["grpo"]
    normalise: Literal["token", "sequence", "fixed"] = key(
        "sequence", help="How the loss is normalised over the update; see token, sequence, fixed."
    )


class DrGrpoConfig(PolicyGradientConfig):
    """GRPO without its two biases: no division by the deviation or by length (2503.20783)."""

    type: Literal["dr_grpo"]
    normalise: Literal["token", "sequence", "fixed"] = key(
        "fixed", help="How the loss is normalised over the update; see token, sequence, fixed."
    )
    scale: Literal["group", "batch", "none"] = key(
        "none", help="Advantages are divided by the rewards' deviation in the group or the batch."
    )


class DapoConfig(PolicyGradientConfig):
    """Clip higher, token mean, dynamic sampling, overlong shaping (arXiv:2503.14476)."""

    type: Literal["dapo"]
    clip_high: float = key(0.28, ge=0, help="The ratio is clipped above 1 + clip_high.")
    dynamic_sampling: DynamicSamplingConfig | None = key(
        DynamicSamplingConfig(), help="Replace groups without any difference in reward."
    )
    overlong: AnyOverlong = key(
        ShapeOverlong(type="shape"), help="What becomes of completions that reach max_new_tokens."
    )


class GspoConfig(PolicyGradientConfig):
    """The ratio of whole sequences, by its geometric mean per token (arXiv:2507.18071)."""

    type: Literal["gspo"]
    clip_low: float = key(3e-4, ge=0, help="The ratio is clipped below 1 - clip_low.")
    clip_high: float = key(4e-4, ge=0, help="The ratio is clipped above 1 + clip_high.")
    # Frozen, so a narrower type is as good.
    correction: GspoCorrectionConfig | None = key(  # type: ignore[assignment]
        GspoCorrectionConfig(),
        help="What is done where the trainer finds a completion more or less likely than the "
        "engine did; its weight is geometric by default, as is the ratio. null: nothing.",
    )
    normalise: Literal["token", "sequence", "fixed"] = key(
        "sequence", help="How the loss is normalised over the update; see token, sequence, fixed."
    )


class CispoConfig(PolicyGradientConfig):
    """Clips the weight of a token, never its gradient (arXiv:2506.13585)."""

    type: Literal["cispo"]
    clip_low: float = key(1.0, ge=0, help="The weight is clipped below 1 - clip_low.")
    clip_high: float = key(4.0, ge=0, help="The weight is clipped above 1 + clip_high.")


class RlooConfig(PolicyGradientConfig):
    """REINFORCE with the mean of the group's other samples as baseline (arXiv:2402.14740).

    Its gradient is that of whole completions' log-probs, which are sums over tokens: hence fixed.
    """

    type: Literal["rloo"]
    normalise: Literal["token", "sequence", "fixed"] = key(
        "fixed", help="How the loss is normalised over the update; see token, sequence, fixed."
    )
    scale: Literal["group", "batch", "none"] = key(
        "none", help="Advantages are divided by the rewards' deviation in the group or the batch."
    )


class ReinforcePpConfig(PolicyGradientConfig):
    """REINFORCE++: discounted returns, normalised over the batch (arXiv:2501.03262)."""

    type: Literal["reinforce_pp"]
    baseline: bool = key(
        False, help="Take the group's mean off the rewards first (REINFORCE++-baseline)."
    )
    discount: float = key(1.0, gt=0, le=1, help="Discount of later rewards, per token.")
    scale: Literal["group", "batch", "none"] = key(
        "none",
        help="Only none: whitening the returns of the batch gives their unit.",
    )
    whiten: bool = key(
        True, help="Advantages get mean 0 and deviation 1 over all trained tokens of the batch."
    )


AnyPolicyGradient = (
    GrpoConfig
    | DrGrpoConfig
    | DapoConfig
    | GspoConfig
    | CispoConfig
    | RlooConfig
    | ReinforcePpConfig
)
AnyAlgorithm = Annotated[SftConfig | AnyPolicyGradient, Field(discriminator="type")]
