"""Look up the illness that a library's own message states.

library_messages.txt holds messages of 68 packages: trainers, engines and libraries. They were
extracted from the packages' sources and labelled by reading them (CONTRIBUTING.md, "Add the
messages of a library"). One line is one message:

    key <tab> illnesses, the likeliest first <tab> libraries <tab> the message's other words

Only the words are kept, without their order and without values that are filled in at run time. They
are enough to recognise the message. The key is the word that the fewest messages contain: only the
lines whose key stands in an error are compared with it.

An error has a known message if it contains all words of a line, and if these are a large enough
part of its words. Of several such lines, the one with the most words is taken.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("library_messages.txt")
# A message with fewer words, or with words that many messages contain, cannot be distinguished from
# other sentences. The second limit is on the sum over words of log(messages / messages with it).
MIN_WORDS = 4
_MIN_TELLING = 16.0
# The least share of an error's words that a message has. The others are values, such as names.
_MIN_SHARE = 0.4
_MAX_CHARS = 1_000
# Two letters are a word, too: "no workers are available" must not match "8 workers are available".
_WORD = re.compile(r"[a-z_][a-z0-9_]{1,60}")


@dataclass(frozen=True, slots=True)
class LibraryMessage:
    """A message with the illnesses that it states, and the libraries that can raise or log it."""

    names: tuple[str, ...]
    libraries: tuple[str, ...]
    words: frozenset[str]

    @property
    def raised_by(self) -> str:
        """Return the libraries as words of a sentence."""
        *others, last = self.libraries
        return f"{', '.join(others)} and {last}" if others else last


def words_of(message: str) -> frozenset[str]:
    """Return the words of a message by which it is recognised."""
    return frozenset(_WORD.findall(message[:_MAX_CHARS].lower()))


def known_message(error: str) -> LibraryMessage | None:
    """Return the message of a library that an error consists of; None if none is known."""
    words = words_of(error)
    found = [
        message
        for key in words & _lines().keys()
        for message in map(parse, _lines()[key])
        if message.words <= words and len(message.words) >= _MIN_SHARE * len(words)
    ]
    return max(found, key=lambda one: (len(one.words), sorted(one.words)), default=None)


@cache
def _lines() -> Mapping[str, list[str]]:
    """Return the lines of the file by their keys. A line is parsed when an error has its key."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in FILE.read_text(encoding="utf-8").splitlines():
        found[line[: line.index("\t")]].append(line)
    return dict(found)


def parse(line: str) -> LibraryMessage:
    """Return the message that a line of the file describes."""
    key, names, libraries, words = line.split("\t")
    return LibraryMessage(
        tuple(names.split(",")), tuple(libraries.split(",")), frozenset((key, *words.split()))
    )


def known_messages() -> list[LibraryMessage]:
    """Return all messages of the file."""
    return [parse(line) for lines in _lines().values() for line in lines]


def _count(messages: Iterable[LibraryMessage]) -> Counter[str]:
    return Counter(word for one in messages for word in one.words)


def distinctive(
    messages: Sequence[LibraryMessage], known: Sequence[LibraryMessage]
) -> list[LibraryMessage]:
    """Return the messages whose words distinguish them from other sentences."""
    distinct = {one.words: one for one in (*known, *messages)}
    count = _count(distinct.values())
    return [
        one
        for one in messages
        if len(one.words) >= MIN_WORDS
        and sum(math.log(len(distinct) / count[word]) for word in one.words) >= _MIN_TELLING
    ]


def file_text(messages: Iterable[LibraryMessage]) -> str:
    """Return the content of the file for these messages.

    Those with equal words become one, with the illnesses of the last.
    """
    merged: dict[frozenset[str], LibraryMessage] = {}
    for one in messages:
        before = merged.get(one.words, one).libraries
        libraries = tuple(sorted({*before, *one.libraries}))
        merged[one.words] = LibraryMessage(one.names, libraries, one.words)
    count = _count(merged.values())
    lines = []
    for one in merged.values():
        key, *others = sorted(one.words, key=lambda word: (count[word], word))
        cells = (key, ",".join(one.names), ",".join(one.libraries), " ".join(sorted(others)))
        lines.append("\t".join(cells) + "\n")
    return "".join(sorted(lines))
