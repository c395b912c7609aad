"""Find symptoms that a text describes in words, such as "the model never stops generating".

People who ask for help often have no error text: they paste a sentence, a command, a setting. The
symptom that such a sentence names has a few usual causes (described.toml). They are guesses, since
nothing in the text measures them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from homeostat.health.log import LogLine

FILE = Path(__file__).with_name("described.toml")
MAX_CAUSES = 4
_MAX_CHARS = 400
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|[\u3002\uff01\uff1f]")
_BESIDE_CHINESE = re.compile(r"(?<=[\u4e00-\u9fff])(?=[a-z0-9])|(?<=[a-z0-9])(?=[\u4e00-\u9fff])")
# Lines of programs, and what may happen or helps: libraries say much that is no symptom.
_LOGGED = re.compile(
    r"^\W{0,3}(?:\d{4}-\d\d|\d\d:\d\d|\[?rank\d|wandb:|\(\w{1,40} pid=)"
    r"|^.{0,60}\b(?:INFO|DEBUG|WARNING|WARN)\b|%\||\b\w{1,40}Warning:"
)
_HEDGED = re.compile(
    r"\b(?:may|might|can|could|potentially|consider|deprecated|newly|to avoid|recommended"
    r"|by default)\b(?! ?not)",
    re.IGNORECASE,
)
_SIGNS = re.compile(r"[^\w.=\-/+!'\"<>|()*,:]+")


@dataclass(frozen=True, slots=True)
class Symptom:
    """A stanza of described.toml. `words` has the alternatives of each word that must be there."""

    says: str
    words: tuple[tuple[str, ...], ...]
    causes: tuple[str, ...]
    if_said: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Described:
    """A symptom with the line that names it, and its causes in order."""

    symptom: Symptom
    line: LogLine
    causes: tuple[str, ...]


def described(lines: Sequence[LogLine]) -> tuple[Described, ...]:
    """Return the symptoms that a text names, the most specific first."""
    units = [
        (_plain(part), line)
        for line in lines
        if _LOGGED.search(line.text) is None
        for part in _parts(line.text)
        if _HEDGED.search(part) is None
    ]
    # A sentence may run over two lines, and the second one may say what the first one left open.
    units += [(f"{a}{b}", line) for (a, line), (b, _) in pairwise(units)]
    whole = "".join(text for text, _ in units)
    found: dict[str, Described] = {}
    for symptom in symptoms():
        line = next((line for text, line in units if _is_in(text, symptom)), None)
        if line is not None:
            found[symptom.says] = Described(symptom, line, tuple(_causes(symptom, whole)))
    return tuple(sorted(found.values(), key=lambda one: -len(one.symptom.words)))


@cache
def symptoms() -> tuple[Symptom, ...]:
    rows: list[dict[str, Any]] = tomllib.loads(FILE.read_text(encoding="utf-8"))["symptom"]
    return tuple(
        Symptom(
            says=row["says"],
            words=tuple(tuple(one.split("|")) for one in row["words"]),
            causes=tuple(row["causes"]),
            if_said=tuple((k, tuple(v.split("|"))) for k, v in row.get("if_said", {}).items()),
        )
        for row in rows
    )


def _parts(text: str) -> Iterator[str]:
    for part in _SENTENCE_END.split(text[: 4 * _MAX_CHARS]):
        if part.strip():
            yield part[:_MAX_CHARS]


def _plain(text: str) -> str:
    """Return a text in lower case with one space around each word."""
    apart = _BESIDE_CHINESE.sub(" ", text.lower())
    return f" {_SIGNS.sub(' ', apart).strip()} "


def _is_in(text: str, symptom: Symptom) -> bool:
    return all(any(_says(text, word) for word in words) for words in symptom.words)


def _says(text: str, word: str) -> bool:
    """Return whether a word of the text begins so. Chinese has no spaces, "n't" follows a word."""
    if word == "n't" or word.startswith("!") or not word.isascii():
        return word in text
    word = word.lstrip()
    at = text.find(word)
    while at > 0 and (text[at - 1].isalnum() or text[at - 1] == "_"):
        at = text.find(word, at + 1)
    return at >= 0


def _causes(symptom: Symptom, whole: str) -> Iterator[str]:
    """Yield the causes; those come first of which the text has a word besides."""
    said = [cause for cause, words in symptom.if_said if any(_says(whole, w) for w in words)]
    yield from dict.fromkeys((*said, *symptom.causes))
