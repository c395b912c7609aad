"""More devices are asked for than there are.

## What it sees
As slime counts: actor nodes times devices, plus the rollout's own unless they share devices, exceed
the devices of the cluster (setting or fact).

## Why it matters
Ray waits forever for the missing devices, so the job hangs when it is submitted.

## Likely causes
- gpu-count-mismatch: --colocate was forgotten, or a node is missing.

## What to do
Share the devices (--colocate), or ask for fewer.

## Known false alarms
A cluster that grows by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import is_true, raw, raw_number
from homeostat.health.view import Kind, RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    nodes = raw_number(view, "actor_num_nodes")
    each = raw_number(view, "actor_num_gpus_per_node")
    there = raw_number(view, "num_gpus") or view.facts.get("num_devices")
    if nodes is None or each is None or not there:
        return
    shared = is_true(raw(view, "colocate"))
    wanted = nodes * each + (0 if shared else raw_number(view, "rollout_num_gpus") or 0)
    if wanted <= there:
        return
    yield Sighting(
        message=f"{wanted:g} devices are asked for and {there:g} are there: the job will wait for "
        "ever. " + ("Ask for fewer." if shared else "Share them (--colocate), or ask for fewer."),
        causes=(Cause("gpu-count-mismatch", f"{wanted:g} > {there:g}"),),
        fixes=(
            Fix(
                "",
                "on",
                "trainer and engine share",
                theirs={"slime": "--colocate", "miles": "--colocate"},
            ),
        ),
        value=wanted,
        limit=float(there),
    )


RULE = Rule(
    code="CFG013",
    name="gpu-count-mismatch",
    family=Family.CONFIG,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    kinds=(Kind.RL,),
)
