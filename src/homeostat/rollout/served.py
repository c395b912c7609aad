"""Verify before sampling that a vendor's engine serves the model that is trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from homeostat.errors import EngineError


@dataclass(frozen=True, slots=True)
class Served:
    """The facts of the trainer's model that the engine's model must match."""

    model_type: str
    vocabulary: int
    dtype: str


class ServingCore(Protocol):
    """The facts that a vendor's engine knows of its model."""

    @property
    def model_type(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    def close(self) -> None: ...


def require_served(core: ServingCore, served: Served, folder: Path, *, vendor: str) -> None:
    """Close the engine and raise EngineError if its model differs from the trainer's."""
    for what, found, wanted in (
        ("a model of type", core.model_type, served.model_type),
        ("a vocabulary of", core.vocabulary, served.vocabulary),
    ):
        if found != wanted:
            core.close()
            raise EngineError(
                f"{vendor} serves {what} {found} from {folder}, and the trainer has {wanted}. "
                "Is model.path the checkpoint that is trained?"
            )
