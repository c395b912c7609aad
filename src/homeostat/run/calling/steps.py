"""Iterate over the steps of a run: the training loop itself, which waits while the caller works.

    for step in Steps(config, ...):     a step is recorded; its checkpoint is saved afterwards
        ...                             the caller's signals, threads, generators are in force here

If the caller leaves the iteration or raises in it, the step in progress is saved, the event
`run_stopped` is recorded, and a later call resumes after that step.
"""

from __future__ import annotations

import signal
import sys
import weakref
from collections.abc import Generator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import IO, cast

from homeostat.config.run import RunConfig
from homeostat.hub.resolve import resolve_names
from homeostat.observe.logs import resolve_level
from homeostat.observe.outlet import Outlet
from homeostat.observe.terminal import SafeConsole
from homeostat.run.calling.callbacks import Callbacks, Teller
from homeostat.run.calling.start import running
from homeostat.run.calling.surroundings import Surroundings
from homeostat.run.session.result import RunResult
from homeostat.run.session.session import Session, open_session
from homeostat.run.session.signals import StopRequest
from homeostat.run.session.step import Running, Step


class Steps:
    """An iterator over the steps of a run, which starts with the first `next`.

    The run is stopped by `close`, by the end of a with block, or when the last reference to the
    iterator is gone. `result` is available when the run has ended.
    """

    def __init__(self, config: RunConfig, *, recipe: str, callbacks: Callbacks) -> None:
        self._run = _Run(config, recipe, callbacks)
        self._stepping = self._run.stepping()
        # Not in __del__: that would also run while the interpreter is being taken down.
        self._closed = weakref.finalize(self, self._stepping.close)

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Step:
        return next(self._stepping)

    def __enter__(self) -> Steps:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Save the step in progress and end the run. Idempotent."""
        self._closed()

    @property
    def result(self) -> RunResult | None:
        """Return the outcome of the run; None before its end."""
        return self._run.result


class _Run:
    """A run that hands its steps over."""

    def __init__(self, config: RunConfig, recipe: str, callbacks: Callbacks) -> None:
        self._config = config
        self._recipe = recipe
        self._callbacks = callbacks
        self._stop: StopRequest | None = None
        self._is_interrupted = False
        self.result: RunResult | None = None

    def stepping(self) -> Generator[Step, None, None]:
        """Yield the steps. Raises KeyboardInterrupt or SystemExit if a signal ended the run."""
        surroundings = Surroundings()
        checkpoints = self._config.run_dir / "checkpoints"
        teller = Teller(
            self._callbacks,
            checkpoints=checkpoints,
            stop=self._ask,
            ends_at_once=lambda: self._stop is not None and self._stop.at_once,
        )
        try:
            config = resolve_names(self._config)
            with self._session(config, teller) as session:
                self._stop = session.stop
                steps = running(config, session)
                while (step := self._next(steps)) is not None:
                    with surroundings.paused(), session.stop.paused():
                        try:
                            teller.step_done(step)
                            # After an error of a callback the run only ends.
                            if teller.error is None:
                                yield step
                        except (GeneratorExit, KeyboardInterrupt) as end:
                            # The loop continues until it has saved this step.
                            self._is_interrupted = isinstance(end, KeyboardInterrupt)
                            self._ask()
        except SystemExit:
            self._raise_signal()
            raise
        finally:
            surroundings.restore()
        if self.result is not None:
            teller.ended(self.result)
        if teller.error is not None:
            raise teller.error
        self._raise_signal()

    def _session(self, config: RunConfig, teller: Teller) -> AbstractContextManager[Session]:
        console = SafeConsole(file=cast(IO[str], Outlet(sys.stdout)))
        return open_session(
            config,
            recipe=self._recipe,
            command=["python", "homeostat.train"],
            console=console,
            log_level=resolve_level(None, config=config.observe.log_level),
            audience=teller,
        )

    def _ask(self) -> None:
        assert self._stop is not None, "a run that was not begun is not stopped"
        self._stop.ask()

    def _next(self, steps: Running) -> Step | None:
        try:
            return next(steps)
        except StopIteration as end:
            self.result = end.value
            return None

    def _raise_signal(self) -> None:
        """Raise what the signal would have raised, if one ended the run, now that all is saved."""
        caught = self._stop.signal if self._stop is not None else None
        if self._is_interrupted or caught is signal.SIGINT:
            raise KeyboardInterrupt
        if caught is not None:
            raise SystemExit(128 + caught)
