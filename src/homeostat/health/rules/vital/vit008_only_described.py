"""The text describes a symptom in words, and neither an error nor a metric shows it.

## What it sees
A short text in which a sentence names a symptom: generation that does not stop, a hang, a loss that
is NaN, weights that do not change. Some 170 symptoms are known, in English and many also in Chinese
(health/guesses/symptoms). If the text also has metrics, only whole sentences count. Of several
symptoms, the one whose words fewer others have comes first. If a rule recognises an error in the
text, that finding is shown instead.

## Why it matters
Nothing is measured here, so this is a guess by what such symptoms usually come from. A log of the
run says more.

## Likely causes
- any illness that shows in this way, the most common first. Words elsewhere in the text, such as a
  setting, may put another one first.

## What to do
Give the doctor the run's log or its metrics: they decide between the causes.

## Known false alarms
A text that speaks of a symptom which it does not have, such as the notes of a release.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.failures.advice import advice_on
from homeostat.health.failures.end_lines import End
from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.guesses.described import MAX_CAUSES, described, sentences
from homeostat.health.rule import Rule
from homeostat.health.view import RunView
from homeostat.health.vital_signs.ending import ending_of
from homeostat.health.vocabulary import FAMILY_OF, WORDS
from homeostat.health.words import shortened

# Lines of a text that somebody may have written to ask for help.
_MAX_LINES = 60


def check(view: RunView, _: object) -> Iterator[Sighting]:
    lines = view.log.lines
    if len(lines) > _MAX_LINES or ending_of(view).how not in (End.UNKNOWN, End.OPEN):
        return
    # Beside metrics stand the other lines of a run's log, which are no sentences.
    found = described(sentences(lines) if view.metrics else lines)
    if not found:
        return
    first = found[0]
    causes: dict[str, Cause] = {}
    for one in found:
        for name in one.causes:
            causes.setdefault(name, Cause(name, WORDS[FAMILY_OF[name]][name]))
    kept = tuple(causes.values())[:MAX_CAUSES]
    shown = "no error" if view.metrics else "no error or metric"
    yield Sighting(
        message=f"The text says that {first.symptom.says}, and shows {shown}. These are the usual "
        "reasons, none of them measured; the run's log can tell which it is.",
        evidence=(shortened(first.line.text.strip(), 300),),
        causes=kept,
        fixes=(*_advice(kept), Fix("", "", "run the doctor on the run's log and metrics")),
    )


def _advice(causes: tuple[Cause, ...]) -> Iterator[Fix]:
    for cause in causes[:2]:
        yield from advice_on(cause.name)


RULE = Rule(
    code="VIT008",
    name="symptom-described",
    family=Family.CONFIG,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("log",),
    # Whatever a rule sees in the text says more.
    yields_to=(
        "AGT",
        "CFG",
        "CKP",
        "DAT",
        "DST",
        "ENV",
        "ERR",
        "GEN",
        "LRN",
        "MEM",
        "MOE",
        "NUM",
        "OFF",
        "POL",
        "PRF",
        "QNT",
        "RWD",
        "SPC",
        "SYN",
        "VIT",
    ),
)
