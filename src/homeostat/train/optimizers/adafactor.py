"""Adafactor (Shazeer and Stern, arXiv 1804.04235): second moments as a row and a column.

    V = R C / mean(R)            R, C: running means of g^2 + eps over columns and over rows
    u = g / sqrt(V)              vectors keep V itself
    u /= max(1, rms(u) / clip_threshold)
    p = (1 - lr decay) p - rate u

with the decay rate 1 - t^-decay_exponent. `rate` is the learning rate; with relative_step at most
1 / sqrt(t), with scale_parameter times max(1e-3, rms(p)). There is no first moment. The options are
those of transformers' Adafactor; with both of the last ones it is torch.optim.Adafactor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from homeostat.config.optimizer import AdafactorConfig
from homeostat.ops.adamw import write_master
from homeostat.train.optimizers.slots import STEP, Piece, Slot, State

ROW, COLUMN, SQUARE = "row_sq", "column_sq", "exp_avg_sq"
# The least scale of a parameter (eps2 of the paper), so that weights of zero can move.
_MIN_SCALE = 1e-3


class Adafactor:
    """The rule of Adafactor. Implements `Rule`."""

    def __init__(self, config: AdafactorConfig) -> None:
        self.config = config

    def begin(
        self, name: str, master: Tensor, *, device: torch.device, computes: torch.device
    ) -> State:
        shape = master.shape
        if len(shape) < 2:
            moments = {SQUARE: torch.zeros(shape, device=device)}
        else:
            moments = {
                ROW: torch.zeros(shape[:-1], device=device),
                COLUMN: torch.zeros((*shape[:-2], shape[-1]), device=device),
            }
        return {STEP: torch.zeros(()), **moments}

    def cut(self, slot: Slot, *, limit: int) -> list[tuple[int, int]]:
        """Rows and columns are means over all of a tensor."""
        return [(0, slot.master.numel())]

    def count(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.state[STEP] += 1

    def work(self, slot: Slot) -> int:
        """The gradient's memory takes the update; weights in bf16 are measured in fp32."""
        is_copied = self.config.scale_parameter and slot.master.dtype != torch.float32
        return slot.master.numel() * 4 if is_copied else 0

    def update(
        self, pieces: Sequence[Piece], *, learning_rate: float, measure: bool
    ) -> list[Tensor]:
        norms = [self._update(piece, learning_rate, measure) for piece in pieces]
        return [norm for norm in norms if norm is not None]

    def _update(self, piece: Piece, learning_rate: float, measure: bool) -> Tensor | None:
        slot, config = piece.slot, self.config
        step = int(slot.state[STEP])
        master = piece.master.view(slot.shape)
        update = self._direction(piece, step=step)
        if config.clip_threshold is not None:
            update /= (_rms(update) / config.clip_threshold).clamp(min=1.0)
        update *= min(learning_rate, step**-0.5) if config.relative_step else learning_rate
        if config.scale_parameter:
            update *= _rms(master.float()).clamp(min=_MIN_SCALE)
        norm = torch.linalg.vector_norm(update) if measure else None
        kept = 1.0 - learning_rate * slot.decay
        # The gradient's memory takes the result: p kept - u.
        update.neg_().add_(master, alpha=kept)
        write_master(master, update, noise=slot.noise(0))
        return norm

    def _direction(self, piece: Piece, *, step: int) -> Tensor:
        """Return g / sqrt(V) in the gradient's memory, with the moments updated."""
        share, eps = step**-self.config.decay_exponent, self.config.eps
        grad, state = piece.grad.reshape(piece.slot.shape), piece.state
        if grad.ndim < 2:
            square = state[SQUARE].lerp_(grad.square().add_(eps), share)
            return grad.mul_(square.rsqrt())
        row = state[ROW].view(grad.shape[:-1]).lerp_(_mean_square(grad, -1).add_(eps), share)
        column = state[COLUMN].view((*grad.shape[:-2], grad.shape[-1]))
        column.lerp_(_mean_square(grad, -2).add_(eps), share)
        grad *= (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        grad *= column.rsqrt().unsqueeze(-2)
        return grad


def _mean_square(x: Tensor, dim: int) -> Tensor:
    """Mean of squares along a dimension, without a tensor of the squares."""
    return torch.linalg.vector_norm(x, dim=dim).square_().div_(x.shape[dim])


def _rms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x) / x.numel() ** 0.5
