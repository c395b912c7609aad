"""A signature, and the rule that looks for it in a log.

The same words may have several causes: "CUDA out of memory" in the log-prob function is another
illness than in the engine's wake-up. So a signature is words *and* context; the one with more
context names the plainer one in `explains`, and wins where both match.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from homeostat.health.failures.end_lines import End, is_supposed
from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.log import LogLine
from homeostat.health.rule import Rule
from homeostat.health.signatures.predicates import holds
from homeostat.health.signatures.unsaid import (
    continues_warning,
    is_caught,
    is_code_beside,
    is_denied,
    is_ignored,
    is_template,
    lists_settings,
)
from homeostat.health.view import RunView
from homeostat.health.vital_signs.ending import ending_of

# Characters of a line that are quoted.
MAX_QUOTE = 300
# Lines of a text whose surroundings are looked at.
MAX_TRIED = 300
# Steps that may be logged after a fatal line: other ranks' last rows, the rows of a second try.
MAX_STEPS_AFTER = 2
# A run has recovered if at most so many lines say it, and so many steps follow the newest one.
MAX_RARE, MIN_SINCE = 3, 20
# Where a logger puts its level: INFO, [W301, [W socket.cpp:601], UserWarning, ": W tensorflow/".
_HEAD = 120
# What a program says when it tries once more, or knows what to do instead: it continues.
_TRIES_AGAIN = re.compile(r"thrown while requesting|\b[Rr]etrying\b|\b[Rr]etry \(?\d{1,3} ?/")
_GOES_ON = re.compile(
    r"[,;:.!-] ?(?:skipping|ignoring|disabling|truncating|setting|using|adding|padding"
    r"|(?:re)?building|creating) |\bfalling back (?:to|on)\b|\b(?:is|are) (?:skipped|ignored)\b"
    r"|\bwill (?:use|be (?:set|used|skipped|ignored|created)) ",
    re.IGNORECASE,
)
_RAISED = re.compile(
    r"\b[A-Z]\w{1,80}(?:Error|Exception|Interrupt)\b|\b(?:ERROR|FATAL|CRITICAL|ABORT|E\d{4})\b"
    r"|\b[Ee]rror:|_ASSERT\b|\bpanicked\b"
)
_TRACEBACK = "Traceback (most recent call last)"
# What launchers raise when a process that they started has failed.
_LAUNCHERS = ("ChildFailedError:", "CalledProcessError: Command '*python")
_HANDLING = "During handling of the above exception"
_CHAINED = (_HANDLING, "was the direct cause of the following")
# Packages that code tries to import and does without; an error about them says so itself.
_TRIED = ("package-missing", "flash-attention-missing")
_BROKEN = ("undefined symbol", "shared object file", "version `GLIBC")
_ASKS_FOR_PACKAGE = re.compile(r"ImportError|ModuleNotFound|NotFoundError|import|install|package")
# The line of code that raised, as a traceback quotes it.
_RAISES = re.compile(r"(?:\[rank\d{1,5}\]:?)?\s{2,80}(?:raise|assert) ")
# What makes a line an error, whatever it is about.
_IS_ERROR = re.compile(
    r"\b[A-Z]\w{1,80}(?:Error|Exception|Interrupt)\b|\b(?:ERROR|FATAL|CRITICAL|Traceback|ABORT)\b"
    r"|\b[Ee]rror:|\bE\d{4} \d\d:|_ASSERT\b|\b[Ff]ail(?:ed|ure)\b|\bpanicked\b"
)
_MILD = re.compile(
    r"\b(?:INFO|DEBUG|WARNING|WARN|[A-Z][A-Za-z]{0,30}Warning)\b|(?:^|\[)[WI]\d{3,4} "
    r"|\[[WI] \w{1,40}\.cpp:|: [WI] (?:tensorflow|external)/"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A stanza of <family>.toml; the package's docstring says what each field means."""

    code: str
    name: str
    family: Family
    texts: tuple[str, ...]
    what: str
    why: str
    fixes: tuple[Fix, ...]
    causes: tuple[Cause, ...] = ()
    context: tuple[str, ...] = ()
    within: int = 80
    unless: tuple[str, ...] = ()
    when: Mapping[str, Any] = field(default_factory=dict)
    notes: bool = False
    survivable: bool = False
    passing: bool = False
    ends_run: bool = False
    level: Level = Level.ERROR
    confidence: Confidence = Confidence.MEASURED
    explains: tuple[str, ...] = ()


def rule_of(signature: Signature) -> Rule:
    """Make the rule that looks for a signature."""

    def check(view: RunView, _: object) -> Iterator[Sighting]:
        found = _match(signature, view)
        if found is None:
            return
        line, beside = found
        is_outlived = signature.survivable and _is_outlived(signature, view)
        is_mild = is_outlived or (not signature.notes and is_said_mildly(line))
        is_past = signature.passing and is_mild and _is_past(signature, view)
        quotes = [line] + ([beside] if beside is not None and beside != line else [])
        yield Sighting(
            message=f"{signature.what} The run has recovered: many steps follow."
            if is_past
            else signature.what,
            evidence=tuple(f"line {q.number}: {q.text.strip()[:MAX_QUOTE]}" for q in quotes),
            causes=signature.causes or (Cause(signature.name, signature.why),),
            fixes=signature.fixes,
            first_step=_step_of(line, view),
            last_step=line.step,
            level=Level.INFO
            if is_past
            else _milder(signature.level, is_mild=is_mild, is_outlived=is_outlived),
        )

    return Rule(
        code=signature.code,
        name=signature.name,
        family=signature.family,
        level=signature.level,
        confidence=signature.confidence,
        check=check,
        needs=("log",),
        explains=signature.explains,
        texts=signature.texts,
        ends_run=signature.ends_run,
        page=partial(_page, signature),
    )


def _step_of(line: LogLine, view: RunView) -> int | None:
    """Return the newest step before the line, or the run's first step if there is none."""
    if line.step is not None:
        return line.step
    firsts = [int(series.steps[0]) for series in view.metrics.values() if len(series)]
    return min(firsts, default=None)


def _milder(level: Level, *, is_mild: bool, is_outlived: bool) -> Level | None:
    """Return the level of a sighting that is less severe than its signature; None if it is not."""
    if level is Level.ERROR:
        return Level.WARN if is_mild else None
    # A warning did not end the run if something else did.
    return Level.INFO if level is Level.WARN and is_outlived else None


def _is_outlived(signature: Signature, view: RunView) -> bool:
    """Return whether a traceback follows that does not hold the signature's words.

    Packages that do not fit show it when they are imported: steps outlive a warning about them.
    """
    newest, traceback = view.log.last(*signature.texts), _last_own_traceback(view)
    if newest is not None and signature.family is Family.INSTALL:
        if _num_steps_after(view, newest) > MAX_STEPS_AFTER:
            return True
    if newest is None or traceback is None or newest.number > traceback.number:
        return False
    # A traceback that names the one before it as its cause belongs to that.
    link = view.log.near(traceback, *_CHAINED, lines=3)
    return link is None or (signature.name in _TRIED and _is_about_something_else(link, view))


def _last_own_traceback(view: RunView) -> LogLine | None:
    """Return where the last traceback begins that is no launcher's report of a failed process."""
    launchers = [line.number for text in _LAUNCHERS for line in view.log.find(text)]
    following = float("inf")
    for line in reversed(tuple(view.log.find(_TRACEBACK))):
        if not any(line.number < number < following for number in launchers):
            return line
        following = line.number
    return None


def _is_about_something_else(link: LogLine, view: RunView) -> bool:
    """Return whether a package was only tried: the error raised after that asks for none."""
    last = view.log.last("Error: ", "Exception: ")
    if last is None or last.number < link.number or _HANDLING not in link.text:
        return False
    is_broken = any(words in last.text for words in _BROKEN)
    return is_broken or _ASKS_FOR_PACKAGE.search(last.text) is None


def _is_past(signature: Signature, view: RunView) -> bool:
    """Return whether the run has recovered: few such lines, and many steps after them."""
    newest = view.log.last(*signature.texts)
    found = (line.number for text in signature.texts for line in view.log.find(text))
    # Every rank says what happens at the start.
    is_at_start = newest is not None and newest.step is None
    is_rare = is_at_start or len(set(islice(found, MAX_TRIED))) <= MAX_RARE
    return newest is not None and is_rare and _num_steps_after(view, newest) >= MIN_SINCE


def _ends_there(signature: Signature, view: RunView) -> bool:
    """Return whether hardly a step was logged after the newest line with the signature's words.

    Runs that continue log the same words: an optional package is missing, a download is retried,
    an exception is caught, an answer of the model is about them. Only the steps that follow
    distinguish the two, and behind the last step, whether the line is an error at all.
    """
    newest = view.log.last(*signature.texts)
    if newest is None or _num_steps_after(view, newest) > MAX_STEPS_AFTER:
        return False
    return _IS_ERROR.search(newest.text) is not None or ending_of(view).how is not End.FINISHED


def _num_steps_after(view: RunView, line: LogLine) -> int:
    before = line.step if line.step is not None else -1
    after = [int((series.steps > before).sum()) for series in view.metrics.values()]
    return max(after, default=0)


def is_said_mildly(line: LogLine) -> bool:
    """Return whether the line's author calls it a note or a warning, continues, or tries again."""
    if _MILD.search(line.text[:_HEAD]) or _TRIES_AGAIN.search(line.text):
        return True
    return _RAISED.search(line.text) is None and _GOES_ON.search(line.text) is not None


def _match(signature: Signature, view: RunView) -> tuple[LogLine, LogLine | None] | None:
    """Find the line with the signature's words, and the one with its context.

    A line that is an error by its own words goes before the code that raised it, and this before
    one that is only a warning. What Python ignored counts only in a log without another traceback.
    """
    if not view.log.may_have(*signature.texts):
        return None
    if signature.unless and view.log.has(*signature.unless):
        return None
    if not holds(view, signature.when):
        return None
    if signature.ends_run and not _ends_there(signature, view):
        return None
    anywhere = (
        view.log.first(*signature.context) if signature.context and not signature.within else None
    )
    mild: tuple[LogLine, LogLine | None] | None = None
    code: tuple[LogLine, LogLine | None] | None = None
    for pattern in signature.texts:
        for line in islice(view.log.find(pattern), MAX_TRIED):
            if not signature.notes and (_is_quoted(line, view) or is_denied(line, pattern)):
                continue
            if is_ignored(line, view.log):
                continue
            if signature.ends_run and continues_warning(line, view.log):
                continue
            beside = anywhere
            if signature.context and beside is None:
                beside = view.log.near(line, *signature.context, lines=signature.within)
                if beside is None:
                    continue
            if is_said_mildly(line):
                mild = mild or (line, beside)
            elif _RAISES.match(line.text):
                code = code or (line, beside)
            else:
                return line, beside
    return code or mild


def _is_quoted(line: LogLine, view: RunView) -> bool:
    """Return whether a line holds words of settings, code or advice: nothing of it happened."""
    return (
        lists_settings(line)
        or is_supposed(line)
        or is_template(line)
        or is_caught(line, view.log)
        or is_code_beside(line, view.log)
    )


def _in_one_line(fix: Fix) -> str:
    """Return our key with its value, why, and the names that other frameworks have for the key."""
    # Markdown would take a token such as <pad> for a tag.
    plain = f"`{fix.value}`" if "<" in fix.value else fix.value
    value = f" ({plain})" if fix.setting and plain else plain
    head = f"`{fix.setting}`{value}" if fix.setting else value
    others = ", ".join(f"{name}: `{theirs}`" for name, theirs in fix.theirs.items())
    return (f"{head}: {fix.why}" if head else fix.why) + (f" ({others})" if others else "")


def _page(signature: Signature) -> str:
    """Write the rule's page in Markdown."""
    texts = "\n".join(f"- `{text}`" for text in signature.texts)
    fixes = "\n".join(f"- {_in_one_line(fix)}" for fix in signature.fixes)
    causes = "\n".join(f"- {cause.name}: {cause.why}" for cause in signature.causes)
    near = ", ".join(f"`{text}`" for text in signature.context)
    context = f"\n\nTogether with one of: {near}." if near else ""
    return (
        f"{signature.what}\n\n## What it sees\nOne of these texts (`*` stands for anything):\n"
        f"{texts}{context}\n\n## Why it matters\n{signature.why}\n\n"
        f"## Likely causes\n{causes or f'- {signature.name}'}\n\n## What to do\n{fixes}\n\n"
        "## Known false alarms\nA log that quotes the text without having met it.\n"
    )
