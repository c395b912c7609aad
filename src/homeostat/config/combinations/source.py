"""Refuse settings of a source, or of a model's name, that have no effect or do not go together."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from homeostat.config.data import (
    MESSAGE_KEYS,
    ROLE_NAMES,
    AutoSource,
    PromptSource,
    Source,
    SourcePlugin,
    all_sources,
)
from homeostat.config.hub_names import cached_path, parse_hub_name
from homeostat.config.run import RunConfig
from homeostat.errors import Problem

_NOT_A_NAME = "the path is a file or folder on disk, which has no revisions."


def find_source_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of names, splits and columns, with its reason and remedy."""
    if config.model.revision is not None and not _is_name(config.model.path):
        yield Problem("model.revision", _NOT_A_NAME, "Remove it, or name a model on the hub.")
    for place, source in all_sources(config.data):
        if isinstance(source, Source) and not isinstance(source, SourcePlugin):
            yield from _one(place, source)


def _one(place: str, source: Source) -> Iterator[Problem]:
    if source.revision is not None and not _is_name(source.path):
        hint = "Remove it, or name a dataset on the hub."
        yield Problem(f"{place}.revision", _NOT_A_NAME, hint)
    for ours, theirs in source.columns.items():
        key = f"{place}.columns.{ours}"
        names = (theirs,) if isinstance(theirs, str) else theirs
        if not names or "" in names:
            yield Problem(
                key, "the column has no name.", ("Give the name of a column, or a list of names.")
            )
        elif f"{ours}_column" in source.model_fields_set:
            yield Problem(key, f"{ours}_column names this column, too.", "Remove one of the two.")
        elif ours in MESSAGE_KEYS and not isinstance(theirs, str):
            yield Problem(key, "a key of a message must be a single name.", "Give one name.")
        elif ours not in (known := known_columns(source)) and not _is_free(source):
            near = difflib.get_close_matches(ours, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"It reads: {', '.join(known)}."
            kind = getattr(source, "type", "")
            yield Problem(key, f"a {kind} source has no column of this name.", hint)
    yield from find_words_of_two_roles(place, source)


def find_words_of_two_roles(place: str, source: Source) -> Iterator[Problem]:
    """Yield a problem for every word that stands for two roles."""
    role_of: dict[str, str] = {}
    for ours in (name for name in ROLE_NAMES if name in source.columns):
        words = source.columns[ours]
        for word in (words,) if isinstance(words, str) else words:
            other = role_of.setdefault(word.lower(), ours)
            if other != ours:
                what = (
                    f"{word!r} is also listed under {other}, and a message can have only one role."
                )
                yield Problem(f"{place}.columns.{ours}", what, "List it once.")


def known_columns(source: Source) -> list[str]:
    """Return the columns that a source reads, and the keys and roles of messages."""
    fields = [name for name in type(source).model_fields if name.endswith("_column")]
    named = [name for name in fields if getattr(source, name) is not None]
    return [*(name.removesuffix("_column") for name in named), *MESSAGE_KEYS, *ROLE_NAMES]


def _is_free(source: Source) -> bool:
    """Rewards receive all columns of a prompt; what a recognised source reads is not known yet."""
    return isinstance(source, PromptSource | AutoSource)


def _is_name(path: str) -> bool:
    """Return whether a path is a name on the hub, or what became of one."""
    return parse_hub_name(path) is not None or cached_path(path) is not None
