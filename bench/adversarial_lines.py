"""Lines made to keep a backtracking matcher busy, from the patterns themselves and from habit.

`attacks` reads a pattern's syntax tree: before each repeat it writes the shortest text that leads
there, then characters that the repeat takes, many times over, then an end that does not match.
Characters are chosen that the neighbours take too, because an ambiguous border between two repeats
is what makes a search quadratic. `GENERIC` needs no pattern: runs of whatever logs are full of.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
import re
from collections.abc import Iterator
from re import _constants as codes
from re import _parser as parser
from typing import Any

import homeostat.health

# Characters that some repeat of most patterns takes.
_CANDIDATES = " 0a,.:=-/_|'\"([{<#%\t9Zs\u2500\u2502\u00e9"
_ENDS = ("", "\x00", "!", " x")
_REPEATS = tuple(
    code
    for name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
    if (code := getattr(codes, name, None)) is not None
)
GENERIC = (
    " ", "0", "9", ",", ".", "a", "A", "_", "-", "=", ":", "|", "{", "[", "(", "<", "'", '"', "\\",
    "\t", "\u2500", "\u2502", "\u2503 ", "\u00e9", "\U0001f600", "a=", "a:", "a b ", "1,", "1.",
    "1,234,", "a: 1, ", "a=1 ", "loss: ", "loss=1 ", "loss ", "step ", "step:1 - ", "step: 1 - a:",
    "{'a': ", "{'a': {", "[[", "({", '{"a":', "\\'", "'a'", "%|", "5%| ", "5%|#| 1/2 [", "| ",
    " |", "1/2 ", "[1", "--a ", "--a=", "a==", "INFO ", "INFO: ", "Epoch ", "iter ", "(train)",
    "(a pid=1) ", "(pid=", "[rank0]: ", "rank0: ", "\x1b[", "\x1b]", "\x1b[1m", "np.float64(",
    "tensor(", "Namespace(", "a(", "<a", "\r", "\r5%| | 1/2 [", "answer: '", "reward: ", "nan ",
    "inf", "1e", "1e5", "-1", "+-", "update weights: ", "sync_weights ", "overflow! ",
    "before sleep ", "pad_token_id 1 ", "process 1 has 1 gib ", "1 gib ", "1 s", "eos", "end of ",
    "Avg ", "Engine 1 ",
    "Decode batch ", "#running-req: 1 ", "[repeated 1x across cluster]",
    "\u2500 Step 1 \u2500",
)  # fmt: skip
HEADS = ("", "step: 1 loss: ", "{'loss': ", " 5%|", "INFO ", "loss=1 reward=", "[prompt] ")


def patterns() -> dict[str, re.Pattern[str]]:
    """Every compiled pattern of the health package: where it is defined -> the pattern."""
    found: dict[str, re.Pattern[str]] = {}
    for module in pkgutil.walk_packages(homeostat.health.__path__, "homeostat.health."):
        for name, value in vars(importlib.import_module(module.name)).items():
            for place, pattern in enumerate(_in_value(value)):
                found[f"{module.name}.{name}.{place}"] = pattern
    unique = {(one.pattern, one.flags): where for where, one in reversed(found.items())}
    return {where: found[where] for where in sorted(unique.values())}


def _of_text(pattern: re.Pattern[bytes]) -> re.Pattern[str]:
    """Return the same pattern for text, in which every byte is a letter."""
    return re.compile(pattern.pattern.decode("latin-1"), pattern.flags | re.ASCII)


def _in_value(value: Any, depth: int = 0) -> Iterator[re.Pattern[str]]:
    if isinstance(value, re.Pattern):
        yield value if isinstance(value.pattern, str) else _of_text(value)
    elif isinstance(value, tuple | list | dict) and depth < 4:
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        for one in inner:
            yield from _in_value(one, depth + 1)


def attacks(pattern: re.Pattern[str], size: int) -> Iterator[str]:
    """Lines of about `size` characters against one pattern."""
    tree = parser.parse(pattern.pattern, pattern.flags)
    pumps = {(before, pump) for before, pump in _pumps(list(tree), "")}
    for before, pump in sorted(pumps):
        for end in _ENDS:
            yield before + pump * (size // len(pump)) + end
        if before:
            # The text that leads to the repeat, again and again: many places to begin from.
            yield (before + pump) * (size // (len(before) + len(pump)))


def _pumps(items: list[Any], before: str) -> Iterator[tuple[str, str]]:
    """Yield the text that leads to each repeat, and a text that it takes."""
    for code, argument in items:
        if code in _REPEATS:
            inner = list(argument[2])
            yield from _pumps(inner, before)
            takes = _matcher(inner)
            if takes is not None:
                yield from ((before, one) for one in _CANDIDATES if takes.fullmatch(one))
            yield before, _shortest(inner, least=1) or " "
        elif code is codes.SUBPATTERN:
            yield from _pumps(list(argument[3]), before)
        elif code is codes.BRANCH:
            for branch in argument[1]:
                yield from _pumps(list(branch), before)
        elif code is codes.ATOMIC_GROUP:
            yield from _pumps(list(argument), before)
        before += _shortest([(code, argument)])


def _matcher(items: list[Any]) -> re.Pattern[str] | None:
    """A pattern for one character, where the repeated item is one."""
    if len(items) != 1:
        return None
    code, argument = items[0]
    if code is codes.ANY:
        return re.compile(".")
    if code is codes.LITERAL:
        return re.compile(re.escape(chr(argument)))
    if code is codes.NOT_LITERAL:
        return re.compile(f"[^{re.escape(chr(argument))}]")
    return re.compile(_set_text(argument)) if code is codes.IN else None


_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d", "CATEGORY_NOT_DIGIT": r"\D", "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S", "CATEGORY_WORD": r"\w", "CATEGORY_NOT_WORD": r"\W",
}  # fmt: skip


def _set_text(parts: list[Any]) -> str:
    text = ""
    for code, argument in parts:
        if code is codes.NEGATE:
            text += "^"
        elif code is codes.LITERAL:
            text += re.escape(chr(argument))
        elif code is codes.RANGE:
            text += f"{re.escape(chr(argument[0]))}-{re.escape(chr(argument[1]))}"
        elif code is codes.CATEGORY:
            text += _CATEGORIES[str(argument)]
    return f"[{text}]"


def _shortest(items: list[Any], *, least: int = 0) -> str:
    """A short text that the items match, as far as one can be written down."""
    text = ""
    for code, argument in items:
        if code is codes.LITERAL:
            text += chr(argument)
        elif code in (codes.IN, codes.ANY, codes.NOT_LITERAL):
            takes = _matcher([(code, argument)])
            assert takes is not None
            text += next((one for one in _CANDIDATES if takes.fullmatch(one)), "")
        elif code in _REPEATS:
            text += _shortest(list(argument[2])) * max(least, argument[0])
        elif code is codes.SUBPATTERN:
            text += _shortest(list(argument[3]))
        elif code is codes.ATOMIC_GROUP:
            text += _shortest(list(argument))
        elif code is codes.BRANCH:
            text += _shortest(list(argument[1][0]))
    return text


def lines(count: int, *, seed: int, longest: int = 20_000) -> Iterator[str]:
    """So many different lines: attacks on all patterns, generic ones, and mixtures of both."""
    rng = random.Random(seed)
    known = list(patterns().values())
    made = 0
    while made < count:
        size = int(10 ** rng.uniform(2, 1) * 10 ** rng.uniform(0, 3)) % longest + 50
        choice = rng.random()
        if choice < 0.5:
            found = list(attacks(rng.choice(known), rng.choice((300, 3_000, longest))))
            line = rng.choice(found) if found else ""
        elif choice < 0.75:
            line = _mixture(rng, size)
        else:
            line = rng.choice(GENERIC) * size
        if line:
            made += 1
            yield line[:longest].replace("\n", " ")


def _mixture(rng: random.Random, size: int) -> str:
    """Pieces that begin like a row, then runs of two things in turn."""
    first, second = rng.choice(GENERIC), rng.choice(GENERIC)
    unit = first * rng.choice((1, 3, 40)) + second * rng.choice((1, 3, 40))
    head = rng.choice(HEADS)
    return head + unit * (size // len(unit) + 1)
