"""The shape of the house: sizes, excepts, prints, docstrings, torch-free packages, recipes."""

from __future__ import annotations

import ast
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.support.sources import PACKAGE, ROOT, mentions, module_of, nodes_of, sources, text_of

from homeostat.config import load_config

SOURCES = sources()
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Long files that are tables: name -> why.
TABLES: dict[str, str] = {
    "health/vocabulary.py": "the words of a diagnosis",
}
# Broad excepts, by file and function: why nothing narrower will do.
BROAD_EXCEPTS = {
    (
        "dashboard/samples.py",
        "_read_tokenizer",
    ): "tokenizers raises Exception itself; shown without",
    ("data/helpers.py", "_serve"): "whatever the work raises is raised in the parent instead",
    ("integrations/live.py", "call"): "a bug of the doctor's must not end a run of another trainer",
    ("hub/transfer.py", "_take_all"): "Xet's library may raise anything; the caller gets our error",
    ("observe/sinks/base.py", "_call"): "a vendor's client may raise anything; the run goes on",
    ("rewards/calls.py", "answer_call"): "a user's function may raise anything; the run goes on",
    ("rewards/worker.py", "_load"): "a user's module may raise anything; the run goes on",
    ("workers/hosting.py", "attempt"): "a hosted object may raise anything; its worker goes on",
    ("config/plugins.py", "load_plugin"): "a plug-in's module may raise anything; it is refused",
    ("data/plugin_rows.py", "__init__"): "a plug-in's rows may raise anything; it is named",
    ("run/calling/callbacks.py", "_call"): "a callback may raise anything; the run is saved",
    ("run/ray/vendor.py", "_connect"): "Ray raises Exception itself; others are raised again",
    (
        "run/session/session.py",
        "open_session",
    ): "whatever ends a run is written down, then raised again",
}
# A path of somebody's machine, which means nothing on another one.
MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:home|root|Users|work|mnt|tmp|workspace)/\w+")
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".toml", ".txt", ".json", ".css", ".js", ".svg", ""}


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes_of(file):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def last_name(called: ast.expr) -> str:
    """Return the name that is called, without what it belongs to: `suppress`, `event`."""
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 50
    assert RECIPES


def test_files_are_short() -> None:
    lengths = {name_of(file): len(text_of(file).splitlines()) for file in SOURCES}
    long = {name: n for name, n in lengths.items() if n > MAX_FILE_LINES and name not in TABLES}
    assert not long, "split these files, or name them in TABLES if they are tables"


def test_functions_are_short() -> None:
    long = [
        f"{name_of(file)}:{node.lineno} {node.name}"
        for file in SOURCES
        for node in functions(file)
        if node.end_lineno is not None and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert not long, f"functions past {MAX_FUNCTION_LINES} lines are two functions"


def is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(c, ast.Name) and c.id in ("Exception", "BaseException") for c in caught)


def broad_excepts(file: Path) -> set[tuple[str, str]]:
    """Functions with an except that catches everything, or suppress(Exception)."""
    found = set()
    for function in functions(file):
        for node in ast.walk(function):
            broad = isinstance(node, ast.ExceptHandler) and is_broad(node)
            if isinstance(node, ast.Call) and last_name(node.func) == "suppress":
                broad = any(ast.unparse(arg).endswith("Exception") for arg in node.args)
            if broad:
                found.add((name_of(file), function.name))
    return found


def test_no_except_is_broad_without_a_reason() -> None:
    files = [file for file in SOURCES if mentions(file, "Exception", "except:")]
    found = set().union(*(broad_excepts(file) for file in files))
    assert found == set(BROAD_EXCEPTS), "catch what can be named, or give the reason above"


def prints(node: ast.AST) -> bool:
    """Writing to stderr is left: it is the last resort of what cannot be logged."""
    if not isinstance(node, ast.Call) or last_name(node.func) not in ("print", "write"):
        return False
    elsewhere = any(ast.unparse(word) == "file=sys.stderr" for word in node.keywords)
    return ast.unparse(node.func) in ("print", "sys.stdout.write") and not elsewhere


def test_only_the_command_line_prints() -> None:
    calls = [
        f"{name_of(file)}:{node.lineno}"
        for file in SOURCES
        if not name_of(file).startswith("cli/") and mentions(file, "print", "sys.stdout")
        for node in nodes_of(file)
        if prints(node)
    ]
    assert not calls


def test_every_module_says_what_it_is() -> None:
    # A package's __init__ may be empty: its modules speak for it.
    files = [file for file in SOURCES if text_of(file).strip()]
    silent = [name_of(file) for file in files if not ast.get_docstring(module_of(file))]
    assert not silent


def tracked_texts() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.splitlines()]
    return [file for file in files if file.is_file() and file.suffix in TEXT_SUFFIXES]


def test_nothing_names_a_machine() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {match.group()}"
        for file in tracked_texts()
        for match in MACHINE_PATH.finditer(file.read_text(encoding="utf-8", errors="replace"))
    ]
    assert not found


HEAVY = {"torch", "transformers", "peft", "gguf", "pyarrow"}
VENDORS = {"wandb", "trackio", "tensorboard", "pynvml"}
# What is loaded after each of these, in one fresh process, because a start takes a second.
STAGES = {
    "help": (
        "sys.argv = ['homeostat', '--help']\nfrom homeostat.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
    ),
    "packages": "{packages}",
    "reference": "sys.path.insert(0, 'docs')\nimport generate\ngenerate.pages()\n",
    "rows": "import homeostat.data.prepare\n",
}
TELL = """
root, ours = logging.getLogger(), logging.getLogger("homeostat")
logs = [len(root.handlers), len(ours.handlers), root.level]
print("\\n" + json.dumps([sorted(sys.modules), logs]))
"""


def light_modules() -> list[str]:
    """Return the modules of the packages that need neither torch nor a vendor."""
    light = [
        "homeostat." + name_of(file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in SOURCES
        if name_of(file).split("/")[0]
        in ("columns.py", "types.py", "errors.py", "config", "observe", "health")
    ]
    # A sink's module needs the package that it speaks to.
    return [name for name in light if ".sinks." not in name]


@cache
def stages() -> dict[str, tuple[set[str], list[int]]]:
    """Return the loaded modules and the state of logging after each stage."""
    packages = "".join(f"import {name}\n" for name in light_modules())
    code = "import json, logging, sys\n" + "".join(
        stage.replace("{packages}", packages) + TELL for stage in STAGES.values()
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    return {name: (set(modules), logs) for name, (modules, logs) in zip(STAGES, told, strict=True)}


def test_help_starts_without_torch() -> None:
    assert not (HEAVY | VENDORS) & stages()["help"][0]


def test_torch_free_packages_import_without_torch_or_a_vendor() -> None:
    assert len(light_modules()) > 20
    assert not (HEAVY | VENDORS) & stages()["packages"][0]


def test_imports_set_up_no_logging() -> None:
    assert stages()["packages"][1] == [0, 0, logging.WARNING]


def test_the_reference_is_generated_without_torch() -> None:
    assert "torch" not in stages()["reference"][0]


def test_rows_are_prepared_without_torch() -> None:
    """As the processes do that prepare them in parallel."""
    assert "torch" not in stages()["rows"][0]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_parses_and_is_named_as_its_file(recipe: Path) -> None:
    assert load_config(recipe).name == recipe.stem


EMITTERS = ("event", "emit", "append_event")


def event_kinds() -> Iterator[tuple[str, str]]:
    """Every kind that the sources emit, with its place: first arguments of event() and emit()."""
    for file in SOURCES:
        for node in nodes_of(file) if mentions(file, *EMITTERS) else ():
            if not isinstance(node, ast.Call) or not node.args:
                continue
            if last_name(node.func) not in EMITTERS:
                continue
            for part in ast.walk(node.args[0]):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value, f"{name_of(file)}:{node.lineno}"


def test_the_event_catalogue_is_what_the_sources_emit() -> None:
    from homeostat.observe.events import EVENTS

    emitted = dict(event_kinds())
    assert set(emitted) == set(EVENTS), "observe/events.py and the sources differ"
