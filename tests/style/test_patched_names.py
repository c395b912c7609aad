"""Tests replace functions of ours by name; the names exist, in tests that run only at night, too.

Python in a string    every name of ours that it imports, and every attribute of such a name
place and name        two strings side by side, as `runs.before` takes them
patched objects       the first two arguments of `setattr` and `patch.object`; paths of `patch`
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(file for file in TESTS.rglob("*.py") if "homeostat" in file.read_text("utf-8"))
PATCHES = ("setattr", "delattr", "object")

# A name of ours, and where a file or a string uses it.
Use = tuple[str, int]


def text_of(node: ast.AST) -> str | None:
    """Return the text of a string, with a name in place of each value that is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "placeholder" for part in node.values)
    return None


def imported(tree: ast.AST) -> dict[str, str]:
    """Return the full name of each name of ours that is imported, by the name it has here."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("homeostat"):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                one.asname: one.name
                for one in node.names
                if one.asname and one.name.startswith("homeostat.")
            }
    return found


def in_python(text: str, line: int) -> Iterator[Use]:
    """Yield the names of ours in Python that is written in a string."""
    if not re.search(r"^\s*(from|import) homeostat\b", text, re.MULTILINE):
        return
    try:
        tree = ast.parse(re.sub(r"\{\w+\}", "placeholder", text))
    except SyntaxError:
        return
    names = imported(tree)
    yield from ((full, line) for full in names.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in names:
                yield f"{names[node.value.id]}.{node.attr}", line


def side_by_side(nodes: list[ast.expr]) -> Iterator[Use]:
    """Yield a place and a name in it that stand one after the other."""
    for first, second in pairwise(nodes):
        place, name = text_of(first), text_of(second)
        if place and name and place.startswith("homeostat.") and not name.startswith("homeostat"):
            if re.fullmatch(r"\w+(\.\w+)*", place) and re.fullmatch(r"\w+(\.\w+)*", name):
                yield f"{place}.{name}", first.lineno


def in_patch(call: ast.Call, names: dict[str, str]) -> Iterator[Use]:
    """Yield the name that a call of `setattr`, `patch.object` or `patch` replaces."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    called = call.func.id if isinstance(call.func, ast.Name) else called
    if not call.args or any(word.arg in ("raising", "create") for word in call.keywords):
        return
    path = text_of(call.args[0])
    if path is not None and called in (*PATCHES, "patch") and path.startswith("homeostat."):
        yield path, call.lineno
    if called in PATCHES and len(call.args) > 1:
        head, dot, rest = ast.unparse(call.args[0]).partition(".")
        name = text_of(call.args[1])
        if name and head in names and re.fullmatch(r"[\w.]*", rest):
            yield f"{names[head]}{dot}{rest}.{name}", call.lineno


def uses(file: Path) -> set[Use]:
    tree = ast.parse(file.read_text("utf-8"))
    names = imported(tree)
    found: set[Use] = set()
    # Two strings that are assigned are two things.
    assigned = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign)}
    for node in ast.walk(tree):
        text = text_of(node)
        if text is not None:
            found.update(in_python(text, node.lineno))  # type: ignore[attr-defined]
        if isinstance(node, ast.Tuple) and id(node) not in assigned:
            found.update(side_by_side(node.elts))
        if isinstance(node, ast.Call):
            found.update(side_by_side(node.args))
            found.update(in_patch(node, names))
    return found


def exists(name: str) -> bool:
    """Return whether a dotted name leads to a module or to what it holds."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        module = ".".join(parts[:split])
        try:
            value: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or "?"):
                # An optional package is missing here: nothing can be said.
                return True
            continue
        for part in parts[split:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


def test_names_that_tests_replace_exist() -> None:
    found = {(file, *use) for file in FILES for use in uses(file)}
    assert len(found) > 80
    gone = [use for use in sorted(found) if not exists(use[1])]
    assert [f"{file.relative_to(TESTS)}:{line}: {name}" for file, name, line in gone] == []


@pytest.mark.parametrize(
    "code",
    [
        'TEXT = """\nfrom homeostat.run.sft import gone\n"""',
        'TEXT = f"import homeostat.run.sft as place\\nplace.gone = {1}"',
        'before("homeostat.run.sft", "gone", "pass")',
        'CASES = [("homeostat.run.sft", "Gone.run")]',
        'monkeypatch.setattr("homeostat.run.sft.gone", None)',
        'from homeostat.run import sft\nmonkeypatch.setattr(sft, "gone", None)',
        'from homeostat.run import sft\npatch.object(sft.train_sft, "gone")',
        'patch("homeostat.run.sft.gone")',
    ],
)
def test_a_name_that_is_gone_is_found(tmp_path: Path, code: str) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(code, encoding="utf-8")
    assert any(not exists(name) for name, _ in uses(file))
    file.write_text(re.sub(r"[gG]one(\.run)?", "__name__", code), encoding="utf-8")
    assert all(exists(name) for name, _ in uses(file))
