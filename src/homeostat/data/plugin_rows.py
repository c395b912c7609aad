"""Rows of a plug-in (config/data.py), read by number like those of a file (sources.RowSource)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from homeostat.config.data import AnySource, Source, SourcePlugin
from homeostat.data.sources import BadRowError, RowSource, open_rows, readable, source_files
from homeostat.errors import DataError


class PluginRows:
    """The rows that a plug-in returned."""

    def __init__(self, source: SourcePlugin) -> None:
        self.brackets = (f"{source.type}[", "]")
        self._source = source
        try:
            self._rows = list(source.rows())
        except Exception as error:
            why = readable(f"{type(error).__name__}: {error}", max_chars=300)
            raise DataError(f"the source {source.type!r} raised {why}") from error
        if not self._rows:
            raise DataError(f"the source {source.type!r} returned no rows.")

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, index: int) -> int:
        return index

    def row(self, index: int) -> dict[str, Any]:
        try:
            return dict(self._rows[index])
        except (TypeError, ValueError):
            kind = type(self._rows[index]).__name__
            raise BadRowError(
                "wrong type", f"a row is a mapping of columns, not a {kind}"
            ) from None

    def digest(self) -> str:
        """Return a checksum of all rows, which tells whether tokenised rows can be used again."""
        text = json.dumps([self.row(i) for i in range(len(self))], sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()


def open_source(source: AnySource, *, columns: Sequence[str] | None) -> RowSource:
    """Open a plug-in's rows, or the file of any other source."""
    if isinstance(source, SourcePlugin):
        return PluginRows(source)
    assert isinstance(source, Source), source
    return open_rows(source.path, columns=columns)


def files_or_digest(source: AnySource) -> tuple[list[Any], list[str]]:
    """Return the files whose change would change the rows; of a plug-in, a digest of the rows."""
    if isinstance(source, SourcePlugin):
        return [], [PluginRows(source).digest()]
    assert isinstance(source, Source), source
    return list(source_files(source.path)), []


def place_of(source: AnySource) -> str:
    """Name a source for people."""
    return source.type if isinstance(source, SourcePlugin) else getattr(source, "path", "")
