"""Call the functions that the caller of a run has given.

    on_step(step)               after every step, with its Step
    on_finding(finding)         a finding opened, got worse or closed: a line of findings.jsonl
    on_checkpoint(step, path)   a checkpoint was saved
    on_event(kind, step, fields)   any event of events.jsonl
    on_end(result)              the run is complete, or was stopped and saved: its RunResult

An exception in one of them is an error of the caller's code. The step in progress is finished and
saved, the run ends, and CallbackError describes what happened. Nothing that the run computed is
lost. SystemExit (sys.exit) and KeyboardInterrupt end the run in the same way, and are raised as
they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from homeostat.errors import CallbackError
from homeostat.run.session.result import RunResult
from homeostat.run.session.step import Step


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The functions of the caller. A function that is None is not called."""

    on_step: Callable[[Step], object] | None = None
    on_finding: Callable[[Mapping[str, Any]], object] | None = None
    on_checkpoint: Callable[[int, Path], object] | None = None
    on_event: Callable[[str, int, Mapping[str, Any]], object] | None = None
    on_end: Callable[[RunResult], object] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if given is not None and not callable(given):
                raise TypeError(f"{field.name} must be a function, not {given!r}")


class Teller:
    """Calls the callbacks, and keeps the first error. `stop` asks the run to end; `ends_at_once`
    says whether a signal ends it before that.

    `checkpoints` is the run's folder of checkpoints, in the form in which events may name it.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        *,
        checkpoints: Path,
        stop: Callable[[], None],
        ends_at_once: Callable[[], bool],
    ) -> None:
        self._callbacks = callbacks
        self._checkpoints = checkpoints
        self._stop = stop
        self._ends_at_once = ends_at_once
        self._step = 0
        self.error: CallbackError | SystemExit | KeyboardInterrupt | None = None

    def step_done(self, step: Step) -> None:
        """Report a step that is recorded."""
        self._step = step.step
        self._call("on_step", step)

    def ended(self, result: RunResult) -> None:
        """Report the end of the run."""
        self._call("on_end", result)

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._callbacks, name)
        # After an error the run only ends, and the failing function is not called again. An exit is
        # no error, so that `on_end` still hears of the end.
        is_over = isinstance(self.error, CallbackError) or (self.error and name != "on_end")
        if function is None or is_over:
            return
        try:
            function(*arguments)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            self.error = CallbackError(
                f"the callback {name} ({_place(function)}) raised {what} at step {self._step}. "
                "The error is in that function, not in the run: the run is saved, and the same "
                "call resumes it."
            )
            self.error.__cause__ = error
            self._stop()
        except (SystemExit, KeyboardInterrupt) as end:
            # A second signal may have interrupted the callback: it does not wait for the save.
            if self._ends_at_once():
                raise
            self.error = end
            self._stop()

    # The rest is observe.recorder.View.

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing: a Step has the metrics of every step."""

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        self._call("on_event", kind, step, fields)
        if kind == "checkpoint_saved":
            self._call("on_checkpoint", step, self._checkpoints / Path(fields["path"]).name)

    def status(self, text: str, done: int, total: int) -> None:
        """Do nothing: progress within a step is only for display."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: a Step has the groups."""

    def finding(self, step: int, finding: Mapping[str, Any]) -> None:
        self._call("on_finding", finding)

    def close(self) -> None:
        """Do nothing, because nothing is open."""


def _place(function: Callable[..., object]) -> str:
    """Name a function and the line where it is defined."""
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name if code is None else f"{name}, {code.co_filename}:{code.co_firstlineno}"
