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
        help="How moments are stored. bf16: with stochastic rounding, in half the memory. 8bit: "
        "as one of 256 code-book values, with a scale for each block of 256 elements, in a "
        "quarter of the memory; tensors of less than 4096 elements stay in fp32.",
    )


class OptimizerConfig(Settings):
    """Keys that every optimizer has."""

    weight_decay: float | None = key(
        None,
        ge=0,
        help="Weight decay, applied to matrices only. Default: 0.01; 0 for an adapter (lora), "
        "because decay would pull the model back to its initial weights.",
    )
    masters: Masters = key(
        "fp32",
        help="Precision of the weights that the optimizer updates if trainer.precision is bf16. "
        "fp32: keep fp32 master weights in addition to the bf16 weights. bf16: no master weights; "
        "updates are added to the bf16 weights with stochastic rounding, which saves 4 bytes per "
        "parameter.",
    )

    @property
    def decay(self) -> float:
        """Return the weight decay, which config/loading/defaults.py chose."""
        assert self.weight_decay is not None, "chosen at load"
        return self.weight_decay


class AdamConfig(OptimizerConfig):
    """Keys that the optimizers with Adam's moments share."""

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
    """Muon for the matrices of the layers, AdamW for all other weights.

    The momentum of a matrix is orthogonalised by Newton-Schulz iterations, so that every direction
    moves equally far. Stacked experts count as a batch of matrices. Embeddings, the output head,
    norms and biases are updated by AdamW with `beta1`, `beta2` and `eps`. Learning rate and weight
    decay are the same for both.
    """

    type: Literal["muon"]
    momentum: float = key(0.95, ge=0, lt=1, help="Decay rate of the momentum of a matrix.")
    nesterov: bool = key(
        True,
        help="Nesterov momentum: orthogonalise a mix of gradient and "
        "momentum instead of the momentum.",
    )
    iterations: int = key(5, ge=1, le=20, help="Number of Newton-Schulz iterations.")
    scale: Literal["match_rms", "original"] = key(
        "match_rms",
        help="Scale factor of the update of an n x m matrix. match_rms: 0.2 sqrt(max(n, m)), so "
        "that an update is as large as AdamW's and AdamW's learning rates can be used "
        "(Moonlight). original: sqrt(max(1, n / m)), which needs a larger learning rate.",
    )


class AdafactorConfig(OptimizerConfig):
    """Adafactor: store the second moment of a matrix as one row and one column, and no first
    moment.
    """

    type: Literal["adafactor"]
    decay_exponent: float = key(
        0.8,
        gt=0,
        le=1,
        help="The second moment's decay rate at update t is 1 - t ** -decay_exponent.",
    )
    eps: float = key(1e-30, gt=0, help="Added to squared gradients for numerical stability.")
    clip_threshold: float | None = key(
        1.0,
        gt=0,
        help="Largest root mean square of an update; larger updates are scaled down to "
        "it. null: no limit.",
    )
    relative_step: bool = key(
        False, help="Limit the learning rate to 1 / sqrt(t) at update t, as in the paper."
    )
    scale_parameter: bool = key(
        False,
        help="Multiply the learning rate by the root mean square of the weights, at least 1e-3.",
    )


AnyOptimizer = Annotated[AdamWConfig | MuonConfig | AdafactorConfig, Field(discriminator="type")]
