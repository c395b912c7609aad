"""Parts of the library are given the settings that they read, not the whole recipe."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.sources import PACKAGE, mentions, nodes_of, sources

# The files and folders that may name RunConfig, and why they need a whole recipe.
WHOLE = {
    "config/": "defines, loads, checks, edits and compares recipes",
    "api/recipes.py": "builds and loads recipes",
    "authoring/fitting.py": "tries whole recipes until one fits",
    "generation/choice.py": "reads the recipe that a run saved in its folder",
    "cli/": "a verb of the command line reads a recipe",
    "hub/resolve.py": "any section may name a model or a dataset on the hub",
    "hub/rows.py": "the algorithm decides which kind of rows a source has",
    "importing/convert.py": "lists the keys that a recipe has",
    "importing/hints.py": "loads a recipe, and lists the keys that it has",
    "run/sft.py": "a loop sets up all parts of a run",
    "run/preference.py": "a loop sets up all parts of a run",
    "run/reward_model.py": "a loop sets up all parts of a run",
    "run/row_loop.py": "a loop sets up all parts of a run, and hands each its settings",
    "run/rl.py": "a loop sets up all parts of a run, and hands each its settings",
    "run/rl_async.py": "a loop sets up all parts of a run, and hands each its settings",
    "run/calling/": "chooses the loop that runs the recipe, and drives it",
    "run/wiring/": "builds the parts of a run, and hands each its settings",
    "run/preflight/": "judges the whole recipe before a run",
    "run/ray/cluster.py": "opens the machines of a run, which may have to shrink",
    "run/ray/machines.py": "runs a smaller recipe if a machine is lost",
    "run/ray/room.py": "tries recipes of fewer ranks and engines, each checked as a whole",
    "run/session/": "keeps the recipe in the run folder, and compares it when the run is resumed",
    "run/sizing/": "plans the memory of all parts together, and tries other recipes",
    "run/healing/watch.py": "a health rule may read any setting",
    "run/publication/fp8_checkpoint.py": "engine, trainer and model decide what is sent",
    "train/empty_model.py": "model, adapter and value head decide the layers of a model",
    "train/runtime.py": "refuses what the device cannot do, whichever section asks for it",
}
WHAT_TO_DO = (
    "Give it the sections that it reads or, if these are three or more, a bundle of "
    "config/parts.py that RunConfig makes (as in `config.for_trainer`). If it does need the whole "
    "recipe, add it to WHOLE in tests/style/test_sections.py with the reason."
)


def names_recipe(file: Path) -> bool:
    """Return whether the code of a file names RunConfig; comments and docstrings do not count."""
    for node in nodes_of(file) if mentions(file, "RunConfig") else ():
        names = {getattr(node, "id", None), getattr(node, "attr", None)}
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
        if "RunConfig" in names:
            return True
    return False


def users() -> list[str]:
    return [file.relative_to(PACKAGE).as_posix() for file in sources() if names_recipe(file)]


def test_parts_are_given_sections_and_not_the_whole_recipe() -> None:
    others = [name for name in users() if not name.startswith(tuple(WHOLE))]
    assert not others, f"{', '.join(others)}: RunConfig is named here. {WHAT_TO_DO}"


def test_every_exception_is_needed() -> None:
    found = users()
    unused = [place for place in WHOLE if not any(name.startswith(place) for name in found)]
    assert not unused, f"nothing there names RunConfig any more: remove {unused} from WHOLE"
