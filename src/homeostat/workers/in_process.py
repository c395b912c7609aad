"""A group of one worker that lives in the controller's process. Calls run at once, in the caller.

There is no channel, and nothing is copied: arguments and results are the objects themselves. Errors
are as from a process.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from homeostat.config.cluster import AnyCluster
from homeostat.errors import WorkerError
from homeostat.workers.context import WorkerContext
from homeostat.workers.group import Pending
from homeostat.workers.hosting import CLOSE, START, Failure, Host, attempt
from homeostat.workers.spec import GroupSpec

log = logging.getLogger(__name__)


def open_in_process(cluster: AnyCluster, spec: GroupSpec) -> InProcessGroup:
    """Build the worker in this process. Its output goes to this process's output, not to a separate
    log.
    """
    assert spec.size == 1, f"{spec.name}: one process has one worker, not {spec.size}"
    assert not spec.env, f"{spec.name}: a worker in this process has this environment"
    (kwargs,) = spec.kwargs_of_ranks()
    return InProcessGroup(spec.factory, kwargs, name=spec.name, host=cluster.host)


class InProcessGroup:
    """A WorkerGroup of size 1, without a process."""

    size = 1

    def __init__(self, factory: str, kwargs: Mapping[str, Any], *, name: str, host: str) -> None:
        self.name = name
        self._is_closed = False
        self._host = Host(WorkerContext(rank=0, size=1, local_rank=0, group_name=name, host=host))
        self._run(START, (factory,), kwargs).result(timeout_s=0)

    def call(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Pending[Any]:
        assert rank == 0, f"{self.name} has 1 worker, not a rank {rank}"
        if self._is_closed:
            raise WorkerError(f"{self.name}: the group is closed, {method!r} cannot be called.")
        return self._run(method, args, kwargs)

    def call_all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Pending[Any]]:
        return [self.call(0, method, *args, **kwargs)]

    def call_each(self, method: str, per_rank: Sequence[tuple[Any, ...]], /) -> list[Pending[Any]]:
        (args,) = per_rank
        return [self.call(0, method, *args)]

    def health(self) -> str | None:
        return None

    def report_hang(self) -> str:
        """Return nothing: a call runs in the caller, so there is no wait that could time out."""
        return ""

    def abandon(self) -> None:
        self.close()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        error = self._run(CLOSE, (), {}).future.exception()
        if error is not None:
            log.warning("%s: closing went wrong: %s", self.name, error)

    def _run(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Pending[Any]:
        pending: Pending[Any] = Pending(self.name, 0, method, last_words=str)
        outcome = attempt(lambda: self._host.run(method, args, kwargs))
        if isinstance(outcome, Failure):
            pending.fail(outcome.error(f"{self.name} rank 0: {method!r}"))
        else:
            pending.settle(outcome)
        return pending
