"""WorkerGroup: one controller calls workers that all run the same program, through futures.

Each worker hosts one object, made in the worker by a factory (see context.py). The controller calls
its methods by name and holds a `Pending` for each call; a worker answers its calls in order.

    call(rank, method, ...)     one worker
    call_all(method, ...)       every worker, the same arguments
    call_each(method, [...])    every worker, each its own arguments
    gather(pending, timeout_s)  the answers, with one deadline for all of them

Every wait has a deadline, and its error names the worker that it waited for. An error of
homeostat.errors arrives as it was raised; anything else as a WorkerError with the traceback of the
worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Generic, Protocol, TypeVar

from homeostat.errors import HomeostatError, WorkerHungError
from homeostat.workers.wire import unpack

T = TypeVar("T")


class Pending(Generic[T]):
    """The answer to one call, which has arrived or is still awaited."""

    def __init__(
        self, group: str, rank: int, method: str, *, last_words: Callable[[], str]
    ) -> None:
        self.group = group
        self.rank = rank
        self.method = method
        # What the call is shown as in a timeline, and when it was made.
        self.label = method
        self.asked_at = time.monotonic()
        self.last_words = last_words
        # Duration of the last wait that timed out.
        self.overdue_s: float | None = None
        self.future: Future[None] = Future()
        self._body: bytes | None = None
        self._value: T | None = None

    def settle(self, value: T) -> None:
        self._value = value
        self.future.set_result(None)

    def settle_packed(self, body: bytes) -> None:
        """Settle with a packed value. The reader unpacks it, and gets any error of unpacking."""
        self._body = body
        self.future.set_result(None)

    def fail(self, error: HomeostatError) -> None:
        self.future.set_exception(error)

    def result(self, *, timeout_s: float) -> T:
        """Wait for the answer. Raises WorkerHungError on time-out; you can call it again."""
        return gather([self], timeout_s=timeout_s)[0]

    def value(self) -> T:
        """Return the answer, which must be there."""
        body = self._body
        if body is not None:
            self._value = unpack(body)
            self._body = None
        return self._value  # type: ignore[return-value]


class WorkerGroup(Protocol):
    """The workers of one kind ("trainer", "engine"), started by any launcher."""

    name: str
    size: int

    def call(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Pending[Any]: ...

    def call_all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Pending[Any]]: ...

    def call_each(
        self, method: str, per_rank: Sequence[tuple[Any, ...]], /
    ) -> list[Pending[Any]]: ...

    def health(self) -> str | None:
        """Return the problem: which rank died and why, or does not answer. None without one."""
        ...

    def report_hang(self) -> str:
        """Inspect hanging workers from outside.

        Writes the stacks of all ranks to a file in the folder of the log. Returns a summary: which
        rank is behind, in which call, and each rank's last collective. Empty if there is nothing to
        inspect.
        """
        ...

    def abandon(self) -> None:
        """End the workers without a request to end, because they hang."""
        ...

    def close(self) -> None:
        """End the workers, if possible by a request to end. Idempotent."""
        ...


def gather(pending: Sequence[Pending[T]], *, timeout_s: float) -> list[T]:
    """Return all answers, in the order of `pending`. The first call that fails ends the wait."""
    futures = [one.future for one in pending]
    done, _ = wait(futures, timeout=timeout_s, return_when=FIRST_EXCEPTION)
    for future in futures:
        if future in done:
            future.result()
    late = [one for one in pending if one.future not in done]
    for one in late:
        one.overdue_s = timeout_s
    if late:
        # All ranks do the same, so the messages of the first rank are enough.
        raise WorkerHungError(describe_overdue(late) + late[0].last_words())
    return [one.value() for one in pending]


def describe_overdue(late: Sequence[Pending[Any]]) -> str:
    ranks: dict[tuple[str, str, float | None], list[str]] = {}
    for one in late:
        ranks.setdefault((one.group, one.method, one.overdue_s), []).append(str(one.rank))
    return "\n".join(
        f"{group}: no answer from rank {', '.join(by)} to {method!r} within {seconds:.4g} s."
        for (group, method, seconds), by in ranks.items()
    )
