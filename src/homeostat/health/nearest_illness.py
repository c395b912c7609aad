"""Find the known illness whose words are nearest to an exception that no rule recognises.

Each signature is a list of texts; a text's words are weighed by how few signatures have them. The
share of that weight which an exception has in common with a text is how near it is.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from homeostat.health.signatures.load import load
from homeostat.health.signatures.signature import Signature

_WORD = re.compile(r"[a-z_]{3,40}")
# Share of a text's weight, and number of its words, that must be in common.
MIN_SHARE = 0.55
MIN_WORDS = 3
_MAX_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class Near:
    """A known illness, and which share of its words an exception has."""

    code: str
    name: str
    share: float


@cache
def _index() -> tuple[tuple[tuple[str, str, frozenset[str]], ...], dict[str, float]]:
    """Return the words of every text with its code and name, and the weight of each word."""
    texts = [
        (one.code, one.name, frozenset(_WORD.findall(text.lower())))
        for one in _errors(load())
        for text in one.texts
    ]
    counts = Counter(word for _, _, words in texts for word in words)
    weights = {word: math.log((1 + len(texts)) / count) for word, count in counts.items()}
    return tuple(one for one in texts if len(one[2]) >= MIN_WORDS), weights


def _errors(signatures: Sequence[Signature]) -> list[Signature]:
    return [one for one in signatures if not one.name.startswith("benign-") and not one.notes]


def nearest(kind: str, message: str) -> Near | None:
    """Return the known illness nearest to an exception; None if none is near."""
    mine = frozenset(_WORD.findall(f"{kind.rpartition('.')[2]} {message[:_MAX_CHARS]}".lower()))
    texts, weights = _index()
    best: Near | None = None
    for code, name, words in texts:
        common = words & mine
        if len(common) < MIN_WORDS:
            continue
        share = sum(weights[w] for w in common) / sum(weights[w] for w in words)
        if share >= MIN_SHARE and (best is None or share > best.share):
            best = Near(code, name, share)
    return best
