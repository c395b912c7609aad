"""A log's search against the plain one: every line, every piece, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from homeostat.health.log import Log, LogLine

WORDS = st.sampled_from(["rank", "Rank", "rank3", "out of", "OOM", "12", "-9", "é", "x=1", "a\tb"])
LINES = st.lists(st.lists(WORDS, max_size=5).map(" ".join), max_size=12)
PATTERNS = st.one_of(
    st.lists(WORDS, min_size=1, max_size=3).map(" ".join),
    st.lists(WORDS, min_size=2, max_size=3).map("*".join),
    st.lists(WORDS, min_size=2, max_size=2).map(" && ".join),
    st.text("rank39 o=-*", min_size=1, max_size=8).filter(lambda text: text.strip("*")),
)


def numbered(lines: list[str], *, gap: int = 1) -> Log:
    return Log([LogLine(index * gap + 1, text) for index, text in enumerate(lines)])


def matches(line: str, pattern: str) -> bool:
    for part in pattern.lower().split(" && "):
        rest = line.lower()
        for piece in part.split("*"):
            _, found, rest = rest.partition(piece) if piece else ("", "", rest)
            if piece and not found:
                return False
    return True


@given(LINES, PATTERNS)
def test_find_yields_the_lines_that_match(lines: list[str], pattern: str) -> None:
    found = [line.number for line in numbered(lines).find(pattern)]
    assert found == [n for n, line in enumerate(lines, start=1) if matches(line, pattern)]


@given(LINES.filter(bool), PATTERNS, st.integers(0, 4), st.integers(1, 3))
def test_near_looks_at_the_lines_around(
    lines: list[str], pattern: str, reach: int, gap: int
) -> None:
    log = numbered(lines, gap=gap)
    middle = log.lines[len(lines) // 2]
    near = [line for line in log.lines if abs(line.number - middle.number) <= reach]
    expected = next((line for line in near if matches(line.text, pattern)), None)
    assert log.near(middle, pattern, lines=reach) == expected


def test_a_number_at_the_end_of_a_pattern_is_a_whole_one() -> None:
    log = Log([LogLine(1, "500 rows left, exit code 137, Converted 10 modules")])
    assert log.has("500 rows left")
    assert log.has("exit code 137")
    assert not log.has("0 rows left")
    assert not log.has("exit code 1")
    assert not log.has("0 && modules")
    assert log.has("exit code 1*")
    assert log.has("*0 rows left")
    # An earlier place that cuts a number does not hide a later one that does not.
    assert Log([LogLine(1, "100 rows left of 7, 0 rows left of 8")]).has("0 rows left")
