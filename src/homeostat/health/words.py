"""Format counts, durations and shortened texts for sentences about a run."""

from __future__ import annotations

_MARK = " ..."
_UNITS = (("day", 86_400.0), ("hour", 3_600.0), ("minute", 60.0))


def rough_time(seconds: float) -> str:
    """Return a duration for a sentence, in the largest unit of which it has two: '40 seconds'."""
    for unit, length in _UNITS:
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}s"
    return f"{seconds:.0f} seconds"


def counted(number: object, noun: str) -> str:
    """Return a number with its noun: "1 step", "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def steps_have(number: int) -> str:
    return f"{counted(number, 'step')} {'has' if number == 1 else 'have'}"


def shortened(text: str, most: int) -> str:
    """Return at most this many characters, cut between words, with an ellipsis if cut.

    A single word that is longer than that is cut inside the word.
    """
    if len(text) <= most:
        return text
    room = most - len(_MARK)
    cut = text[: room + 1].rpartition(" ")[0].rstrip()
    # A path or number without a space nearby is cut inside.
    return (cut if len(cut) > room // 2 else text[:room].rstrip()) + _MARK
