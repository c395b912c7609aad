"""AdamW over moments and masters of any precision: one kernel on a GPU, plain torch on a CPU.

    m += (1 - beta1) (g - m)        v = beta2 v + (1 - beta2) g^2
    p = (1 - lr decay) p - lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)        c = 1 - beta^t

The update is computed from the new moments in fp32, before they are rounded to be stored. Where all
is fp32, torch's own fused kernel does the same (train/optimizers/adamw.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from homeostat.ops import kernels
from homeostat.ops.adamw_step import AdamWStep
from homeostat.ops.moments import Moment, read_moment, write_moment
from homeostat.ops.stochastic import Noise, round_into

# Elements that plain torch updates in one go; a multiple of the blocks of 8-bit moments.
_CHUNK = 2**18


def adamw_(
    master: Tensor,
    grad: Tensor,
    mean: Moment,
    square: Moment,
    *,
    how: AdamWStep,
    noise: Noise,
    measure: bool = False,
) -> Tensor | None:
    """Update flat tensors in place; with `measure`, return the norm of the update without decay.

    A master in bf16 is rounded stochastically.
    """
    if kernels.fused(grad):
        from homeostat.ops.kernels.adamw import fused_adamw_

        return fused_adamw_(master, grad, mean, square, how=how, noise=noise, measure=measure)
    norms = []
    for start in range(0, len(grad), _CHUNK):
        stop = min(start + _CHUNK, len(grad))
        moments = mean.part(start, stop), square.part(start, stop)
        here = {"how": how, "noise": noise.shifted(start)}
        update = _adamw_chunk(master[start:stop], grad[start:stop], *moments, **here)
        if measure:
            norms.append(torch.linalg.vector_norm(update))
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else None


def _adamw_chunk(
    master: Tensor, grad: Tensor, mean: Moment, square: Moment, *, how: AdamWStep, noise: Noise
) -> Tensor:
    m = read_moment(mean).lerp_(grad, 1.0 - how.beta1)
    v = read_moment(square).mul_(how.beta2).addcmul_(grad, grad, value=1.0 - how.beta2)
    update = m / (v.sqrt() / how.root).add_(how.eps) * how.size
    write_moment(mean, m, noise=noise)
    write_moment(square, v, noise=noise)
    write_master(master, master.float() * how.kept - update, noise=noise)
    return update


def write_master(master: Tensor, value: Tensor, *, noise: Noise) -> None:
    """Store new weights; in bf16 they are rounded stochastically."""
    if master.dtype == torch.float32:
        master.copy_(value)
    else:
        round_into(master, value, noise.other())
