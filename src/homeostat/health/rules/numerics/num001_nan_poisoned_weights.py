"""One non-finite update has left non-finite weights, and the policy writes garbage.

## What it sees
Loss, gradient norm, KL or entropy are not finite from one step to the end of the log, and from that
step on (or the next) the policy is gone: rewards fall to their minimum, completions run to the
length limit, or samples are one character over and over. homeostat's own engine refuses such
weights; the end of the run then says so.

## Why it matters
Weights that are NaN stay NaN. Nothing but an older checkpoint brings the run back.

## Likely causes
- nan-update-poisoned-weights: the update was applied although its gradient was not finite.
- lr-too-high: the gradient norm grew towards it.
- fp16-overflow: fp16 overflows where bf16 does not.
- kl-estimator-overflow: the KL grew by orders of magnitude just before.

## What to do
Go back to the last checkpoint before that step. Skip updates that are not finite (homeostat's
trainer does, and names the module that they come from). Lower the rate if the gradient grew before
it.

## Known false alarms
None known: all signs must come together.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import mean_before, mean_since, precision
from homeostat.health.series.medians import median
from homeostat.health.view import Event, Kind, RunView, Series
from homeostat.health.words import shortened

_NAMES = ("grad_norm", "train/loss", "train/policy_loss", "kl", "entropy")


class Options(RuleOptions):
    fire: int = option(2, "Number of newest records that are not finite.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    failed = [event for event in view.events_of("run_failed") if _says_so(event)]
    if failed:
        yield _refused(failed[-1])
        return
    found = [_onset(series, options.fire) for name in _NAMES if (series := view.series(name))]
    starts = [step for step in found if step is not None]
    if not starts:
        return
    first = min(starts)
    signs = list(_garbage(view, first))
    if not signs:
        return
    yield Sighting(
        message=f"Loss or gradient is not finite since step {first}, and the policy is lost from "
        f"there on: {'; '.join(signs)}. The weights hold NaN: go back to a checkpoint before step "
        f"{first}, and skip updates that are not finite.",
        evidence=(f"not finite from step {first} to the end", *signs),
        causes=tuple(_causes(view, first)),
        fixes=(
            Fix("checkpoint.load_step", f"before {first}", "weights that are still finite"),
            Fix(
                "trainer.on_nonfinite",
                "skip",
                "updates that are not finite are then not applied",
                Grade.SAFE,
            ),
            Fix(
                "trainer.lr", "a third of it", "if the gradient grew before that step", Grade.UNSAFE
            ),
        ),
        first_step=first,
        last_step=view.last_step,
    )


def _says_so(event: Event) -> bool:
    text = str(event.fields.get("message", "")).lower()
    return "not finite" in text and "log-prob" in text


def _refused(event: Event) -> Sighting:
    """Our own engine refuses weights that give no finite log-probs, and the run ends."""
    return Sighting(
        message=f"The weights of step {event.step} give log-probs that are not finite, and the run "
        "ended: go back to the checkpoint before.",
        evidence=(shortened(str(event.fields.get("message", "")), 200),),
        causes=(Cause("nan-update-poisoned-weights", "nothing can be sampled from the weights"),),
        fixes=(Fix("checkpoint.load_step", f"before {event.step}", "weights that are finite"),),
        first_step=event.step,
        last_step=event.step,
        confidence=Confidence.MEASURED,
    )


def _onset(series: Series, fire: int) -> int | None:
    """The step since which a series has no finite value to its end."""
    good = np.flatnonzero(np.isfinite(series.values))
    start = int(good[-1]) + 1 if len(good) else 0
    return int(series.steps[start]) if len(series) - start >= fire else None


def _garbage(view: RunView, first: int) -> Iterator[str]:
    """Describe what the policy does since then but did not do before."""
    before = mean_before(view, "reward", step=first)
    after = mean_since(view, "reward", step=first + 1)
    if before is not None and after is not None and before > 0.02 and after < 0.1 * before:
        yield f"the reward fell from {before:.3g} to {after:.3g}"
    cut_before = mean_before(view, "completions/clipped_ratio", step=first)
    cut = mean_since(view, "completions/clipped_ratio", step=first + 1)
    if cut is not None and cut > 0.9 and (cut_before is None or cut_before < 0.5):
        yield f"{cut:.0%} of the completions run to the limit"
    for sample in view.samples:
        text = sample.text.strip()
        if len(text) >= 16 and len(set(text)) <= 2:
            yield f"a completion is {text[:12]!r} and so on"
            return


def _causes(view: RunView, first: int) -> Iterator[Cause]:
    yield Cause("nan-update-poisoned-weights", "an update that was not finite was applied")
    norm = view.series("grad_norm")
    if norm is not None and _grew(norm, first, 3.0):
        yield Cause("lr-too-high", "the gradient norm grew towards it")
    far = view.series("kl")
    if far is not None and _grew(far, first, 30.0):
        yield Cause("kl-estimator-overflow", "the KL grew by orders of magnitude before it")
    if precision(view) == "fp16":
        yield Cause("fp16-overflow", "fp16 overflows where bf16 does not")


def _grew(series: Series, first: int, factor: float) -> bool:
    before = series.before(first).finite().values
    if len(before) < 6:
        return False
    early, late = median(before[: len(before) // 3]), median(before[-3:])
    return bool(late > factor * abs(early) and early > 0)


RULE = Rule(
    code="NUM001",
    name="nan-update-poisoned-weights",
    family=Family.NUMERICS,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("grad_norm|train/loss|train/policy_loss",),
    kinds=(Kind.RL,),
    options=Options,
    explains=(
        "NUM002",
        "NUM003",
        "LRN005",
        "RWD001",
        "SYN002",
        "RWD002",
        "RWD006",
        "GEN001",
        "GEN004",
        "POL001",
        "POL002",
        "POL004",
        "POL013",
        "OFF007",
    ),
)
