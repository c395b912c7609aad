"""The sink protocol, and the one place where a vendor's failure is caught.

A sink gets one call per metric record. Steps only increase, within a run and over its resumes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from homeostat.observe.durable import write_atomically
from homeostat.observe.run_dir import RunDir

log = logging.getLogger(__name__)

# An evaluation before the training is step 0.
_NOTHING_SENT = -1


class Sink(Protocol):
    """A destination of metric records."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SinkContext:
    """The run that a sink belongs to. `resumed_from` is the step it resumes from, or None."""

    run_dir: RunDir
    run_name: str
    resumed_from: int | None


class VendorGuard:
    """Run a vendor's sink; if it fails, the sink is disabled and the run continues.

    A tracking service can raise anything (its own errors, network and protocol errors, errors of
    its database), so this class is the one place where every Exception is caught. A failure is
    reported at once and never retried: a sink with gaps would be worse than none.
    """

    def __init__(self, sink: Sink) -> None:
        self.name = sink.name
        self.on_failure: Callable[[str, str], None] | None = None
        self._sink: Sink | None = sink

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._sink is not None:
            sink = self._sink
            self._call(lambda: sink.log(step, metrics))

    def close(self) -> None:
        if self._sink is not None:
            self._call(self._sink.close)
            self._sink = None

    def _call(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._sink = None
            reason = f"{type(error).__name__}: {error}"
            log.warning(
                "%s failed and is switched off for the rest of this run (%s). "
                "metrics.jsonl is still written.",
                self.name,
                reason,
            )
            if self.on_failure is not None:
                self.on_failure(self.name, reason)


class SentMark:
    """The last step that was sent to a service, stored with the run.

    It is for services that cannot go back a step: after a resume, steps up to the mark are not sent
    a second time. A mark that a power cut or a full disk left unreadable counts as `resumed_from`.
    """

    def __init__(self, path: Path, *, service: str, resumed_from: int | None) -> None:
        self._path = path
        self._service = service
        self._told = False
        try:
            self.step = int(path.read_text()) if path.is_file() else _NOTHING_SENT
        except ValueError:
            self.step = _NOTHING_SENT if resumed_from is None else resumed_from
            log.warning("%s was damaged: %s gets the steps after %d", path, service, self.step)

    def is_new(self, step: int) -> bool:
        """Return whether a step has not been sent yet."""
        if step > self.step:
            return True
        if not self._told:
            self._told = True
            log.warning(
                "%s already holds steps up to %d and keeps them: those computed again are not "
                "sent twice. metrics.jsonl has the new values.",
                self._service,
                self.step,
            )
        return False

    def move_to(self, step: int) -> None:
        """Record that a step was sent."""
        self.step = step
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, f"{step}\n", sync=False)
