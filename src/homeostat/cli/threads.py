"""The collection of real failure threads in a source checkout: its format, checks and halves.

    bench/threads/open.jsonl     cases that rules may be written from
    bench/threads/sealed.jsonl   cases that only bench/threads.py reads, which prints counts alone

A case is a public thread whose cause a maintainer or the reporter confirmed, one JSON object a
line. Its half is computed from the repository and the month of the thread, so that nobody chooses
it, and threads about the same regression mostly fall into the same half.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Any

from homeostat.errors import HomeostatError
from homeostat.health.guesses.known_cases import FILE, telling_lines
from homeostat.health.vocabulary import FAMILY_OF
from homeostat.json_text import parse_json
from homeostat.observe.redact import has_known_token

FOLDER = Path("bench") / "threads"
KNOWN = Path("src") / "homeostat" / "health" / "guesses" / FILE.name
MAX_LINES = 60
MAX_CHARACTERS = 6000
MAX_SENTENCE = 400
_ADDRESS = re.compile(r"https://[\w.-]+/[\w.-]+/[\w./#?=-]+")
_GITHUB = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/")
_TEXTS = ("framework", "url", "log", "cause", "fix")


class Half(StrEnum):
    """The part of the collection that a case belongs to."""

    OPEN = "open"
    SEALED = "sealed"


class Told(StrEnum):
    """The part of the cause that an expert could name who saw the log and nothing else."""

    RIGHT = "right"
    FAMILY = "family"
    NOTHING = "nothing"


class Review(StrEnum):
    """A second labeller, who did not see the names, judged them so.

    `DISPUTED` names stand because the thread does not settle the matter; `CORRECTED` ones were
    changed after the second reading.
    """

    AGREED = "agreed"
    DISPUTED = "disputed"
    CORRECTED = "corrected"


@dataclass(frozen=True, slots=True)
class Case:
    """A thread with a confirmed cause.

    `names` are the illnesses of the vocabulary that are right answers, the best one first.
    `log` are the error's own lines, as a user would paste them; `cause` and `fix` are one sentence
    each, in our own words; `settings` are those that the fix names, in the framework's words.
    `tellable` says whether an expert who sees only the log could name the cause.
    `version` is the version of the framework where the thread states it, else empty; `when` is the
    earliest date known of the thread. `told` and `review` are empty for most cases: they are kept
    for those that an expert or a second labeller was asked about.
    """

    framework: str
    version: str
    url: str
    when: str
    names: tuple[str, ...]
    tellable: bool
    log: str
    cause: str
    fix: str
    settings: tuple[str, ...] = ()
    told: str = ""
    review: str = ""


_ASKED: dict[str, type[StrEnum]] = {"told": Told, "review": Review}


def parse(row: Any) -> Case:
    """Return the case that a JSON object describes, or raise with everything that is wrong."""
    if not isinstance(row, dict):
        raise HomeostatError("a case is a JSON object.")
    known = {field.name for field in fields(Case)}
    missing = known - {"settings", *_ASKED, *row}
    if missing or row.keys() - known:
        odd = ", ".join(sorted(row.keys() - known)) or "none"
        raise HomeostatError(
            f"keys missing: {', '.join(sorted(missing)) or 'none'}; unknown: {odd}."
        )
    problems = _wrong_types(row)
    if not problems:
        lists = {key: tuple(row.get(key, ())) for key in ("names", "settings")}
        values: dict[str, Any] = {**row, **lists}
        case = Case(**values)
        problems = _problems(case)
        if not problems:
            return case
    raise HomeostatError(" ".join(problems))


def _wrong_types(row: dict[str, Any]) -> list[str]:
    texts = (*_TEXTS, "version", "when", *_ASKED)
    wrong = [f"{key} must be a text." for key in texts if not isinstance(row.get(key, ""), str)]
    lists = (row["names"], row.get("settings", []))
    if not all(isinstance(one, list) and all(isinstance(x, str) for x in one) for one in lists):
        wrong.append("names and settings must be lists of texts.")
    if not isinstance(row["tellable"], bool):
        wrong.append("tellable must be true or false.")
    return wrong


def _problems(case: Case) -> list[str]:
    """List what is wrong with a case's values."""
    found = [f"{key} is empty." for key in _TEXTS if not getattr(case, key).strip()]
    if not _ADDRESS.fullmatch(case.url):
        found.append(f"url is {case.url!r}: give the thread's full https address.")
    try:
        date.fromisoformat(case.when)
    except ValueError:
        found.append(f"when is {case.when!r}: write a date as 2025-03-31.")
    found += [
        f"{key} is {getattr(case, key)!r}: one of {', '.join(kinds)}, or leave it out."
        for key, kinds in _ASKED.items()
        if getattr(case, key) not in ("", *kinds)
    ]
    if not case.names:
        found.append("names is empty: name the illness, or the closest one.")
    unknown = [name for name in case.names if name not in FAMILY_OF]
    if unknown:
        found.append(f"names: {', '.join(unknown)} is not in health/vocabulary.py.")
    lines = case.log.count("\n") + 1
    if lines > MAX_LINES or len(case.log) > MAX_CHARACTERS:
        found.append(
            f"log has {lines} lines, {len(case.log)} characters: keep the error's own lines, at "
            f"most {MAX_LINES} and {MAX_CHARACTERS}."
        )
    if has_known_token(case.log):
        found.append("log holds what looks like an access token: cut it out.")
    found += [
        f"{key} has {len(getattr(case, key))} characters: write one sentence, at most "
        f"{MAX_SENTENCE}, in your own words."
        for key in ("cause", "fix")
        if len(getattr(case, key)) > MAX_SENTENCE
    ]
    return found


def repository(case: Case) -> str:
    """Return the repository of the thread, or the site's name for other addresses."""
    match = _GITHUB.match(case.url)
    return match[1].lower() if match else case.url.split("/")[2].lower()


def half_of(case: Case) -> Half:
    """Return the half that the repository and the thread's month give."""
    key = f"{repository(case)} {case.when[:7]}".encode()
    return Half.SEALED if hashlib.sha256(key).digest()[0] % 2 else Half.OPEN


def kind_of(case: Case) -> str:
    """Return the part of a run that is ill: the family of the first name."""
    return FAMILY_OF[case.names[0]].value


def load(root: Path, half: Half) -> list[Case]:
    """Read the cases of a half."""
    file = root / FOLDER / f"{half.value}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [parse(parse_json(line)) for line in lines]


def add(root: Path, cases: Iterable[Case]) -> dict[Half, int]:
    """Append cases to their halves and return how many went where.

    Nothing is written if one of them is in the collection already: the same thread, or the same
    log apart from numbers and white space.
    """
    seen = {key: case.url for half in Half for case in load(root, half) for key in _identity(case)}
    fresh: dict[Half, list[Case]] = {half: [] for half in Half}
    for case in cases:
        doubled = [seen[key] for key in _identity(case) if key in seen]
        if doubled:
            raise HomeostatError(f"{case.url}: in the collection already, as {doubled[0]}.")
        seen.update(dict.fromkeys(_identity(case), case.url))
        fresh[half_of(case)].append(case)
    for half, own in fresh.items():
        file = root / FOLDER / f"{half.value}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as sink:
            sink.writelines(json.dumps(_row(case), ensure_ascii=False) + "\n" for case in own)
    return {half: len(own) for half, own in fresh.items()}


def known_text(root: Path) -> str:
    """Return the content of the doctor's file of known cases: the open half, one case per line."""
    rows = (
        {
            "url": case.url,
            "names": case.names,
            "words": telling_lines(case.log.splitlines()),
            "fix": case.fix,
        }
        for case in load(root, Half.OPEN)
    )
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return f"[\n{lines}\n]\n"


def write_known(root: Path) -> None:
    """Let the doctor know the open half."""
    file = root / KNOWN
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(known_text(root), encoding="utf-8")


def _row(case: Case) -> dict[str, Any]:
    """Return the JSON object of a case; what nobody was asked is left out."""
    return {key: value for key, value in asdict(case).items() if value or key not in _ASKED}


def _identity(case: Case) -> tuple[str, str]:
    """Return what identifies a case: the address, and the log without numbers and white space."""
    address = case.url.split("#")[0].rstrip("/").lower().replace("/pull/", "/issues/")
    return address, re.sub(r"[\d\s]+", "", case.log).lower()
