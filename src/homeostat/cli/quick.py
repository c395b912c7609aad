"""Parse the arguments of verbs that must start fast, without pydantic.

Typer parses arguments with pydantic, which takes longer to load than the doctor takes to answer.
Plain arguments are parsed here, from the same signature; anything else (help, a mistake) is left to
Typer, so that there is only one set of messages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from typer.models import OptionInfo


def arguments_of(verb: Callable[..., None], words: Sequence[str]) -> dict[str, Any] | None:
    """Return parameter -> value from the words after the verb, or None to leave it to Typer."""
    types: dict[str, type] = {}
    options: dict[str, str] = {}
    places: list[str] = []
    for name, hint in get_type_hints(verb, include_extras=True).items():
        if name == "return":
            continue
        annotation, info = get_args(hint)
        types[name] = _plain_type(annotation)
        if isinstance(info, OptionInfo):
            # Inside Annotated, Typer stores the first name of an option in the place of the
            # default.
            names = (str(info.default), *(info.param_decls or ()))
            options |= dict.fromkeys(names, name)
        else:
            places.append(name)
    said = _said(words, options=options, places=places, types=types)
    if said is None:
        return None
    parameters = inspect.signature(verb).parameters.values()
    needed = {one.name for one in parameters if one.default is inspect.Parameter.empty}
    return said if needed <= said.keys() else None


def _plain_type(annotation: Any) -> type:
    """Return the type of a value that was given: `Path | None` is a Path."""
    if get_origin(annotation) is list:
        return annotation
    found = [part for part in get_args(annotation) if part is not NoneType]
    return found[0] if found else annotation


def _said(
    words: Sequence[str], *, options: dict[str, str], places: list[str], types: dict[str, type]
) -> dict[str, Any] | None:
    said: dict[str, Any] = {}
    waiting, rest = list(places), list(words)
    while rest:
        word = rest.pop(0)
        if word == "-" or not word.startswith("-"):
            if not waiting:
                return None
            name, text = waiting[0], word
            # An argument that may be repeated takes all words that are left.
            if types[name] != list[str]:
                waiting.pop(0)
        else:
            option, has_value, text = word.partition("=")
            name = options.get(option, "")
            if not name:
                return None
            if types[name] is bool:
                if has_value:
                    return None
                said[name] = True
                continue
            if not has_value:
                if not rest:
                    return None
                text = rest.pop(0)
        # An option that may be repeated is a list of words.
        if types[name] == list[str]:
            said.setdefault(name, []).append(text)
            continue
        value = _value(text, types[name])
        if value is None:
            return None
        said[name] = value
    return said


def _value(text: str, kind: type) -> str | Path | None:
    """Convert a word to the type; None if that is impossible."""
    if issubclass(kind, StrEnum):
        return kind(text) if text in list(kind) else None
    assert kind in (str, Path), kind
    return kind(text)
