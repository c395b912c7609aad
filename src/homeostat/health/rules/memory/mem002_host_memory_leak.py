"""Host memory grows step after step.

## What it sees
Host memory of the process or the node rises steadily over at least `min_records` records, by
`min_growth` in all, and still in the second half; or the memory of the process alone rises in a
straight line over the newest `line_records`, and is by `min_growth` above its start. With a kill by
the system or by Ray in the log it is an error.

## Why it matters
When memory runs out the system kills a process, which then cannot print a message.

## Likely causes
- host-ram-oom: memory ran out, and a process was killed.
- host-memory-leak: samples, images or logs are kept: by reward workers, agent loops, loaders.

## What to do
Fewer workers, smaller batches; see which process grows. A higher threshold of the killer only
delays it. Resume from the last checkpoint.

## Known false alarms
The file cache counts as used in some metrics, and grows by nature at the start.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.memory.growth import Growth, gib, leak, rise
from homeostat.health.rules.readings import needed
from homeostat.health.view import RunView
from homeostat.health.words import shortened


class Options(RuleOptions):
    min_growth: float = option(0.3, "Growth in all, as a share.")
    min_bytes: int = option(1073741824, "Smallest number of bytes that matters.")
    min_records: int = option(16, "Number of records that are needed.")
    line_records: int = option(12, "Number of records of a straight line that are enough.")
    line_bytes: int = option(268435456, "Bytes that are worth speaking of, where it is one.")


_KILLED = ("node running low on memory", "oom-kill", "out of memory: killed", "exitcode: -9",
           "exit code -9", "signal 9", "sigkill")  # fmt: skip


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    used = needed(view, "memory/host_used", "memory/host_rss").finite()
    killed = view.log.first(*_KILLED)
    if len(used) < (4 if killed else options.min_records):
        return
    growth = leak(view, used, 0.02 if killed else options.min_growth)
    if killed is None:
        growth = _large(growth, options.min_bytes) or _line(view, options)
    if growth is None:
        return
    why = f"{gib(growth.first)} -> {gib(growth.last)}"
    causes = [Cause("host-memory-leak", why)]
    if killed is not None:
        causes.insert(
            0, Cause("host-ram-oom", f"line {killed.number}: {shortened(killed.text.strip(), 120)}")
        )
    yield Sighting(
        message=f"Host memory grows from {gib(growth.first)} to {gib(growth.last)}, about "
        f"{growth.per_step / 2**20:.3g} MiB a step"
        + (", and a process was killed because of it" if killed else ", and does not stop")
        + ". See which process grows; use fewer workers.",
        causes=tuple(causes),
        fixes=(
            Fix(
                "rewards.workers",
                "1",
                "fewer processes that keep what they saw",
                Grade.SAFE,
                theirs={"verl": "actor_rollout_ref.rollout.agent.num_workers"},
            ),
            Fix("data.num_processes", "1", "fewer copies of the data", Grade.SAFE),
        ),
        first_step=growth.since,
        last_step=int(used.steps[-1]),
        value=growth.last,
        limit=growth.first,
        level=Level.ERROR if killed else None,
    )


def _line(view: RunView, options: Options) -> Growth | None:
    """Return steady growth of the process alone.

    The memory of a whole node, with its file cache, may well grow like this.
    """
    own = view.series("memory/host_rss")
    if own is None:
        return None
    found = rise(
        view, own.finite(), num_records=options.line_records, min_growth=options.min_growth
    )
    return _large(found, options.line_bytes)


def _large(growth: Growth | None, min_bytes: int) -> Growth | None:
    return growth if growth is not None and growth.last - growth.first >= min_bytes else None


RULE = Rule(
    code="MEM002",
    name="host-memory-leak",
    family=Family.MEMORY,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("memory/host_used|memory/host_rss",),
    options=Options,
)
