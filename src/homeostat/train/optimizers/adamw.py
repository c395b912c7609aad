"""AdamW (Loshchilov and Hutter, arXiv 1711.05101), with moments and masters of any precision.

If moments and masters are fp32, torch's fused kernel updates all tensors at once, bitwise as
torch.optim.AdamW(fused=True) does. In all other cases `ops.adamw` updates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from homeostat.config.optimizer import AdamConfig
from homeostat.ops.adamw import adamw_
from homeostat.ops.adamw_step import AdamWStep
from homeostat.ops.moments import BLOCK
from homeostat.train.optimizers.slots import STEP, Piece, Slot, State, begin_moment, even_cuts
from homeostat.train.saving.frozen import CHUNK_ELEMENTS

MEAN, SQUARE = "exp_avg", "exp_avg_sq"


class AdamW:
    """The rule of AdamW. Implements `Rule`."""

    def __init__(self, config: AdamConfig) -> None:
        self.config = config

    def begin(
        self, name: str, master: Tensor, *, device: torch.device, computes: torch.device
    ) -> State:
        kind = self.config.moments
        state = begin_moment(MEAN, master, kind, device=device)
        state |= begin_moment(SQUARE, master, kind, signed=False, device=device)
        # The fused kernel reads the count where it computes; other code reads it on the host.
        place = computes if _is_fused(master, state) else torch.device("cpu")
        return {STEP: torch.zeros((), device=place), **state}

    def cut(self, slot: Slot, *, limit: int) -> list[tuple[int, int]]:
        return even_cuts(slot.master.numel(), limit=limit, unit=BLOCK)

    def count(self, slots: Sequence[Slot]) -> None:
        counts = [slot.state[STEP] for slot in slots]
        for place in dict.fromkeys(count.device for count in counts):
            here = [count for count in counts if count.device == place]
            torch._foreach_add_(here, 1)

    def work(self, slot: Slot) -> int:
        """Everything is updated in one pass, in place."""
        return 0

    def update(
        self, pieces: Sequence[Piece], *, learning_rate: float, measure: bool
    ) -> list[Tensor]:
        alike: dict[tuple[Any, ...], list[Piece]] = {}
        norms: dict[int, Tensor] = {}
        for piece in pieces:
            if _is_fused(piece.master, piece.state):
                kind = piece.master.device, piece.slot.decay
                alike.setdefault(kind, []).append(piece)
            elif (norm := self._update(piece, learning_rate, measure)) is not None:
                norms[id(piece)] = norm
        for (_, decay), group in alike.items():
            self._update_fused(group, learning_rate, decay)
            for piece in group if measure else ():
                norms[id(piece)] = self._norm(piece, learning_rate)
        return [norms[id(piece)] for piece in pieces] if measure else []

    def _update(self, piece: Piece, learning_rate: float, measure: bool) -> Tensor | None:
        slot, config = piece.slot, self.config
        how = AdamWStep(
            lr=learning_rate,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            decay=slot.decay,
            step=int(slot.state[STEP]),
        )
        moments = piece.moment(MEAN), piece.moment(SQUARE, signed=False)
        master, grad = piece.master.view(-1), piece.grad.reshape(-1)
        noise = slot.noise(piece.start)
        return adamw_(master, grad, *moments, how=how, noise=noise, measure=measure)

    def _update_fused(self, pieces: Sequence[Piece], learning_rate: float, decay: float) -> None:
        torch._fused_adamw_(
            [piece.master for piece in pieces],
            [piece.grad for piece in pieces],
            [piece.state[MEAN] for piece in pieces],
            [piece.state[SQUARE] for piece in pieces],
            [],
            [piece.slot.state[STEP] for piece in pieces],
            lr=learning_rate,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            weight_decay=decay,
            eps=self.config.eps,
            amsgrad=False,
            maximize=False,
        )

    def _norm(self, piece: Piece, learning_rate: float) -> Tensor:
        """Return the norm of what the last update took off, weight decay aside, from the moments.

        lr * (m / c1) / (sqrt(v / c2) + eps) = lr sqrt(c2) / c1 * m / (sqrt(v) + eps sqrt(c2)) with
        c = 1 - beta^step.
        """
        beta1, beta2, eps = self.config.beta1, self.config.beta2, self.config.eps
        count = piece.slot.state[STEP].to(piece.master.device)
        root = (1 - beta2**count).sqrt()
        norm = _norm_of_quotient(piece.state[MEAN], piece.state[SQUARE], eps * root)
        return norm * (learning_rate * root / (1 - beta1**count))


def _is_fused(master: Tensor, state: State) -> bool:
    return MEAN in state and master.dtype == torch.float32


def _norm_of_quotient(mean: Tensor, square: Tensor, small: Tensor) -> Tensor:
    """Norm of mean / (sqrt(square) + small), by chunks: never a copy of a whole tensor."""
    chunks = zip(*(t.reshape(-1).split(CHUNK_ELEMENTS) for t in (mean, square)), strict=True)
    norms = [torch.linalg.vector_norm(m / v.sqrt().add_(small)) for m, v in chunks]
    return torch.linalg.vector_norm(torch.stack(norms))
