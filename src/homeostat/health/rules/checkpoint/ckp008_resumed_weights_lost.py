"""A resumed run starts from its first weights again, although its steps continue.

## What it sees
At the point where the run was resumed, the loss (in RL the reward) falls back from one record to
the next: `min_share` of all that was gained since the run's start is gone, by more than `sigmas` of
the noise.

## Why it matters
Everything that was learned before is lost, and the learning rate is that of the middle of a run.

## Likely causes
- resumed-weights-lost: the checkpoint's weights were not loaded: a new adapter was created, a path
  names the base model, or keys did not match and were skipped.

## What to do
Stop, and compare the loss of the checkpoint with that of the base model on a few rows. Then load
the weights that were saved, and read what the loader reports about missing and unexpected keys.

## Known false alarms
A resumption together with other data, or with another reward.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.resumed import around, resumed_steps
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    min_share: float = option(0.7, "Share of the progress that must be gone.")
    min_gain: float = option(0.2, "Progress before, as a share of the first value, to judge by.")
    sigmas: float = option(6.0, "Fall, in units of the noise.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    steps = resumed_steps(view)
    if not steps:
        yield Unknown("the run was not resumed, as far as is known")
        return
    name = "reward" if view.kind is Kind.RL else "train/loss"
    for step in steps:
        found = around(view.series(name), step)
        if found is None:
            continue
        gained = found.before - found.start
        is_better = gained > 0 if name == "reward" else gained < 0
        far = abs(found.after - found.before) > options.sigmas * found.noise
        if not is_better or abs(gained) < options.min_gain * max(abs(found.start), 1e-6):
            continue
        if found.lost_share < options.min_share or not far:
            continue
        yield Sighting(
            message=f"{name} went from {found.start:.4g} to {found.before:.4g} and is "
            f"{found.after:.4g} right after the run was resumed at step {step}: "
            f"{found.lost_share:.0%} of what was learned is gone. The checkpoint's weights were "
            "not loaded; stop, and load them.",
            evidence=(f"{name} {found.before:.4g} -> {found.after:.4g} after step {step}",),
            causes=(
                Cause("resumed-weights-lost", f"{name} is back where the run started"),
                Cause("weights-not-loaded", "keys or paths that do not match"),
            ),
            fixes=(Fix("checkpoint.load_step", "the newest", "the weights that were saved"),),
            first_step=step + 1,
            last_step=step + 1,
            value=found.lost_share,
            limit=options.min_share,
        )


RULE = Rule(
    code="CKP008",
    name="resumed-weights-lost",
    family=Family.CHECKPOINT,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    options=Options,
    explains=("LRN002", "LRN003", "LRN009", "RWD006", "POL013", "CKP001"),
)
