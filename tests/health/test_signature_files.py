"""The TOML files of signatures: what a mistake is told, and that no stale copy of them is used."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from homeostat.errors import SignatureError
from homeostat.health.registry import BY_CODE, SIGNATURES, rule_files
from homeostat.health.signatures.folder import COMPILED, FOLDER, toml_texts
from homeostat.health.signatures.lists import LISTS
from homeostat.health.signatures.load import load, rows
from homeostat.health.signatures.predicates import PREDICATES
from homeostat.health.signatures.source import compiled_text, parse, write_compiled

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
[[signature]]
code = "ERR001"
name = "memory-fragmented"
"""
BODY = """
texts = ["CUDA out of memory"]
what = "It ran out."
why = '''
Too many rows
at once.
'''
"""
FIX = """
[[signature.fix]]
setting = "trainer.lr"
value = "lower"
why = "Because."
"""
WHOLE = HEAD + BODY + FIX


def message(text: str, *, file: str = "memory.toml", shared: str = "") -> str:
    with pytest.raises(SignatureError) as error:
        parse({file: text.encode(), "shared.toml": shared.encode()})
    return str(error.value)


def test_a_stanza_becomes_a_row_whose_prose_is_one_line() -> None:
    (row,) = parse({"memory.toml": WHOLE.encode()})
    assert row["why"] == "Too many rows at once."
    assert row["family"] == "memory"
    assert row["fix"] == [{"setting": "trainer.lr", "value": "lower", "why": "Because."}]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (WHOLE.replace("texts =", "txts ="), "unknown key 'txts'. Did you mean 'texts'?"),
        (WHOLE.replace("texts =", "txts ="), "texts is missing"),
        (HEAD + FIX, "what is missing"),
        (HEAD + BODY, "fix is missing"),
        (WHOLE.replace('"ERR001"', '"ERR1"'), "a code is three capital letters"),
        (WHOLE.replace('["CUDA out of memory"]', '"CUDA"'), "texts is 'CUDA'. It holds a list"),
        (HEAD + "notes = 1" + BODY + FIX, "notes is 1. It holds true or false."),
        (HEAD + "within = -1" + BODY + FIX, "within is -1. It holds a whole number"),
        (HEAD + 'level = "bad"' + BODY + FIX, "level is 'bad'. One of info, warn, error."),
        (
            WHOLE.replace("memory-fragmented", "memory-fragmentd"),
            "no illness is called 'memory-fragmentd'. Add the name",
        ),
        (WHOLE.replace("CUDA out of memory", "a*b c*d"), "is found everywhere"),
        (WHOLE.replace("CUDA out of memory", r"CUDA \\d+ memory"), "is a regular expression"),
        (WHOLE.replace("CUDA out of memory", "@out_of_memry"), "no list 'out_of_memry'. Did you"),
        (HEAD + "when = { is_shred = true }" + BODY + FIX, "no predicate 'is_shred'. Did you mean"),
        (HEAD + "when = { is_shared = 3 }" + BODY + FIX, "is_shared does not take 3"),
        (HEAD + "when = { oom_at = true }" + BODY + FIX, "oom_at does not take True"),
        (HEAD + "when = { tried_at_least_gib = true }" + BODY + FIX, "does not take True"),
        (HEAD + "when = { seen_at_least = { times = 3 } }" + BODY + FIX, "does not take {"),
        (WHOLE.replace("trainer.lr", "trainer.lrr"), "'trainer.lrr' is no setting of a recipe"),
        (WHOLE + 'theirs = { trll = "a" }', "no framework 'trll'. Did you mean 'trl'?"),
        (WHOLE + 'theirs = { trl = "lerning_rate" }', "trl has no setting 'lerning_rate'. Did"),
        (WHOLE + 'grade = "good"', "grade is 'good'. One of safe, unsafe, advice."),
        (WHOLE + '[[signature.fix]]\nuse = "nothing"', "there is no fix 'nothing' to use"),
        (WHOLE + '[[signature.cause]]\nname = "memory-fragmented"', "why is missing"),
    ],
)
def test_a_mistake_is_told_with_its_file_and_code(text: str, told: str) -> None:
    lines = message(text).splitlines()
    code = "ERR1" if '"ERR1"' in text else "ERR001"
    assert any(line.startswith(f"memory.toml: {code}: ") and told in line for line in lines), lines


def test_all_mistakes_are_told_at_once() -> None:
    text = WHOLE.replace("texts =", "txts =").replace("trainer.lr", "lr")
    assert len(message(text).splitlines()) == 3


def test_a_code_is_used_once_over_all_files() -> None:
    with pytest.raises(SignatureError, match=r"own\.toml: ERR001: memory\.toml has this code"):
        parse({
            "memory.toml": WHOLE.encode(),
            "own.toml": WHOLE.replace("name =", 'family = "memory"\nname =', 1).encode(),
        })  # fmt: skip


def test_a_file_that_is_no_family_needs_families() -> None:
    assert "own.toml: ERR001: family is missing" in message(WHOLE, file="own.toml")


def test_what_is_not_toml_is_told_with_its_line() -> None:
    assert "memory.toml: not TOML: " in message("[[signature]]\ncode = \n")
    assert "at line 2" in message("[[signature]]\ncode = \n")


def test_fixes_and_lists_are_used_by_name() -> None:
    shared = "[fixes.rest]" + FIX.replace("[[signature.fix]]", "")
    text = '[lists]\nwords = ["one word", "another"]' + HEAD
    text += BODY.replace('"CUDA out of memory"', '"first", "@words", "@out_of_memory"')
    text += '[[signature.fix]]\nuse = "rest"'
    row, *_ = parse({"memory.toml": text.encode(), "shared.toml": shared.encode()})
    assert row["texts"] == ["first", "one word", "another", "@out_of_memory"]
    assert row["fix"][0]["setting"] == "trainer.lr"
    named_twice = message(text + "\n" + shared, shared=shared)
    assert "memory.toml: fixes.rest: shared.toml has a fix of this name" in named_twice
    taken = message("[lists]\nwaiting = ['a list']" + WHOLE)
    assert "memory.toml: lists.waiting: lists.py has a list of this name" in taken
    assert "memory.toml: lists.words: it is no list" in message("[lists]\nwords = 'a'" + WHOLE)


def test_the_stanza_that_contributors_are_shown_is_right() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", page, re.M | re.S)
    (row,) = parse({"memory.toml": shown.encode()})
    assert set(row["explains"]) <= BY_CODE.keys()


def test_the_compiled_file_is_current() -> None:
    assert (FOLDER / COMPILED).read_text(encoding="utf-8") == compiled_text(toml_texts()), (
        "run `make docs`"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Some of the signatures, compiled."""
    for name in ("agents.toml", "policy.toml", "shared.toml"):
        shutil.copy(FOLDER / name, tmp_path / name)
    write_compiled(tmp_path)
    return tmp_path


def test_the_compiled_file_is_used_while_it_is_current(folder: Path) -> None:
    compiled = json.loads((folder / COMPILED).read_text(encoding="utf-8"))
    compiled["signatures"][0]["what"] = "Only compiled."
    (folder / COMPILED).write_text(json.dumps(compiled), encoding="utf-8")
    assert rows(folder)[0]["what"] == "Only compiled."


def test_an_edited_file_takes_effect_before_anything_is_compiled(folder: Path) -> None:
    first, *others = load(folder)
    text = (folder / "agents.toml").read_text(encoding="utf-8")
    (folder / "agents.toml").write_text(text.replace("Many tool calls", "Some tool calls"))
    assert first.what == "Many tool calls of the model cannot be parsed."
    assert load(folder)[0].what == "Some tool calls of the model cannot be parsed."
    assert load(folder)[1:] == tuple(others)


def test_a_new_file_is_found_by_being_there(folder: Path) -> None:
    for file in folder.glob("*.toml"):
        file.unlink()
    (folder / "memory.toml").write_text(WHOLE, encoding="utf-8")
    assert [one.code for one in load(folder)] == ["ERR001"]


@pytest.mark.parametrize("content", ["<<<<<<< ours\n{}", "[]", "", "{}"])
def test_a_broken_compiled_file_is_not_used(folder: Path, content: str) -> None:
    before = load(folder)
    (folder / COMPILED).write_text(content, encoding="utf-8")
    assert load(folder) == before


def test_every_predicate_and_list_has_a_user() -> None:
    assert {name for one in SIGNATURES for name in one.when} == PREDICATES.keys()
    said = b"".join(toml_texts().values()).decode()
    assert [name for name in LISTS if f'"@{name}"' not in said] == []


def test_every_rule_is_found_by_its_file() -> None:
    codes = [file.name[:6].upper() for file in rule_files()]
    by_words = {one.code for one in SIGNATURES}
    assert sorted(codes) == sorted(BY_CODE.keys() - by_words)


def test_the_files_are_part_of_a_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["homeostat"]
    files = [file.name for file in FOLDER.iterdir() if file.suffix in (".toml", ".json")]
    assert len(files) > 20
    assert all(any(fnmatch(f"a/{name}", one) for one in patterns) for name in files)
