"""Find the name of a number in the text before it: "trainer.py: step 3 loss" -> "loss".

A word before a metric's name may make it another quantity ("critic loss", "best val loss").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

from homeostat.health.frameworks import ALL
from homeostat.health.readers.values.common_names import folded, metric_of

# Separators between the name of a number and the text before that name.
_APART = re.compile(r"[|,;\t()\[\]{}<>]|\s-\s|\d")
_WORD = re.compile(r"[A-Za-z][A-Za-z_./]*")
# Names of counters, the finest first: if a script prints epochs and steps, steps are used.
_COUNTERS = (
    frozenset({"step", "steps", "global_step", "iter", "iters", "iteration", "it", "update"}),
    frozenset({"episode", "episodes", "round", "batch"}),
    frozenset({"epoch", "epochs", "ep"}),
)
OF_EPISODES = {"score", "average_score", "return", "episode_return", "average_return", "reward"}
# Words that make a loss or a reward another quantity than the one that is trained on.
_OTHER_QUANTITY = frozenset({
    "aux", "auxiliary", "balancing", "best", "critic", "draft", "entropy", "format", "gold",
    "highest", "kl", "lowest", "max", "maximum", "min", "minimum", "mtp", "old", "ref", "reference",
    "router", "shaped", "std", "test", "validation", "value", "vf", "worst",
})  # fmt: skip
_COPULAS = frozenset({"is", "was", "of"})
# Scores of texts, which keep their names.
_SCORE = re.compile(r"(?:bl(?:eu|ue)|rouge\w{0,6}|f1|wer|cer|em|exact_match)", re.IGNORECASE)
_ONE_WORD = re.compile(r"[A-Za-z][A-Za-z.-]{0,40}")
# Words before a metric's name that leave it the same quantity, or do not belong to it.
_SAME_QUANTITY = frozenset({
    "and", "at", "average", "avg", "batch", "cur", "current", "epoch", "finished", "has", "is",
    "iter", "iteration", "iterations", "iters", "its", "local", "mean", "new", "of", "overall",
    "running", "smoothed", "step", "steps", "the", "total", "train", "training", "with",
})  # fmt: skip


def last_part(text: str) -> str:
    """Return the words right before a number, even if it is in brackets or in a table's cell."""
    parts = [part.strip(" :=#.-") for part in _APART.split(text)]
    is_cell = len(parts) > 1 and not parts[-1] and text.rstrip()[-1:] in {"|", "[", "("}
    return parts[-2] if is_cell else parts[-1]


def last_words(text: str) -> list[str]:
    """Return the words right before a number."""
    return _WORD.findall(last_part(text))


def named(text: str) -> tuple[str, int | None]:
    """Return the metric's name in a text, and the rank of the counter that the text names."""
    words = last_words(text)
    if len(words) > 1 and words[-1].lower() in _COPULAS:
        words.pop()
    if not words:
        return "", None
    for rank, counters in enumerate(_COUNTERS):
        if words[-1].strip("./").lower() in counters:
            return "", rank
    return metric_in(words), None


def metric_in(words: Sequence[str]) -> str:
    """Return the longest end of some words that is a metric's name; "" if none is."""
    for tail in _tails(words):
        if metric_of(tail) is not None or folded(tail) in OF_EPISODES:
            before = words[: len(words) - tail.count(" ") - 1]
            is_other = bool(before) and before[-1].strip("./").lower() in _OTHER_QUANTITY
            return "" if is_other else tail
    return words[-1] if words and _SCORE.fullmatch(words[-1]) else ""


def _tails(words: Sequence[str]) -> Iterator[str]:
    clean = [word.strip("./") for word in words]
    for start in range(max(0, len(clean) - 4), len(clean)):
        yield " ".join(clean[start:])


def known_tail(name: str) -> str:
    """Return the end of a text that is a metric's name: "trainer.py: step 3 loss" -> "loss".

    A word may make it another quantity, as in "critic loss": the name is then not known, or it is
    one that a framework has.
    """
    words = name.split()
    tails = [" ".join(words[start:]) for start in range(max(0, len(words) - 4), len(words))]
    for place, tail in enumerate(tails, start=len(words) - len(tails)):
        if metric_of(tail) is not None:
            if place == 0 or not _is_qualifier(words[place - 1]):
                return tail
            return next((one for one in tails if one in _names_of_words()), "")
    return ""


def known_end(name: str) -> str:
    """Return the end of a name in one piece that is a metric's: "iters_average_Loss" -> "Loss".

    All words before it must leave it the same quantity.
    """
    words = name.split("_")
    for start in range(1, len(words)):
        if words[start - 1].lower() not in _SAME_QUANTITY:
            return ""
        tail = "_".join(words[start:])
        if metric_of(tail) is not None:
            return tail
    return ""


def _is_qualifier(word: str) -> bool:
    return word.lower() not in _SAME_QUANTITY and _ONE_WORD.fullmatch(word) is not None


@cache
def _names_of_words() -> frozenset[str]:
    """Return the frameworks' names of metrics that have several words."""
    return frozenset(name for table in ALL.values() for name in table.metrics if " " in name)
