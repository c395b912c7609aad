"""The vital signs of a run, which are read before anything else is judged.

They are: how the run ended; which vital metrics are not finite, zero, frozen or gone; whether it
makes progress; and how much of it could be judged. They can be read from any run of any framework.
"No illness" is reported only if they are good. The rules of rules/vital report them as findings.
"""

from __future__ import annotations

from dataclasses import dataclass

from homeostat.health.names import FOREIGN, unprefixed
from homeostat.health.view import RunView
from homeostat.health.vital_signs.ending import Ending, ending_of, fatal_traceback
from homeostat.health.vital_signs.metrics import (
    ends_not_finite,
    frozen,
    gone,
    not_finite,
    vital_names,
    vital_series,
    zero,
)
from homeostat.health.vital_signs.purpose import Purpose, Trend, purpose_of
from homeostat.health.vital_signs.visible import Visible, visible_signs
from homeostat.observe.names import describe

__all__ = ["Vitals", "fatal_traceback", "vital_names", "vital_signs"]
# Known metrics that say nothing about a run's health.
_TRIVIAL = ("epoch", "num_tokens", "step", "time", "time/", "memory/", "throughput/")


@dataclass(frozen=True, slots=True)
class Vitals:
    """All vital signs. Metrics have the names that rules use.

    `not_finite` are metrics that are NaN or infinite now; `ends_not_finite` are those whose newest
    value is. `missing` are vital metrics that were never logged, `gone` those that are no longer
    logged. `visible` counts the signs that could be judged.
    """

    ending: Ending
    not_finite: tuple[str, ...]
    ends_not_finite: tuple[str, ...]
    zero: tuple[str, ...]
    frozen: tuple[str, ...]
    gone: tuple[str, ...]
    missing: tuple[str, ...]
    understood: tuple[str, ...]
    not_understood: tuple[str, ...]
    purpose: Purpose
    visible: Visible

    @property
    def are_good(self) -> bool:
        """Return whether nothing shows that the run died, and its vital metrics are good."""
        is_ill = self.not_finite or self.ends_not_finite or self.zero or self.frozen or self.gone
        return not (self.ending.is_death or is_ill or self.purpose.trend is Trend.WORSE)

    @property
    def is_little_known(self) -> bool:
        """Return whether so little was understood that the absence of findings means nothing."""
        num, others = len(self.understood), len(self.not_understood)
        return num < 2 or (others > 0 and num < 3) or others > 3 * num


def vital_signs(view: RunView) -> Vitals:
    """Return all vital signs of a run. Pure, and cheap enough to call again."""
    known = [name for name in view.metrics if _is_known(name)]
    return Vitals(
        ending=ending_of(view),
        not_finite=tuple(not_finite(view)),
        ends_not_finite=tuple(ends_not_finite(view)),
        zero=tuple(zero(view)),
        frozen=tuple(frozen(view)),
        gone=tuple(name for name, _ in gone(view)),
        missing=tuple(name for name in vital_names(view.kind) if vital_series(view, name) is None),
        understood=tuple(name for name in known if not name.startswith(_TRIVIAL)),
        not_understood=tuple(
            name
            for name in view.metrics
            if name not in known and not _is_told_twice(name, view)
            if not name.startswith(_TRIVIAL)
        ),
        purpose=purpose_of(view),
        visible=visible_signs(view),
    )


def _is_known(name: str) -> bool:
    return name in FOREIGN or describe(name) is not None


def _is_told_twice(name: str, view: RunView) -> bool:
    """Return whether a tracker logged it twice, with a prefix: train/grad_norm and grad_norm."""
    plain = unprefixed(name.removeprefix("raw/"))
    others = {plain, f"train/{plain}"} - {name}
    return plain != name and any(other in view.metrics for other in others)
