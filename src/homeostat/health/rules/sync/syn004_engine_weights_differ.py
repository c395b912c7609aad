"""The checksum of the engine's weights is not the trainer's.

## What it sees
`sync/checksum_off`, the number of tensors whose checksum differs after a publication, above 0.

## Why it matters
The engine samples with other weights than those that are trained, whatever the metrics say.

## Likely causes
- engine-weights-differ: tensors were lost, mixed up or damaged on the way.

## What to do
Publish again; if it persists use another transport (sync.transport).

## Known false alarms
None known: bits are compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.view import Kind, RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting | Unknown]:
    off = view.series("sync/checksum_off")
    if off is None:
        yield Unknown("the metric sync/checksum_off was not logged")
        return
    at = np.flatnonzero(off.values > 0)
    if not len(at):
        return
    first = int(off.steps[at[0]])
    yield Sighting(
        message=f"{int(off.values[at[-1]])} tensors of the engine differ from the trainer's, first "
        f"at step {first}: it samples with other weights. Publish again, or change the transport.",
        evidence=(f"sync/checksum_off above 0 in {len(at)} of {len(off)} records",),
        causes=(Cause("engine-weights-differ", "checksums differ after a publication"),),
        fixes=(
            Fix("sync.transport.type", "disk", "the simplest transport for weights", Grade.SAFE),
        ),
        first_step=first,
        last_step=int(off.steps[at[-1]]),
        value=float(off.values[at].max()),
        limit=0.0,
        level=None if off.latest > 0 else Level.INFO,
    )


RULE = Rule(
    code="SYN004",
    name="engine-weights-differ",
    family=Family.SYNC,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    kinds=(Kind.RL,),
    explains=(
        "SYN001",
        "SYN002",
        "RWD001",
        "RWD002",
        "RWD004",
        "RWD006",
        "GEN001",
        "GEN002",
        "GEN004",
        "OFF001",
        "OFF002",
        "POL002",
        "POL011",
        "POL013",
    ),
)
