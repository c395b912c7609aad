"""Linear maps in FP8: forward, the gradient of the inputs, and that of the weight.

    y_MO  = x_MK @ W_OK.T        sums over K
    dx_MK = dy_MO @ W_OK         sums over O
    dW_OK = dy_MO.T @ x_MK       sums over M, the tokens

Each product quantises both operands along the axis that it sums over. Inputs are quantised once in
the forward pass, by rows and by columns, and the copy by columns is all that is kept of them for
the backward pass: half of what bf16 keeps. Maps that have the same inputs (queries, keys and
values; gate and up) share these copies. Copies of weights are made once after each update.

Suffixes: `_M` tokens, `_K` inputs, `_O` outputs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from homeostat.precision.history import AmaxHistory
from homeostat.precision.operands import Arithmetic, Operand, Pair
from homeostat.precision.recipe import E4M3, Fp8Recipe

Watched = Literal["input", "weight", "gradient"]
# Sees a tensor before it is quantised: the layer's name, what it is, the tensor, and the largest
# number that a delayed scale expects.
Watch = Callable[[str, Watched, Tensor, Tensor | None], None]


class WeightCopies:
    """The FP8 copies of one weight, at fixed addresses, made again after the weight has changed."""

    def __init__(self, recipe: Fp8Recipe, arithmetic: Arithmetic) -> None:
        self._recipe, self._arithmetic = recipe, arithmetic
        self._made: list[Operand | None] = [None, None]
        self._is_fresh = [False, False]
        # Parts of a micro-batch are computed by several threads.
        self._lock = threading.Lock()

    def changed(self) -> None:
        """Note that the weight is another one now."""
        self._is_fresh = [False, False]

    def place(self, rows: Operand) -> None:
        """Write the copy by rows to this memory from now on."""
        self._made[0], self._is_fresh[0] = rows, False

    def by_rows(self, weight_OK: Tensor) -> Operand:
        """Return the copy [O, K], for the output."""
        return self._copy(weight_OK, 0)

    def by_columns(self, weight_OK: Tensor) -> Operand:
        """Return the copy [K, O], for the gradient of the inputs."""
        return self._copy(weight_OK, 1)

    @torch.no_grad()
    def _copy(self, weight_OK: Tensor, which: int) -> Operand:
        with self._lock:
            if not self._is_fresh[which]:
                # Both are made from one load, if both have been needed before.
                wanted = [which == side or self._made[side] is not None for side in (0, 1)]
                pair = self._arithmetic.operands(
                    weight_OK,
                    self._recipe,
                    E4M3,
                    is_weight=True,
                    rows=wanted[0],
                    columns=wanted[1],
                    into=(self._made[0], self._made[1]),
                )
                self._made, self._is_fresh = list(pair), wanted
            found = self._made[which]
        assert found is not None, which
        return found


class _Kept:
    """The copies of one tensor, for as long as the tensor is alive and unchanged."""

    def __init__(self, x: Tensor, pair: Pair) -> None:
        self.source, self.version, self.pair = weakref.ref(x, self._drop), x._version, pair

    def _drop(self, source: weakref.ref[Tensor]) -> None:
        self.pair = None, None


class SharedInputs(threading.local):
    """The quantised copies of a thread's last inputs, for maps that are given the same ones."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def find(self, x: Tensor, *, columns: bool) -> Pair | None:
        """Return the copies of this very tensor, if they were made last."""
        kept = self._kept
        if kept is None or kept.source() is not x or kept.version != x._version:
            return None
        return kept.pair if kept.pair[1] is not None or not columns else None

    def keep(self, x: Tensor, pair: Pair) -> None:
        """Remember the copies until other inputs come, or these are freed."""
        self._kept = _Kept(x, pair)


@dataclass(slots=True, eq=False)
class Fp8Product:
    """The product of one linear map. It takes the place of `Linear.product`."""

    name: str
    recipe: Fp8Recipe
    arithmetic: Arithmetic
    weights: WeightCopies
    shared: SharedInputs
    input_amax: AmaxHistory
    gradient_amax: AmaxHistory
    watch: Watch | None = None

    def __call__(self, x: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        if self.watch is not None:
            self.watch(self.name, "input", x_MK, self.input_amax.expected)
            self.watch(self.name, "weight", weight_OK, None)
        in_update = torch.is_grad_enabled()
        pair = self._inputs(
            x, x_MK, learns=in_update and weight_OK.requires_grad, records=in_update
        )
        out_MO = _Product.apply(x_MK, weight_OK, bias_O, pair, self)
        return out_MO.view(*x.shape[:-1], len(weight_OK))

    @torch.no_grad()
    def _inputs(self, x: Tensor, x_MK: Tensor, *, learns: bool, records: bool) -> Pair:
        columns = learns and self.recipe.gradients is not None
        pair = self.shared.find(x, columns=columns)
        if pair is None:
            amax = self.input_amax.now(records=records)
            pair = self.arithmetic.operands(x_MK, self.recipe, E4M3, columns=columns, amax=amax)
            self.shared.keep(x, pair)
        return pair

    def copies(self) -> tuple[WeightCopies, ...]:
        """Return the copies of its weights."""
        return (self.weights,)

    def histories(self) -> dict[str, AmaxHistory]:
        """Return its histories by the tensor that they are of."""
        return {"input": self.input_amax, "gradient": self.gradient_amax}

    def output(self, rows: Operand, weight_OK: Tensor, *, num_rows: int) -> Tensor:
        """Return y = x @ W.T."""
        sizes = num_rows, len(weight_OK)
        copies = self.weights.by_rows(weight_OK)
        # Fast sums lose bits: they are faster with scales of rows, not with one scale, and
        # blocks have none. Invariant numerics fix the order of the sums that may be fast.
        is_fast = self.recipe.scaling != "tensorwise"
        return self.arithmetic.product(rows, copies, self.recipe, sizes=sizes, fast=is_fast)

    def gradients(
        self,
        grad_MO: Tensor,
        weight_OK: Tensor,
        columns: Operand | None,
        *,
        needs_x: bool,
        needs_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return dx and dW, as far as they are needed."""
        recipe, product = self.recipe, self.arithmetic.product
        assert recipe.gradients is not None, "products with gradients stay in bf16"
        if self.watch is not None:
            self.watch(self.name, "gradient", grad_MO, self.gradient_amax.expected)
        by_rows, by_columns = self.arithmetic.operands(
            grad_MO,
            recipe,
            recipe.gradients,
            rows=needs_x,
            columns=needs_weight,
            amax=self.gradient_amax.now(records=True),
        )
        (num_outputs, num_inputs), num_rows = weight_OK.shape, len(grad_MO)
        dx_MK = dweight_OK = None
        if needs_x:
            assert by_rows is not None
            copies, sizes = self.weights.by_columns(weight_OK), (num_rows, num_inputs)
            dx_MK = product(by_rows, copies, recipe, sizes=sizes, fast=False)
        if needs_weight:
            assert by_columns is not None
            assert columns is not None
            sizes = num_outputs, num_inputs
            dweight_OK = product(by_columns, columns, recipe, sizes=sizes, fast=False)
        return dx_MK, dweight_OK


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        weight_OK: Tensor,
        bias_O: Tensor | None,
        pair: Pair,
        layer: Fp8Product,
    ) -> Tensor:
        rows, columns = pair
        assert rows is not None
        ctx.layer, ctx.is_plain = layer, layer.recipe.gradients is None
        kept = (x_MK,) if ctx.is_plain else () if columns is None else columns.tensors()
        ctx.save_for_backward(weight_OK, *kept)
        out_MO = layer.output(rows, weight_OK, num_rows=len(x_MK)).to(x_MK.dtype)
        return out_MO if bias_O is None else out_MO + bias_O

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad_MO,) = grads
        weight_OK, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if ctx.is_plain:
            dx_MK = grad_MO @ weight_OK if needs_x else None
            dweight_OK = grad_MO.t() @ kept[0] if needs_weight else None
        else:
            columns = Operand(*kept) if kept else None
            needs = {"needs_x": needs_x, "needs_weight": needs_weight}
            dx_MK, dweight_OK = ctx.layer.gradients(grad_MO, weight_OK, columns, **needs)
            dx_MK = None if dx_MK is None else dx_MK.to(grad_MO.dtype)
            dweight_OK = None if dweight_OK is None else dweight_OK.to(weight_OK.dtype)
        dbias_O = grad_MO.sum(0) if needs_bias else None
        return dx_MK, dweight_OK, dbias_O, None, None
