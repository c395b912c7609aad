"""Settings of the algorithms. There is one class per algorithm, with recommended defaults.

The policy-gradient algorithms share their components: a surrogate (how the ratio of new to old
policy is clipped), an advantage (what a sample is compared with), a normalisation over the whole
update, and optional terms. The formulas are in `homeostat.algorithms`, one file each.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from homeostat.config.base import RowAlgorithm, key
from homeostat.config.correction import GspoCorrectionConfig
from homeostat.config.kind import RunKind
from homeostat.config.plugins import Pluggable
from homeostat.config.policy_gradient import (
    AlgorithmPlugin,
    AnyOverlong,
    DynamicSamplingConfig,
    PolicyGradientConfig,
    ShapeOverlong,
)
from homeostat.config.preference import PreferencePluginAlgorithm
from homeostat.config.reward_model import AnyLabelledAlgorithm


class SftConfig(RowAlgorithm):
    """Supervised fine-tuning: cross-entropy on the trained tokens."""

    kind: ClassVar[RunKind] = RunKind.SFT

    type: Literal["sft"] = "sft"
    normalise: Literal["token", "row"] = key(
        "token",
        help="token: every trained token of an update has the same weight. row: every row has "
        "the same weight.",
    )


class GrpoConfig(PolicyGradientConfig):
    """Group-relative policy optimisation (arXiv:2402.03300)."""

    type: Literal["grpo"]
    normalise: Literal["token", "sequence", "fixed"] = key(
        "sequence",
        help="How the loss is normalised over the update. The values are explained in the shared "
        "settings above.",
    )


class DrGrpoConfig(PolicyGradientConfig):
    """GRPO without division by standard deviation and length, which bias it (arXiv:2503.20783)."""

    type: Literal["dr_grpo"]
    normalise: Literal["token", "sequence", "fixed"] = key(
        "fixed",
        help="How the loss is normalised over the update. The values are explained in the shared "
        "settings above.",
    )
    scale: Literal["group", "batch", "none"] = key(
        "none",
        help="Divide advantages by the standard deviation of the rewards in the group or the "
        "batch.",
    )


class DapoConfig(PolicyGradientConfig):
    """Decoupled clipping, token mean, dynamic sampling and overlong shaping (arXiv:2503.14476)."""

    type: Literal["dapo"]
    clip_high: float = key(0.28, ge=0, help="The ratio is clipped above 1 + clip_high.")
    dynamic_sampling: DynamicSamplingConfig | None = key(
        DynamicSamplingConfig(), help="Replace groups in which all rewards are equal."
    )
    overlong: AnyOverlong = key(
        ShapeOverlong(type="shape"), help="How completions that reach max_new_tokens are treated."
    )


class GspoConfig(PolicyGradientConfig):
    """Clip one ratio per completion: the geometric mean over its tokens (arXiv:2507.18071)."""

    type: Literal["gspo"]
    clip_low: float = key(3e-4, ge=0, help="The ratio is clipped below 1 - clip_low.")
    clip_high: float = key(4e-4, ge=0, help="The ratio is clipped above 1 + clip_high.")
    # The config is frozen, so narrowing the type of an inherited field is safe.
    correction: GspoCorrectionConfig | None = key(  # type: ignore[assignment]
        GspoCorrectionConfig(),
        help="Correction for completions to which the trainer and the engine assign different "
        "probabilities. Its weight is geometric by default, like the ratio. null: no correction.",
    )
    normalise: Literal["token", "sequence", "fixed"] = key(
        "sequence",
        help="How the loss is normalised over the update. The values are explained in the shared "
        "settings above.",
    )


class CispoConfig(PolicyGradientConfig):
    """Clip the importance weight of a token, never its gradient (arXiv:2506.13585)."""

    type: Literal["cispo"]
    clip_low: float = key(1.0, ge=0, help="The weight is clipped below 1 - clip_low.")
    clip_high: float = key(4.0, ge=0, help="The weight is clipped above 1 + clip_high.")


class RlooConfig(PolicyGradientConfig):
    """REINFORCE with the mean of the group's other samples as baseline (arXiv:2402.14740).

    The default of `normalise` is fixed, because the gradient is that of the log-probs of whole
    completions, which are sums over tokens.
    """

    type: Literal["rloo"]
    normalise: Literal["token", "sequence", "fixed"] = key(
        "fixed",
        help="How the loss is normalised over the update. The values are explained in the shared "
        "settings above.",
    )
    scale: Literal["group", "batch", "none"] = key(
        "none",
        help="Divide advantages by the standard deviation of the rewards in the group or the "
        "batch.",
    )


class ReinforcePpConfig(PolicyGradientConfig):
    """REINFORCE++: discounted returns, normalised over the batch (arXiv:2501.03262)."""

    type: Literal["reinforce_pp"]
    baseline: bool = key(
        False, help="Subtract the group's mean from the rewards first (REINFORCE++-baseline)."
    )
    discount: float = key(1.0, gt=0, le=1, help="Discount factor per token for later rewards.")
    scale: Literal["group", "batch", "none"] = key(
        "none",
        help="Must be none, because whitening already scales the returns of the batch.",
    )
    whiten: bool = key(
        True,
        help="Scale advantages to mean 0 and standard deviation 1 over all trained tokens of "
        "the batch.",
    )


class PpoConfig(PolicyGradientConfig):
    """PPO with a critic, which section `critic` configures (arXiv:1707.06347)."""

    type: Literal["ppo"]
    scale: Literal["group", "batch", "none"] = key(
        "none",
        help="Must be none: advantages come from the critic's values, and `whiten` scales them.",
    )
    whiten: bool = key(
        True,
        help="Scale advantages to mean 0 and standard deviation 1 over all trained tokens of "
        "the batch.",
    )


class CpgdConfig(PolicyGradientConfig):
    """Clipped log-ratio policy gradient with a drift penalty (arXiv:2505.12504)."""

    type: Literal["cpgd"]
    clip_low: float = key(0.2, ge=0, lt=1, help="The log-ratio is clipped below ln(1 - clip_low).")
    clip_high: float = key(0.2, ge=0, help="The log-ratio is clipped above ln(1 + clip_high).")
    drift: float = key(
        0.01,
        ge=0,
        help="Weight of the policy drift: an estimate of the KL divergence of the old policy from "
        "the new one. It limits how far a single update moves the policy. 0: no such term.",
    )
    drift_clip: float = key(0.2, gt=0, help="Bound of the slope of the drift, which is ratio - 1.")

    @property
    def surrogate_params(self) -> dict[str, float]:
        return {"drift": self.drift, "drift_clip": self.drift_clip}

    @property
    def has_other_terms(self) -> bool:
        return self.drift > 0 or super().has_other_terms


class SapoConfig(PolicyGradientConfig):
    """Soft gating of the ratio instead of clipping (arXiv:2511.20347)."""

    type: Literal["sapo"]
    normalise: Literal["token", "sequence", "fixed"] = key(
        "sequence",
        help="How the loss is normalised over the update. The values are explained in the shared "
        "settings above.",
    )
    tau_pos: float = key(
        1.0,
        gt=0,
        help="How fast the weight of a token with a positive advantage falls off as its ratio "
        "leaves 1.",
    )
    tau_neg: float = key(
        1.05,
        gt=0,
        help="The same for a token with a negative advantage. A larger value is more stable, "
        "because such an update raises the probabilities of many other tokens at once.",
    )

    @property
    def surrogate_params(self) -> dict[str, float]:
        return {"tau_pos": self.tau_pos, "tau_neg": self.tau_neg}


class GmpoConfig(PolicyGradientConfig):
    """The geometric mean of a completion's ratios, each of which is clipped first
    (arXiv:2507.20673).
    """

    type: Literal["gmpo"]
    clip_low: float = key(
        0.4, ge=0, help="The log-ratio of a token is clipped below -clip_low (not 1 - clip_low)."
    )
    clip_high: float = key(
        0.4, ge=0, help="The log-ratio of a token is clipped above clip_high (not 1 + clip_high)."
    )
    normalise: Literal["token", "sequence", "fixed"] = key(
        "sequence",
        help="How the loss is normalised over the update. The values are explained in the shared "
        "settings above.",
    )


class EbftPolicyConfig(PolicyGradientConfig):
    """Energy-based fine-tuning (arXiv:2603.12248): the energy is the reward; see section `ebft`.

    The gradient is that of the log-probs of whole completions, as in rloo.
    """

    type: Literal["ebft"]
    normalise: Literal["token", "sequence", "fixed"] = key(
        "fixed",
        help="How the loss is normalised over the update. The values are explained in the shared "
        "settings above.",
    )
    scale: Literal["group", "batch", "none"] = key(
        "none",
        help="Must be none: ebft.advantage_estimator decides whether advantages are scaled.",
    )


AnyPolicyGradient = (
    GrpoConfig
    | DrGrpoConfig
    | DapoConfig
    | GspoConfig
    | CispoConfig
    | RlooConfig
    | ReinforcePpConfig
    | PpoConfig
    | CpgdConfig
    | SapoConfig
    | GmpoConfig
    | EbftPolicyConfig
)
AnyRowAlgorithm = SftConfig | AnyLabelledAlgorithm
AnyAlgorithm = Annotated[
    AnyRowAlgorithm | AnyPolicyGradient,
    Field(discriminator="type"),
    Pluggable("algorithm", (AlgorithmPlugin, PreferencePluginAlgorithm)),
]
