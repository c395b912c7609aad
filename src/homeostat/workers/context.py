"""The place of a worker in its group: the first argument of every factory.

A factory is a function `factory(context, **kwargs) -> object`, named by its import path
("package.module:function"). The object that it returns is the worker: the controller calls its
methods by name, and its `close()`, if it has one, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from homeostat.workers.activity import ActivityRecord


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """One worker's place in its group."""

    rank: int
    size: int
    local_rank: int
    group_name: str
    # Address on which the group meets; what the worker serves is bound to it.
    host: str
    # What the worker does, for a report where it hangs. Calls are noted by whoever runs them.
    record: ActivityRecord = field(default_factory=ActivityRecord, compare=False, repr=False)
