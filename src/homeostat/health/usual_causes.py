"""Guess what an exception comes from by its class, where its words tell nothing.

Counted over the open half of the threads with a confirmed cause (bench/threads/open.jsonl), those
that rules recognise included: how many ended in an exception of the class, and in how many of them
each cause was confirmed. A thread may have several. "Versions" are all kinds of libraries that do
not fit together, or of a faulty release.
"""

from __future__ import annotations

from dataclasses import dataclass

VERSIONS = "library-version-mismatch"


@dataclass(frozen=True, slots=True)
class Usual:
    """A cause, in how many threads of how many it was confirmed, and for which exceptions."""

    cause: str
    threads: int
    of: int
    kind: str

    @property
    def why(self) -> str:
        return f"a guess: the cause of {self.threads} of {self.of} known cases of {self.kind}"


# Class of the exception -> number of threads, and the causes that were confirmed most often.
_COUNTED: dict[str, tuple[int, dict[str, int]]] = {
    "RuntimeError": (49, {VERSIONS: 10, "attention-unsupported": 5}),
    "ValueError": (46, {VERSIONS: 4, "quantised-base-not-trainable": 4}),
    "TypeError": (27, {VERSIONS: 23, "unknown-setting": 12}),
    "ImportError": (18, {VERSIONS: 12, "extension-abi-mismatch": 3}),
    "AttributeError": (18, {VERSIONS: 13}),
    "AssertionError": (18, {"parallel-sizes-inconsistent": 5, "batch-not-divisible": 4}),
    "KeyError": (8, {VERSIONS: 3, "column-missing": 2}),
    "ModuleNotFoundError": (6, {VERSIONS: 4, "build-isolation": 2}),
    "NotImplementedError": (5, {VERSIONS: 4}),
}
_OTHERS = (36, {VERSIONS: 7})


def usual_causes(kind: str) -> tuple[Usual, ...]:
    """Return the usual causes of an exception, by its class without module, most frequent first."""
    of, counts = _COUNTED.get(kind, _OTHERS)
    named = f"a {kind}" if kind in _COUNTED else "a rarer exception"
    return tuple(Usual(cause, threads, of, named) for cause, threads in counts.items())
