"""Turn a view into a diagnosis: evaluate every rule, and sort findings by likelihood.

There are three outcomes: a rule fired, is clear, or could not be evaluated, with the reason. A
finding that another one explains becomes evidence of that one, so that the illness comes first
and not its symptoms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from homeostat.health.advice import is_followed
from homeostat.health.differential.answer import NOTHING, Differential, differential
from homeostat.health.differential.illnesses import fitted_table
from homeostat.health.end_of_run import READ_IT, EndOfRun, end_of_run
from homeostat.health.failures.text import end_of_message
from homeostat.health.finding import (
    Finding,
    Level,
    NotEvaluated,
    Sighting,
    Unknown,
    quoted_lines,
)
from homeostat.health.frameworks import HOMEOSTAT
from homeostat.health.guesses.near_names import with_near_name
from homeostat.health.guesses.second_opinion import with_guesses
from homeostat.health.rule import Rule
from homeostat.health.signatures.lists import AFTERMATH
from homeostat.health.view import Kind, RunView
from homeostat.health.vital_signs.last_exception import last_exception
from homeostat.health.watchlist import NOTHING_SET, Watchlist, watchlist_in
from homeostat.health.words import shortened

# Why a rule has no finding in a run of ours although its illness may be there.
TURNED_OFF = "health.levels turns it off in this run"
EXPECTED = "health.allow expects its finding in this run"

_JUST_ABOVE = 3
# Maximum number of lines with a signature's words that are compared with another finding's.
_MAX_LINES = 300
_SAYS_NOTHING = "Nothing in this log says why"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that is known about a run's health.

    `clear` are codes of rules without finding, `explained` the keys of findings that are evidence
    of others.
    """

    findings: tuple[Finding, ...]
    not_evaluated: tuple[NotEvaluated, ...]
    clear: tuple[str, ...]
    differential: Differential = NOTHING
    explained: frozenset[tuple[str, str]] = frozenset()

    @property
    def num_clear(self) -> int:
        return len(self.clear)

    @property
    def is_healthy(self) -> bool:
        return all(finding.level is Level.INFO for finding in self.findings)


def diagnose(view: RunView, rules: Sequence[Rule]) -> Diagnosis:
    """Evaluate every rule.

    A run of ours is judged with the levels, options and allowances of its recipe, as while it
    trained.
    """
    is_ours = view.framework is HOMEOSTAT
    watched = watchlist_in(view.settings, rules) if is_ours else NOTHING_SET
    # Logs contain numbers of any size; one that overflows is judged as not finite.
    with np.errstate(all="ignore"):
        return _diagnose(view, rules, watched)


def _diagnose(view: RunView, rules: Sequence[Rule], watched: Watchlist) -> Diagnosis:
    findings: list[Finding] = []
    unknown: list[NotEvaluated] = []
    clear: list[str] = []
    # Hundreds of rules need the same.
    missing: dict[tuple[str, ...], str] = {}
    for rule in rules:
        if rule.kinds and view.kind is not Kind.UNKNOWN and view.kind not in rule.kinds:
            continue
        if watched.is_off(rule.code):
            unknown.append(NotEvaluated(rule.code, rule.name, TURNED_OFF))
            continue
        if rule.needs not in missing:
            missing[rule.needs] = what_is_missing(rule, view)
        given = watched.options.get(rule.code, {})
        found = judge(rule, view, options=given, missing=missing[rule.needs])
        if isinstance(found, NotEvaluated):
            unknown.append(found)
        elif found:
            findings += map(watched.levelled, found)
        else:
            clear.append(rule.code)
    folded_ = folded(findings, rules, view)
    explained = frozenset(one.key for one in findings) - {one.key for one in folded_}
    kept, expected = _without_allowed(folded_, watched, step=view.last_step or 0)
    unknown += expected
    weighed = differential(
        kept, clear=clear, is_calibrated=_is_run_of_ours(view), table=fitted_table()
    )
    reasoned = [with_reason(one, view) for one in kept]
    quoted = quoted_lines(kept[0]) if kept else ()
    said = with_guesses(reasoned, quoted, view.log, seen=findings)
    said = with_near_name(said, quoted, view)
    return Diagnosis(tuple(said), tuple(unknown), tuple(clear), weighed, explained)


def _without_allowed(
    findings: Iterable[Finding], watched: Watchlist, *, step: int
) -> tuple[list[Finding], list[NotEvaluated]]:
    """Return the findings that the run does not allow, and an entry for each that it allows."""
    kept: list[Finding] = []
    expected: list[NotEvaluated] = []
    for finding in findings:
        allowed = watched.allowances(finding, step)
        if allowed:
            why = f"{EXPECTED}: {allowed[0].reason}"
            expected.append(NotEvaluated(finding.code, finding.name, why))
        else:
            kept.append(finding)
    return kept, expected


def _is_run_of_ours(view: RunView) -> bool:
    """Return whether the view is of one of our run folders, where every rule can be judged."""
    return view.framework is HOMEOSTAT and bool(view.events)


def judge(
    rule: Rule,
    view: RunView,
    *,
    options: Mapping[str, Any] | None = None,
    missing: str | None = None,
) -> list[Finding] | NotEvaluated:
    """Return one rule's findings; an empty list if it is clear.

    `missing` is `what_is_missing(rule, view)`, if the caller knows it.
    """
    if missing is None:
        missing = what_is_missing(rule, view)
    if missing:
        return NotEvaluated(rule.code, rule.name, missing)
    return judge_ready(rule, view, options=options)


def judge_ready(
    rule: Rule, view: RunView, *, options: Mapping[str, Any] | None = None
) -> list[Finding] | NotEvaluated:
    """Return the same as `judge` for a rule whose needs are known to be met."""
    found: list[Finding] = []
    for sighting in rule.check(view, rule.options_with(options)):
        if isinstance(sighting, Unknown):
            return found or NotEvaluated(rule.code, rule.name, sighting.why)
        found.append(named(rule, sighting, view))
    return found


def named(rule: Rule, sighting: Sighting, view: RunView) -> Finding:
    """Turn a sighting into a finding of its rule, without advice that the run already follows."""
    fields = {f.name: getattr(sighting, f.name) for f in dataclasses.fields(sighting)}
    fields["level"] = sighting.level or rule.level
    fields["confidence"] = sighting.confidence or rule.confidence
    fields["family"] = sighting.family or rule.family
    fields["fixes"] = tuple(fix for fix in sighting.fixes if not is_followed(fix, view))
    return Finding(code=rule.code, name=rule.name, **fields)


def what_is_missing(rule: Rule, view: RunView) -> str:
    """Return the first input that the rule needs and the view lacks; "" if it has all."""
    for need in rule.needs:
        if need.startswith("setting:"):
            key = need.removeprefix("setting:")
            if not any(view.settings.get(name) is not None for name in key.split("|")):
                return f"the setting {key} is not known"
        elif need.startswith("fact:"):
            if need.removeprefix("fact:") not in view.facts:
                return f"nothing probed {need.removeprefix('fact:')}"
        elif need in ("log", "events", "samples"):
            if not getattr(view, need):
                return f"there is no {need.removesuffix('s')} to read"
        elif view.series(*need.split("|")) is None:
            return f"the metric {need.replace('|', ' or ')} was not logged"
    return ""


def folded(
    findings: Sequence[Finding], rules: Iterable[Rule], view: RunView | None = None
) -> list[Finding]:
    """Return the findings in order; those that another explains become its evidence.

    Without the view, only the lines that the findings quote tell whether they are about the same.
    """
    present = {finding.code for finding in findings}
    of_code = {rule.code: rule for rule in rules if rule.code in present}
    end = end_of_run(view)
    at_end = {finding.code for finding in findings if end.tells_of(finding)}
    fatal = at_end | {finding.code for finding in findings if finding.level is Level.ERROR}
    by: dict[str, str] = {}
    played_down = {f.code for f in findings if _is_played_down(f, of_code)}
    warned = {f.code for f in findings if _is_only_warned(f, of_code)} - at_end
    for code in sorted(present):
        for symptom in of_code[code].explains:
            # Two findings that explain each other both stay, a mere note hides no illness, and what
            # is only warned of hides neither an error nor the exception that ended the run.
            hides = code in played_down and symptom in present - played_down
            hides = hides or (code in warned and symptom in fatal)
            if symptom in present and code not in of_code[symptom].explains and not hides:
                by.setdefault(symptom, code)
    for finding in findings:
        better = _says_more(finding, findings, of_code, view) if finding.code not in by else None
        if better is not None and by.get(better.code) != finding.code:
            by[finding.code] = better.code
        elif finding.code not in by:
            taken = [other.code for other in findings if _is_taken(other, finding, of_code)]
            by.update(dict.fromkeys(taken, finding.code))
    ordered = in_order(findings, end)
    here = [one for one in ordered if one.code not in by]
    by |= {after.code: first.code for first, after in end.followed(here)}
    _fold_equals([one for one in ordered if one.code not in by], by)
    kept = []
    for finding in ordered:
        if finding.code in by:
            continue
        symptoms = [
            other
            for other in findings
            if _root(other.code, by) == finding.code and not _says_less(other, of_code)
        ]
        lines = tuple(f"{other.code} {other.name}: {other.message}" for other in symptoms)
        # A finding that explains a dead run is as severe as that. A note stays a note: it is
        # benign.
        worst = max((finding, *symptoms), key=lambda one: one.level.rank).level
        is_note = finding.level is Level.INFO and finding.code not in READ_IT
        level = finding.level if is_note else worst
        kept.append(dataclasses.replace(finding, level=level, evidence=finding.evidence + lines))
    return in_order(kept, end)


def _fold_equals(findings: Sequence[Finding], by: dict[str, str]) -> None:
    """Let the likeliest of several rules that name the same illness stand for all of them."""
    first: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        one = first.setdefault((finding.name, finding.subject), finding)
        if one.code != finding.code and Level.INFO not in (one.level, finding.level):
            by.setdefault(finding.code, one.code)


def _is_played_down(finding: Finding, rules: Mapping[str, Rule]) -> bool:
    """Return whether a finding is only info although its rule usually warns.

    Rules that only ever inform name what is benign.
    """
    return finding.level is Level.INFO and rules[finding.code].level is not Level.INFO


def _is_only_warned(finding: Finding, rules: Mapping[str, Rule]) -> bool:
    """Return whether words that end a process were said as a warning: it did not end there."""
    rule = rules[finding.code]
    return rule.ends_run and finding.level.rank < rule.level.rank


def _says_less(finding: Finding, rules: Mapping[str, Rule]) -> bool:
    """Return whether a note or a guess is made redundant by another finding: it is no evidence."""
    rule = rules[finding.code]
    return bool(rule.yields_to) and Level.INFO in (finding.level, rule.level)


def _says_more(
    finding: Finding,
    findings: Sequence[Finding],
    rules: Mapping[str, Rule],
    view: RunView | None,
) -> Finding | None:
    """Return the most likely of the findings to which this finding's rule yields."""
    codes = rules[finding.code].yields_to
    if not codes:
        return None
    mine = quoted_lines(finding)
    is_read = finding.code in READ_IT and finding.level is not Level.INFO
    last = _last_line(mine, view)
    for other in in_order(findings):
        if not other.code.startswith(codes) or other == finding:
            continue
        there = quoted_lines(other)
        if is_read and other.code in AFTERMATH and mine and max(mine) not in there:
            # That a process failed says less than the words of its exception, if they are read.
            continue
        if other.level is Level.INFO:
            # A rule that only ever informs knows these words: they say that nothing is wrong.
            if rules[other.code].level is Level.INFO and mine and set(mine) <= set(there):
                return other
            continue
        # A message just above a traceback is about the same failure, unless it is only a warning
        # and the exception's own words say something else.
        is_apart = finding.level is Level.WARN and _is_only_warned(other, rules)
        above = 0 if is_read and is_apart else _JUST_ABOVE
        if not mine or any(min(mine) - above <= n <= last for n in there):
            return other
        # A signature quotes one of the lines that it knows.
        if any(min(mine) <= n <= last for n in _known_lines(rules[other.code], view)):
            return other
    return None


def _last_line(mine: Sequence[int], view: RunView | None) -> int:
    """Return the last of a finding's lines, to the end of the message of the exception it quotes.

    The words that a signature knows are often below the line with the exception's class.
    """
    last = max(mine, default=0)
    reading = last_exception(view) if view is not None and mine else None
    if view is None or reading is None or reading.failure.end.number not in mine:
        return last
    return max(last, end_of_message(reading.failure, view.log))


def _known_lines(rule: Rule, view: RunView | None) -> Iterator[int]:
    """Yield the numbers of the lines with a signature's words."""
    if view is not None:
        for text in rule.texts:
            yield from (line.number for line in islice(view.log.find(text), _MAX_LINES))


def _is_taken(other: Finding, finding: Finding, rules: Mapping[str, Rule]) -> bool:
    codes, mine = rules[finding.code].takes, quoted_lines(finding)
    if not codes or not mine or not other.code.startswith(codes):
        return False
    return any(min(mine) <= number <= max(mine) for number in quoted_lines(other))


def with_reason(finding: Finding, view: RunView) -> Finding:
    """Name the log's exception in a finding that says "nothing in this log says why"."""
    told = next((one for one in view.tracebacks if not one.is_report), None)
    if told is None or not any(_SAYS_NOTHING in cause.why for cause in finding.causes):
        return finding
    why = f"the exception in line {told.end.number} says why: {shortened(told.error, 200)}"
    causes = tuple(
        dataclasses.replace(cause, why=why) if _SAYS_NOTHING in cause.why else cause
        for cause in finding.causes
    )
    return dataclasses.replace(finding, causes=causes)


def _root(code: str, by: Mapping[str, str]) -> str | None:
    """Return the finding into which a symptom is finally folded; None if it stands alone."""
    seen, found = {code}, by.get(code)
    while found is not None and found in by and found not in seen:
        seen.add(found)
        found = by[found]
    return found


def in_order(findings: Sequence[Finding], end: EndOfRun | None = None) -> list[Finding]:
    """Sort findings: the most severe, most certain and earliest first.

    `end` tells which findings are about the exception that ended the run. Those go before other
    warnings.
    """
    here = end or EndOfRun()

    def key(finding: Finding) -> tuple[int, bool, int, float]:
        step = finding.first_step if finding.first_step is not None else float("inf")
        is_else = finding.level is Level.WARN and not here.tells_of(finding)
        return -finding.level.rank, is_else, -finding.confidence.rank, step

    return sorted(findings, key=key)
