"""Rows of a plug-in (config/data.py), read by number like those of a file (sources.RowSource)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from homeostat.config.data import SourcePlugin
from homeostat.data.sources import BadRowError, readable
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


def plugin_digests(sources: Iterable[Any]) -> list[str]:
    """Return a checksum of the rows of each source that is a plug-in, and has no files."""
    return [PluginRows(one).digest() for one in sources if isinstance(one, SourcePlugin)]
