"""Muon: momentum orthogonalised by Newton-Schulz for the matrices of layers, AdamW for the rest.

    b += (1 - momentum) (g - b)        u = g + momentum (b - g) with nesterov, else b
    p = (1 - lr decay) p - lr scale O(u)

O(u) maps the singular values of u to about 1: five iterations X = a X + (b A + c A A) X, A = X X^T,
with the coefficients of Jordan (kellerjordan.github.io/posts/muon), in bf16 on a GPU and in fp32 on
a CPU. `scale` for an n x m matrix is 0.2 sqrt(max(n, m)), with which an update has the root mean
square of AdamW's, so that its learning rate and decay fit (Liu et al., Muon is Scalable for LLM
Training, arXiv 2502.16982), or Jordan's sqrt(max(1, n / m)). Both are those of torch.optim.Muon.

Stacked experts are a batch of matrices; gate and up, which share a tensor, are two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from homeostat.config.optimizer import MuonConfig
from homeostat.ops.adamw import write_master
from homeostat.ops.moments import BLOCK, read_moment, write_moment
from homeostat.train.optimizers.adamw import AdamW
from homeostat.train.optimizers.slots import STEP, Piece, Slot, State, begin_moment, even_cuts

MOMENTUM = "momentum"
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7
# Elements of small matrices that are orthogonalised in one batch.
_GROUP_ELEMENTS = 2**22
# For each of them: momentum, its mixture with the gradient and the update in fp32, the new weight,
# and three matrices of an iteration in bf16.
_WORK_BYTES = 22
_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")


class Muon:
    """The rule of Muon. Implements `Rule`."""

    def __init__(self, config: MuonConfig) -> None:
        self.config = config
        self.adamw = AdamW(config)

    def begin(
        self, name: str, master: Tensor, *, device: torch.device, computes: torch.device
    ) -> State:
        if not is_hidden_matrix(name, master):
            return self.adamw.begin(name, master, device=device, computes=computes)
        moment = begin_moment(MOMENTUM, master, self.config.moments, device=device)
        return {STEP: torch.zeros(()), **moment}

    def cut(self, slot: Slot, *, limit: int) -> list[tuple[int, int]]:
        if not _is_muon(slot.state):
            return self.adamw.cut(slot, limit=limit)
        return even_cuts(slot.master.numel(), limit=limit, unit=_unit(slot))

    def count(self, slots: Sequence[Slot]) -> None:
        self.adamw.count(slots)

    def work(self, slot: Slot) -> int:
        if not _is_muon(slot.state):
            return self.adamw.work(slot)
        return _unit(slot) * _WORK_BYTES

    def update(
        self, pieces: Sequence[Piece], *, learning_rate: float, measure: bool
    ) -> list[Tensor]:
        how = {"learning_rate": learning_rate, "measure": measure}
        others = [piece for piece in pieces if not _is_muon(piece.state)]
        adamw_norms = iter(self.adamw.update(others, **how))
        norms = []
        for piece in pieces:
            if _is_muon(piece.state):
                norms.append(self._update(piece, **how))
            elif measure:
                norms.append(next(adamw_norms))
        return [norm for norm in norms if norm is not None]

    def _update(self, piece: Piece, *, learning_rate: float, measure: bool) -> Tensor | None:
        """Update some matrices at a time: a stack of experts has no copy as a whole."""
        unit, norms = _unit(piece.slot), []
        for start, stop in even_cuts(piece.master.numel(), limit=unit, unit=unit):
            update = self._update_some(piece, start, stop, learning_rate=learning_rate)
            if measure:
                norms.append(torch.linalg.vector_norm(update))
        return torch.linalg.vector_norm(torch.stack(norms)) if measure else None

    def _update_some(self, piece: Piece, start: int, stop: int, *, learning_rate: float) -> Tensor:
        slot, config = piece.slot, self.config
        shape = matrix_shape(slot.name, slot.shape)
        noise, moment = slot.noise(piece.start + start), piece.moment(MOMENTUM).part(start, stop)
        grad = piece.grad.reshape(-1)[start:stop]
        master = piece.master.view(-1)[start:stop]
        momentum = read_moment(moment).lerp_(grad, 1.0 - config.momentum)
        mixed = grad.lerp(momentum, config.momentum) if config.nesterov else momentum
        direction = orthogonalised(mixed.view(-1, *shape), iterations=config.iterations)
        write_moment(moment, momentum, noise=noise)
        size = learning_rate * update_scale(shape, config.scale)
        update = direction.float().mul_(size).reshape(-1)
        kept = master.float() * (1.0 - learning_rate * slot.decay)
        write_master(master, kept.sub_(update), noise=noise)
        return update


def _unit(slot: Slot) -> int:
    """Return the number of elements that are updated in one go: whole matrices, whole blocks.

    It is the same whether a slot comes in parts or not, so that the products have the same bits.
    """
    rows, columns = matrix_shape(slot.name, slot.shape)
    together = max(1, _GROUP_ELEMENTS // (rows * columns)) * rows * columns
    return min(math.lcm(together, BLOCK), slot.master.numel())


def is_hidden_matrix(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor is a matrix of a layer, or a stack of them."""
    return tensor.ndim in (2, 3) and _LAYER.search(name) is not None


def matrix_shape(name: str, shape: torch.Size) -> tuple[int, int]:
    """Return the shape of each matrix of a stack. Gate and up of experts are stacked in one."""
    rows, columns = shape[-2:]
    is_pair = len(shape) == 3 and name.endswith("gate_up_proj")
    return (rows // 2 if is_pair else rows), columns


def update_scale(shape: tuple[int, int], kind: str) -> float:
    """Return the factor of the orthogonalised update of a matrix."""
    rows, columns = shape
    if kind == "match_rms":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def orthogonalised(
    matrices: Tensor, *, iterations: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a batch of matrices with singular values near 1, by Newton-Schulz iterations."""
    a, b, c = _COEFFICIENTS
    x = matrices.to(dtype or (torch.bfloat16 if matrices.is_cuda else torch.float32))
    is_tall = x.shape[-2] > x.shape[-1]
    # The smaller side makes the smaller products.
    x = x.mT if is_tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(iterations):
        gram = torch.bmm(x, x.mT)
        mixed = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, mixed, x, beta=a)
    return x.mT if is_tall else x


def _is_muon(state: State) -> bool:
    return any(name.startswith(MOMENTUM) for name in state)
