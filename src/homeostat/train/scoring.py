"""Uses of `Trainer.forward`: check which outputs a model can compute, and compute log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from homeostat.arrays import FloatArray
from homeostat.errors import ModelError
from homeostat.models.build import ModelSheet
from homeostat.train.reducers import REDUCERS
from homeostat.types import Computed, Outputs, Role, TrainBatch


class Forwards(Protocol):
    """The part of a Trainer that computes without learning."""

    def forward(
        self, role: Role, batches: Sequence[TrainBatch], outputs: Outputs
    ) -> list[Computed]: ...


def score(
    trainer: Forwards, role: Role, batches: Sequence[TrainBatch], *, temperature: float = 1.0
) -> list[FloatArray]:
    """Return, per batch, the log-probs of its trained tokens under the current weights."""
    found = trainer.forward(role, batches, Outputs(logp=True, temperature=temperature))
    return [one.logp_M for one in found if one.logp_M is not None]


def require_outputs(outputs: Outputs, *, role: Role, sheet: ModelSheet) -> None:
    """Raise ModelError, before anything is computed, for outputs that the role's model cannot
    compute.
    """
    if outputs.value and not sheet.has_value_head:
        raise ModelError(
            f"values were requested from the {role}, whose model has no value head: it only "
            "predicts tokens. Ask for logp, entropy or hidden."
        )
    if (outputs.logp or outputs.entropy) and sheet.has_value_head:
        raise ModelError(
            f"log-probs or entropies were requested from the {role}, whose model has a value head "
            "in place of its output matrix. Ask for value or hidden."
        )
    if outputs.load and sheet.moe is None:
        raise ModelError(
            f"the load of experts was requested from the {role}, whose model has no experts."
        )
    if outputs.reducer and outputs.reducer not in REDUCERS:
        known = ", ".join(sorted(REDUCERS))
        raise ModelError(f"there is no reducer {outputs.reducer!r}. Known reducers: {known}.")
    last = int(sheet.source_config["num_hidden_layers"]) if outputs.hidden else 0
    beyond = [layer for layer in outputs.hidden if not 0 <= layer <= last]
    if beyond:
        raise ModelError(
            f"hidden states of layer {beyond[0]} were requested from the {role}, which has layers "
            f"0 (the embedding) to {last}."
        )
