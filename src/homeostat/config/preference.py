"""Settings of preference training: one class per algorithm, and what all of them share.

The algorithms learn from completions of which one is known to be better (dpo, ipo, orpo, simpo: a
chosen and a rejected one of the same prompt) or which are known to be good or bad (kto). The
formulas are in `homeostat.algorithms`, one file each; docs/guide/preferences.md names the sources
of the defaults.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from homeostat.config.base import RowAlgorithm, Settings, key
from homeostat.config.kind import RunKind
from homeostat.config.plugins import Plugged

# Parameters of the loss of every preference algorithm, beside those of its own keys.
# A trainer reads `temperature` of every loss.
LOSS_PARAMS = frozenset(("algorithm", "beta", "reference", "kl", "chosen_tokens", "temperature"))


class PreferenceAlgorithm(RowAlgorithm):
    """Base of the preference algorithms.

    `needs_reference`: its loss compares the policy with a reference model. `paired`: it learns from
    pairs of a chosen and a rejected completion. `beta` and `lr` are its recommended defaults.
    """

    kind: ClassVar[RunKind] = RunKind.PREFERENCE
    needs_reference: ClassVar[bool] = True
    paired: ClassVar[bool] = True
    beta: ClassVar[float] = 0.1
    lr: ClassVar[float] = 1e-6

    @property
    def rows_per_example(self) -> int:
        """Return 2 for a pair of completions, else 1."""
        return 2 if self.paired else 1

    @property
    def loss_params(self) -> dict[str, float | str]:
        """Return the algorithm's own keys as parameters of its loss."""
        own = self.model_dump(exclude={"type"})
        return {name: float(value) for name, value in own.items()}


class PreferencePluginAlgorithm(Plugged, PreferenceAlgorithm):
    """Base of your preference algorithms (homeostat.plugins.PreferenceAlgorithm).

    A plug-in defines the loss of pairs. Its keys that are numbers, texts or truth values reach it
    as `params`, beside `beta`; a key `sft_weight` adds the cross-entropy of the chosen completions
    with that weight. `needs_reference`, `beta` and `lr` are class variables that it may set.

        def losses(pairs: Pairs, params) -> PairLosses    (static)
    """

    losses: ClassVar[Any] = None

    @classmethod
    def noun(cls) -> str:
        return "algorithm"

    @classmethod
    def find_defect(cls) -> str:
        if cls.losses is None:
            return "it does not define losses"
        if not cls.paired:
            return "it sets paired = False, and a plug-in's loss is that of pairs"
        if taken := sorted(LOSS_PARAMS.intersection(cls.own_keys())):
            return f"its key {taken[0]!r} has the name of a parameter that every loss has"
        return ""

    @classmethod
    def needs(cls) -> str:
        pairs = "pairs (a preference source)"
        return f"{pairs} and a reference" if cls.needs_reference else pairs

    @property
    def loss_params(self) -> dict[str, float | str]:
        values = {name: getattr(self, name) for name in self.own_keys()}
        return {name: one for name, one in values.items() if isinstance(one, int | float | str)}


class DpoConfig(PreferenceAlgorithm):
    """Direct preference optimisation (arXiv:2305.18290)."""

    type: Literal["dpo"]
    label_smoothing: float = key(
        0.0,
        ge=0,
        lt=0.5,
        help="Probability that a label is wrong (conservative DPO): the loss of the swapped pair "
        "counts with this share.",
    )
    sft_weight: float = key(
        0.0,
        ge=0,
        help="Weight of the cross-entropy of the chosen completions, per token, that is added to "
        "the loss (RPO's alpha). This term keeps the chosen completions likely.",
    )
    length_normalised: bool = key(
        False,
        help="Divide the log-ratio of a completion by its number of tokens, so that long "
        "completions do not get larger margins. Use a larger preference.beta with it, about 5.",
    )


class IpoConfig(PreferenceAlgorithm):
    """Identity preference optimisation: regress the margin to 1 / (2 beta) (arXiv:2310.12036)."""

    type: Literal["ipo"]


class KtoConfig(PreferenceAlgorithm):
    """Kahneman-Tversky optimisation: good and bad completions, not paired (arXiv:2402.01306)."""

    paired: ClassVar[bool] = False

    type: Literal["kto"]
    desirable_weight: float = key(1.0, gt=0, help="Weight of the loss of desirable completions.")
    undesirable_weight: float = key(
        1.0, gt=0, help="Weight of the loss of undesirable completions."
    )


class OrpoConfig(PreferenceAlgorithm):
    """Cross-entropy plus an odds-ratio penalty, without a reference (arXiv:2403.07691)."""

    needs_reference: ClassVar[bool] = False
    lr: ClassVar[float] = 5e-6

    type: Literal["orpo"]


class SimpoConfig(PreferenceAlgorithm):
    """Length-normalised margin with a target, without a reference (arXiv:2405.14734)."""

    needs_reference: ClassVar[bool] = False
    beta: ClassVar[float] = 2.0

    type: Literal["simpo"]
    target_margin: float = key(
        1.0,
        ge=0,
        help="Margin between the rewards of a pair at which its loss is log 2 (the paper's gamma).",
    )
    label_smoothing: float = key(
        0.0,
        ge=0,
        lt=0.5,
        help="Probability that a label is wrong: the loss of the swapped pair counts with this "
        "share.",
    )
    sft_weight: float = key(
        0.0,
        ge=0,
        help="Weight of the cross-entropy of the chosen completions, per token, that is added to "
        "the loss (CPO-SimPO).",
    )


AnyPreference = DpoConfig | IpoConfig | KtoConfig | OrpoConfig | SimpoConfig


class PreferenceConfig(Settings):
    """Settings that the preference algorithms share."""

    beta: float | None = key(
        None,
        gt=0,
        help="Scale of the implicit reward. dpo, ipo, kto: a larger value keeps the policy closer "
        "to the reference. orpo: weight of the odds-ratio penalty. Default: 0.1; for simpo 2.",
    )
    reference_logps: Literal["precomputed", "live"] = key(
        "precomputed",
        help="precomputed: compute the reference's log-probs of all rows once, before the first "
        "step, and save them in the run folder; the reference then leaves memory. live: keep the "
        "reference in memory and compute the log-probs of the rows in each step.",
    )
