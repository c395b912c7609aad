"""Whether words in a log ended a run or were only said on the way, and what a first failure drags
along."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from homeostat.health.finding import Level
from homeostat.health.texts.parts import AFTERMATH
from homeostat.health.texts.trouble import Trouble
from homeostat.health.view import RunView


def ended_there(*patterns: str) -> Callable[[RunView], bool]:
    """True where no step was logged after the newest line with such words.

    An optional package that is missing, or a download that is tried again, is told in the same
    words by a run that goes on; only the steps that follow tell the two apart.
    """

    def when(view: RunView) -> bool:
        newest = view.log.last(*patterns)
        if newest is None or view.last_step is None:
            return newest is not None
        return newest.step is not None and newest.step >= view.last_step

    return when


def first_failures(troubles: Iterable[Trouble]) -> tuple[Trouble, ...]:
    """Troubles that end a process: each explains what dies after it."""
    return tuple(
        dataclasses.replace(trouble, explains=(*trouble.explains, *AFTERMATH))
        if trouble.level is Level.ERROR
        else trouble
        for trouble in troubles
    )
