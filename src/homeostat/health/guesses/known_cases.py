"""Guess the cause of an error that no rule knows, from the known errors with the most similar text.

Known errors are those of public threads with a confirmed cause (known_cases.json, written by
`homeostat dev add-case` from bench/threads/open.jsonl), and the texts of all signatures. The
description of a cause in its signatures counts as one more.

Words are weighted by tf-idf. Lines that say what was wrong count most, the lines around them a
little. The nearest errors vote for their causes with the square of the cosine similarity. Each
cause also starts with votes in proportion to how often it was confirmed. Causes that are the same
to a user count as one (`SAME`), for example a wrong version of any library.

Every guess is marked as one, with the share of similar guesses that were right. bench/guesses.py
measures that share by guessing each thread without the threads of its repository.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from heapq import nlargest
from itertools import chain
from pathlib import Path
from typing import Any

from homeostat.health.failures.code_owners import PACKAGES
from homeostat.health.signatures.load import shipped

FILE = Path(__file__).with_name("known_cases.json")
VERSIONS = "library-version-mismatch"
# Names that a user need not distinguish, because the remedy is the same. The first one is printed.
SAME = (
    (VERSIONS, "known-bad-version", "dependency-conflict", "vllm-version-incompatible",
     "sglang-version-incompatible"),
    ("nan-loss", "grad-nan", "vital-sign-not-finite"),
    ("column-missing", "dataset-column-missing"),
    ("cuda-illegal-access", "vllm-illegal-memory-access"),
    ("parallel-sizes-inconsistent", "parallel-degrees-mismatch"),
    ("memory-fragmentation", "memory-fragmented"),
    ("cuda-oom-training", "activation-oom"),
    ("path-missing", "model-path-wrong"),
)  # fmt: skip
_SAID = {name: group[0] for group in SAME for name in group}
_TELLING = re.compile(
    r"error|exception|fail|fatal|not |n't|unable|invalid|must|require|unsupported|missing"
    r"|mismatch|exceed|no such",
    re.IGNORECASE,
)
# The last two parts of a path show whose code it is. The others depend on the machine and are cut.
_FOLDERS = re.compile(
    r"(?:[A-Za-z]:)?[\\/~](?:[\w.+~-]{1,100}[\\/]){1,30}(?=[\w.+-]{1,100}[\\/][\w.+-])"
    r"|(?<![\w.:/])/(?=\w)"
)
# A package in advice, "numpy 1.26" or "Upgrade tokenizers", and words for a repaired release.
_NAMED_IN_ADVICE = (
    re.compile(r"([A-Za-z][\w-]{1,40})(?: version)? ?[<>=~!]{0,2} ?v?\d{1,4}\.\d"),
    re.compile(
        r"\b(?:[Uu]pgrade|[Uu]pdate|[Dd]owngrade) (?!to\b|the\b|an?\b|it\b)([A-Za-z][\w-]{1,40})"
    ),
)
_RELEASE = re.compile(r"(?i)\b(?:version|release|commit|repair|correct|updat|upgrad|fix)")
_WORD = re.compile(r"[A-Za-z_]{2,60}")
_PART = re.compile(r"[A-Z]?[a-z]{2,}|[A-Z]{3,}")
# Number of last lines in which the error's words are searched, and of informative lines used.
MAX_LINES = 60
_MAX_TELLING = 4
_MAX_CHARS = 2_000
# Weight of the words of all lines, relative to those of the informative lines.
_AROUND = 0.3
# The number of errors that vote. Then votes of a signature's text and of a cause's description (a
# thread has one vote), votes with which causes start, and the weight of a thread's second cause.
_NEIGHBOURS = 25
_SIGNATURE_VOTE = 0.5
_DESCRIPTION_VOTE = 2.0
_ADVANCE = 0.4
_SECOND_VOTE = 0.5
MAX_GUESSES = 3
# Share of all votes -> share of such guesses that were right, rounded (bench/guesses.py --unseen):
# for first guesses, and for second and third ones.
_RIGHT_FIRST = ((0.6, 0.95), (0.4, 0.8), (0.25, 0.6), (0.0, 0.45))
_RIGHT_AFTER = ((0.13, 0.3), (0.1, 0.2), (0.05, 0.1), (0.0, 0.02))
_WORTH_SAYING = 0.1
# If a known error is this similar, its thread is worth reading.
_NEAR = 0.4


@dataclass(frozen=True, slots=True)
class KnownCase:
    """A thread with a confirmed cause: its address, causes, informative lines, and what helped."""

    url: str
    names: tuple[str, ...]
    words: str
    fix: str


@dataclass(frozen=True, slots=True)
class Guess:
    """A cause with its share of the votes, and a similar thread in which it was the cause.

    `is_first` is True for the cause with the most votes.
    """

    cause: str
    votes: float
    case: KnownCase | None
    is_first: bool = False

    @property
    def right(self) -> float:
        """Return the share of such guesses that were right."""
        table = _RIGHT_FIRST if self.is_first else _RIGHT_AFTER
        return next(right for least, right in table if self.votes >= least)


@dataclass(frozen=True, slots=True)
class _Known:
    """A known error: its causes, the weight of its vote, and its thread or its signature's text."""

    names: tuple[str, ...]
    votes: float
    case: KnownCase | None = None
    text: str = ""

    def is_among(self, repository: str, texts: frozenset[str]) -> bool:
        """Return whether it is a thread of the repository, or has one of the texts."""
        of = "" if self.case is None else _repository(self.case.url)
        return of == repository != "" or self.text in texts


def telling_lines(lines: Sequence[str]) -> str:
    """Return the last lines that say what was wrong; the very last lines if none does."""
    last = _last_lines(lines)
    telling = [line for line in last if _TELLING.search(line)]
    return "\n".join(telling[-_MAX_TELLING:] or last[-_MAX_TELLING:])


def _last_lines(lines: Sequence[str]) -> list[str]:
    """Return the last lines that are not empty, with paths cut to their last two parts."""
    short = (_FOLDERS.sub("", line.strip()[:_MAX_CHARS]) for line in lines[-MAX_LINES:])
    return [line for line in short if line]


_left_out: ContextVar[tuple[str, frozenset[str]]] = ContextVar(
    "left_out", default=("", frozenset())
)


@contextmanager
def leaving_out(url: str, texts: Iterable[str] = ()) -> Iterator[None]:
    """Ignore the threads of a URL's repository while guessing, to measure guesses about one of
    them.

    `texts` are texts of signatures that are ignored, too.
    """
    token = _left_out.set((_repository(url), frozenset(texts)))
    try:
        yield
    finally:
        _left_out.reset(token)


def guesses(lines: Sequence[str]) -> tuple[Guess, ...]:
    """Return the likeliest causes of the error with which these lines end, the likeliest first."""
    near = _nearest(telling_lines(lines), "\n".join(_last_lines(lines)), *_left_out.get())
    said = _counted("\n".join(line[:_MAX_CHARS] for line in lines[-MAX_LINES:]))
    votes = defaultdict[str, float](float, _in_advance())
    example: dict[str, KnownCase] = {}
    for known, closeness in near:
        for place, name in enumerate(known.names):
            votes[name] += closeness**2 * known.votes * (_SECOND_VOTE if place else 1.0)
            case = known.case if closeness >= _NEAR else None
            if case is not None and (name != VERSIONS or _is_about(case, said)):
                example.setdefault(name, case)
    total = sum(votes.values()) or 1.0
    likeliest = sorted(votes, key=lambda name: -votes[name])[:MAX_GUESSES]
    found = (
        Guess(name, votes[name] / total, example.get(name), is_first=place == 0)
        for place, name in enumerate(likeliest)
    )
    return tuple(guess for guess in found if guess.right >= _WORTH_SAYING)


def _is_about(case: KnownCase, said: Container[str]) -> bool:
    """Return whether a log names one of the packages whose version a thread was about.

    Errors of different packages have the same words, and only that package's version helps. Advice
    to take a repaired release that names no package is about the thread's own repository.
    """
    named = (one for pattern in _NAMED_IN_ADVICE for one in pattern.findall(case.fix))
    packages = {name.lower().replace("-", "_") for name in named}
    packages |= PACKAGES.intersection(_counted(case.fix))
    if not packages and _RELEASE.search(case.fix):
        name = _repository(case.url).rpartition("/")[2].replace("-", "_")
        packages = {name, name.removeprefix("py")}
    return not packages or any(package in said for package in packages)


_NOWHERE: tuple[list[int], list[float]] = ([], [])


# The first finding and the guesses added to it look up the same lines.
@lru_cache(maxsize=4)
def _nearest(
    words: str, around: str, repository: str, texts: frozenset[str]
) -> tuple[tuple[_Known, float], ...]:
    """Return the nearest known errors with their similarity, the nearest first.

    `words` are the informative lines, `around` all lines. Threads of the given repository and
    signatures with the given texts are ignored.
    """
    errors, places, weights = _index()
    closeness = defaultdict[int, float](float)
    own, others = _weighed(_counted(words), weights), _weighed(_counted(around), weights)
    mixed = {word: own.get(word, 0.0) + _AROUND * weight for word, weight in others.items()}
    for word, weight in _unit(mixed).items():
        for number, other in zip(*places.get(word, _NOWHERE), strict=True):
            closeness[number] += weight * other
    asked: Iterable[int] = closeness
    if repository or texts:
        asked = (number for number in closeness if not errors[number].is_among(repository, texts))
    nearest = nlargest(_NEIGHBOURS, asked, key=closeness.__getitem__)
    return tuple((errors[number], closeness[number]) for number in nearest)


def _repository(url: str) -> str:
    return "/".join(url.split("/")[:5]).lower()


@cache
def known_cases() -> tuple[KnownCase, ...]:
    """Read the threads from known_cases.json."""
    rows: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(KnownCase(**(row | {"names": tuple(row["names"])})) for row in rows)


@cache
def _in_advance() -> Mapping[str, float]:
    first = Counter(merged(case.names)[0] for case in known_cases())
    return {name: _ADVANCE * count / first.total() for name, count in first.items()}


# Word -> numbers of the errors that have it, and its weight in each. These are two lists, because
# one tuple for each pair would be 60,000 objects for the garbage collector to visit again and
# again.
_Places = dict[str, tuple[list[int], list[float]]]


@cache
def _index() -> tuple[tuple[_Known, ...], _Places, dict[str, float]]:
    """Return the known errors, an index from words to errors, and the weight of each word."""
    errors, texts = [], []
    for case in known_cases():
        errors.append(_Known(merged(case.names), 1.0, case))
        texts.append(_counted(case.words))
    described = defaultdict[str, list[str]](list)
    for signature in shipped():
        if signature.name.startswith("benign-") or signature.notes:
            continue
        names = merged((signature.name,))
        described[names[0]] += [signature.name.replace("-", " "), signature.what, signature.why]
        for text in signature.texts:
            errors.append(_Known(names, _SIGNATURE_VOTE, text=text))
            texts.append(_counted(text))
    # Weights count how rare a word is in errors. Words that only descriptions have match nothing.
    having = Counter(word for text in texts for word in text)
    weights = {word: math.log((1 + len(texts)) / count) for word, count in having.items()}
    for name, parts in described.items():
        errors.append(_Known((name,), _DESCRIPTION_VOTE))
        texts.append(_counted(" ".join(parts)))
    places: _Places = {}
    for number, text in enumerate(texts):
        for word, weight in _unit(_weighed(text, weights)).items():
            numbers, own = places.setdefault(word, ([], []))
            numbers.append(number)
            own.append(weight)
    return tuple(errors), places, weights


def merged(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names without repeats, with one name for all that mean the same."""
    return tuple(dict.fromkeys(_SAID.get(name, name) for name in names))


def _counted(text: str) -> Counter[str]:
    """Count the words of a text, and the parts of its compound words."""
    return Counter(chain.from_iterable(map(_with_parts, _WORD.findall(text))))


@cache
def _with_parts(word: str) -> tuple[str, ...]:
    """Return a word and, if it is compound, its parts."""
    parts = _PART.findall(word)
    return (word.lower(), *map(str.lower, parts)) if len(parts) > 1 else (word.lower(),)


def _weighed(words: Counter[str], weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of the words that are known. A repeated word weighs more."""
    return {
        word: weights[word] * (1 if count == 1 else 1 + math.log(count))
        for word, count in words.items()
        if word in weights
    }


def _unit(words: Mapping[str, float]) -> dict[str, float]:
    """Return the words' weights, scaled to length 1."""
    length = math.sqrt(sum(value * value for value in words.values())) or 1.0
    return {word: value / length for word, value in words.items()}
