"""Verifies that an engine serves the weights that were published.

An engine changes the layout of weights and may get that wrong, so there are two questions: did it
receive every tensor (the checksum over all it unpacked), and does it compute with them (the
log-probs of fixed rows, against the trainer's own)?

How far may log-probs differ by rounding alone? A residual stream is rounded about ten times a
layer, and errors that are independent add up like a random walk: u * sqrt(10 L) with the unit
roundoff u = eps / 2 of the weights' dtype. Sums of about 4096 products are taken in fp32 whatever
the dtype, in another order by each engine, and each of their additions rounds too:

    limit = (u(dtype) * sqrt(10 L) + u(fp32) * sqrt(10 L * 4096)) * (1 + |logp|)

For 28 layers that is 6.5e-5 in fp32 and 0.065 in bf16, times 1 + |logp|. A wrong, missing or
misplaced matrix moves the log-probs of random tokens by far more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from homeostat.arrays import FloatArray
from homeostat.errors import NotServedError, PolicyNotFiniteError
from homeostat.sync.bucket import Manifest
from homeostat.types import TokenRow

_NUM_ROWS = 3
_ROUNDINGS_PER_LAYER = 10
_SUM_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Probe:
    """Fixed rows to score. `dtype` is the less precise of the dtypes in which trainer and engine
    compute.
    """

    vocabulary: int
    num_layers: int
    dtype: torch.dtype
    temperature: float = 1.0
    # Limit the rows to what the engine can serve.
    row_tokens: int = 16

    def rows(self) -> list[TokenRow]:
        rng = np.random.default_rng(self.vocabulary)
        tokens_BT = rng.integers(0, self.vocabulary, (_NUM_ROWS, self.row_tokens), dtype=np.int64)
        weights_T = np.ones(self.row_tokens, dtype=np.float32)
        weights_T[0] = 0
        return [TokenRow(index, tokens_T, weights_T) for index, tokens_T in enumerate(tokens_BT)]

    @property
    def tolerance(self) -> float:
        """Return the largest difference that rounding can explain, as a share of 1 + |logp|."""
        walk = math.sqrt(_ROUNDINGS_PER_LAYER * self.num_layers)
        sums = torch.finfo(torch.float32).eps * math.sqrt(_SUM_LENGTH)
        return 0.5 * walk * (torch.finfo(self.dtype).eps + sums)


def require_received(manifest: Manifest, received_checksum: str | None) -> None:
    """Raise NotServedError unless the engine received everything that was sent, in order."""
    if received_checksum != manifest.checksum:
        raise NotServedError(
            f"the engine does not serve the weights that were published as version "
            f"{manifest.version}: the checksum over what it took in is {received_checksum}, and "
            f"over the {manifest.num_tensors} tensors that were sent {manifest.checksum}. Tensors "
            "were lost, doubled or reordered. Close it."
        )


def require_served(
    manifest: Manifest,
    probe: Probe,
    *,
    trainer_logp: Sequence[FloatArray],
    engine_logp: Sequence[FloatArray],
) -> None:
    """Raise NotServedError unless the engine's log-probs match the trainer's within the tolerance.

    Raises PolicyNotFiniteError if the trainer's are not finite.
    """
    trainer_logp_M = np.concatenate(trainer_logp).astype(np.float64)
    engine_logp_M = np.concatenate(engine_logp).astype(np.float64)
    if not np.isfinite(trainer_logp_M).all():
        raise PolicyNotFiniteError(
            f"the weights of version {manifest.version} give log-probs that are not finite in the "
            "trainer itself. Did an update go wrong? Go back to a checkpoint, and lower trainer.lr "
            "or trainer.max_grad_norm."
        )
    difference_M = np.abs(engine_logp_M - trainer_logp_M)
    limit_M = probe.tolerance * (1 + np.abs(trainer_logp_M))
    # A NaN exceeds every limit.
    off_M = ~(difference_M <= limit_M)
    if off_M.any():
        worst = int(np.argmax(np.where(np.isnan(difference_M), np.inf, difference_M / limit_M)))
        raise NotServedError(
            f"the engine does not serve the weights that were published as version "
            f"{manifest.version}: {off_M.sum()} of {len(off_M)} probe tokens are off. The worst "
            f"has log-prob {engine_logp_M[worst]:.6g} in the engine and "
            f"{trainer_logp_M[worst]:.6g} in the trainer: they differ by "
            f"{difference_M[worst]:.3g}, and {limit_M[worst]:.3g} is the limit in "
            f"{str(probe.dtype).removeprefix('torch.')}. Close it."
        )
