"""A vital metric is no longer logged, although the run continues.

## What it sees
Loss, gradient norm, reward, KL, entropy, mean length or margin that was logged for at least
8 records and is then missing, while another of them is logged for 8 records more.

## Why it matters
What is not logged cannot be judged. A trainer leaves a metric out when it has no value to report:
every reward function failed, no sample was left, the part that computes it was switched off. Where
all samples of a group earn the same (RWD001 to RWD005, POL001, POL015), there is no update, and
that finding is shown instead.

## Likely causes
- vital-sign-gone: the step at which it disappeared.

## What to do
Look at what happened at that step: a resumption with other settings, a stage that changed, a
warning in the console text.

## Known false alarms
Two logs of which one was cut, read as one run.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Level, Sighting
from homeostat.health.rule import Rule
from homeostat.health.view import RunView
from homeostat.health.vital_signs.metrics import gone

# Rules that see groups without a difference: such steps have neither loss nor gradient.
_NO_UPDATES = ("RWD001", "RWD002", "RWD003", "RWD004", "RWD005", "POL001", "POL015")


def check(view: RunView, _: object) -> Iterator[Sighting]:
    missing = list(gone(view))
    if not missing:
        return
    names = " and ".join(name for name, _ in missing)
    last = min(step for _, step in missing)
    newest = view.last_step or last
    yield Sighting(
        message=f"{names} {'is' if len(missing) == 1 else 'are'} not logged since step {last}, "
        f"while the run continues to step {newest}: look at what changed there.",
        evidence=tuple(f"{name} was logged last at step {step}" for name, step in missing),
        causes=(Cause("vital-sign-gone", f"nothing of it from step {last} to {newest}"),),
        first_step=last,
        last_step=newest,
    )


RULE = Rule(
    code="VIT007",
    name="vital-sign-gone",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("train/loss|train/policy_loss|grad_norm|reward|kl|entropy",),
    yields_to=("ERR", "VIT001", "VIT004", *_NO_UPDATES),
)
