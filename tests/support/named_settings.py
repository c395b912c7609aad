"""Find environment variables and flags that the sentences of causes and fixes name.

The setting of a fix is translated for a framework (telling.py) and so is one of its list. Sentences
are printed as they are, whatever framework runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import homeostat.health
from homeostat.health.frameworks import ALL, UNKNOWN
from homeostat.health.frameworks.known import known
from homeostat.health.registry import SIGNATURES

# Lists of what sentences may name for any framework.
SHARED = ("environment", "commands")
# Read by the loader, compilers and every HTTP client, so by no framework in particular.
_SYSTEM = ("LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "HTTPS_PROXY")
# Not settings: a capability, a section of nvidia-smi, a feature of processors, a flag of ours and
# one of compute-sanitizer.
_OTHER = ("SYS_PTRACE", "PAGE_RETIREMENT", "FEAT_BF16", "layers", "tool")
HEALTH = Path(homeostat.health.__file__).parent
# Words that can only be settings: flags, and environment variables.
_WORD = re.compile(r"(?<![\w/.-])(?:--[a-z][\w.-]*\w|[A-Z][A-Z0-9]*_[A-Z][A-Za-z0-9_]+|RAY_\w+)\b")
_BUILDERS = ("Fix", "Cause")
_TO_DO = re.compile(r"^## What to do\n(.*?)(?=^## |\Z)", re.M | re.S)


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence that a finding may print; `where` is its signature or file."""

    where: str
    text: str


def sentences() -> Iterator[Sentence]:
    """Return what causes and fixes say in words."""
    for one in SIGNATURES:
        words = (one.what, *(cause.why for cause in one.causes))
        words += tuple(part for fix in one.fixes for part in (fix.value, fix.why))
        yield from (Sentence(one.code, text) for text in words)
    for path, node in _calls():
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield Sentence(path.name, part.value)
    for path in sorted((HEALTH / "rules").rglob("*.py")):
        page = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        yield from (Sentence(path.name, text) for text in _TO_DO.findall(page))


def is_known(word: str) -> bool:
    """Return whether a word is a setting, or one of its values, that some list has."""
    return word.lstrip("-") in _known_words()


def unknown_words() -> dict[str, set[str]]:
    """Return words of sentences that no list has -> where they stand."""
    found: dict[str, set[str]] = {}
    for sentence in sentences():
        for word in _WORD.findall(sentence.text):
            if not is_known(word):
                found.setdefault(word, set()).add(sentence.where)
    return found


@cache
def _known_words() -> frozenset[str]:
    found = {*_SYSTEM, *_OTHER}
    for name in (*(one for one in ALL if one != UNKNOWN.name), *SHARED):
        for setting, kind in (known(name).settings or {}).items():
            found.add(setting.lstrip("-"))
            found.update(kind if isinstance(kind, tuple) else ())
    return frozenset(found)


def _calls() -> Iterator[tuple[Path, ast.Call]]:
    """Return the places in Python where causes and fixes are written down."""
    for path in sorted(HEALTH.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in _BUILDERS:
                yield path, node
