"""No line costs more than in proportion to its length: every expression, every signature's pattern,
and the reader as a whole.

Growth is what is judged, by CPU time: four times as long may take about four times the time. A
quadratic search takes sixteen times, a cubic one sixty-four. What is over in a few milliseconds at
the larger size is not compared, because so short a time cannot be measured.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import homeostat.health
from homeostat.health.log import Log, LogLine
from homeostat.health.readers import read_text
from homeostat.health.readers.files.text import TextReader
from homeostat.health.registry import SIGNATURES

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
try:
    import adversarial_lines
finally:
    sys.path.pop(0)

SHORT, LONG = 1_000, 4_000
MEASURABLE_S = 0.006
MAX_GROWTH = 9.0
# Tried at one place of a text, never looked for in it.
AT_ONE_PLACE = (
    "bars._IN_TITLE", "bars._TRAINING", "blocks._BULLET", "dumps._INSIDE", "dumps._PAIR",
    "end_lines._SUPPOSED",
    "frames._ARROW", "frames._BOXED", "frames._BOXED_NAME", "frames._CELL", "frames._OLD_CELL",
    "line_parts._ONE_BAR", "line_rows._BARE", "line_rows._PAIR", "line_rows._SPACED",
    "literals._NUMERIC_CALLS",
    "literals._STRING", "literals._WHOLE", "loose_logs._ROTATED", "numbers._WITH_UNIT",
    "values.settings._COLON", "values.settings._MEANT", "tracebacks.EXCEPTION_NAME",
)  # fmt: skip
PATTERNS = adversarial_lines.patterns()
HEALTH = Path(homeostat.health.__file__).parent


def seconds(call: Callable[[str], object], line: str) -> float:
    began = time.process_time()
    call(line)
    return time.process_time() - began


def assert_linear(call: Callable[[str], object], short: str, long: str) -> None:
    slow = seconds(call, long)
    if slow < MEASURABLE_S:
        return
    quick = min(seconds(call, short) for _ in range(3))
    limit = max(MEASURABLE_S, MAX_GROWTH / 4 * len(long) / max(1, len(short)) * quick)
    if slow >= limit:
        # One long time may be another process's doing.
        slow = min(seconds(call, long) for _ in range(3))
    assert slow < limit, (
        f"{len(short)} characters take {quick:.4f} s, {len(long)} take {slow:.4f} s: {short[:80]!r}"
    )


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_takes_time_in_proportion_to_the_line(name: str) -> None:
    pattern: re.Pattern[str] = PATTERNS[name]
    calls: list[Callable[[str], object]] = [pattern.match, pattern.fullmatch]
    if not any(f".{place}." in name for place in AT_ONE_PLACE):
        calls.append(pattern.findall)
    attacks = (list(adversarial_lines.attacks(pattern, size)) for size in (SHORT, LONG))
    for short, long in zip(*attacks, strict=True):
        for call in calls:
            assert_linear(call, short, long)


@pytest.mark.parametrize("place", AT_ONE_PLACE)
def test_a_pattern_for_one_place_is_not_searched_for(place: str) -> None:
    module, name = place.rsplit(".", 1)
    (file,) = HEALTH.rglob(f"{module.replace('.', '/')}.py")
    uses = re.findall(rf"\b{name}\.(\w+)\(", file.read_text(encoding="utf-8"))
    assert uses
    assert set(uses) <= {"match", "fullmatch"}


def pieces_of(pattern: str) -> list[str]:
    return [piece for part in pattern.split(" && ") for piece in part.split("*") if piece]


def attacks_on(pattern: str, size: int) -> list[str]:
    """The pattern's pieces again and again: in order, reversed, and without the last."""
    pieces = pieces_of(pattern)
    units = ("".join(pieces), "".join(reversed(pieces)), "".join(pieces[:-1]))
    return [unit * (size // len(unit)) for unit in dict.fromkeys(units) if unit]


def test_a_signatures_pattern_takes_time_in_proportion_to_the_line() -> None:
    patterns = sorted({p for one in SIGNATURES for p in (*one.texts, *one.context, *one.unless)})
    assert len(patterns) > 2_000
    for pattern in patterns:

        def find(line: str, pattern: str = pattern) -> list[LogLine]:
            return list(Log([LogLine(1, line)]).find(pattern))

        shorts, longs = (attacks_on(pattern, size) for size in (SHORT, LONG))
        assert find(" ".join(pieces_of(pattern))), "the pieces in order match"
        for short, long in zip(shorts, longs, strict=True):
            assert_linear(find, short, long)


@pytest.mark.parametrize("unit", adversarial_lines.GENERIC)
def test_a_line_takes_time_in_proportion_to_its_length(unit: str) -> None:
    for head in adversarial_lines.HEADS:
        short, long = (head + unit * (size // len(unit)) for size in (SHORT, LONG))
        assert_linear(lambda line: TextReader().feed((line,)), short, long)


@pytest.mark.parametrize(
    "line",
    [
        " 12%|" + " " * 3_000,
        "CUDA out of memory. " + "9" * 19_000 + " GiB is reserved by PyTorch but unallocated",
        "\u2500" * 6_000 + "x",
        "  * " + "Loss " + " " * 300 + "= 0.5" + " " * 60 + "x",
        "INFO " * 70 + "x",
        "before sleep 1 after " * 900,
    ],
    ids=["bar", "size", "rule", "bullet", "levels", "sleep"],
)
def test_lines_that_once_took_seconds_are_read_at_once(line: str) -> None:
    began = time.process_time()
    read_text("\n".join([line] * 20))
    # Each of them took from 0.05 s to 40 s alone.
    assert time.process_time() - began < 2.0
