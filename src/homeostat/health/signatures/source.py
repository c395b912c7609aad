"""Parse the TOML files of signatures, and say what is wrong with them and how to fix it.

A problem names the file and the code. All problems of all files are found before any is raised.
The package's docstring says what the keys mean; KEYS_* list them.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints, is_typeddict

from homeostat.errors import Problem, SignatureError
from homeostat.health.finding import Confidence, Family, Grade, Level
from homeostat.health.frameworks import ALL
from homeostat.health.frameworks.known import known
from homeostat.health.frameworks.planned import FOREIGN, PLANNED
from homeostat.health.frameworks.telling import named_settings
from homeostat.health.signatures.folder import COMPILED, FOLDER, Row, checksums, toml_texts
from homeostat.health.signatures.lists import LISTS
from homeostat.health.signatures.predicates import PREDICATES
from homeostat.health.vocabulary import FAMILY_OF

SHARED = "shared.toml"
# A pattern's longest piece without wildcards: anything shorter is found in every log.
MIN_PIECE = 4
_CODE = re.compile(r"[A-Z]{3}\d{3}")
# Marks of a regular expression. A pattern is plain text, so that it takes time in proportion to the
# line; what needs an expression is a predicate, whose expressions tests/health/test_linear_time.py
# tries against adversarial lines.
_EXPRESSION = re.compile(r"\\[a-zA-Z]|\(\?|\[[^\]]{1,20}\][*+]")


@dataclass(frozen=True, slots=True)
class Key:
    """The kind of value that a key holds: text, prose, texts, flag, count, table or tables."""

    kind: str
    is_required: bool = False
    choices: Sequence[str] = ()


KEYS_OF_FILE = {"lists": Key("table"), "fixes": Key("table"), "signature": Key("tables")}
KEYS_OF_SIGNATURE = {
    "code": Key("text", is_required=True),
    "name": Key("text", is_required=True),
    "family": Key("text", choices=tuple(Family)),
    "level": Key("text", choices=tuple(Level)),
    "confidence": Key("text", choices=tuple(Confidence)),
    "texts": Key("texts", is_required=True),
    "context": Key("texts"),
    "within": Key("count"),
    "unless": Key("texts"),
    "when": Key("table"),
    "notes": Key("flag"),
    "survivable": Key("flag"),
    "passing": Key("flag"),
    "ends_run": Key("flag"),
    "what": Key("prose", is_required=True),
    "why": Key("prose", is_required=True),
    "explains": Key("texts"),
    "cause": Key("tables"),
    "fix": Key("tables", is_required=True),
}
KEYS_OF_CAUSE = {"name": Key("text", is_required=True), "why": Key("prose", is_required=True)}
KEYS_OF_FIX = {
    "setting": Key("text"),
    "value": Key("prose"),
    "why": Key("prose", is_required=True),
    "grade": Key("text", choices=tuple(Grade)),
    "theirs": Key("table"),
}
KEYS_OF_USE = {"use": Key("text", is_required=True)}
PATTERNS = ("texts", "context", "unless")


def parse(texts: Mapping[str, bytes]) -> list[Row]:
    """Return the stanzas of all files, with references to their own lists and fixes resolved."""
    files = [_File(name) for name in texts]
    tables = {file.name: file.toml(texts[file.name]) for file in files}
    shared = tables.get(SHARED, {}).get("fixes", {})
    found = [(file, row) for file in files for row in file.rows(tables[file.name], shared)]
    first: dict[str, _File] = {}
    for file, row in found:
        if row["code"] in first:
            file.complain(row["code"], f"{first[row['code']].name} has this code already.")
        first.setdefault(row["code"], file)
    problems = [(file.name, problem) for file in files for problem in file.problems]
    if problems:
        raise SignatureError("\n".join(problem.render(name) for name, problem in problems))
    return [row for _, row in found]


def write_compiled(folder: Path = FOLDER) -> None:
    """Write compiled.json for the TOML files of a folder."""
    text = compiled_text(toml_texts(folder))
    (folder / COMPILED).write_text(text, encoding="utf-8")


def compiled_text(texts: Mapping[str, bytes]) -> str:
    """Return what compiled.json holds: a line per signature, so that a change is a short diff."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in parse(texts))
    sums = json.dumps(checksums(texts), indent=0)
    return f'{{"checksums": {sums},\n"signatures": [\n{lines}\n]}}\n'


@dataclass(slots=True)
class _File:
    """One TOML file, and the problems found in it."""

    name: str
    problems: list[Problem] = field(default_factory=list)

    def complain(self, place: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(place, message, hint))

    def toml(self, text: bytes) -> Row:
        try:
            found = tomllib.loads(text.decode("utf-8"))
        except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
            self.complain("", f"not TOML: {error}.")
            return {}
        return self.table(found, KEYS_OF_FILE, place="")

    def rows(self, table: Row, shared: Mapping[str, Row]) -> list[Row]:
        """Return the file's stanzas. `shared` are the fixes of shared.toml."""
        lists = {name: one for name, one in table.get("lists", {}).items() if _is_texts(one)}
        for name in table.get("lists", {}).keys() - lists.keys():
            self.complain(f"lists.{name}", f"it is no list. It holds {_KINDS['texts']}.")
        for name in lists.keys() & LISTS.keys():
            self.complain(f"lists.{name}", "lists.py has a list of this name.", "Rename it.")
        own = table.get("fixes", {})
        if self.name != SHARED:
            for name in own.keys() & shared.keys():
                self.complain(f"fixes.{name}", f"{SHARED} has a fix of this name.", "Rename it.")
        fixes = {
            name: self.fix(one, f"fixes.{name}", is_reported=name in own)
            for name, one in {**shared, **own}.items()
        }
        return [self.row(one, lists, fixes) for one in table.get("signature", ())]

    def row(self, stanza: Row, lists: Mapping[str, list[str]], fixes: Mapping[str, Row]) -> Row:
        """Return one stanza as plain data."""
        code = str(stanza.get("code", "(a stanza without code)"))
        row = self.table(stanza, KEYS_OF_SIGNATURE, place=code)
        if not _CODE.fullmatch(code):
            self.complain(code, "a code is three capital letters and three digits, like ERR001.")
        self.family(row, code)
        for key in ("texts", "context", "unless", "explains"):
            if key in row:
                row[key] = self.expanded(row[key], lists, code)
        for pattern in (one for key in PATTERNS for one in row.get(key, ())):
            if not pattern.startswith("@") and (problem := pattern_problem(pattern)):
                self.complain(code, problem)
        if "when" in row:
            row["when"] = self.when(row["when"], lists, code)
        causes = [self.table(one, KEYS_OF_CAUSE, place=code) for one in row.pop("cause", ())]
        for name in [row.get("name", ""), *(one.get("name", "") for one in causes)]:
            if name not in FAMILY_OF:
                self.complain(code, f"no illness is called {name!r}.", _NAME_IT)
        given = [self.used(one, fixes, code) for one in row.pop("fix", ())]
        return {"code": code, **row} | ({"cause": causes} if causes else {}) | {"fix": given}

    def family(self, row: Row, code: str) -> None:
        """Fill in the family that the file's name says."""
        stem = self.name.removesuffix(".toml")
        if "family" not in row and stem not in tuple(Family):
            self.complain(code, f"family is missing: {stem!r} is no family.", _one_of(Family))
        row.setdefault("family", stem)

    def used(self, fix: Row, fixes: Mapping[str, Row], code: str) -> Row:
        """Return a fix of a stanza, or the named one that it uses."""
        if "use" not in fix:
            return self.fix(fix, code)
        name = self.table(fix, KEYS_OF_USE, place=code).get("use", "")
        if name not in fixes:
            self.complain(code, f"there is no fix {name!r} to use.", _meant(name, fixes))
        return fixes.get(name, {})

    def fix(self, fix: Row, place: str, *, is_reported: bool = True) -> Row:
        """Check a fix; `is_reported` is false for one that another file complains about."""
        reader = self if is_reported else _File(self.name)
        row = reader.table(fix, KEYS_OF_FIX, place=place)
        setting = row.get("setting", "")
        ours = {**(known("homeostat").settings or {}), **PLANNED, **FOREIGN}
        if setting and setting not in ours:
            hint = _meant(setting, ours) or "known/homeostat.toml and planned.py list them."
            reader.complain(place, f"{setting!r} is no setting of a recipe.", hint)
        for framework, text in row.get("theirs", {}).items():
            reader.theirs(framework, str(text), place)
        return row

    def theirs(self, framework: str, text: str, place: str) -> None:
        """Check that a framework has the settings that a fix names."""
        if framework not in ALL:
            hint = _meant(framework, ALL)
            self.complain(place, f"theirs: there is no framework {framework!r}.", hint)
            return
        facts = known(framework)
        for name, _ in named_settings(text):
            if facts.spelling(name) is None:
                hint = _meant(name, facts.settings or {}) or f"known/{framework}.toml lists them."
                self.complain(place, f"theirs: {framework} has no setting {name!r}.", hint)

    def when(self, when: Row, lists: Mapping[str, list[str]], code: str) -> Row:
        """Check the conditions, and put the file's own lists into their arguments."""
        for name, argument in when.items():
            if name not in PREDICATES:
                hint = _meant(name, PREDICATES) or "predicates.py has them."
                self.complain(code, f"when: there is no predicate {name!r}.", hint)
            elif not _takes(name, argument):
                self.complain(code, f"when: {name} does not take {argument!r}.", _NO_ARGUMENT)
        return {name: self.argument(value, lists, code) for name, value in when.items()}

    def argument(self, value: Any, lists: Mapping[str, list[str]], code: str) -> Any:
        if isinstance(value, dict):
            return {name: self.argument(one, lists, code) for name, one in value.items()}
        return self.expanded(value, lists, code) if isinstance(value, list) else value

    def expanded(self, items: Iterable[str], lists: Mapping[str, list[str]], code: str) -> Any:
        """Put the file's own lists in place of their names."""
        found: list[str] = []
        for item in items:
            name = item.removeprefix("@")
            if name == item or name in LISTS:
                found.append(item)
            elif name in lists:
                found += lists[name]
            else:
                self.complain(code, f"there is no list {name!r}.", _meant(name, {**lists, **LISTS}))
        return found

    def table(self, given: Any, keys: Mapping[str, Key], *, place: str) -> Row:
        """Keep the known keys of a table whose values are of the right kind, prose in one line."""
        if not isinstance(given, dict):
            self.complain(place, f"{given!r} should be a table.")
            return {}
        for name in given.keys() - keys.keys():
            hint = _meant(name, keys) or f"Known are {', '.join(keys)}."
            self.complain(place, f"unknown key {name!r}.", hint)
        found: Row = {}
        for name, key in keys.items():
            if name not in given:
                if key.is_required:
                    self.complain(place, f"{name} is missing.")
            elif not _fits(given[name], key):
                wanted = _one_of(key.choices) if key.choices else f"It holds {_KINDS[key.kind]}."
                self.complain(place, f"{name} is {given[name]!r}.", wanted)
            else:
                value = given[name]
                found[name] = " ".join(value.split()) if key.kind == "prose" else value
        return found


_NAME_IT = "Add the name and its meaning to health/vocabulary.py."
_NO_ARGUMENT = "A predicate without argument is named with true."
_SAY_MORE = f"A part of it without wildcards needs at least {MIN_PIECE} characters."
_PLAIN = "Write plain text with * for anything; what needs an expression is a predicate."
_KINDS = {
    "text": "a text that is not empty",
    "prose": "a text that is not empty",
    "texts": "a list of texts that is not empty",
    "flag": "true or false",
    "count": "a whole number, 0 or more",
    "table": "a table",
    "tables": "tables: [[signature]], [[signature.cause]] or [[signature.fix]]",
}


def pattern_problem(pattern: str) -> str:
    """Say what is wrong with a pattern: too short, several lines, or a regular expression."""
    if "\n" in pattern:
        return f"the pattern {pattern!r} has several lines; it is looked for in one."
    if len(max(re.split(r"\*| && ", pattern), key=len)) < MIN_PIECE:
        return f"the pattern {pattern!r} is found everywhere. {_SAY_MORE}"
    if _EXPRESSION.search(pattern):
        return f"{pattern!r} is a regular expression. {_PLAIN}"
    return ""


def _fits(value: Any, key: Key) -> bool:
    """Return whether a value is of the kind that a key holds."""
    if key.choices:
        return isinstance(value, str) and value in key.choices
    if key.kind in ("text", "prose"):
        return isinstance(value, str) and bool(value.strip())
    if key.kind == "texts":
        return _is_texts(value)
    if key.kind == "tables":
        return isinstance(value, list) and all(isinstance(one, dict) for one in value)
    if key.kind == "count":
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return isinstance(value, bool if key.kind == "flag" else dict)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _takes(name: str, argument: Any) -> bool:
    """Return whether a predicate takes an argument, by its own signature."""
    hints = get_type_hints(PREDICATES[name])
    wanted = [hint for parameter, hint in hints.items() if parameter not in ("view", "return")]
    return _is_of(argument, wanted[0]) if wanted else argument is True


def _is_of(value: Any, hint: Any) -> bool:
    if is_typeddict(hint):
        parts = get_type_hints(hint)
        fits = isinstance(value, dict) and value.keys() == parts.keys()
        return fits and all(_is_of(value[name], part) for name, part in parts.items())
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and value is not True
    return _is_texts(value)


def _meant(name: str, known_names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known_names), n=1)
    return f"Did you mean {close[0]!r}?" if close else ""


def _one_of(choices: Iterable[str]) -> str:
    return f"One of {', '.join(choices)}."
