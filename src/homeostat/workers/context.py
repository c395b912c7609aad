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
    # Address at which the group meets. Servers of the worker are bound to it.
    host: str
    # A record of what the worker does, for the report if it hangs. The code that runs a call
    # records it.
    record: ActivityRecord = field(default_factory=ActivityRecord, compare=False, repr=False)
