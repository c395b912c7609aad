"""The names that a source file defines, each with the class or function that owns it.

A setting exists where a program defines it: a flag that a parser is given, a field of a config
class, a parameter of a function, a key of a config file, an environment variable that is read. A
name that only stands in a comment, a docstring or a sentence is not a definition.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

import yaml

# Files in which settings are defined. Compiled code reads environment variables, too.
COMPILED = (".c", ".cc", ".cpp", ".cu", ".cuh", ".go", ".h", ".hpp", ".rs")
SUFFIXES = (".py", ".yaml", ".yml", *COMPILED)
# A part of a flag that a program computes: f"--{role}.lr".
ANY = "*"
_WORD = re.compile(r"-{0,2}[A-Za-z][\w.-]*")
_FLAG = re.compile(r"--[\w.*-]*[A-Za-z][\w.*-]*")
_QUOTED = re.compile(r'"([A-Za-z][\w-]*)"')
# Ray's and NCCL's macros define a variable by a part of its name.
_MACRO = {
    "RAY_": re.compile(r"\bRAY_CONFIG\(\s*[\w:<>]+,\s*(\w+)"),
    "NCCL_": re.compile(r'\bNCCL_PARAM\(\s*\w+,\s*"(\w+)"'),
    "": re.compile(r"\bDEFINE_NCCL_PARAM\(\s*\w+,\s*\w+,\s*(NCCL_\w+)"),
}
_RUST_FIELD = re.compile(r"^\s+(?:pub )?([a-z]\w*): ", re.M)
_YAML_KEY = re.compile(r"^[ ]*(?:- )?([A-Za-z][\w.-]*):(?:\s|$)", re.M)


@dataclass(frozen=True, slots=True)
class Definition:
    """A defined name.

    `owner` is the class of a field or the qualified name of a parameter's function; "" for flags,
    keys and other whole words of a program. `is_path` says that the name is the whole dotted path
    of a key in its file.
    """

    name: str
    owner: str = ""
    is_path: bool = False


def definitions(text: str, *, path: str) -> frozenset[Definition]:
    """Return what a file defines; nothing for a file whose language is not read."""
    suffix = PurePosixPath(path).suffix
    if suffix == ".py":
        return frozenset(_of_python(text))
    if suffix in (".yaml", ".yml"):
        return frozenset(_of_yaml(text))
    if suffix in COMPILED:
        fields = _RUST_FIELD.findall(text) if suffix == ".rs" else []
        return frozenset((*_of_compiled(text), *map(Definition, fields)))
    return frozenset()


def is_defined_by(setting: str, found: Definition) -> bool:
    """Return whether a definition is the one of a setting, which is written as a user does."""
    wanted = _folded(setting.lstrip("-").replace("[]", ""))
    name = _folded(found.name.lstrip("-"))
    if found.is_path:
        return wanted == name or wanted.endswith(f".{name}")
    if found.name.startswith("--"):
        is_same = wanted in (name, f"no_{name}") or (ANY in name and fnmatchcase(wanted, name))
        return is_same and setting.startswith("-")
    last = wanted.rpartition(".")[2]
    return name in (last, wanted) or (setting.startswith("--no-") and f"no_{name}" == wanted)


def _folded(name: str) -> str:
    return name.replace("-", "_")


def _of_python(text: str) -> Iterator[Definition]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        # Templates of code and files of another Python's syntax define nothing for us.
        return
    # A config may be a module of plain names.
    yield from (Definition(name) for name in _fields(tree))
    yield from _in_body(tree, owner="")
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in documentation:
            word = node.value
            if isinstance(word, str) and _WORD.fullmatch(word):
                yield Definition(word)
        elif isinstance(node, ast.JoinedStr) and _FLAG.fullmatch(flag := _joined(node)):
            yield Definition(flag)


def _joined(node: ast.JoinedStr) -> str:
    """Return an f-string with a star for each part that is computed."""
    return "".join(str(one.value) if isinstance(one, ast.Constant) else ANY for one in node.values)


def _in_body(node: ast.AST, *, owner: str) -> Iterator[Definition]:
    """Return fields and parameters; the owner of a nested one is joined by dots."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            inner = f"{owner}.{child.name}".lstrip(".")
            yield from (Definition(name, inner) for name in _fields(child))
            yield from _in_body(child, owner=inner)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{owner}.{child.name}".lstrip(".")
            given = child.args
            everything = (*given.posonlyargs, *given.args, *given.kwonlyargs)
            yield from (Definition(one.arg, inner) for one in everything if one.arg != "self")
            yield from _in_body(child, owner=inner)
        elif not isinstance(child, ast.expr):
            yield from _in_body(child, owner=owner)


def _fields(node: ast.ClassDef | ast.Module) -> Iterator[str]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            yield line.target.id
        elif isinstance(line, ast.Assign):
            yield from (one.id for one in line.targets if isinstance(one, ast.Name))


def _of_yaml(text: str) -> Iterator[Definition]:
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError:
        # A template, or tags of another program: the keys are there, their nesting is not known.
        yield from (Definition(key) for key in _YAML_KEY.findall(text))
        return
    for document in documents:
        yield from (Definition(path, is_path=True) for path in _paths(document, prefix=""))


def _paths(value: Any, *, prefix: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            path = f"{prefix}.{key}".lstrip(".")
            yield path
            yield from _paths(inner, prefix=path)
    elif isinstance(value, list):
        for inner in value:
            yield from _paths(inner, prefix=prefix)


def _of_compiled(text: str) -> Iterator[Definition]:
    yield from (Definition(word) for word in _QUOTED.findall(text))
    for prefix, macro in _MACRO.items():
        yield from (Definition(prefix + name) for name in macro.findall(text))
