"""Settle which split a source reads, and what kind of rows it has, by looking at its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from homeostat.config.data import AnySource, AutoSource, Source
from homeostat.config.run import RunConfig
from homeostat.data.column_map import MappedRows
from homeostat.data.dataset_folder import choose_files, files_below, read_readme
from homeostat.data.opening import open_rows
from homeostat.data.recognise import Columns, known_forms, recognise
from homeostat.data.sources import BadRowError, readable, saved_splits
from homeostat.errors import ConfigError, DataError, Problem

# A column may be null in some rows: what it holds is seen in the first row that has it.
NUM_LOOKED_AT = 20


def with_split(source: Source, *, default: str, place: str) -> Source:
    """Return the source with the split of its folder that it reads, if it does not say it."""
    folder = Path(source.path)
    if source.split is not None or not folder.is_dir() or (folder / "state.json").is_file():
        return source
    try:
        if (folder / "dataset_dict.json").is_file():
            splits = saved_splits(folder)
            split = default if default in splits else None
        else:
            how = {"config": source.config, "split": None, "default": default}
            split = choose_files(
                files_below(folder), read_readme(folder), place=source.path, **how
            ).split
    except DataError as error:
        raise DataError(f"{place}: {error}") from None
    return source if split is None else source.model_copy(update={"split": split})


def recognised_source(
    source: Source, config: RunConfig, *, place: str, tell: Callable[[str], None]
) -> Source:
    """Return a source of the type that its rows have, if the recipe does not say the type."""
    if not isinstance(source, AutoSource):
        return source
    row = _first_values(source, place)
    found = recognise(row, kind=config.kind, is_text=config.is_strided)
    if found is None:
        shown = readable(", ".join(list(row)[:20]), max_chars=300)
        known = "; ".join(known_forms(config.kind))
        raise ConfigError(
            [
                Problem(
                    f"{place}.type",
                    f"it is not set, and the columns ({shown}) are not recognised for "
                    f"algorithm.type={config.algorithm.type} (known: {known}).",
                    "Set type, and columns: {prompt: ..., completion: ...} for those it reads.",
                )
            ]
        )
    tell(f"{place}: recognised as {found.describe()}")
    given = source.model_dump(exclude_unset=True, exclude={"type", "columns"})
    if columns := _composed(found.columns, source.columns):
        given["columns"] = columns
    return _source_class(found.type)(type=found.type, **(found.settings() | given))


def _first_values(source: AutoSource, place: str) -> dict[str, Any]:
    """Return the first value of each column, under the names that the recipe gives."""
    try:
        rows = open_rows(source.path, columns=None, split=source.split, config=source.config)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None
    mapped = MappedRows(rows, source.columns)
    values: dict[str, Any] = {}
    for index in range(min(len(rows), NUM_LOOKED_AT)):
        try:
            row = mapped.row(index)
        except BadRowError:
            continue
        for name, value in row.items():
            if values.get(name) is None:
                values[name] = value
    return values


def _composed(found: Columns, given: Mapping[str, str | tuple[str, ...]]) -> Columns:
    """Return the recipe's names with those that were recognised among them."""
    whole = dict(given)
    for ours, names in found.items():
        parts = (names,) if isinstance(names, str) else names
        own = [whole.pop(name, name) for name in parts]
        flat = tuple(one for name in own for one in ((name,) if isinstance(name, str) else name))
        whole[ours] = flat[0] if len(flat) == 1 else flat
    return whole


def _source_class(name: str) -> Any:
    classes = get_args(get_args(AnySource)[0])
    return next(one for one in classes if name in get_args(one.model_fields["type"].annotation))
