"""Read the exception or crash that ended a run, whether or not a rule recognises it."""

from __future__ import annotations

from homeostat.health.failures.reading import ExceptionReading, read_exception
from homeostat.health.view import RunView
from homeostat.health.vital_signs.ending import ending_of, last_failures


def last_exception(view: RunView) -> ExceptionReading | None:
    """Return the reading of the exception that ended the run; None if no exception did."""
    ending = ending_of(view)
    if ending.traceback is None:
        return None
    return read_exception(ending.traceback, last_failures(view), view.log)
