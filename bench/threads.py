"""The doctor against real threads whose cause is known: counts by half, kind and framework.

    python bench/threads.py [--half open|sealed|both] [--wrong] [--unseen] [--name NAME]

The cases are in bench/threads/ (CONTRIBUTING.md tells what a case is and how one is added). Only
the log of a case is read, in this process, as `homeostat doctor FILE --format json` would. What
the doctor says are its findings of level warn and error, in its order. A finding names a case's
cause if its own name, or one of its first two causes, is among the names of the case or means the
same to a user (`SAME`); of a finding that only says that something failed, the first cause counts.
Guesses are made without the threads of the case's own repository. Beside an illness that a rule
recognised, a guess (`guess` in the JSON) counts as right among three, never as first.

    first     the first finding names the cause
    three     the second or third one does, or the third cause of the first one, or a guess beside
              it, or all that was said, as a finding of any level, is that something failed
              (`VAGUE`), and one of the first three causes it considers is right
    vague     none of that is right, and nothing misleads: something failed
    silent    no finding; at most the last lines are quoted as not recognised
    wrong     the first finding says something specific, and none of the first three is right

Shares come with 95 % Wilson intervals. "confidence" is that of the first finding, if it names
something specific (health/finding.py states the shares of these that are right). "tellable" counts
the cases whose cause an expert could name from the log alone, by the judgement of whoever added
them. "expert" counts what a second labeller could name of the cause from the log alone: the ceiling
for a reader of logs.
For the sealed half only counts are printed. `--wrong` lists the cases of the open half that are
not right, with what was said. `--unseen` estimates on the open half what a fresh one would give:
each case is judged without the texts of signatures that it alone contains, and guessed without
them, too.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common

from homeostat.cli.threads import Case, Half, Told, kind_of, load
from homeostat.health.diagnose import diagnose
from homeostat.health.formats.as_json import as_json
from homeostat.health.guesses.known_cases import SAME, leaving_out
from homeostat.health.guesses.second_opinion import LEAVES_OPEN
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES, SIGNATURES
from homeostat.health.rule import Rule
from homeostat.health.signatures.signature import rule_of

ROOT = Path(__file__).resolve().parents[1]
VERDICTS = ("first", "three", "vague", "silent", "wrong")
TOLD = 3
# A text of a signature, with the signature's code.
Text = tuple[str, str]
# Names that say that something failed and leave open what.
VAGUE = LEAVES_OPEN


@dataclass(frozen=True, slots=True)
class Judged:
    """A case with its verdict, the names that the doctor said first, and how sure it was of one."""

    case: Case
    verdict: str
    said: tuple[str, ...]
    confidence: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--half", choices=("open", "sealed", "both"), default="open")
    parser.add_argument("--wrong", action="store_true", help="list what is not right (open half)")
    parser.add_argument("--name", help="write bench/results/NAME.json")
    parser.add_argument(
        "--unseen", action="store_true", help="without the texts that only this case has"
    )
    chosen = parser.parse_args()
    halves = list(Half) if chosen.half == "both" else [Half(chosen.half)]
    if chosen.unseen and halves != [Half.OPEN]:
        parser.error("--unseen is for the open half: no rule was written from the sealed one")
    found: dict[Half, list[Judged]] = {}
    for half in halves:
        cases = load(ROOT, half)
        texts = own_texts(cases) if chosen.unseen else [frozenset[Text]()] * len(cases)
        found[half] = [judge(case, own) for case, own in zip(cases, texts, strict=True)]
    for half, judged in found.items():
        show(half, judged)
    for one in found.get(Half.OPEN, ()):
        if chosen.wrong and one.verdict not in ("first", "three"):
            wanted = "|".join(one.case.names)
            print(f"{one.verdict:7} {one.case.url}\n        {wanted}, said {list(one.said)}")
    if chosen.name:
        halves_found = {half.value: result_of(judged) for half, judged in found.items()}
        common.write_result(chosen.name, {**common.machine(("numpy",)), **halves_found})


def own_texts(cases: Sequence[Case]) -> list[frozenset[Text]]:
    """Return for each case the texts of signatures that its log alone contains."""
    found: list[set[Text]] = []
    for case in cases:
        log = read_text(case.log, config=None).log
        texts = ((one.code, text) for one in SIGNATURES for text in one.texts)
        found.append({(code, text) for code, text in texts if log.has(text)})
    counts = Counter(hit for hits in found for hit in hits)
    return [frozenset(hit for hit in hits if counts[hit] == 1) for hits in found]


def rules_without(own: frozenset[Text]) -> Sequence[Rule]:
    """Return the rules without some texts of signatures."""
    changed: dict[str, Rule | None] = {}
    for one in SIGNATURES:
        kept = tuple(text for text in one.texts if (one.code, text) not in own)
        if kept != one.texts:
            changed[one.code] = rule_of(replace(one, texts=kept)) if kept else None
    rules = (changed.get(rule.code, rule) for rule in RULES)
    return [rule for rule in rules if rule is not None]


def answer_to(case: Case, own: frozenset[Text] = frozenset()) -> dict[str, Any]:
    """Return what the doctor says of a case's log, without the texts `own`."""
    view = read_text(case.log, config=None)
    with leaving_out(case.url, {text for _, text in own}):
        return as_json(diagnose(view, rules_without(own) if own else RULES), view)


def judge(case: Case, own: frozenset[Text] = frozenset()) -> Judged:
    """Let the doctor read a case's log and compare what it says with the confirmed cause."""
    answer = answer_to(case, own)
    findings = [one for one in answer["findings"] if one["level"] != "info"]
    right = _with_equals(case.names)
    hits = [bool(right & _named(one)) for one in findings]
    said = tuple(one["name"] for one in findings[:TOLD])
    guesses = {c["name"] for x in answer["findings"] if x["name"] in VAGUE for c in x["causes"][:3]}
    hits = [*hits[:TOLD], bool(findings and right & _also_named(findings[0]))]
    is_specific = bool(said) and said[0] not in VAGUE
    return Judged(
        case,
        _verdict(hits, said, answer, is_guessed=bool(right & guesses)),
        said,
        findings[0]["confidence"] if is_specific else "not specific",
    )


def _named(finding: dict[str, Any]) -> set[str]:
    """Return the names that count as a finding's answer: its own, and its first causes'.

    The second cause of a finding that only says that something failed is a guess, and so is what
    is marked as one beside an illness that was recognised.
    """
    if finding["name"] in VAGUE:
        causes = finding["causes"][:1]
    else:
        causes = [cause for cause in finding["causes"][:2] if "guess" not in cause]
    return {finding["name"], *(cause["name"] for cause in causes)}


def _also_named(finding: dict[str, Any]) -> set[str]:
    """Return the third cause of a finding that names an illness, and guesses beside it."""
    causes = finding["causes"]
    third = set() if finding["name"] in VAGUE else {cause["name"] for cause in causes[2:TOLD]}
    return third | {cause["name"] for cause in causes if "guess" in cause}


def _verdict(
    hits: list[bool], said: tuple[str, ...], answer: dict[str, Any], *, is_guessed: bool
) -> str:
    if hits and hits[0]:
        return "first"
    if any(hits):
        return "three"
    if said and not set(said) <= VAGUE:
        return "wrong"
    if is_guessed:
        return "three"
    is_read = any(one["name"] in VAGUE for one in answer["findings"])
    return "vague" if is_read else "silent"


def _with_equals(names: Iterable[str]) -> set[str]:
    own = set(names)
    return own.union(*(group for group in SAME if not own.isdisjoint(group)))


def wilson(hits: int, cases: int, *, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share."""
    if cases == 0:
        return 0.0, 1.0
    share, spread = hits / cases, z * z / cases
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / cases + spread / (4 * cases)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def show(half: Half, judged: list[Judged]) -> None:
    """Print the counts of a half: all of it, the tellable ones, by kind, by framework."""
    print(f"\n{half.value}: {len(judged)} cases")
    groups: dict[str, Callable[[Judged], str]] = {
        "": lambda one: "all",
        "tellable": lambda one: "tellable" if one.case.tellable else "not tellable",
        "confidence": lambda one: one.confidence,
        "kind": lambda one: kind_of(one.case),
        "framework": lambda one: one.case.framework,
    }
    for title, group in groups.items():
        print(f"{title:18} {'cases':>5} " + " ".join(f"{one:>6}" for one in VERDICTS) + "  first")
        for name, counts in _counted(judged, group).items():
            total = counts.total()
            low, high = wilson(counts["first"], total)
            cells = " ".join(f"{counts[one]:>6}" for one in VERDICTS)
            share = counts["first"] / total
            print(f"{name:18} {total:>5} {cells}  {share:.0%} ({low:.0%} to {high:.0%})")
    for kind, found in expert(judged).items():
        print(f"expert: {kind:10} {found['cases']:>5}  {found['share']:.0%}", end=" ")
        print(f"({found['low']:.0%} to {found['high']:.0%})")


def expert(judged: Iterable[Judged]) -> dict[str, dict[str, float]]:
    """Return what the expert could name of the cases asked about: counts and shares by kind."""
    counts = Counter(one.case.told for one in judged if one.case.told)
    asked = counts.total()
    return {
        kind.value: {"cases": counts[kind], **_share(counts[kind], asked)}
        for kind in (Told if asked else ())
    }


def _counted(judged: Iterable[Judged], group: Callable[[Judged], str]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for one in judged:
        counts.setdefault(group(one), Counter())[one.verdict] += 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1].total(), item[0])))


def result_of(judged: list[Judged]) -> dict[str, Any]:
    """Return a half's counts for bench/results; no text of a case is in it."""
    total = len(judged)
    counts = Counter(one.verdict for one in judged)
    among = counts["first"] + counts["three"]
    return {
        "cases": total,
        "counts": {verdict: counts[verdict] for verdict in VERDICTS},
        "first": _share(counts["first"], total),
        "among_three": _share(among, total),
        "wrong": _share(counts["wrong"], total),
        "tellable": sum(one.case.tellable for one in judged),
        "expert": expert(judged),
        "by_confidence": {k: dict(v) for k, v in _counted(judged, lambda x: x.confidence).items()},
        "by_kind": {k: dict(v) for k, v in _counted(judged, lambda x: kind_of(x.case)).items()},
        "by_framework": {
            k: dict(v) for k, v in _counted(judged, lambda x: x.case.framework).items()
        },
    }


def _share(hits: int, total: int) -> dict[str, float]:
    low, high = wilson(hits, total)
    return {"share": hits / max(1, total), "low": low, "high": high}


if __name__ == "__main__":
    main()
