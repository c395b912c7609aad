"""What the texts of a first failure have in common: the process ends there, and others follow it.

The same words are also said by runs that go on: an optional package is missing, a download is
tried again, an exception is caught. Only the steps that follow tell the two apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable

from homeostat.health.finding import Level
from homeostat.health.log import LogLine
from homeostat.health.texts.parts import AFTERMATH
from homeostat.health.texts.trouble import Trouble
from homeostat.health.view import RunView

# Steps that may be logged after a fatal line: other ranks' last rows, the rows of a second try.
MAX_STEPS_AFTER = 2


def first_failures(
    troubles: Iterable[Trouble], *, run_goes_on: Collection[str] = ()
) -> tuple[Trouble, ...]:
    """Troubles of level error explain what dies after them, and end the process; those named in
    `run_goes_on` may also be seen in a run that continues."""
    return tuple(
        _first_failure(trouble, ends=trouble.code not in run_goes_on)
        if trouble.level is Level.ERROR
        else trouble
        for trouble in troubles
    )


def _first_failure(trouble: Trouble, *, ends: bool) -> Trouble:
    explains = (*trouble.explains, *AFTERMATH)
    when = _ended_there(trouble) if ends else trouble.when
    return dataclasses.replace(trouble, explains=explains, when=when)


def _ended_there(trouble: Trouble) -> Callable[[RunView], bool]:
    """True where hardly a step was logged after the newest line with the trouble's words."""

    def when(view: RunView) -> bool:
        if trouble.when is not None and not trouble.when(view):
            return False
        newest = view.log.last(*trouble.texts)
        return newest is not None and _num_steps_after(view, newest) <= MAX_STEPS_AFTER

    return when


def _num_steps_after(view: RunView, line: LogLine) -> int:
    before = line.step if line.step is not None else -1
    after = [int((series.steps > before).sum()) for series in view.metrics.values()]
    return max(after, default=0)
