"""Describe failures other than the first one: those of other processes, and consequences."""

from __future__ import annotations

from collections.abc import Sequence

from homeostat.health.failures.first_failure import is_aftermath
from homeostat.health.failures.speakers import rank_of
from homeostat.health.failures.tracebacks import Traceback
from homeostat.health.words import shortened


def others_than(failure: Traceback, around: Sequence[Traceback]) -> list[str]:
    """Describe failures other than the first one: those of other processes, and consequences."""
    said: list[str] = []
    same, different, lost = [], [], []
    for one in around:
        if one is failure or one.speaker == failure.speaker:
            continue
        if one.error == failure.error:
            same.append(one)
        elif one.is_report:
            # A launcher or Ray only reports that something failed, which the log already shows.
            continue
        elif is_aftermath(one):
            lost.append(one)
        else:
            different.append(one)
    if failure.speaker and (same or different or lost):
        who = (
            "rank " + str(rank)
            if (rank := rank_of(failure.speaker)) is not None
            else failure.speaker
        )
        said.append(f"the first to fail was {who}")
    if same:
        who = _count([one.speaker for one in same])
        said.append(f"line {same[0].end.number}: {who} raised the same exception")
    for one in _distinct(different):
        said.append(f"{one.speaker or 'another process'} raised {one.error[:120]}")
    if lost:
        who = _count([one.speaker for one in lost])
        said.append(f"{who} only lost the connection afterwards ({lost[0].error[:80]})")
    said += _chain(failure, around)
    return said


def _chain(failure: Traceback, around: Sequence[Traceback]) -> list[str]:
    """Describe the exceptions that, according to Python's output, followed from this one."""
    said, is_after = [], False
    for one in around:
        if one is failure:
            is_after = True
        elif is_after and one.speaker == failure.speaker:
            if not one.link:
                break
            how = "was raised from it" if one.link == "cause" else "came up while it was handled"
            words = shortened(one.error, 120)
            said.append(f"line {one.end.number}: {words} {how}")
    return said[:2]


def _distinct(found: Sequence[Traceback]) -> list[Traceback]:
    """Return one failure per process, at most three."""
    return list({one.speaker: one for one in reversed(found)}.values())[:3]


def _count(speakers: Sequence[str]) -> str:
    names = list(dict.fromkeys(speakers))
    if len(names) == 1:
        return names[0] or "another process"
    return f"{len(names)} other processes"
