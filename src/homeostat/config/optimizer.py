"""Settings of the optimizers: AdamW, Muon and Adafactor, and the precision of what they keep."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from homeostat.config.base import Settings, key

# How a moment is stored between two updates; all arithmetic is fp32.
Moments = Literal["fp32", "bf16", "8bit"]
Masters = Literal["fp32", "bf16"]


def _moments() -> Moments:
    return key(
        "fp32",
        help="How moments are stored. bf16: rounded stochastically, half the memory. 8bit: a "
        "code book of 256 values with a scale for each block of 256, a quarter; tensors of less "
        "than 4096 elements stay in fp32.",
    )


class OptimizerConfig(Settings):
    """Keys that every optimizer has."""

    weight_decay: float | None = key(
        None,
        ge=0,
        help="Weight decay, applied to matrices only. Default: 0.01; 0 for an adapter (lora), "
        "because decay would pull the model back to where it started.",
    )
    masters: Masters = key(
        "fp32",
        help="Weights that the optimizer updates if trainer.precision is bf16. fp32: master "
        "weights beside those that are computed with. bf16: no masters; updates are rounded "
        "stochastically into the weights themselves, which saves 4 bytes per parameter.",
    )

    @property
    def decay(self) -> float:
        """Return the weight decay, which is chosen when a recipe is loaded (config/defaults.py)."""
        assert self.weight_decay is not None, "chosen at load"
        return self.weight_decay


class AdamConfig(OptimizerConfig):
    """Keys of Adam's moments."""

    beta1: float = key(0.9, ge=0, lt=1, help="Decay rate of the running mean of the gradient.")
    beta2: float = key(
        0.999, ge=0, lt=1, help="Decay rate of the running mean of the squared gradient."
    )
    eps: float = key(1e-8, gt=0, help="Added to the denominator for numerical stability.")
    moments: Moments = _moments()


class AdamWConfig(AdamConfig):
    """AdamW with decoupled weight decay. Biases and norm weights are never decayed."""

    type: Literal["adamw"] = "adamw"


class MuonConfig(AdamConfig):
    """Muon for the matrices of the layers, AdamW for all else.

    The momentum of a matrix is orthogonalised by Newton-Schulz iterations, so that every direction
    moves equally far. Stacked experts are a batch of matrices. Embeddings, the output head, norms
    and biases are updated by AdamW with `beta1`, `beta2` and `eps`. Learning rate and weight decay
    are the same for both.
    """

    type: Literal["muon"]
    momentum: float = key(0.95, ge=0, lt=1, help="Decay rate of the momentum of a matrix.")
    nesterov: bool = key(True, help="Look ahead: orthogonalise the gradient mixed with momentum.")
    iterations: int = key(5, ge=1, le=20, help="Number of Newton-Schulz iterations.")
    scale: Literal["match_rms", "original"] = key(
        "match_rms",
        help="Factor of an n x m matrix's update. match_rms: 0.2 sqrt(max(n, m)), so that an "
        "update is as large as AdamW's and its learning rates fit (Moonlight). original: "
        "sqrt(max(1, n / m)), which needs its own, larger learning rate.",
    )


class AdafactorConfig(OptimizerConfig):
    """Adafactor: the second moment of a matrix is kept as a row and a column; no first moment."""

    type: Literal["adafactor"]
    decay_exponent: float = key(
        0.8,
        gt=0,
        le=1,
        help="The second moment's decay rate at update t is 1 - t ** -decay_exponent.",
    )
    eps: float = key(1e-30, gt=0, help="Added to squared gradients for numerical stability.")
    clip_threshold: float | None = key(
        1.0, gt=0, help="Updates with a larger root mean square are scaled down to it; null: never."
    )
    relative_step: bool = key(
        False, help="Use the learning rate at most as 1 / sqrt(t) at update t, as in the paper."
    )
    scale_parameter: bool = key(
        False,
        help="Multiply the learning rate by the root mean square of the weights, at least 1e-3.",
    )


AnyOptimizer = Annotated[AdamWConfig | MuonConfig | AdafactorConfig, Field(discriminator="type")]
