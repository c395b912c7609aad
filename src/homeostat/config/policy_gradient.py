"""Settings that all policy-gradient algorithms share, and the base class of plug-ins.

The formulas are in `homeostat.algorithms`, one file each.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from homeostat.config.base import Algorithm, Settings, key
from homeostat.config.correction import CorrectionConfig
from homeostat.config.kind import RunKind
from homeostat.config.plugins import Plugged

# Parameters of the loss of every policy gradient, beside those of its surrogate. Each of them turns
# on, or changes, a part of the loss wherever it is there.
LOSS_PARAMS = frozenset(
    (
        *("algorithm", "temperature", "kl_estimator", "kl_coefficient", "kl_importance_weighted"),
        *("weight_level", "weight_low", "weight_high", "weight_outside", "weight_mean"),
        *("reject_level", "reject_low", "reject_high", "veto", "off_policy_mask"),
    )
)


class KlConfig(Settings):
    """Penalty for diverging from the reference model."""

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
        "unbiased after the first update. With k1 in the loss it is necessary: without it the "
        "gradient is useless.",
    )
    target: float | None = key(
        None,
        gt=0,
        help="Adapt the coefficient so that the KL per token stays near this value. "
        "null: keep the coefficient constant.",
    )
    horizon: int = key(
        10_000,
        ge=1,
        help="Number of samples over which the coefficient may change by at most a fifth (with "
        "target).",
    )


class DynamicSamplingConfig(Settings):
    """Draw other prompts in place of groups whose samples all have the same reward.

    The advantages in such a group are 0, so the model cannot learn from it.
    """

    max_rounds: int = key(
        8,
        ge=2,
        help="Largest number of sampling rounds in a step. After that the step continues with the "
        "groups that it has.",
    )


class KeepOverlong(Settings):
    """Train completions that reach max_new_tokens like any other."""

    type: Literal["keep"] = "keep"


class MaskOverlong(Settings):
    """Do not train on completions that reach max_new_tokens. Their rewards still count in the
    group.
    """

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
        help="Upper bound of the ratio for tokens with a negative advantage, for example 3. It "
        "keeps a token that has become much more likely since it was sampled from outweighing all "
        "others.",
    )
    normalise: Literal["token", "sequence", "fixed"] = key(
        "token",
        help="How the loss is normalised over the whole update. token: every token has the same "
        "weight. sequence: every completion has the same weight. fixed: the sum over tokens is "
        "divided by the number of completions times fixed_length, so that a token's weight does "
        "not depend on the length of its completion.",
    )
    fixed_length: int | None = key(
        None, ge=1, help="Length used by normalise=fixed. Default: rollout.max_new_tokens."
    )
    scale: Literal["group", "batch", "none"] = key(
        "group",
        help="Divide advantages by the standard deviation of the rewards (unbiased, plus 1e-4) in "
        "the group or in the batch. none: do not divide.",
    )
    whiten: bool = key(
        False,
        help="Scale advantages to mean 0 and standard deviation 1 over all trained tokens of "
        "the batch.",
    )
    advantage_clip: float | None = key(
        None, gt=0, help="Clip advantages to plus or minus this value."
    )
    kl: KlConfig | None = key(None, help="Penalty for diverging from the reference model.")
    correction: CorrectionConfig | None = key(
        CorrectionConfig(),
        help="Correction for tokens to which the trainer and the engine assign different "
        "probabilities. null: no correction.",
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
        help="Do not compute rows whose advantage is 0, unless another term of the loss has a "
        "gradient for them. The gradient is the same. An update in which no row is left is "
        "skipped.",
    )

    @property
    def surrogate_params(self) -> dict[str, float]:
        """Return the parameters of the surrogate beside the clip range."""
        return {}

    @property
    def has_other_terms(self) -> bool:
        """Return whether the loss has a gradient in rows whose advantage is 0."""
        return self.entropy_bonus > 0 or (self.kl is not None and self.kl.place == "loss")


class AlgorithmPlugin(Plugged, PolicyGradientConfig):
    """Base of your algorithms (homeostat.plugins.Algorithm).

    A plug-in defines one of the two functions, or both; the other is that of GRPO. Its keys that
    are numbers, texts or truth values reach `surrogate` as `params`.

        def advantages(self, batch: RewardBatch) -> list[FloatArray64]
        def surrogate(tokens: PolicyTokens, log_ratio_M: Tensor, params) -> Surrogate (static)

    A surrogate may have a term that does not vanish where the advantage is 0 (a drift penalty), so
    a plug-in that defines one trains on all rows. One whose surrogate is a multiple of the
    advantage may override the property `has_other_terms`.
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
    def has_other_terms(self) -> bool:
        return self.surrogate is not None or super().has_other_terms

    @property
    def surrogate_params(self) -> dict[str, float | str]:  # type: ignore[override]
        values = {name: getattr(self, name) for name in self.own_keys()}
        return {name: one for name, one in values.items() if isinstance(one, int | float | str)}
