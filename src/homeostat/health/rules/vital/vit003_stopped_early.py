"""The run did not reach its end.

## What it sees
It is a warning if something killed the run: the kernel, a scheduler, a time limit. It is a warning
if the run hung: a watchdog says so, or the log continues without a further step for half an hour,
ten times as long as any step before. It is a warning if one of our own runs, which record every
kind of end, has no end, and its files were not written to for an hour: kill -9 and a power cut
leave nothing else. It is information if a person or a signal stopped the run, if it ended by itself
before the planned number of steps (early stopping), and if the log just ends: it may still be
written, it may be a copy from the middle of a run, or its owner ended it without a line in the log.
Such a run is called unfinished, never healthy. The planned number of steps comes from a progress
bar, the log's own counter or the settings.

## Why it matters
All work since the newest checkpoint is lost, and a schedule that was made for all steps has not
reached its end.

## Likely causes
- host-ram-oom: signal 9 ended it, and no line says why; dmesg does.
- stopped-early: the log's own words, or its last step.

## What to do
Resume from the newest checkpoint. Find out from the scheduler (sacct, kubectl describe) and the
kernel's log (dmesg) what ended it.

## Known false alarms
A step that takes more than an hour.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.failures.end_lines import BY_SIGKILL, End
from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.frameworks import HOMEOSTAT
from homeostat.health.rule import Rule
from homeostat.health.view import RunView
from homeostat.health.vital_signs.ending import Ending, ending_of
from homeostat.health.words import shortened


def check(view: RunView, _: object) -> Iterator[Sighting]:
    ending = ending_of(view)
    ended = ending.how in (End.KILLED, End.HUNG, End.STOPPED) or ending.is_early or ending.is_stale
    if ending.how is not End.OPEN and not ended:
        return
    step, total, quote = view.last_step, view.total_steps, ending.line
    is_open, is_death = ending.how is End.OPEN, ending.is_death
    said = [f"{ending.words[0].upper()}{ending.words[1:]}."]
    if step is not None and not is_open and f"step {step:,}" not in ending.words:
        said.append(f"The newest step is {step:,}{f' of {total:,}' if total else ''}.")
    if ended:
        said.append("What was learned is in the newest checkpoint.")
    yield Sighting(
        message=" ".join(said),
        evidence=(f"line {quote.number}: {shortened(quote.text.strip(), 300)}",) if quote else (),
        causes=tuple(_causes(ending)),
        fixes=(Fix("", "", "go on from the newest checkpoint"),) if ended else (),
        first_step=step,
        last_step=step,
        value=float(step) if step is not None else None,
        limit=float(total) if total else None,
        level=Level.WARN if is_death or (ending.is_stale and _is_ours(view)) else None,
        # A signature that knows the words says more.
        confidence=Confidence.INFERRED if is_death else None,
    )


def _causes(ending: Ending) -> Iterator[Cause]:
    if BY_SIGKILL in ending.words:
        # The kernel ends the process that holds most; people and schedulers mostly send SIGTERM.
        yield Cause("host-ram-oom", "if dmesg, or the container's events, name the process")
    words = "no line says how the run ended" if ending.how is End.OPEN else ending.words
    yield Cause("stopped-early", words)


def _is_ours(view: RunView) -> bool:
    """Return whether it is a run of ours, which records its end."""
    return bool(view.events_of("run_started")) or view.framework is HOMEOSTAT


RULE = Rule(
    code="VIT003",
    name="stopped-early",
    family=Family.DISTRIBUTED,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    # A run that is watched live has not stopped: only what was read is judged.
    needs=("fact:sources",),
    yields_to=("ERR", "VIT001", "VIT002", "VIT006"),
)
