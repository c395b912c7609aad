"""Syntax trees of Python files, for the tests that look at the sources themselves.

Parsing all sources takes seconds, so a file is parsed once per process, and only if a text search
finds the word that a test looks for.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "homeostat"


@cache
def text_of(file: Path) -> str:
    """Return the text of a file, which is read once."""
    return file.read_text(encoding="utf-8")


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree, in the order of `ast.walk`."""
    return list(ast.walk(ast.parse(text_of(file))))


def module_of(file: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    module = nodes_of(file)[0]
    assert isinstance(module, ast.Module)
    return module


def mentions(file: Path, *words: str) -> bool:
    """Return True if any of the words is in the file, wherever."""
    return any(word in text_of(file) for word in words)


@cache
def sources() -> list[Path]:
    """Return the Python files of the package, in order."""
    return sorted(PACKAGE.rglob("*.py"))
