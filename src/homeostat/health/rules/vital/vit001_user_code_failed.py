"""Code of the user that the trainer calls raised: a reward function, a dataset, a collator.

## What it sees
A traceback in which a training library calls a function that lies outside of installed packages
and of the trainer's own checkout, and no library's frame is below it except those that this
function called. At level error if no step was logged after it; as a warning if the run continued
and it came `fire` times.

## Why it matters
The run ended there, or continues without what the failing code should have returned. No setting
fixes it: the named line has to be changed.

## Likely causes
- reward-timeout, reward-server-unreachable, external-api-rate-limited, environment-failed: the code
  asked a server, a judge or an environment over the network, and the request failed.
- reward-fn-failing: the code is a reward function, and met an answer that it cannot score.
- dataset-column-missing: it reads a column or key that the rows do not have.
- user-code-failed: the line raised on an input that it was not written for.

## What to do
Open the file at the line. Call the function by hand with the input that it failed on; make a reward
return 0 or None for answers that it cannot score. Then resume from the newest checkpoint.

## Known false alarms
Scripts of a framework that were copied out of its package are taken for the user's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from homeostat.health.failures.details import details_of
from homeostat.health.failures.forms import installation
from homeostat.health.failures.frames import Frame
from homeostat.health.failures.requests_failed import failed_request
from homeostat.health.failures.tracebacks import Traceback
from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.signatures.lists import AFTERMATH
from homeostat.health.view import RunView
from homeostat.health.vital_signs.ending import fatal_traceback
from homeostat.health.words import shortened

# Exceptions that come up in the user's code and are not its fault: packages, memory, a person.
_NOT_ITS_FAULT = ("ImportError", "ModuleNotFoundError", "OutOfMemoryError", "MemoryError",
                  "KeyboardInterrupt", "SystemExit", "AcceleratorError",
                  "SignalException")  # fmt: skip
_OF_DEVICES = ("cuda", "nccl", "out of memory", "hip error", "cudnn")
_REWARD = ("reward", "score", "verif", "grade", "judge", "accuracy", "format")
_DATA = ("data", "collat", "tokeniz", "preprocess", "map_fn", "getitem", "load", "prompt")
_LOOK_UPS = ("AttributeError", "TypeError")
# The frame in which datasets calls a mapped function, and words about a list.
_MAPS_ROWS = ("datasets/arrow_dataset.py", "datasets/iterable_dataset.py")
_LIST = re.compile(r"'list' object|concatenate list|got '?list|not '?\"?list")


class Options(RuleOptions):
    fire: int = option(3, "Number of times that it must occur in a run that continues.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    fatal = fatal_traceback(view)
    frame = blamed(fatal) if fatal is not None else None
    if fatal is not None and frame is not None and not is_about_installation(fatal):
        yield sighting_of(fatal, frame, ended=True, times=1)
        return
    mine = [(one, at) for one in view.tracebacks if (at := blamed(one)) is not None]
    counts = Counter((at, one.kind) for one, at in mine)
    for (at, kind), times in counts.most_common(1):
        if times >= options.fire:
            first = next(one for one, where in mine if where == at and one.kind == kind)
            yield sighting_of(first, at, ended=False, times=times)


def blamed(found: Traceback) -> Frame | None:
    """The user's frame, where the exception is one that the code there is to blame for."""
    if not found.is_called_by_library or not is_its_fault(found):
        return None
    return found.user_frame


def is_its_fault(found: Traceback) -> bool:
    """Not a missing package, memory, a device or a person; not a crash or a cut-off text."""
    if found.is_native or not (found.has_head and found.has_tail):
        return False
    low = found.message.lower()
    return not found.kind.endswith(_NOT_ITS_FAULT) and not any(word in low for word in _OF_DEVICES)


def is_about_installation(found: Traceback) -> bool:
    """Return whether the words name a package, a version or a GPU, whoever raised."""
    details = details_of(found.kind, found.message)
    return any(one.kind in installation.CAUSES for one in details)


def sighting_of(found: Traceback, frame: Frame, *, ended: bool, times: int) -> Sighting:
    family = family_of(frame, caller=found.caller)
    what = shortened(found.error, 200)
    wrong = "; ".join(one.words for one in details_of(found.kind, found.message))
    how = "and ended the run" if ended else f"{times} times; the run continued without it"
    return Sighting(
        message=f"Your own code raised {how}: {what}, in {frame.function or 'the script'} at "
        f"{frame.file}:{frame.line}. Mend that line; no setting of the trainer helps.",
        evidence=(
            f"line {found.start.number}: {shortened(found.start.text.strip(), 300)}",
            f"the innermost frame outside of installed packages: {frame}",
            f"line {found.end.number}: {shortened(found.end.text.strip(), 300)}",
            *((f"read from its words: {shortened(wrong, 300)}",) if wrong else ()),
        ),
        causes=tuple(_causes(found, frame, family)),
        fixes=tuple(_fixes(found, frame, family)),
        first_step=found.end.step,
        last_step=found.end.step,
        level=None if ended else Level.WARN,
        family=family,
    )


def _fixes(found: Traceback, frame: Frame, family: Family) -> Iterator[Fix]:
    call = frame.function or "it"
    yield Fix(
        "",
        "",
        f"open {frame.file} at line {frame.line}, and call {call} by hand with the input that it "
        "failed on",
    )
    if found.kind.endswith("KeyError") and family is Family.DATA:
        yield Fix("", "", "print one row, and rename the field in the data or in that line")
    if _got_a_batch(found):
        yield Fix(
            "",
            "",
            "a function that map calls with batched=True gets lists, one entry a row: loop over "
            "them, or leave batched out",
        )
    if family is Family.REWARD:
        yield Fix("", "", "return 0 (or None) for an answer that cannot be scored")
    if failed_request(found, is_reward=family is Family.REWARD) is not None:
        yield Fix(
            "",
            "",
            "catch the failed request there: try again a few times with a longer time limit, then "
            "give a neutral value, so that one slow answer does not end the run",
        )


def _got_a_batch(found: Traceback) -> bool:
    """Return whether a mapped function failed on a list, as one does that expects a single row."""
    is_mapped = any(frame.file.endswith(_MAPS_ROWS) for frame in found.frames)
    return is_mapped and found.kind.endswith(_LOOK_UPS) and bool(_LIST.search(found.message))


def family_of(frame: Frame, *, caller: str = "") -> Family:
    """Return which part of the run the code is, by the names of its caller, function and file."""
    if "reward" in caller.lower():
        return Family.REWARD
    for words, family in ((_REWARD, Family.REWARD), (_DATA, Family.DATA)):
        if any(word in frame.function.lower() for word in words):
            return family
    file = frame.file.rpartition("/")[2].lower()
    for words, family in ((_REWARD[:4], Family.REWARD), (_DATA[:4], Family.DATA)):
        if any(word in file for word in words):
            return family
    return Family.CONFIG


def _causes(found: Traceback, frame: Frame, family: Family) -> Iterator[Cause]:
    column = Cause("dataset-column-missing", "such an error often is a column that is not there")
    is_key = found.kind.endswith("KeyError")
    if is_key:
        yield column
    request = failed_request(found, is_reward=family is Family.REWARD)
    if request is not None:
        yield Cause(*request)
    if family is Family.REWARD:
        by = f"{found.caller} called it" if "reward" in found.caller.lower() else "by its name"
        yield Cause("reward-fn-failing", f"it is a reward function ({by})")
    yield Cause("user-code-failed", f"{frame} raised {found.kind.rpartition('.')[2]}")
    if found.kind.endswith(_LOOK_UPS) and "NoneType" in found.message:
        yield column


RULE = Rule(
    code="VIT001",
    name="user-code-failed",
    family=Family.CONFIG,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("log",),
    options=Options,
    explains=(*AFTERMATH, "ERR502"),
    yields_to=("ERR50", "ERR51", "ERR52"),
    takes=("ERR",),
)
