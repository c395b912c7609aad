"""Settings of the algorithms. There is one class per algorithm, with recommended defaults.

The policy-gradient algorithms share their components: a surrogate (how the ratio of new to old
policy is clipped), an advantage (what a sample is compared with), a normalisation over the whole
update, and optional terms. The formulas are in `homeostat.algorithms`, one file each.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from homeostat.config.base import Algorithm, RowAlgorithm, Settings, key
from homeostat.config.correction import CorrectionConfig, GspoCorrectionConfig
from homeostat.config.kind import RunKind
from homeostat.config.plugins import Pluggable, Plugged
from homeostat.config.reward_model import AnyLabelledAlgorithm

# Parameters of the loss of every policy gradient, beside those of its surrogate.
LOSS_PARAMS = frozenset(
    ("algorithm", "temperature", "kl_estimator", "kl_coefficient", "kl_importance_weighted")
)


class SftConfig(RowAlgorithm):
    """Supervised fine-tuning: cross-entropy on the trained tokens."""

    kind: ClassVar[RunKind] = RunKind.SFT

    type: Literal["sft"] = "sft"
    normalise: Literal["token", "row"] = key(
        "token",
        help="token: every trained token of an update has the same weight. row: every row has "
        "the same weight.",
    )


class KlConfig(Settings):
    """Penalty for moving away from the reference model."""

    coefficient: float = key(
        0.001, gt=0, help="Weight of the penalty; with `target`, its initial value."
    )
    estimator: Literal["k1", "k2", "k3"] = key(
        "k3",
        help="Estimator of the KL divergence, where x is the log-ratio of policy to reference. "
        "k1: x. k2: x^2 / 2. k3: exp(-x) - 1 + x, which is never negative and has low variance.",
    )
    place: Literal["loss", "reward"] = key(
        "loss",
        help="loss: add the penalty to the loss. reward: subtract it from the rewards before "
        "advantages are computed.",
    )
    importance_weighted: bool = key(
        False,
        help="Weight the loss term by the ratio of new to old policy. This keeps its gradient "
        "unbiased after the first update, and without it k1 in the loss has no useful gradient "
        "at all.",
    )
    target: float | None = key(
        None, gt=0, help="Adapt the coefficient so that the KL per token stays near this value."
    )
    horizon: int = key(
        10_000,
        ge=1,
        help="Number of samples over which the coefficient may change by a fifth (with target).",
    )


class DynamicSamplingConfig(Settings):
    """Draw other prompts in place of groups whose samples all have the same reward.

    Such groups have no advantage, so nothing can be learnt from them.
    """

    max_rounds: int = key(
        8,
        ge=2,
        help="Largest number of sampling rounds in a step; after that the step continues with "
        "the groups that it has.",
    )


class KeepOverlong(Settings):
    """Train completions that reach max_new_tokens like any other."""

    type: Literal["keep"] = "keep"


class MaskOverlong(Settings):
    """Do not train completions that reach max_new_tokens; their reward still counts."""

    type: Literal["mask"]


class ShapeOverlong(Settings):
    """Subtract a penalty that grows linearly over the `buffer_tokens` before max_new_tokens."""

    type: Literal["shape"]
    buffer_tokens: int | None = key(
        None,
        ge=1,
        help="Number of tokens before the limit over which the penalty grows. Default: a fifth "
        "of max_new_tokens.",
    )
    penalty: float = key(1.0, gt=0, help="The penalty at the limit.")

    def buffer(self, max_new_tokens: int) -> int:
        """Return the number of tokens before the limit over which the penalty grows."""
        return self.buffer_tokens or max(1, max_new_tokens // 5)


AnyOverlong = Annotated[KeepOverlong | MaskOverlong | ShapeOverlong, Field(discriminator="type")]


class PolicyGradientConfig(Algorithm):
    """Settings that all policy-gradient algorithms share."""

    kind: ClassVar[RunKind] = RunKind.RL

    clip_low: float = key(0.2, ge=0, help="The ratio is clipped below 1 - clip_low.")
    clip_high: float = key(0.2, ge=0, help="The ratio is clipped above 1 + clip_high.")
    dual_clip: float | None = key(
        None,
        gt=1,
        help="Also bound the ratio by this value if the advantage is negative (for example 3), "
        "so that a token that became much more likely since it was sampled does not outweigh all "
        "others.",
    )
    normalise: Literal["token", "sequence", "fixed"] = key(
        "token",
        help="How the loss is normalised over the whole update. token: every token has the same "
        "weight. sequence: every completion has the same weight. fixed: the sum is divided by "
        "completions times fixed_length, so that longer completions gain nothing.",
    )
    fixed_length: int | None = key(
        None, ge=1, help="Length used by normalise=fixed. Default: rollout.max_new_tokens."
    )
    scale: Literal["group", "batch", "none"] = key(
        "group",
        help="Divide advantages by the standard deviation of the rewards (unbiased, plus 1e-4) "
        "in the group or in the batch.",
    )
    whiten: bool = key(
        False,
        help="Scale advantages to mean 0 and standard deviation 1 over all trained tokens of "
        "the batch.",
    )
    advantage_clip: float | None = key(
        None, gt=0, help="Clip advantages to plus or minus this value."
    )
    kl: KlConfig | None = key(None, help="Penalty for moving away from the reference model.")
    correction: CorrectionConfig | None = key(
        CorrectionConfig(),
        help="Correction for tokens to which trainer and engine give different probabilities. "
        "null: none.",
    )
    entropy_bonus: float = key(0.0, ge=0, help="Weight of the policy's entropy in the objective.")
    dynamic_sampling: DynamicSamplingConfig | None = key(
        None, help="Replace groups in which all rewards are equal."
    )
    overlong: AnyOverlong = key(
        KeepOverlong(), help="How completions that reach max_new_tokens are treated."
    )
    skip_zero_advantage: bool = key(
        True,
        help="Leave out rows whose advantage is 0 if they have no other term with a gradient. "
        "The gradient is the same for less work. An update without any row is skipped.",
    )

    @property
    def surrogate_params(self) -> dict[str, float]:
        """Return the parameters of the surrogate beside the clip range."""
        return {}

    @property
    def has_other_terms(self) -> bool:
        """Return whether the loss has a gradient in rows whose advantage is 0."""
        return self.entropy_bonus > 0 or (self.kl is not None and self.kl.place == "loss")


class GrpoConfig(PolicyGradientConfig):
    """Group-relative policy optimisation (arXiv:2402.03300)."""

    type: Literal["grpo"]
    normalise: Literal["token", "sequence", "fixed"] = key(
        "sequence",
        help="How the loss is normalised over the update; token, sequence and fixed are "
        "explained above.",
    )


class DrGrpoConfig(PolicyGradientConfig):
    """GRPO without division by standard deviation or length, its two biases (arXiv:2503.20783)."""

    type: Literal["dr_grpo"]
    normalise: Literal["token", "sequence", "fixed"] = key(
        "fixed",
        help="How the loss is normalised over the update; token, sequence and fixed are "
        "explained above.",
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
    """Clip one ratio per completion, the geometric mean over its tokens (arXiv:2507.18071)."""

    type: Literal["gspo"]
    clip_low: float = key(3e-4, ge=0, help="The ratio is clipped below 1 - clip_low.")
    clip_high: float = key(4e-4, ge=0, help="The ratio is clipped above 1 + clip_high.")
    # The config is frozen, so narrowing the type of an inherited field is safe.
    correction: GspoCorrectionConfig | None = key(  # type: ignore[assignment]
        GspoCorrectionConfig(),
        help="Correction for completions to which trainer and engine give different "
        "probabilities. Its weight is geometric by default, like the ratio. null: none.",
    )
    normalise: Literal["token", "sequence", "fixed"] = key(
        "sequence",
        help="How the loss is normalised over the update; token, sequence and fixed are "
        "explained above.",
    )


class CispoConfig(PolicyGradientConfig):
    """Clip the importance weight of a token, never its gradient (arXiv:2506.13585)."""

    type: Literal["cispo"]
    clip_low: float = key(1.0, ge=0, help="The weight is clipped below 1 - clip_low.")
    clip_high: float = key(4.0, ge=0, help="The weight is clipped above 1 + clip_high.")


class RlooConfig(PolicyGradientConfig):
    """REINFORCE with the mean of the group's other samples as baseline (arXiv:2402.14740).

    The gradient is that of the log-probs of whole completions, which are sums over tokens;
    therefore the default of `normalise` is fixed.
    """

    type: Literal["rloo"]
    normalise: Literal["token", "sequence", "fixed"] = key(
        "fixed",
        help="How the loss is normalised over the update; token, sequence and fixed are "
        "explained above.",
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
    discount: float = key(1.0, gt=0, le=1, help="Discount factor of later rewards, per token.")
    scale: Literal["group", "batch", "none"] = key(
        "none",
        help="Must be none: whitening the returns of the batch already scales them.",
    )
    whiten: bool = key(
        True,
        help="Scale advantages to mean 0 and standard deviation 1 over all trained tokens of "
        "the batch.",
    )


class PpoConfig(PolicyGradientConfig):
    """PPO with a critic, which `critic` describes (arXiv:1707.06347)."""

    type: Literal["ppo"]
    scale: Literal["group", "batch", "none"] = key(
        "none",
        help="Must be none: samples are compared with the critic's values, and whitening scales.",
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
        "the new one, which holds single updates back. 0: none.",
    )
    drift_clip: float = key(
        0.2, gt=0, help="The slope of the drift, ratio - 1, is bounded by this value."
    )

    @property
    def surrogate_params(self) -> dict[str, float]:
        return {"drift": self.drift, "drift_clip": self.drift_clip}

    @property
    def has_other_terms(self) -> bool:
        return self.drift > 0 or super().has_other_terms


class SapoConfig(PolicyGradientConfig):
    """A soft gate in place of the clip (arXiv:2511.20347)."""

    type: Literal["sapo"]
    normalise: Literal["token", "sequence", "fixed"] = key(
        "sequence",
        help="How the loss is normalised over the update; token, sequence and fixed are "
        "explained above.",
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
        help="The same for a negative advantage. Larger is more stable: such an update raises "
        "many other tokens at once.",
    )

    @property
    def surrogate_params(self) -> dict[str, float]:
        return {"tau_pos": self.tau_pos, "tau_neg": self.tau_neg}


class GmpoConfig(PolicyGradientConfig):
    """The geometric mean of a completion's ratios, each clipped by itself (arXiv:2507.20673)."""

    type: Literal["gmpo"]
    clip_low: float = key(
        0.4, ge=0, help="The log-ratio of a token is clipped below -clip_low (not 1 - clip_low)."
    )
    clip_high: float = key(
        0.4, ge=0, help="The log-ratio of a token is clipped above clip_high (not 1 + clip_high)."
    )
    normalise: Literal["token", "sequence", "fixed"] = key(
        "sequence",
        help="How the loss is normalised over the update; token, sequence and fixed are "
        "explained above.",
    )


class EbftPolicyConfig(PolicyGradientConfig):
    """Energy-based fine-tuning (arXiv:2603.12248): the energy is the reward; see section `ebft`.

    The gradient is that of the log-probs of whole completions, as in rloo.
    """

    type: Literal["ebft"]
    normalise: Literal["token", "sequence", "fixed"] = key(
        "fixed",
        help="How the loss is normalised over the update; token, sequence and fixed are "
        "explained above.",
    )
    scale: Literal["group", "batch", "none"] = key(
        "none",
        help="Must be none: ebft.advantage_estimator says whether advantages are scaled.",
    )


class AlgorithmPlugin(Plugged, PolicyGradientConfig):
    """Base of an algorithm of your own (homeostat.plugins.Algorithm).

    A plug-in defines one of the two functions, or both; the other is that of GRPO. Its keys that
    are numbers, texts or truth values reach `surrogate` as `params`.

        def advantages(self, batch: RewardBatch) -> list[FloatArray64]
        def surrogate(tokens: PolicyTokens, log_ratio_M: Tensor, params) -> Surrogate (static)
    """

    advantages: ClassVar[Any] = None
    surrogate: ClassVar[Any] = None

    @classmethod
    def noun(cls) -> str:
        return "algorithm"

    @classmethod
    def find_defect(cls) -> str:
        if cls.advantages is None and cls.surrogate is None:
            return "it defines neither advantages nor surrogate"
        if taken := sorted(LOSS_PARAMS.intersection(cls.own_keys())):
            return f"its key {taken[0]!r} has the name of a parameter that every loss has"
        return ""

    @property
    def surrogate_params(self) -> dict[str, float | str]:  # type: ignore[override]
        values = {name: getattr(self, name) for name in self.own_keys()}
        return {name: one for name, one in values.items() if isinstance(one, int | float | str)}


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
    Pluggable("algorithm", AlgorithmPlugin),
]
