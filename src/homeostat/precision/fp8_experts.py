"""Experts in FP8: grouped products of quantised rows with quantised matrices.

Forward products and gradients of the inputs are in FP8. The gradients of the matrices stay in the
model's dtype: they sum over the tokens that an expert happens to have, which fill no block.

    rowwise, tensorwise   torch's scaled grouped product
    blockwise             a kernel of our own (ops/kernels/fp8_grouped.py)
    on a CPU              dequantised, one expert after the other

Suffixes: `_N` tokens, `_K` slots, `_D` model dim, `_E` experts, `_I` width of an expert, `_J` twice
that: gate, then up; `_S` all (token, slot) pairs by expert; `_C` the summed axis, `_O` the other.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from homeostat.config.moe import GroupedKernel
from homeostat.ops.expert_rows import gated, gated_gradients, gathered, spread
from homeostat.ops.grouped_experts import grouped_mm
from homeostat.ops.linear import Numerics
from homeostat.ops.pairs import Pairs, pairs_of
from homeostat.precision.fp8 import dequantise, largest_of, quantise
from homeostat.precision.fp8_linear import Watch
from homeostat.precision.history import AmaxHistory
from homeostat.precision.operands import Amax, Operand, TensorCores
from homeostat.precision.recipe import E4M3, Fp8Recipe


class StackCopies:
    """The FP8 copies of one stack of matrices, at fixed addresses, made again after it changed."""

    def __init__(self, recipe: Fp8Recipe) -> None:
        self._recipe = recipe
        self._made: dict[bool, Operand] = {}
        self._fresh: set[bool] = set()
        self._lock = threading.Lock()

    def changed(self) -> None:
        """Note that the matrices are others now."""
        self._fresh.clear()

    @torch.no_grad()
    def copy(self, stack_EOC: Tensor, *, turned: bool) -> Operand:
        """Return [E, O, C], or the transposed matrices [E, C, O], with the last axis summed."""
        with self._lock:
            if turned not in self._fresh:
                make = _on_gpu if stack_EOC.is_cuda else _emulated
                found = make(stack_EOC.detach(), self._recipe, turned=turned)
                # A captured graph knows the memory of the first copy.
                kept = self._made.setdefault(turned, found)
                if kept is not found:
                    for old, new in zip(kept.tensors(), found.tensors(), strict=True):
                        old.copy_(new)
                self._fresh.add(turned)
            return self._made[turned]


class Fp8Experts:
    """The product of one layer of experts. It takes the place of `Experts.product`."""

    def __init__(self, name: str, recipe: Fp8Recipe, *, device: torch.device) -> None:
        self.name, self.recipe = name, recipe
        self.gate_up, self.down = StackCopies(recipe), StackCopies(recipe)
        self.watch: Watch | None = None
        limits = {"limit": largest_of(E4M3), "device": device}
        kinds = ("input", "gated", "gated_gradient", "gradient")
        self._histories = {kind: AmaxHistory(recipe.history, **limits) for kind in kinds}

    def __call__(
        self,
        x_ND: Tensor,
        ids_NK: Tensor,
        weights_NK: Tensor,
        gate_up_EJD: Tensor,
        down_EDI: Tensor,
        *,
        numerics: Numerics,
        kernel: GroupedKernel,
    ) -> Tensor:
        if self.watch is not None:
            self.watch(self.name, "input", x_ND, self._histories["input"].expected)
            self.watch(self.name, "weight", gate_up_EJD.flatten(0, 1), None)
        return _Experts.apply(x_ND, ids_NK, weights_NK, gate_up_EJD, down_EDI, self)

    def copies(self) -> tuple[StackCopies, ...]:
        """Return the copies of its matrices."""
        return self.gate_up, self.down

    def histories(self) -> dict[str, AmaxHistory]:
        """Return its histories by the tensor that they are of."""
        return self._histories

    def product(
        self,
        rows_SC: Tensor,
        copy: Operand,
        pairs: Pairs,
        *,
        num_outputs: int,
        kind: str,
        records: bool,
    ) -> Tensor:
        """Return [S, O]: each row by its expert's matrix."""
        is_gradient = kind.endswith("gradient")
        dtype = (self.recipe.gradients or E4M3) if is_gradient else E4M3
        amax = self._histories[kind].now(records=records)
        if not rows_SC.is_cuda:
            return _emulated_product(rows_SC, copy, pairs, self.recipe, dtype, amax)
        out = _gpu_product(rows_SC, copy, pairs, self.recipe, dtype, amax)
        return out[:, :num_outputs].contiguous()


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        ids_NK: Tensor,
        weights_NK: Tensor,
        gate_up_EJD: Tensor,
        down_EDI: Tensor,
        layer: Fp8Experts,
    ) -> Tensor:
        pairs, num_slots = pairs_of(ids_NK, len(down_EDI), like=x_ND), ids_NK.shape[1]
        records = any(ctx.needs_input_grad)
        rows_SD = spread(x_ND, pairs, num_slots=num_slots)
        stack = layer.gate_up.copy(gate_up_EJD, turned=False)
        how = {"kind": "input", "num_outputs": gate_up_EJD.shape[1], "records": records}
        both_SJ = layer.product(rows_SD, stack, pairs, **how).contiguous()
        del rows_SD
        stack = layer.down.copy(down_EDI, turned=False)
        how = {"kind": "gated", "num_outputs": down_EDI.shape[1], "records": records}
        out_SD = layer.product(gated(both_SJ), stack, pairs, **how).contiguous()
        places = pairs.order_S, pairs.place_S, pairs.ends_E
        ctx.layer = layer
        ctx.save_for_backward(x_ND, weights_NK, both_SJ, gate_up_EJD, down_EDI, *places)
        return gathered(out_SD, pairs, weights_NK, num_slots=num_slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x_ND, weights_NK, both_SJ, gate_up_EJD, down_EDI, *places = ctx.saved_tensors
        needs_x, _, needs_weights, needs_gate_up, needs_down, _ = ctx.needs_input_grad
        pairs, num_slots, layer = Pairs(*places), weights_NK.shape[1], ctx.layer
        dx_ND = dgate_up_EJD = ddown_EDI = None
        dout_SD = spread(grads[0], pairs, num_slots=num_slots)
        if layer.watch is not None:
            expected = layer.histories()["gradient"].expected
            layer.watch(layer.name, "gradient", dout_SD, expected)
        back_SI = _back(layer, dout_SD, down_EDI, layer.down, pairs, kind="gradient")
        dboth_SJ, dweights_NK, scaled_SI = gated_gradients(back_SI, both_SJ, pairs, weights_NK)
        if needs_down:
            ddown_EDI = grouped_mm(dout_SD.t(), scaled_SI, pairs.ends_E)
        del back_SI, dout_SD, scaled_SI
        if needs_gate_up:
            rows_SD = spread(x_ND, pairs, num_slots=num_slots)
            dgate_up_EJD = grouped_mm(dboth_SJ.t(), rows_SD, pairs.ends_E)
            del rows_SD
        if needs_x:
            args = dboth_SJ, gate_up_EJD, layer.gate_up, pairs
            drows_SD = _back(layer, *args, kind="gated_gradient")
            dx_ND = gathered(drows_SD, pairs, None, num_slots=num_slots)
        return dx_ND, None, dweights_NK if needs_weights else None, dgate_up_EJD, ddown_EDI, None


def _back(
    layer: Fp8Experts,
    rows_SO: Tensor,
    stack_EOC: Tensor,
    copies: StackCopies,
    pairs: Pairs,
    *,
    kind: str,
) -> Tensor:
    """Return the gradient of a product's rows."""
    if layer.recipe.gradients is None:
        return grouped_mm(rows_SO, stack_EOC, pairs.ends_E)
    copy = copies.copy(stack_EOC, turned=True)
    how = {"kind": kind, "num_outputs": stack_EOC.shape[2], "records": True}
    return layer.product(rows_SO, copy, pairs, **how).contiguous()


def _emulated(stack_EOC: Tensor, recipe: Fp8Recipe, *, turned: bool) -> Operand:
    stack = stack_EOC.transpose(1, 2) if turned else stack_EOC
    how = {"block": recipe.weights, "power_of_two": recipe.power_of_two}
    return Operand(dequantise(quantise(stack, **how)))


def _on_gpu(stack_EOC: Tensor, recipe: Fp8Recipe, *, turned: bool) -> Operand:
    made = []
    for matrix_OC in stack_EOC:
        pair = TensorCores().operands(
            matrix_OC, recipe, E4M3, is_weight=True, rows=not turned, columns=turned
        )
        made.append(pair[turned])
    values, scales = (
        torch.stack(parts) for parts in zip(*(m.tensors() for m in made), strict=True)
    )
    return Operand(values, scales)


def _emulated_product(
    rows_SC: Tensor,
    copy: Operand,
    pairs: Pairs,
    recipe: Fp8Recipe,
    dtype: torch.dtype,
    amax: Amax,
) -> Tensor:
    if amax.record is not None and rows_SC.numel():
        torch.maximum(amax.record, rows_SC.abs().amax().float(), out=amax.record)
    how = {"block": recipe.rows, "dtype": dtype, "power_of_two": recipe.power_of_two}
    dense_SC = dequantise(quantise(rows_SC, **how, amax=amax.expected))
    return grouped_mm(dense_SC, copy.values.transpose(1, 2), pairs.ends_E).to(rows_SC.dtype)


def _gpu_product(
    rows_SC: Tensor,
    copy: Operand,
    pairs: Pairs,
    recipe: Fp8Recipe,
    dtype: torch.dtype,
    amax: Amax,
) -> Tensor:
    rows, _ = TensorCores().operands(rows_SC, recipe, dtype, columns=False, amax=amax)
    assert rows is not None
    assert rows.scales is not None
    assert copy.scales is not None
    num_rows = len(rows_SC)
    if recipe.scaling == "blockwise":
        from homeostat.ops.kernels.fp8_grouped import grouped_fp8

        return grouped_fp8(rows.values, rows.scales, copy.values, copy.scales, pairs)
    return torch._scaled_grouped_mm(
        rows.values[:num_rows],
        copy.values.transpose(1, 2),
        _each(rows.scales, num_rows),
        _each(copy.scales, copy.values.shape[1], batch=len(copy.values)),
        offs=pairs.ends_E,
        out_dtype=torch.bfloat16,
    )


def _each(scales: Tensor, count: int, *, batch: int = 0) -> Tensor:
    """Return one scale per row, [count] or [batch, count]; one for all is repeated."""
    if not batch:
        return scales.flatten()[:count].expand(count).contiguous()
    return scales.reshape(batch, -1)[:, :count].expand(batch, count).contiguous()
