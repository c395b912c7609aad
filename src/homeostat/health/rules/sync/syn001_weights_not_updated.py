"""The engine goes on sampling with old weights.

## What it sees
The version of the weights that the engine samples with stays the same over `fire` records while
steps go on and nothing says that it should (a sync interval of that length).

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
from dataclasses import dataclass

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, option
from homeostat.health.rules.readings import has_adapter, needed
from homeostat.health.view import Kind, RunView
from homeostat.health.windows import newest_spell


@dataclass(frozen=True)
class Options:
    fire: int = option(4, "Records without a new version.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    version = needed(view, "engine/policy_version", "sync/version")
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
        f"{first}, now at step {version.steps[-1]}: nothing that is learned reaches it. See the "
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
)
