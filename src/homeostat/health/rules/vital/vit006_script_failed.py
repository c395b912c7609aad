"""The script itself raised, outside of any training library.

## What it sees
A traceback that ended the run, whose innermost frame lies outside of installed packages, without a
training library above it. If a rule knows the exception's words, that finding is shown instead.

## Why it matters
The run ended there, or never began. No setting of a trainer fixes it: the named line has to be
changed.

## Likely causes
- script-failed: the line raised on an input that it was not written for.
- dataset-column-missing: it reads a column or key that the rows do not have.
- library-version-mismatch: it gives a library's class an argument that the installed version does
  not take, or asks a module for a name that it lacks.
- setting-missing, unknown-setting: it reads a setting that is not there, or passes on a setting
  that nothing knows.
- shape-mismatch, dtype-mismatch, object-not-picklable, batch-not-divisible, path-missing and other
  names: the exception's words say what was wrong.

## What to do
Open the file at the line.

## Known false alarms
Scripts of a framework that were copied out of its package are taken for the user's.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.failures.advice import advice_on
from homeostat.health.failures.reading import read_exception
from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule
from homeostat.health.rules.vital.vit001_user_code_failed import (
    family_of,
    is_about_installation,
    is_its_fault,
)
from homeostat.health.signatures.lists import AFTERMATH
from homeostat.health.view import RunView
from homeostat.health.vital_signs.ending import fatal_traceback
from homeostat.health.words import shortened


def check(view: RunView, _: object) -> Iterator[Sighting]:
    found = fatal_traceback(view)
    frame = found.user_frame if found is not None else None
    if found is None or frame is None or found.is_called_by_library or not is_its_fault(found):
        return
    if is_about_installation(found):
        return
    where = f"{frame.file}:{frame.line}"
    causes = [Cause("script-failed", f"{frame} raised {found.kind.rpartition('.')[2]}")]
    told = read_exception(found, (), view.log).likely
    if told is not None:
        causes.insert(0, Cause(told[0], f"read, not recognised: {told[1]}"))
    elif found.kind.endswith("KeyError"):
        causes.append(Cause("dataset-column-missing", "a key that is not there often is a column"))
    raised = f"The script raised {shortened(found.error, 200)}, in "
    raised += f"{frame.function or 'its body'} at {where}, and ended the run."
    wrong = f"Read from it: {shortened(told[1], 200)}." if told else "Mend that line."
    yield Sighting(
        message=f"{raised} {wrong}",
        evidence=(
            f"line {found.start.number}: {shortened(found.start.text.strip(), 300)}",
            f"line {found.end.number}: {shortened(found.end.text.strip(), 300)}",
        ),
        causes=tuple(causes),
        fixes=(
            *(advice_on(told[0]) if told else ()),
            Fix("", "", f"open {frame.file} at line {frame.line}"),
        ),
        first_step=found.end.step,
        last_step=found.end.step,
        family=family_of(frame),
    )


RULE = Rule(
    code="VIT006",
    name="script-failed",
    family=Family.CONFIG,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("log",),
    explains=AFTERMATH,
    yields_to=("ERR",),
)
