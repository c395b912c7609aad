"""A machine of the cluster was lost, and the run waited for another one or shrank.

## What it sees
Our events node_lost, cluster_shrunk and cluster_restored. A run that is smaller than its recipe, or
that is still waiting, is a warning; one that has all of its machines again is information. The
evidence is which machine went away and what was missing then.

## Why it matters
A run that shrank computes the same updates with fewer devices: every step takes longer. A run that
waits computes nothing.

## Likely causes
- ray-node-lost: the machine was taken away (a spot instance, a reservation that ended), or failed.
- host-ram-oom: a machine that swaps does not answer Ray either, and counts as lost.

## What to do
Check whether the machine is up, and read its dmesg and raylet.out. Once it has joined the Ray
cluster again, a run that waits continues by itself; one that shrank takes it back when it is
stopped (SIGTERM saves first) and started again by the same command.

## Known false alarms
None: they are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.view import Event, RunView
from homeostat.health.words import counted


def check(view: RunView, options: NoOptions) -> Iterator[Sighting]:
    lost = view.events_of("node_lost")
    if not lost:
        return
    shrunk, restored = view.events_of("cluster_shrunk"), view.events_of("cluster_restored")
    waits = [event for event in lost if event.fields.get("action") == "wait"]
    # In the order in which they happen: each loss ends in one of the other two.
    is_waiting = len(waits) > len(restored)
    is_small = bool(shrunk) and _last_step(shrunk) > _last_step(restored)
    gone = ", ".join(str(one) for event in lost for one in event.fields.get("nodes", ()))
    evidence = [str(lost[-1].fields.get("missing", ""))]
    state = "has room for all of it again"
    if is_small:
        before, now = (shrunk[-1].fields.get(name) for name in ("ranks_before", "ranks_now"))
        state = f"continues with {counted(now, 'rank')} in place of {before}"
        evidence.append(f"cluster_shrunk at step {shrunk[-1].step}")
    elif is_waiting:
        state = f"waits until {lost[-1].fields.get('until', '')}"
    fixes = [
        Fix(
            "checkpoint.interval_steps",
            "fewer",
            "less work is repeated after a restart",
            Grade.SAFE,
        )
    ]
    if waits:
        fixes.append(
            Fix(
                "cluster.on_lost_node",
                "shrink",
                "the run continues on the machines that are left",
                Grade.SAFE,
            )
        )
    yield Sighting(
        message=f"{gone or 'A machine'} left the cluster ({len(lost)} loss(es)); the run {state}.",
        evidence=tuple(one for one in evidence if one),
        causes=(Cause("ray-node-lost", f"{gone or 'a machine'} left the Ray cluster"),),
        fixes=tuple(fixes),
        first_step=lost[0].step,
        last_step=lost[-1].step,
        value=float(len(lost)),
        limit=0.0,
        level=Level.WARN if is_small or is_waiting else Level.INFO,
    )


def _last_step(events: Sequence[Event]) -> int:
    """Return the step of the last event; -1 if there is none."""
    return max((event.step or 0 for event in events), default=-1)


RULE = Rule(
    code="DST006",
    name="machine-lost",
    family=Family.DISTRIBUTED,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("events",),
)
