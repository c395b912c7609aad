"""The model that vLLM serves is the model that is trained: proven before anything is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from homeostat.errors import EngineError
from homeostat.rollout.vllm.core import Core


@dataclass(frozen=True, slots=True)
class Served:
    """The facts of the trainer's model that vLLM's must match."""

    model_type: str
    vocabulary: int
    dtype: str


def require_served(core: Core, served: Served, folder: Path) -> None:
    """Closes vLLM and raises EngineError where the two differ."""
    for what, found, wanted in (
        ("a model of type", core.model_type, served.model_type),
        ("a vocabulary of", core.vocabulary, served.vocabulary),
    ):
        if found != wanted:
            core.close()
            raise EngineError(
                f"vLLM serves {what} {found} from {folder}, and the trainer has {wanted}. "
                "Is model.path the checkpoint that is trained?"
            )
