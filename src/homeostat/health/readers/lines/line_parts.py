"""Split a console line into redrawn progress bars, prefixes of Ray or launchers, and the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence

from homeostat.health.readers.lines.bars import bar_in

_ACTOR = re.compile(r"^\s*+\((?P<actor>[^()]{0,80}?)\s?pid=\d++[^()]{0,80}+\)\s?")
_MAX_ACTORS = 4
_RANK = re.compile(r"^\[?(?:default|rank)\s?(?P<rank>\d{1,6})\]?\s?:\s?", re.IGNORECASE)
# A line with a prefix of Ray or of a launcher begins with one of these characters.
_PREFIXED = frozenset("( [dDrR")
_PERCENTAGE = " 0123456789"
_DIGIT = re.compile(r"[0-9]")
# Drawings of one bar as in `is_one_bar`: all have the same title and no metrics.
_ONE_BAR = re.compile(
    rb"(?P<title>(?:[^\r\x1b%|={0-9]*[^\r\x1b%|={0-9 ])?)[ 0-9]*+%\|[^\r\x1b={]*+"
    rb"(?:\r(?P=title)[ 0-9]*+%\|[^\r\x1b={]*+)++"
)
_REPEATED = re.compile(r"\[repeated \d++x across cluster\]")

# One step of an episode: `step=3 action=... reward=0.5 done=false`.
_TRANSITION = re.compile(
    r"\b(?:done|terminal|terminated|truncated)['\"]?\s?[=:]\s?(?:true|false)\b", re.IGNORECASE
)


def is_transition(body: str) -> bool:
    """Return whether a line reports an agent's action or observation in one step of an episode."""
    is_told = "action" in body or "observation" in body
    return is_told and _TRANSITION.search(body) is not None


def apart(piece: str) -> list[str]:
    """Split a progress bar from the text that was printed after it on the same line.

        5%|4         | 7/150 [00:12<04:04,  1.71s/it]Traceback (most recent call last):

    A row of metrics after a bar is not split off, because it belongs to the step that the bar
    shows.
    """
    if "%|" not in piece or "{" in piece or piece.rstrip().endswith("]"):
        return [piece]
    bar = bar_in(piece)
    if bar is None or not piece[bar.end :].strip():
        return [piece]
    return [piece[: bar.end], piece[bar.end :].lstrip()]


def is_redrawn(piece: str, following: str) -> bool:
    """Return whether the next drawing replaces this one of a bar without metrics.

    Then only the later drawing is used.
    """
    title, sign, rest = piece.partition("%|")
    if not sign or "=" in rest or "{" in piece or "{" in following or " 0/" in following:
        return False
    if "%|" not in following:
        # tqdm.write() clears the bar by spaces before it prints a row of metrics.
        return False
    title = title.rstrip(_PERCENTAGE)
    return title == following.partition("%|")[0].rstrip(_PERCENTAGE) and not _DIGIT.search(title)


def is_one_bar(pieces: Sequence[str]) -> bool:
    """Return whether every piece but the last is replaced by the next one (`is_redrawn`)."""
    parts = [piece.partition("%|") for piece in pieces]
    titles = {title.rstrip(_PERCENTAGE) for title, _, _ in parts}
    if len(titles) != 1 or not all(sign for _, sign, _ in parts):
        return False
    if any("=" in rest or " 0/" in rest for _, _, rest in parts) or any("{" in p for p in pieces):
        return False
    return not _DIGIT.search(titles.pop())


def last_drawing(line: bytes) -> bytes:
    """Return the last drawing of a line that only redraws one bar; any other line unchanged."""
    if b"\r" not in line or b" 0/" in line or not line.isascii():
        return line
    return line.rpartition(b"\r")[2] if _ONE_BAR.fullmatch(line) else line


def bare(piece: str) -> tuple[str, str, int]:
    """Return a line without prefixes of Ray and launchers, the actor's name, and the rank."""
    source, rank = "", 0
    body = piece
    if body[:1] not in _PREFIXED and "[repeated " not in body:
        return body, source, rank
    for _ in range(_MAX_ACTORS):
        found = _ACTOR.match(body) if body[:1] in {"(", " "} else None
        if not found:
            break
        source, body = found["actor"] or source, body[found.end() :]
    found = _RANK.match(body)
    if found:
        rank, body = int(found["rank"]), body[found.end() :]
    if "[repeated " in body:
        found = _REPEATED.search(body)
        body = body[: found.start()].rstrip() if found else body
    return body, source, rank
