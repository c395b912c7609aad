"""Facts about a model and its rows that a new recipe depends on."""

from __future__ import annotations

from homeostat.authoring.draft import DataFacts
from homeostat.config.model import ModelConfig
from homeostat.data.opening import open_rows
from homeostat.data.sources import BadRowError
from homeostat.errors import DataError
from homeostat.models.build import open_source, read_configs


def read_data(path: str) -> DataFacts:
    """Return the first row of a file and its number of rows."""
    rows = open_rows(path, columns=None)
    if len(rows) == 0:
        raise DataError(f"--data: {path} has no rows.")
    try:
        return DataFacts(rows.row(0), len(rows))
    except BadRowError as error:
        raise DataError(f"--data: the first row of {path} cannot be read: {error}.") from None


def max_positions(path: str) -> int | None:
    """Return the largest number of tokens that a model was made for, if its files say so."""
    config, _ = read_configs(open_source(ModelConfig(path=path)))
    value = config.get("max_position_embeddings")
    return value if isinstance(value, int) else None
