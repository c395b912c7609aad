"""Load a recipe, with errors that understand what users of other frameworks write."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from homeostat.config.loading.load import load_config
from homeostat.config.loading.schema import known_keys
from homeostat.config.run import RunConfig
from homeostat.errors import ConfigError, Problem
from homeostat.health.frameworks import ALL
from homeostat.importing.reading import read_foreign
from homeostat.importing.recognise import IMPORTABLE, MIN_NAMES, keys_by_name, recognise
from homeostat.json_text import parse_json

_UNKNOWN_KEY = "unknown key."
_ADAPTER = "adapter_config.json"


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read and check a recipe as `load_config` does.

    A file of another framework is recognised, and an unknown key is looked up under the names of
    other frameworks.
    """
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        if foreign := _as_foreign(Path(path), error):
            raise foreign from None
        problems = [_with_hint(problem) for problem in error.problems]
        raise ConfigError(problems, file=error.file) from None
    if problem := find_wrong_folder(config):
        raise ConfigError([problem], file=str(path))
    return config


def find_wrong_folder(config: RunConfig) -> Problem | None:
    """Return the problem of a model.path that is the folder of an adapter or of a run."""
    folder = Path(config.model.path)
    return _adapter_as_model(folder) or _run_as_model(folder)


def _adapter_as_model(folder: Path) -> Problem | None:
    file = folder / _ADAPTER
    if not file.is_file() or (folder / "config.json").exists():
        return None
    try:
        base = parse_json(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    named = f" ({base})" if isinstance(base, str) and base else ""
    return Problem(
        "model.path",
        "this is the folder of a LoRA adapter, which is no model by itself.",
        f"Set model.path to its base model{named}, and lora.path={folder}.",
    )


def _run_as_model(folder: Path) -> Problem | None:
    if not (folder / "config.json").is_file() or not (folder / "events.jsonl").is_file():
        return None
    exported = sorted(folder.glob("checkpoints/step_*/hf"))
    hint = f"homeostat export {folder} NEW_FOLDER makes a model of its best checkpoint"
    if exported:
        hint = f"Set it to the weights of a step, such as {exported[-1]}; {hint}"
    return Problem("model.path", "this is the folder of a run, not of a model.", f"{hint}.")


def _as_foreign(path: Path, error: ConfigError) -> ConfigError | None:
    """Return one problem in place of many, if a file belongs to another framework."""
    unknown = [one for one in error.problems if one.message == _UNKNOWN_KEY]
    is_recipe = path.suffix in (".yaml", ".yml") and len(unknown) < MIN_NAMES
    if not path.is_file() or (is_recipe and any(one.place for one in error.problems)):
        return None
    try:
        found = read_foreign(path)
    except ConfigError:
        return None
    framework = recognise(found)
    if framework is None:
        return None
    what = f"this is a file of {framework.title}, not a recipe of homeostat."
    hint = f"Turn it into one: homeostat import {path} --out recipe.yaml"
    return ConfigError([Problem("", what, hint)], file=str(path))


def _with_hint(problem: Problem) -> Problem:
    """Name our key for another framework's name, unless the hint is another one already."""
    if problem.message != _UNKNOWN_KEY or problem.hint.startswith("Did you mean"):
        return problem
    section, _, name = problem.place.rpartition(".")
    keys = our_keys(name)
    if not keys:
        return problem
    likeliest = min(keys, key=lambda key: not key.startswith(f"{section}."))
    return replace(problem, hint=f"Did you mean {likeliest}?")


@cache
def our_keys(name: str) -> tuple[str, ...]:
    """Return our keys for a name that other frameworks use, those of most of them first."""
    own = {path.replace("[]", "") for path in known_keys(RunConfig)}
    votes: dict[str, int] = {}
    for framework in (*IMPORTABLE, "transformers"):
        if framework not in ALL:
            continue
        for theirs, keys in keys_by_name(framework).items():
            if theirs.rpartition(".")[2] == name:
                for key in own.intersection(keys):
                    votes[key] = votes.get(key, 0) + 1
    return tuple(sorted(votes, key=lambda key: (-votes[key], key)))
