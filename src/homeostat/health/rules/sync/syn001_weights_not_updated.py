"""The engine keeps sampling with old weights.

## What it sees
The version of the weights that the engine samples with stays the same over `fire` records while
training continues, and no setting explains it (a sync interval of that length). Or: log-probs of
engine and trainer agreed to rounding, and differ more with each update since some step.

## Why it matters
Samples get older with each step: what looks like RL is training on a fixed set of answers. Rewards
stay where they are while the trainer's loss moves.

## Likely causes
- weights-not-updated: the publication is not called, fails without a message, or goes to another
  engine.
- lora-not-synced: only the base weights are published, not the adapter.

## What to do
Publish after each step and compare a checksum of the engine's weights with the trainer's (our own
runs do: sync.verify).

## Known false alarms
A long sync interval, which is taken into account where it is known.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import has_adapter, needed
from homeostat.health.series.medians import median
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView

# Nats that exact implementations differ by at most.
_ROUNDING = 1e-3
_FAR = 0.3


class Options(RuleOptions):
    fire: int = option(4, "Number of records without a new version.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    apart = _apart(view)
    if apart is not None:
        yield apart
        return
    # While only the critic learns, there is no new version.
    warmup = int(view.number("critic.warmup_steps") or 0)
    version = needed(view, "engine/policy_version", "sync/version").since(warmup + 1)
    if not len(version):
        return
    interval = int(view.number("sync.interval") or 1)
    steps = version.steps - version.steps[0]
    still = np.concatenate([[False], np.diff(version.values) <= 0])
    spell = newest_spell(still, fire=max(options.fire, 2 * interval + 1))
    if spell is None or not spell.is_open or int(steps[-1]) < options.fire:
        return
    norm = view.series("grad_norm")
    first = int(version.steps[spell.start])
    if norm is not None and not np.any(norm.since(first).values > 0):
        return
    causes = [Cause("weights-not-updated", f"version {version.latest:g} since step {first}")]
    if has_adapter(view):
        causes.append(Cause("lora-not-synced", "an adapter is trained"))
    yield Sighting(
        message=f"The engine samples with version {version.latest:g} of the weights since step "
        f"{first}, now at step {version.steps[-1]}: nothing that is learned reaches it. Check the "
        "publication of weights.",
        evidence=(f"version {version.latest:g} over {len(spell) + 1} records",),
        causes=tuple(causes),
        fixes=(
            Fix("sync.interval", "1", "publishes after every step", Grade.UNSAFE),
            Fix(
                "sync.verify",
                "true",
                "compares the engine's weights with the trainer's",
                Grade.SAFE,
            ),
        ),
        first_step=first,
        last_step=int(version.steps[-1]),
        value=version.latest,
    )


def _apart(view: RunView) -> Sighting | None:
    """Engine and trainer agreed to rounding, and then came apart further with each update: the
    version that is reported is not the version that samples."""
    gap = view.series("sampling/sampling_logp_difference/mean")
    values = gap.finite() if gap is not None else None
    if values is None or len(values) < 6:
        return None
    off = np.flatnonzero(values.values > _ROUNDING)
    # A new adapter changes nothing: an engine without it agrees in the first step, and only there.
    is_new = bool(has_adapter(view)) and view.setting("lora.path") is None
    agrees = 1 if is_new else 3
    if len(off) < 3 or off[0] < agrees or len(off) != len(values) - off[0]:
        return None
    late = values.tail(len(off))
    agreed = median(values.values[: off[0]])
    if late.latest < 0.01 or late.latest < 100 * agreed or late.latest < 2 * late.first:
        return None
    # One update does not lead that far: what is far at once is other weights, not old ones.
    if late.first > _FAR:
        return None
    first = int(late.steps[0])
    causes = [Cause("weights-not-updated", f"the distance grows since step {first}")]
    if has_adapter(view):
        why = "an adapter is trained, and the engine agrees until it has been updated"
        causes.insert(0 if off[0] < 3 else 1, Cause("lora-not-synced", why))
    return Sighting(
        message=f"Engine and trainer agreed to {agreed:.0e} nats until step {first} and differ by "
        f"{late.latest:.2g} now, more with each update: the engine no longer gets the weights. "
        "Publish them again, and compare checksums.",
        evidence=(f"log-prob difference {agreed:.0e} -> {late.latest:.2g}",),
        causes=tuple(causes),
        fixes=(Fix("sync.verify", "true", "compares the engine's weights", Grade.SAFE),),
        first_step=first,
        last_step=int(late.steps[-1]),
        value=late.latest,
        limit=_ROUNDING,
    )


RULE = Rule(
    code="SYN001",
    name="weights-not-updated",
    family=Family.SYNC,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("engine/policy_version|sync/version",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("OFF002", "OFF005", "OFF008"),
)
