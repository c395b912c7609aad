"""Render a diagnosis for people: the verdict first, then each illness with evidence and remedies.

The output is plain text with a few ANSI colours. No terminal library is loaded, so that the command
starts fast. Control characters in quoted log text are made visible, because data must not control
the terminal.
"""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from homeostat.health.diagnose import EXPECTED, TURNED_OFF, Diagnosis
from homeostat.health.failures.end_lines import End
from homeostat.health.finding import Cause, Finding, Grade, Level, NotEvaluated, quoted_lines
from homeostat.health.formats.as_json import Verdict, read_as, unknown_error, verdict
from homeostat.health.formats.told_apart import decider_line, shares_line
from homeostat.health.frameworks import UNKNOWN
from homeostat.health.frameworks.telling import in_their_words, told_all
from homeostat.health.readers.values.given_names import MOST_READ
from homeostat.health.reading import Reading
from homeostat.health.view import Kind, RunView
from homeostat.health.vital_signs.purpose import Trend
from homeostat.health.vital_signs.vitals import Vitals, vital_signs
from homeostat.health.words import shortened

_STYLES = {
    "error": "1;31",
    "warn": "1;33",
    "info": "1;36",
    "good": "1;32",
    "bold": "1",
    "dim": "2",
}
_MAX_WIDTH = 110
# Maximum number of unknown metrics that are listed by name.
_MAX_NAMES = 12
_KINDS = {
    Kind.SFT: "fine-tuning (SFT)",
    Kind.RL: "reinforcement learning",
    Kind.PREFERENCE: "preference training",
    Kind.REWARD_MODEL: "training of a reward model",
    Kind.UNKNOWN: "",
}
_GRADES = {
    Grade.SAFE.value: " [safe]",
    Grade.UNSAFE.value: " [changes how the run learns]",
    Grade.ADVICE.value: "",
}
_SAFE = "[safe]: what is learned stays the same"
# Start of the reason why a rule was not evaluated -> a short form of the reason.
_REASONS = {
    "the metric ": "metric not logged",
    "the setting ": "setting not known (--config)",
    "nothing probed ": "only runs of homeostat measure it",
    "there is no ": "no log text, events or completions to read",
    TURNED_OFF: "turned off by the run's health.levels",
    EXPECTED: "expected by the run's health.allow",
}


class Page:
    """Lines of at most `width` characters, with styles if the terminal has colours."""

    def __init__(self, *, width: int, color: bool) -> None:
        self.width = max(40, min(width, _MAX_WIDTH))
        self.color = color
        self.lines: list[str] = []

    def style(self, text: str, style: str) -> str:
        return f"\033[{_STYLES[style]}m{text}\033[0m" if self.color and text else text

    def add(self, text: str, *, indent: int = 0, first: str = "", style: str = "") -> None:
        """Add a paragraph. `first` precedes its first line; the other lines are indented as far."""
        head = " " * indent + first
        wrapped = textwrap.wrap(
            printable(text),
            self.width,
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_on_hyphens=False,
        )
        self.lines += [self.style(line, style) if style else line for line in wrapped or [head]]

    def gap(self) -> None:
        self.lines.append("")

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n") + "\n"


def printable(text: str) -> str:
    """Return a text in which no character controls the terminal."""
    return "".join(
        char if char.isprintable() else " " if char in "\t\n\r" else repr(char)[1:-1]
        for char in text
    )


def as_text(
    diagnosis: Diagnosis,
    view: RunView,
    *,
    findings: Sequence[Finding] | None = None,
    width: int = 80,
    color: bool = False,
    verbose: bool = False,
) -> str:
    """Return the page as text. `findings` are those to show; default: all."""
    shown = diagnosis.findings if findings is None else findings
    page = Page(width=width, color=color)
    page.add(_subject(view), style="dim")
    joined = view.facts.get("joined", ())
    if len(joined) > 1:
        more = f" and {len(joined) - _MAX_NAMES} more" if len(joined) > _MAX_NAMES else ""
        names = ", ".join(joined[:_MAX_NAMES])
        page.add(f"{len(joined)} files, taken as one run: {names}{more}.", style="dim")
    _verdict(page, diagnosis, view)
    _vital_signs(page, shown, view)
    for place, finding in enumerate(shown, start=1):
        page.gap()
        _finding(page, finding, view, place=place)
    _differential(page, diagnosis, view)
    hidden = len(diagnosis.findings) - len(shown)
    if hidden:
        page.gap()
        page.add(f"{_count(hidden, 'finding')} of a lower level not shown (--level info).")
    page.gap()
    _not_evaluated(page, diagnosis, verbose=verbose)
    return page.text()


def _subject(view: RunView) -> str:
    """Describe what was read: the framework, the kind of run, its steps, and how much of it."""
    known = view.framework is not UNKNOWN
    parts = [view.framework.title if known else "framework not recognised"]
    parts += filter(None, [_KINDS[view.kind]])
    if view.last_step is not None:
        of = f" of {view.total_steps:,}" if view.total_steps else ""
        parts.append(f"step {view.last_step:,}{of}")
    amounts = (("metric", len(view.metrics)), ("log line", len(view.log.lines)))
    parts += [_count(number, what) for what, number in amounts if number]
    return "Read: " + ", ".join(parts) + "."


def _verdict(page: Page, diagnosis: Diagnosis, view: RunView) -> None:
    signs, said = vital_signs(view), verdict(diagnosis, view)
    levels = Counter(finding.level for finding in diagnosis.findings)
    unknown = unknown_error(diagnosis, view)
    if unknown is not None:
        page.add(_read_as(diagnosis), style="warn")
        page.add(shortened(unknown.text.strip(), 600), indent=2, first=f"line {unknown.number}: ")
        read = "No rule recognises it, so the following was read from its frames and message. "
        page.add(read + _asked(diagnosis))
    elif said in (Verdict.ILL, Verdict.LOOK):
        counts = [_count(levels[one], one.value) for one in reversed(Level) if levels[one]]
        worst = Level.ERROR if said is Verdict.ILL else Level.WARN
        words = said.value.upper()
        page.add(f"{words}: {', '.join(counts)}. Most likely illness first.", style=worst.value)
    elif said is Verdict.NO_ILLNESS:
        open_end = signs.ending.how is End.UNKNOWN
        page.add(f"NO ILLNESS FOUND{', as far as it is logged' if open_end else ''}.", style="good")
        page.add(_asked(diagnosis))
    elif said is Verdict.UNFINISHED:
        page.add("UNFINISHED: no illness so far, but the run did not reach its end.", style="warn")
        page.add(_asked(diagnosis))
    elif not signs.understood:
        page.add("NOT KNOWN: there is no metric here that a rule could judge.", style="warn")
        known = "Only the notes below match" if diagnosis.findings else "No rule matches"
        page.add(f"I do not know this. {known}: {_asked(diagnosis)}")
    elif not signs.are_good:
        page.add("NOT KNOWN: the vital signs are bad, and no rule knows why.", style="warn")
        page.add(_asked(diagnosis))
    else:
        page.add(
            "NOT KNOWN: too little of this log is understood to call it healthy.", style="warn"
        )
        page.add("No rule found an illness, but too little could be judged. " + _asked(diagnosis))


def _read_as(diagnosis: Diagnosis) -> str:
    """Return the verdict on an error that no rule recognises: what it was read as, if anything."""
    likely = read_as(diagnosis)
    head = f"MOST LIKELY {likely}" if likely else "NOT KNOWN"
    return f"{head}: the log ends in an error that no rule knows."


def _vital_signs(page: Page, shown: Sequence[Finding], view: RunView) -> None:
    """Describe how the run ended, how it developed, and how much of it could be judged."""
    signs = vital_signs(view)
    # If a run died before its first record, report the error and not the metrics that are missing.
    is_dead = not view.metrics and any(one.level is not Level.INFO for one in shown)
    parts = [_ending(signs, shown), signs.purpose.words]
    bad = tuple(dict.fromkeys((*signs.not_finite, *signs.ends_not_finite)))
    for what, names in (
        ("not finite", bad),
        ("0 throughout", signs.zero),
        ("frozen", signs.frozen),
        ("no longer logged", signs.gone),
        ("not logged", () if is_dead else signs.missing),
    ):
        parts.append(f"{what}: {', '.join(names)}" if names else "")
    if signs.purpose.trend is Trend.WORSE:
        parts.append("the wrong direction")
    if any(parts):
        page.add("; ".join(filter(None, parts)) + ".", first="Vital signs: ", style="dim")
    if not is_dead:
        page.add(_judged(signs), style="dim")
        _not_understood(page, signs, view)


def _ending(signs: Vitals, shown: Sequence[Finding]) -> str:
    """Return how the run ended; leave out what a finding below reports in the same words."""
    ending = signs.ending
    if any(one.message.lower().startswith(ending.words) for one in shown):
        return ""
    lines = {number for one in shown for number in quoted_lines(one)}
    is_quoted = ending.line is not None and ending.line.number in lines
    return ending.brief if is_quoted else shortened(ending.words, 300)


def _not_understood(page: Page, signs: Vitals, view: RunView) -> None:
    """List the metrics that no rule knows, and explain how the user can map them."""
    reading = view.facts.get("reading") or Reading()
    if signs.not_understood:
        total = len(signs.understood) + len(signs.not_understood)
        known = f"Understood {len(signs.understood)} of {total} metrics."
        page.add(f"{known} Not understood: {_named(signs.not_understood)}.", style="dim")
    elif reading.unnamed_metrics and not view.metrics:
        rows = f"{_count(reading.num_unnamed, 'row')} of numbers with names"
        page.add(f"Read {rows} that no rule knows: {_named(reading.unnamed_metrics)}.")
    elif reading.num_unread_rows and not view.metrics:
        lines = _count(reading.num_unread_rows, "line")
        page.add(f"{lines} may be metrics in a format that is not known, for example:")
        page.add(reading.unread_rows[0], indent=2)
    unknown = reading.unnamed_metrics or signs.not_understood
    wanted = [name for name in MOST_READ if name not in view.metrics]
    if unknown and wanted and signs.is_little_known:
        page.add(
            f"If you know what one of them measures, say so: --map {shlex.quote(unknown[0])}="
            f"{wanted[0]}. Most rules read {', '.join(wanted)}."
        )


def _named(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _judged(signs: Vitals) -> str:
    """Return how much could be judged, and the settings that would show more."""
    flags = [
        f"{setting}{f' = {value}' if value else ''} ({shows})"
        for setting, value, shows in signs.visible.flags
    ]
    more = f"; to see more, set {', '.join(flags)}" if flags else ""
    return f"{signs.visible.words}{more}."


def _asked(diagnosis: Diagnosis) -> str:
    has_texts = any(code.startswith("ERR") for code in diagnosis.clear)
    known = ", known error texts among them," if has_texts else ""
    return f"{_count(diagnosis.num_clear, 'rule')}{known} found nothing."


def _finding(page: Page, finding: Finding, view: RunView, *, place: int) -> None:
    about = f" ({finding.subject})" if finding.subject else ""
    title = f"{finding.level.value} {finding.code} {finding.name}{about}"
    page.add(title, first=f"{place}. ", style=finding.level.value)
    since = f", since step {finding.first_step:,}" if finding.first_step is not None else ""
    page.add(f"{finding.family}, {finding.certainty}{since}", indent=3, style="dim")
    page.add(in_their_words(finding.message, view.framework), indent=3)
    if finding.evidence:
        _list(page, "Evidence", finding.evidence)
    if finding.causes:
        known = [cause for cause in finding.causes if cause.guess is None]
        guesses = [cause for cause in finding.causes if cause.guess is not None]
        _list(page, "Likely causes, in order", _causes(known, view), numbered=True)
        _list(page, "Guesses, from similar errors of others", _causes(guesses, view))
    if finding.fixes:
        fixes = list(_fixes(finding, view))
        _list(page, _fixes_title(view, fixes), fixes)
    page.add(f"homeostat explain {finding.code}", indent=3, first="More: ", style="dim")


def _differential(page: Page, diagnosis: Diagnosis, view: RunView) -> None:
    """Add how likely each illness is, given all signs, and what would distinguish them."""
    found = diagnosis.differential
    if not found.illnesses and not found.deciders:
        return
    page.gap()
    if found.illnesses:
        page.add(f"{shares_line(found)}.", first="By all signs together: ")
    for decider in found.deciders:
        page.add(decider_line(decider, view.framework))


def _causes(causes: Sequence[Cause], view: RunView) -> list[str]:
    return [f"{cause.name}: {in_their_words(cause.why, view.framework)}" for cause in causes]


def _fixes_title(view: RunView, fixes: Sequence[str]) -> str:
    known = view.framework is not UNKNOWN
    title = f"What to do, with {view.framework.title}" if known else "What to do"
    safe = _GRADES[Grade.SAFE.value]
    return f"{title} ({_SAFE})" if any(one.endswith(safe) for one in fixes) else title


def _list(page: Page, title: str, items: Sequence[str], *, numbered: bool = False) -> None:
    """Add a title and its items; nothing if there are no items."""
    if items:
        page.add(title, indent=3, style="bold")
    for place, text in enumerate(items, start=1):
        page.add(text, indent=5, first=f"{place}. " if numbered else "- ")


def _fixes(finding: Finding, view: RunView) -> Iterator[str]:
    for here in told_all(finding.fixes, view.framework):
        value = f" = {here.value}" if here.value else ""
        advice = f" ({here.advice})" if here.advice else ""
        head = f"{here.setting}{value}{advice}" if here.setting else here.advice
        text = f"{head}: {here.why}" if head else here.why
        yield text + _GRADES[here.grade]


def _not_evaluated(page: Page, diagnosis: Diagnosis, *, verbose: bool) -> None:
    missing = diagnosis.not_evaluated
    if not missing:
        return
    counts = Counter(_reason(one) for one in missing).most_common()
    parts = "; ".join(f"{count:,}: {reason}" for reason, count in counts)
    tail = "" if verbose else " --verbose lists them."
    number = _count(len(missing), "rule")
    page.add(f"{number} could not be evaluated ({parts}).{tail}", style="dim")
    for one in missing if verbose else ():
        page.add(f"{one.code} {one.name}: {one.why}", indent=2, style="dim")


def _reason(one: NotEvaluated) -> str:
    found = (words for start, words in _REASONS.items() if one.why.startswith(start))
    return next(found, "other reasons")


def _count(number: int, word: str) -> str:
    plural = {"error": "errors", "warn": "warnings", "info": "notes"}
    one = {"error": "error", "warn": "warning", "info": "note"}.get(word, word)
    return f"{number:,} {one if number == 1 else plural.get(word, word + 's')}"
