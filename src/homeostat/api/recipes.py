"""`homeostat.recipe`: build a recipe in code, or load one. Needs no torch.

Wherever the functions of `import homeostat` want a recipe, it may be one that `recipe` returned,
the path of a YAML file, or a mapping of its sections.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from homeostat.config.loading.beside import placed
from homeostat.config.loading.load import build_config
from homeostat.config.loading.yaml_file import read_yaml
from homeostat.config.run import RunConfig
from homeostat.errors import ConfigError, Problem
from homeostat.importing.hints import find_wrong_folder, load_recipe

PathLike = str | os.PathLike[str]
AnyRecipe = RunConfig | PathLike | Mapping[str, Any]


def recipe(source: AnyRecipe | None = None, /, *overrides: str, **sections: Any) -> RunConfig:
    """Return a recipe: from a YAML file, a mapping, another recipe, or sections given as keywords.

    `overrides` are texts such as "trainer.lr=1e-6", as on the command line. `sections` are laid
    over what `source` says, key by key; one of another `type` replaces the whole section. Raises
    ConfigError with every problem found.
    """
    if isinstance(source, str | os.PathLike) and not sections:
        return load_recipe(os.fspath(source), list(overrides))
    file, below = None, {}
    if isinstance(source, RunConfig):
        # Only what was set: a default that does not apply may not be set at all.
        below = source.model_dump(mode="json", exclude_unset=True)
    elif isinstance(source, Mapping):
        below = _plain(source)
    elif source is not None:
        file = os.fspath(source)
        # The whole recipe is checked once, below: a section may replace what is wrong in the file.
        below = _read(file)
    config = build_config(_laid_over(below, _plain(sections)), list(overrides), file=file)
    if problem := find_wrong_folder(config):
        raise ConfigError([problem], file=file)
    return config


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return `below` with the keys of `above`. A section of another type is replaced as a whole."""
    merged = dict(below)
    for name, value in above.items():
        under = below.get(name)
        if isinstance(value, dict) and isinstance(under, dict):
            is_other = "type" in value and value["type"] != under.get("type")
            value = value if is_other else _laid_over(under, value)
        merged[name] = value
    return merged


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as YAML would give them: paths as text, tuples as lists."""
    try:
        return json.loads(json.dumps(dict(given), default=os.fspath))
    except TypeError as error:
        what = f"{error}: a recipe holds texts, numbers, lists and mappings."
        raise ConfigError([Problem("", what)]) from None


def _read(file: str) -> dict[str, Any]:
    raw, _ = read_yaml(Path(file))
    raw = placed(raw, Path(file).parent)
    if not isinstance(raw, dict):
        what = f"a recipe is a mapping of keys, this is a {type(raw).__name__}."
        raise ConfigError([Problem("", what, line=1)], file=file)
    return raw


def given_recipe(source: AnyRecipe) -> tuple[RunConfig, str]:
    """Return the recipe, and its text for the run folder."""
    if isinstance(source, str | os.PathLike):
        return recipe(source), Path(source).read_text(encoding="utf-8")
    if isinstance(source, RunConfig):
        raw = source.model_dump(mode="json", exclude_unset=True)
        return source, yaml.safe_dump(raw, sort_keys=False)
    return recipe(source), yaml.safe_dump(_plain(source), sort_keys=False)
