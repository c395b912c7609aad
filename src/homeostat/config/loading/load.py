"""Build one validated RunConfig from a YAML file, presets and `a.b=c` overrides.

All mistakes are reported at once: unknown keys (with the nearest known one), values of the wrong
type, and combinations that cannot work. If some keys are invalid, combinations of the others are
still checked.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from homeostat.config.combinations.check import find_conflicts
from homeostat.config.data import AutoSource
from homeostat.config.fp8 import scales_of_environment
from homeostat.config.int4 import FLAG_VARIABLE, int4_of_environment
from homeostat.config.loading.beside import placed
from homeostat.config.loading.defaults import with_defaults
from homeostat.config.loading.presets import PRESETS, preset_of
from homeostat.config.loading.schema import is_of_names, known_keys, settings_at, types_at
from homeostat.config.loading.shareable import is_private
from homeostat.config.loading.tree import child, fill, has, is_index, parts, without
from homeostat.config.loading.yaml_file import MAX_DEPTH, Place, dotted, parse_yaml, read_yaml
from homeostat.config.plugins import UNUSABLE, with_absolute_files
from homeostat.config.run import RunConfig
from homeostat.errors import COMMAND_LINE, REMOVED, ConfigError, Problem

_ABSENT = object()
_SHOULD_BE = "Input should be "
# Old dotted name -> new one. The error for an old name suggests the new one.
RENAMED_KEYS: dict[str, str] = {}
# The member of a union to assume if a recipe sets some of its keys but no type.
DEFAULT_TYPES = {
    "engine": "native",
    "trainer.backend": "local",
    "trainer.optimizer": "adamw",
    "critic.optimizer": "adamw",
}


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read, merge and check a recipe. Raises ConfigError with every problem found.

    Files that the recipe names are looked for beside it, then in the current folder.
    """
    raw, lines = read_yaml(Path(path))
    raw = placed(raw, Path(path).parent)
    return build_config(raw, overrides or [], file=str(path), lines=lines)


def build_config(
    raw: Any, overrides: list[str], *, file: str | None, lines: dict[Place, int] | None = None
) -> RunConfig:
    """Merge presets and overrides into a raw recipe and check the result."""
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        what = f"a recipe is a mapping of keys, this is a {type(raw).__name__}."
        raise ConfigError([Problem("", what, line=1)], file=file)
    raw = copy.deepcopy(raw)
    problems = [problem for text in overrides if (problem := _apply_override(raw, text))]
    with_absolute_files(raw, folder=Path(file).parent if file is not None else Path())
    problems += _follow_environment(raw)
    for place, tag in DEFAULT_TYPES.items():
        section: Any = raw
        for part in parts(place):
            section = child(section, part)
        if isinstance(section, dict):
            section.setdefault("type", tag)
    _recognise_untyped(raw)
    spots = _spots(lines or {}, [text.partition("=")[0] for text in overrides])
    merged, preset_problems = _merge_presets(raw)
    problems += preset_problems
    config, more = _validate(merged, spots)
    while gives_way := [p for p in more if has(merged, p.place) and not has(raw, p.place)]:
        merged = without(merged, [parts(problem.place) for problem in gives_way])
        config, more = _validate(merged, spots)
    problems += more
    if problems or config is None:
        raise ConfigError([_naming_environment(problem) for problem in problems], file=file)
    return with_defaults(config)


def _recognise_untyped(raw: dict[str, Any]) -> None:
    """Set the type of untyped sources to auto, unless the recipe names their columns."""
    for part in ("train", "validation"):
        sources = child(raw.get("data"), part)
        for source in sources if isinstance(sources, list) else []:
            if isinstance(source, dict) and "path" in source:
                if "type" not in source and source.keys() <= AutoSource.model_fields.keys():
                    source["type"] = "auto"


def _follow_environment(raw: dict[str, Any]) -> list[Problem]:
    """Set what the environment asks for where the recipe is silent."""
    trainer = raw.get("trainer") or {}
    if not isinstance(trainer, dict):
        return []
    # In the recipe, so that the run records it: a resume elsewhere has the same scales.
    fp8, has_power_of_two = trainer.get("fp8"), scales_of_environment()
    if isinstance(fp8, dict) and has_power_of_two is not None:
        if fp8.get("power_of_two_scales") is None:
            fp8["power_of_two_scales"] = has_power_of_two
    if "int4" in trainer:
        return []
    try:
        wanted = int4_of_environment()
    except ValueError as error:
        hint = "Unset the variable, or set trainer.int4 (null turns INT4 off)."
        return [Problem("trainer.int4", f"{error}.", hint)]
    if wanted is not None:
        raw["trainer"] = {**trainer, "int4": wanted.model_dump(mode="json")}
    return []


def _naming_environment(problem: Problem) -> Problem:
    """Say that the environment asked for what is in the way, where it did."""
    if not problem.place.startswith("trainer.int4") or os.environ.get(FLAG_VARIABLE) != "1":
        return problem
    hint = f"{problem.hint} ({FLAG_VARIABLE}=1 turns trainer.int4 on unless the recipe sets it.)"
    return replace(problem, hint=hint.strip())


def _apply_override(raw: dict[str, Any], text: str) -> Problem | None:
    name, equals, value_text = text.partition("=")
    if not equals or not name:
        return Problem(text, "an override looks like trainer.lr=1e-5.")
    try:
        value, _ = parse_yaml(value_text, name=name)
    except ConfigError as error:
        shown = REMOVED if is_private(parts(name), raw) else repr(value_text)
        return Problem(name, f"the value {shown} is {error.problems[0].message}")
    words = _words(name, raw)
    if len(words) > MAX_DEPTH:
        shown = ".".join(words[:4])
        return Problem(f"{shown:.80}...", f"nested deeper than {MAX_DEPTH} levels.")
    here: Any = raw
    for depth, part in enumerate(words[:-1]):
        place = ".".join(words[: depth + 1])
        if isinstance(here, list):
            if not is_index(part) or int(part) >= len(here):
                return Problem(name, f"{place} does not exist: the list has {len(here)} items.")
            here = here[int(part)]
        else:
            if here.get(part) is None:
                here[part] = {}
            here = here[part]
        if not isinstance(here, (dict, list)):
            return Problem(name, f"{place} is a single value, it has no keys below it.")
    return _set_item(here, words[-1], value, name)


def _words(name: str, raw: dict[str, Any]) -> list[str]:
    """Split the name of an override; names in a mapping may have dots, as in columns."""
    words = name.split(".")
    for end in range(1, min(len(words) - 1, MAX_DEPTH)):
        if is_of_names(parts(".".join(words[:end])), raw):
            return [*words[:end], ".".join(words[end:])]
    return words


def _set_item(here: dict[str, Any] | list[Any], part: str, value: Any, name: str) -> Problem | None:
    if isinstance(here, dict):
        here[part] = value
    elif is_index(part) and int(part) < len(here):
        here[int(part)] = value
    else:
        return Problem(name, f"the list has {len(here)} items, numbered from 0.")
    return None


def _merge_presets(raw: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Put the recipe on top of its presets. A single preset may be given as a word."""
    names = raw.get("preset", [])
    if isinstance(names, str):
        names = raw["preset"] = [names]
    problems: list[Problem] = []
    merged = raw
    for name in reversed(names) if isinstance(names, list) else []:
        if isinstance(name, str) and name in PRESETS:
            merged = fill(merged, preset_of(name, raw))
        else:
            hint = _did_you_mean(str(name), list(PRESETS)) or f"Known: {', '.join(PRESETS)}."
            problems.append(Problem("preset", f"no preset is named {name!r}.", hint))
    return merged, problems


def _validate(raw: dict[str, Any], lines: dict[str, int]) -> tuple[RunConfig | None, list[Problem]]:
    """Return the config, or as much of it as is valid, and the problems of the rest."""
    try:
        config = _parse(raw)
    except ValidationError as error:
        items = _joined([(_strip_tags(raw, item), item) for item in error.errors()])
        places = [place for place, _ in items]
        # pydantic reports a list with invalid items a second time, as too short: drop that echo.
        items = [(place, item) for place, item in items if not _is_echo(place, places)]
        places = [place for place, _ in items]
        problems = [_explain(place, item, raw, lines) for place, item in items]
        if any(place[:1] == ("algorithm",) and len(place) < 2 for place in places):
            # The keys that the other sections may hold depend on the algorithm.
            return None, problems
        sound = without(raw, places)
        try:
            conflicts = find_conflicts(_parse(sound))
        except ValidationError:
            return None, problems
        bad = {dotted(place) for place in places}
        problems += [_located(p, lines) for p in conflicts if p.place not in bad]
        return None, problems
    return config, [_located(problem, lines) for problem in find_conflicts(config)]


def _is_echo(place: Place, places: list[Place]) -> bool:
    return any(len(other) > len(place) and other[: len(place)] == place for other in places)


def _parse(raw: dict[str, Any]) -> RunConfig:
    """Validate strictly in JSON mode: a list may fill a tuple, but nothing else is coerced."""
    return RunConfig.model_validate_json(json.dumps(raw))


def _strip_tags(raw: Any, item: Any) -> Place:
    """Drop the union tags that pydantic puts into locations but that the file does not have."""
    place: list[str | int] = []
    here = raw
    for index, part in enumerate(item["loc"]):
        # The end of a location may be a key that is missing; all else is there, or is a tag.
        is_missing = item["type"] == "missing" and index == len(item["loc"]) - 1
        if is_missing or child(here, part, _ABSENT) is not _ABSENT:
            place.append(part)
            here = child(here, part)
    return tuple(place)


def _joined(items: list[tuple[Place, Any]]) -> list[tuple[Place, Any]]:
    """Return one error for each place: a value has one for every type that it could have."""
    found: dict[Place, Any] = {}
    for place, item in items:
        if place not in found:
            found[place] = item
        elif (what := item["msg"].removeprefix(_SHOULD_BE)) not in found[place]["msg"]:
            found[place] = {**found[place], "msg": f"{found[place]['msg']} or {what}"}
    return list(found.items())


def _explain(place: Place, item: Any, raw: dict[str, Any], lines: dict[str, int]) -> Problem:
    kind, last = item["type"], str(place[-1]) if place else ""
    owner = settings_at(RunConfig, place[:-1], raw)
    if kind == "extra_forbidden":
        renamed = RENAMED_KEYS.get(dotted(place))
        if renamed:
            return _located(Problem(dotted(place), f"this key is now called {renamed}."), lines)
        hint = _unknown_key_hint(last, place, owner)
        return _located(Problem(dotted(place), "unknown key.", hint), lines)
    if kind == "missing":
        what = "a required key is missing."
        return _located(Problem(dotted(place), what, _help_of(owner, last)), lines)
    types = types_at(place, raw)
    if kind == "union_tag_not_found" or (kind == "dict_type" and item["input"] in types):
        return _located(_untyped(place, item["input"], types), lines)
    if kind == "union_tag_invalid":
        tag = str(item["ctx"]["tag"])
        expected = [word.strip(" '") for word in item["ctx"]["expected_tags"].split(",")]
        hint = _did_you_mean(tag, expected) or _tags_hint(item)
        return _located(
            Problem(dotted((*place, "type")), (f"there is no type {tag!r}."), hint), lines
        )
    if kind == UNUSABLE:
        hint = "Install or repair the plug-in, or correct its import path."
        return _located(Problem(dotted((*place, "type")), item["msg"], hint), lines)
    shown = REMOVED if is_private(place, raw) else json.dumps(item["input"], default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
    hint = _help_of(owner, last)
    if kind == "literal_error":
        hint = _did_you_mean(str(item["input"]), item["ctx"]["expected"].split("'")[1::2])
    return _located(Problem(dotted(place), f"{shown}: {message}.", hint), lines)


def _tags_hint(item: Any) -> str:
    return f"Choose one of {item['ctx']['expected_tags']}."


def _untyped(place: Place, given: Any, types: list[str]) -> Problem:
    """Return the problem of a section without a type, or with a value in its place."""
    key = dotted((*place, "type"))
    if given in types:
        what = f"{json.dumps(given)} is a type; the section has further keys."
        return Problem(dotted(place), what, f"Did you mean {key}={given}?")
    return Problem(key, "a required key is missing.", f"Choose one of {', '.join(types)}.")


def _spots(lines: dict[Place, int], names: list[str]) -> dict[str, int]:
    """Return the line of each dotted name; `names` are those of the command line.

    A problem has no other place: a name in it may be a number or have dots.
    """
    spots = {dotted(place): line for place, line in lines.items()}
    for name in names:
        spots = {one: line for one, line in spots.items() if not one.startswith(f"{name}.")}
        spots[name] = COMMAND_LINE
        if section := name.rpartition(".")[0]:
            spots.setdefault(section, COMMAND_LINE)
    return spots


def _located(problem: Problem, lines: dict[str, int]) -> Problem:
    """Return the line of a place, or of the nearest enclosing one that the file has."""
    place = problem.place
    while place and place not in lines:
        place = place.rpartition(".")[0]
    return Problem(problem.place, problem.message, problem.hint, lines.get(place))


def _unknown_key_hint(name: str, place: Place, owner: type[BaseModel] | None) -> str:
    siblings = list(owner.model_fields) if owner is not None else []
    near = _did_you_mean(name, siblings, prefix=dotted(place[:-1]))
    elsewhere = [path for path in known_keys(RunConfig) if path.split(".")[-1] == name]
    if elsewhere:
        # Several sections may have such a key: `lr` alone is the policy's, not the critic's.
        best = min(elsewhere, key=lambda path: _strangeness(path, section=str(place[0])))
        is_remote = _strangeness(best, section=str(place[0])) >= (1, 1, 3)
        return near if near and is_remote else f"Did you mean {best}?"
    return near or (f"Known here: {', '.join(siblings)}." if siblings else "")


def _strangeness(path: str, *, section: str) -> tuple[int, int, int]:
    """Order keys of one name: of the same section first, then of the trainer, then by depth."""
    parts_of_path = path.split(".")
    top = parts_of_path[0]
    return int(top != section), int(top != "trainer"), len(parts_of_path)


def _did_you_mean(word: str, known: list[str], *, prefix: str = "") -> str:
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not found:
        return ""
    return f"Did you mean {prefix + '.' if prefix else ''}{found[0]}?"


def _help_of(owner: type[BaseModel] | None, name: str) -> str:
    info = owner.model_fields.get(name) if owner is not None else None
    return f"({info.description})" if info is not None and info.description else ""
