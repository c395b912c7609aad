"""Write an imported recipe as YAML with comments, and list what became of each setting."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from homeostat.config.loading.yaml_file import parse_yaml
from homeostat.errors import REMOVED, ConfigError
from homeostat.health.frameworks import ALL
from homeostat.importing.entries import Entry, Given, Imported, Status
from homeostat.importing.recognise import fold
from homeostat.observe.redact import mask_text

# The order in which a reader expects the sections.
_ORDER = ("name", "runs_dir", "seed", "model", "lora", "data", "algorithm", "preference", "rewards")
_ORDER += ("rollout", "engine", "trainer", "cluster", "eval", "checkpoint", "observe")
_LISTED = 70
# Names such as pad_token and eos_token are words of a tokenizer.
_SECRET = re.compile(
    r"(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)token$|secret|password|api_key|wandb[._]key$|passphrase"
)


def render_recipe(imported: Imported, *, source: str) -> str:
    """Return the recipe as YAML. Comments name the keys that the user has to look at."""
    title = ALL[imported.framework].title
    lines = [f"# Made by `homeostat import` from {source} ({title})."]
    if imported.needed:
        lines.append("# Look at the keys marked LOOK before you train.")
    for problem in imported.problems:
        lines.append(f"# LOOK: {_one_line(problem)}")
    looked = {one.key for one in imported.needed}
    comments = {
        key: f"LOOK: {text}" if key in looked else text for key, text in imported.comments.items()
    }
    lines += recipe_lines(imported.recipe, comments)
    return "\n".join(lines) + "\n"


def recipe_lines(raw: dict[str, Any], comments: dict[str, str]) -> list[str]:
    """Return a recipe as lines of YAML, in the usual order, with a comment after some keys."""
    ranks = {name: rank for rank, name in enumerate(_ORDER)}
    ordered = dict(sorted(raw.items(), key=lambda item: ranks.get(item[0], len(ranks))))
    return list(_lines(ordered, "", comments, indent=0))


def _lines(raw: Any, place: str, comments: dict[str, str], *, indent: int) -> Iterator[str]:
    items = enumerate(raw) if isinstance(raw, list) else _type_first(raw)
    for key, value in items:
        here = f"{place}.{key}" if place else str(key)
        start = "  " * indent + (f"{key}:" if isinstance(raw, dict) else "-")
        note = f"  # {_one_line(comments[here])}" if here in comments else ""
        if isinstance(value, dict) and value and not isinstance(raw, dict):
            inner = list(_lines(value, here, comments, indent=indent + 1))
            yield f"{'  ' * indent}- {inner[0].lstrip()}"
            yield from inner[1:]
        elif isinstance(value, dict | list) and value and not _is_flat(value):
            yield f"{start}{note}"
            yield from _lines(value, here, comments, indent=indent + 1)
        else:
            yield f"{start} {_scalar(value)}{note}"


def _type_first(raw: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(raw.items(), key=lambda item: item[0] != "type")


def _is_flat(value: Any) -> bool:
    """Return whether a list is short enough for one line."""
    return isinstance(value, list) and not any(isinstance(one, dict | list) for one in value)


def _scalar(value: Any) -> str:
    """Return a value so that our own reader reads the same again."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()
    text = text.removesuffix("...").strip()
    try:
        same = parse_yaml(text, name="value")[0] == value and "\n" not in text
    except ConfigError:
        same = False
    return text if same else json.dumps(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def render_listing(imported: Imported) -> str:
    """Return the list of settings for people, grouped by what became of them."""
    lines = [f"{ALL[imported.framework].title}: {len(imported.entries)} settings", ""]
    for status in Status:
        entries = [one for one in imported.entries if one.status is status]
        if entries:
            lines += [f"{status.value} ({len(entries)})", *map(_listed, entries), ""]
    if imported.needed:
        lines.append(f"to look at ({len(imported.needed)})")
        lines += [f"  {one.key}: {one.why}" for one in imported.needed]
        lines.append("")
    return "\n".join(lines)


def _listed(entry: Entry) -> str:
    shown = f"{entry.given.name} = {_short(_shared(entry.given))}"
    if entry.key and entry.value is not None:
        shown += f"  ->  {entry.key} = {_short(entry.value)}"
    elif entry.key:
        shown += f"  ->  {entry.key}"
    return f"  {shown}  ({entry.why})" if entry.why else f"  {shown}"


def _shared(given: Given) -> Any:
    """Return a value without secrets: frameworks take keys of services as arguments.

    A column is called a key, too (`--input-key`), so that the name alone decides little.
    """
    if _SECRET.search(fold(given.name)) and isinstance(given.value, str):
        return REMOVED
    return mask_text(given.value) if isinstance(given.value, str) else given.value


def _short(value: Any) -> str:
    text = _one_line(value if isinstance(value, str) else json.dumps(value, default=str))
    return text if len(text) <= _LISTED else text[: _LISTED - 3] + "..."


def as_json(imported: Imported) -> dict[str, Any]:
    """Return the recipe and the list for programs."""
    return {
        "framework": imported.framework,
        "ok": not imported.problems,
        "recipe": imported.recipe,
        "settings": [
            {
                "name": one.given.name,
                "value": _shared(one.given),
                "status": one.status.value,
                "key": one.key,
                "our_value": one.value,
                "why": one.why,
            }
            for one in imported.entries
        ],
        "look_at": [{"key": one.key, "why": one.why} for one in imported.needed],
        "problems": list(imported.problems),
    }
