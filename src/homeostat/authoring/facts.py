"""Facts about a model and its rows that a new recipe depends on."""

from __future__ import annotations

from homeostat.authoring.draft import DataFacts, ModelFacts
from homeostat.config.model import ModelConfig
from homeostat.data.opening import open_rows
from homeostat.data.sources import BadRowError
from homeostat.data.tokenizer import load_tokenizer
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


def read_model(path: str) -> ModelFacts:
    """Return how long rows may be for a model, and whether it has a chat template."""
    model = ModelConfig(path=path)
    config, _ = read_configs(open_source(model))
    value = config.get("max_position_embeddings")
    return ModelFacts(
        max_positions=value if isinstance(value, int) else None,
        has_chat_template=load_tokenizer(model).chat_template is not None,
    )
