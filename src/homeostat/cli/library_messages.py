"""Collect the messages that a library can raise, and add labelled ones to what the doctor knows.

    sources of a package -> messages of `raise` and `assert` -> those that the doctor cannot read
    -> labelled by a person -> health/failures/library_messages.txt

A line of the list is: library <tab> illnesses, separated by commas <tab> message. Values that are
filled in at run time stand as {...}.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from homeostat.errors import HomeostatError
from homeostat.health.diagnose import diagnose
from homeostat.health.failures.library_messages import (
    FILE,
    MIN_WORDS,
    LibraryMessage,
    distinctive,
    file_text,
    parse,
    words_of,
)
from homeostat.health.finding import Level
from homeostat.health.guesses.second_opinion import LEAVES_OPEN
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES
from homeostat.health.vocabulary import FAMILY_OF

MESSAGES = Path("src") / "homeostat" / "health" / "failures" / FILE.name
UNLABELLED = "?"
_VALUE = "{...}"
_TESTS = frozenset({"test", "tests", "testing"})
_VALUES = re.compile(re.escape(_VALUE) + r"|%[sdrfi]|\{[^}]*\}")


@dataclass(frozen=True, slots=True)
class Raised:
    """A message in a library's sources, and the exception that carries it."""

    library: str
    file: str
    exception: str
    message: str


def folder_of(package: str) -> Path:
    """Return the folder of an installed package, or of a checkout if a path is given."""
    if Path(package).is_dir():
        return Path(package)
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise HomeostatError(
            f"{package} is neither an installed package nor a folder. Give the name by which it is "
            "imported, or the folder of its sources."
        )
    return Path(next(iter(found.submodule_search_locations)))


def raised_in(folder: Path) -> Iterator[Raised]:
    """Yield the messages of all `raise` and `assert` statements of a package without its tests.

    Files that are no Python (templates) or that cannot be read are skipped.
    """
    seen: set[frozenset[str]] = set()
    library = folder.resolve().name
    for file in sorted(folder.rglob("*.py")):
        place = file.relative_to(folder)
        if not _TESTS.isdisjoint(place.parts):
            continue
        try:
            found = list(_messages(ast.parse(file.read_bytes())))
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        for exception, message in found:
            words = words_of(_VALUES.sub(" ", message))
            if len(words) >= MIN_WORDS and words not in seen:
                seen.add(words)
                yield Raised(library, str(place), exception, message)


def _messages(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            said = " ".join(filter(None, map(_text, node.exc.args)))
            name = ast.unparse(node.exc.func).rpartition(".")[2]
        elif isinstance(node, ast.Assert) and node.msg is not None:
            said, name = _text(node.msg), "AssertionError"
        else:
            continue
        if said:
            yield name, " ".join(said.split())


def _text(node: ast.expr) -> str:
    """Return the text of an expression, with {...} for what is only known at run time."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(_text, parts))
        case ast.FormattedValue():
            return _VALUE
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return f"{_text(left)}{_text(right)}"
        case ast.BinOp(left=left, op=ast.Mod()):
            return _text(left)
        case ast.Call(func=ast.Attribute(value=value, attr="format")):
            return _text(value)
    return ""


def is_left_open(raised: Raised) -> bool:
    """Return whether the doctor can at best guess what this message means."""
    message = _VALUES.sub("X", raised.message)
    place = f"/usr/lib/python3/site-packages/{raised.library}/{raised.file}"
    log = (
        f'Traceback (most recent call last):\n  File "{place}", line 1, in f\n'
        f"{raised.exception}: {message}\n"
    )
    found = diagnose(read_text(log), RULES).findings
    first = next((one for one in found if one.level is not Level.INFO), None)
    if first is None:
        return True
    causes = first.causes[:1]
    return first.name in LEAVES_OPEN and all(cause.guess is not None for cause in causes)


def parse_labels(lines: Iterable[str]) -> list[LibraryMessage]:
    """Return the labelled messages, or raise with everything that is wrong with them.

    Lines whose illness is still `?` are left out.
    """
    found: list[LibraryMessage] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        cells = line.rstrip("\n").split("\t")
        if not line.strip() or cells[1:2] == [UNLABELLED]:
            continue
        problem = _problem(cells)
        if problem:
            problems.append(f"line {number}: {problem}")
            continue
        library, names, message = cells
        words = words_of(_VALUES.sub(" ", message))
        found.append(LibraryMessage(_split(names), _split(library), words))
    if problems:
        raise HomeostatError("\n".join([*problems, "Nothing was added."]))
    return found


def _problem(cells: list[str]) -> str:
    if len(cells) != 3:
        return f"{len(cells)} columns: write library, illnesses and message, separated by tabs."
    if not cells[0].strip():
        return "the library has no name."
    unknown = [name for name in _split(cells[1]) if name not in FAMILY_OF]
    if unknown:
        return f"{', '.join(unknown)} is not in health/vocabulary.py."
    return ""


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(","))


def add(root: Path, messages: Sequence[LibraryMessage]) -> tuple[int, int]:
    """Add messages to those in a checkout; a message that is known gets the new illnesses.

    Return how many are new, and how many were left out because their words are too common.
    """
    file = root / MESSAGES
    known = [parse(line) for line in file.read_text(encoding="utf-8").splitlines()]
    kept = distinctive(messages, known)
    text = file_text([*known, *kept])
    file.write_text(text, encoding="utf-8")
    return text.count("\n") - len(known), len(messages) - len(kept)
