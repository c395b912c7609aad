"""Find symptoms that a text describes in words, such as "the model never stops generating".

People who ask for help often have no error text: they paste a sentence, a command, a setting. The
symptom that such a sentence names has a few usual causes (the files in symptoms/). They are
guesses, since nothing in the text measures them.

A text may name several symptoms: "it hangs" and "it hangs after a weight update". Words that few
symptoms have say most, so the symptom with the rarest words comes first.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from itertools import chain, pairwise, takewhile
from operator import or_
from pathlib import Path
from typing import Any

from homeostat.health.log import QUOTES, LogLine

FOLDER = Path(__file__).with_name("symptoms")
MAX_CAUSES = 4
_MAX_CHARS = 400
# A symptom whose words are spread over two sentences is less sure than one in a single sentence.
_IN_TWO = 0.75
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|[\u3002\uff01\uff1f]")
_BESIDE_CHINESE = re.compile(r"(?<=[\u4e00-\u9fff])(?=[a-z0-9])|(?<=[a-z0-9])(?=[\u4e00-\u9fff])")
# Lines of programs, and what may happen or helps: libraries say much that is no symptom.
_LOGGED = re.compile(
    r"^\W{0,3}(?:\d{4}-\d\d|\d\d:\d\d|\[?rank\d|wandb:|\(\w{1,40} pid=)"
    r"|^.{0,60}\b(?:INFO|DEBUG|WARNING|WARN)\b|%\||\b\w{1,40}Warning:"
)
_HEDGED = re.compile(
    r"(?<!\bi )(?<!\bwe )\b(?:may|might|can|could)\b"
    r"(?! ?not\b|'t\b| see\b| (?:any|some)(?:one|body))"
    r"|\b(?:potentially|consider|deprecated|newly|to avoid|recommended|by default)\b",
    re.IGNORECASE,
)
_SIGNS = re.compile(r"[^\w.=\-/+!'\"<>|()*,:%\ufffd]+")
_PUNCTUATION = re.compile(r"(?<![.,:)*])[.,:)*]++(?= |$)")
_WORD_START = re.compile(r"(?<![^\W_])(?<!_)\S")
# Words that sentences have, and lines with numbers seldom do.
_SMALL_WORDS = (
    "a about after all am an and any at but does even every for from have i if is it my no not"
    " of on only same so some than that the then this to was we when while why with you"
)
_OF_SENTENCES = frozenset(_SMALL_WORDS.split())
_MIN_OF_SENTENCES = 3
_MIN_CHINESE = 6
_CHINESE = re.compile(r"[\u4e00-\u9fff]")


@dataclass(frozen=True, slots=True)
class Symptom:
    """A stanza of a file. `words` has the alternatives of each word that must be there."""

    says: str
    words: tuple[tuple[str, ...], ...]
    causes: tuple[str, ...]
    if_said: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Described:
    """A symptom with the line that names it, its causes in order, and how much its words say."""

    symptom: Symptom
    line: LogLine
    causes: tuple[str, ...]
    weight: float


def described(lines: Sequence[LogLine]) -> tuple[Described, ...]:
    """Return the symptoms that a text names, the most specific first."""
    units = [
        (_plain(part), line)
        for line in lines
        if _LOGGED.search(line.text) is None
        for part in _parts(line.text)
        if _HEDGED.search(part) is None
    ]
    # Most logs have no sentence, and reading the symptoms takes time.
    return tuple(sorted(_named_in(units), key=lambda one: -one.weight)) if units else ()


def sentences(lines: Iterable[LogLine]) -> tuple[LogLine, ...]:
    """Return the lines that somebody wrote, as opposed to a program that logs numbers."""
    return tuple(line for line in lines if _is_sentence(line.text))


@cache
def symptoms() -> tuple[Symptom, ...]:
    alike: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    for path in sorted(FOLDER.glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        alike |= table.get("alike", {})
        rows += table.get("symptom", ())
    return tuple(
        Symptom(
            says=row["says"],
            words=tuple(tuple(_alternatives(one, alike)) for one in row["words"]),
            causes=tuple(row["causes"]),
            if_said=tuple((k, tuple(v.split("|"))) for k, v in row.get("if_said", {}).items()),
        )
        for row in rows
    )


def _alternatives(words: str, alike: Mapping[str, str]) -> Iterator[str]:
    """Yield the alternatives; `@hang` stands for the words that mean the same as "hang"."""
    for word in words.split("|"):
        if word.startswith("@"):
            yield from alike[word[1:]].split("|")
        else:
            yield word


def _is_sentence(text: str) -> bool:
    words = _plain(text).split()
    of_sentences = sum(word.strip(".,!?:()\"'`") in _OF_SENTENCES for word in words)
    return of_sentences >= _MIN_OF_SENTENCES or len(_CHINESE.findall(text)) >= _MIN_CHINESE


def _parts(text: str) -> Iterator[str]:
    for part in _SENTENCE_END.split(text[: 4 * _MAX_CHARS]):
        if part.strip():
            yield part[:_MAX_CHARS].translate(QUOTES)


def _plain(text: str) -> str:
    """Return a text in lower case with one space around each word."""
    apart = _BESIDE_CHINESE.sub(" ", text.lower())
    return f" {_PUNCTUATION.sub('', _SIGNS.sub(' ', apart)).strip()} "


@dataclass(slots=True)
class _Index:
    """The words of all symptoms, each with the bits of the places in which it counts.

    A place is an entry of a symptom's `words`. `needs` has the bits of each symptom's places.
    `phrases` have a space between two words, and are kept by the first one; `anywhere` counts also
    in the middle of a word; `beginnings` are the others.
    """

    needs: list[tuple[int, Symptom]] = field(default_factory=list)
    beginnings: Counter[str] = field(default_factory=Counter)
    phrases: dict[str, Counter[str]] = field(default_factory=dict)
    anywhere: Counter[str] = field(default_factory=Counter)
    seen: dict[tuple[str, str], tuple[int, tuple[tuple[str, int], ...]]] = field(
        default_factory=dict
    )

    def bits_of(self, text: str) -> int:
        """Return the bits of all places that have a word in the text."""
        bits = 0
        for token, following in pairwise([*text.split(), ""]):
            key = (token, following[:1])
            if key not in self.seen:
                self.seen[key] = self._read(*key)
            own, phrases = self.seen[key]
            bits |= own
            for phrase, more in phrases:
                if phrase in text and _says(text, phrase):
                    bits |= more
        for word, more in self.anywhere.items():
            if word in text:
                bits |= more
        return bits

    def without_chinese(self) -> _Index:
        """Return the index for texts in ASCII, which is read much faster."""
        ascii_only = Counter({word: bits for word, bits in self.anywhere.items() if word.isascii()})
        return replace(self, anywhere=ascii_only)

    def _read(self, token: str, following: str) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Return the bits of a token, and the phrases that may begin with it."""
        bits, phrases = 0, []
        for start in _WORD_START.finditer(token):
            rest = token[start.start() :]
            for end in range(1, len(rest) + 2):
                bits |= self.beginnings[f"{rest} "[:end]]
            own = self.phrases.get(rest, Counter[str]()).items()
            phrases += [one for one in own if one[0][len(rest) + 1 :].startswith(following)]
        return bits, tuple(phrases)


def _index() -> _Index:
    index, bit = _Index(), 1
    for symptom in symptoms():
        need = 0
        for words in symptom.words:
            for word in words:
                _add(index, word.lstrip(), bit)
            need, bit = need | bit, bit << 1
        index.needs.append((need, symptom))
    return index


def _add(index: _Index, word: str, bit: int) -> None:
    first, _, more = word.partition(" ")
    if _is_anywhere(word):
        index.anywhere[word] |= bit
    elif more:
        index.phrases.setdefault(first, Counter())[word] |= bit
    else:
        index.beginnings[word] |= bit


def _named_in(units: Sequence[tuple[str, LogLine]]) -> Iterator[Described]:
    """Yield each symptom that a text names, first those that are named in one sentence."""
    index = _index()
    ascii_index = index.without_chinese()
    whole = "".join(text for text, _ in units)
    alone = [
        ((ascii_index if text.isascii() else index).bits_of(text), text, line, 1.0)
        for text, line in units
    ]
    # A sentence may run over two lines, and the second one may say what the first one left open.
    both = [
        (bits | more, f"{text}{other}", line, _IN_TWO)
        for (bits, text, line, _), (more, other, _, _) in pairwise(alone)
    ]
    anywhere = reduce(or_, (bits for bits, *_ in alone), 0)
    needs = [(need, symptom) for need, symptom in index.needs if need & anywhere == need]
    for bits, text, line, share in chain(alone, both):
        for symptom in [symptom for need, symptom in needs if need & bits == need]:
            weight = share * _weight(symptom, text)
            yield Described(symptom, line, tuple(_causes(symptom, whole)), weight)
            needs = [one for one in needs if one[1] is not symptom]


@cache
def _rarity() -> dict[str, float]:
    """Return for each word how much it says: the more, the fewer symptoms have it.

    A word is a beginning, so "grad" is as common as all words together that begin so.
    """
    having: dict[str, set[str]] = {}
    for one in symptoms():
        for word in chain.from_iterable(one.words):
            having.setdefault(word.strip(), set()).add(one.says)
    ordered = sorted(having)
    rarity: dict[str, float] = {}
    for at, word in enumerate(ordered):
        longer = takewhile(lambda other, word=word: other.startswith(word), ordered[at:])
        count = len(set().union(*(having[other] for other in longer)))
        rarity[word] = math.log(1 + len(symptoms()) / count)
    return rarity


def _weight(symptom: Symptom, text: str) -> float:
    """Return how much the words say by which a text names a symptom; a word counts once."""
    said = {
        max((word.strip() for word in words if _says(text, word)), key=_rarity().__getitem__)
        for words in symptom.words
    }
    return sum(_rarity()[word] for word in said)


def _is_anywhere(word: str) -> bool:
    """Return whether a word has no beginning: Chinese has no spaces, "n't" follows a word."""
    return word.startswith(("n't", "!")) or not word.isascii()


def _says(text: str, word: str) -> bool:
    """Return whether a word of the text begins so."""
    if _is_anywhere(word):
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
