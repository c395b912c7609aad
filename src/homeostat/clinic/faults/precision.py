"""Faults of low precision: scales, ranges, layers and switches that do not do what they should."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from homeostat.clinic.injector import FROM_START, Cure, Injector
from homeostat.clinic.recipes import Body, Raw, put
from homeostat.health.finding import Family
from homeostat.precision.fp8_linear import Fp8Product
from homeostat.run.session.session import Session
from homeostat.types import Role

# Layers 64 wide are half a block: rows are the finest scales that are whole.
FP8: Raw = {"trainer.fp8": {"recipe": "rowwise"}, "observe.precision_interval": 2}
DELAYED: Raw = {
    "trainer.fp8": {"recipe": "tensorwise", "scaling": "delayed"},
    "observe.precision_interval": 2,
}
INT4: Raw = {"trainer.int4": {"group_size": 32}, "observe.precision_interval": 2}
LATE_DELAYED: Raw = {**DELAYED, "trainer.fp8": {**DELAYED["trainer.fp8"], "start_step": 20}}
LATE_INT4: Raw = {**INT4, "trainer.int4": {**INT4["trainer.int4"], "start_step": 20}}
SORT_FP8 = Body("sort", "sft", steps=40, changes=FP8)
SORT_DELAYED = Body("sort", "sft", steps=40, changes=DELAYED)
SORT_INT4 = Body("sort", "sft", steps=40, changes=INT4)


def products(parts: Any) -> Iterator[Fp8Product]:
    """Yield the FP8 products of the policy's linear maps."""
    (rewrite,) = parts.trainer.roles[Role.POLICY].rewrites
    for layer in rewrite.layers():
        product = layer.module.product
        if isinstance(product, Fp8Product):
            yield product


class ZeroScale(Injector):
    """A scale of quantised inputs is taken from a number that is not finite: all of it is NaN."""

    name, family = "fp8_bad_scale", Family.PRECISION
    expects = ("fp8-zero-scale", "nan-loss", "steps-skipped")
    body, is_fatal = SORT_FP8, True

    def before_step(self, step: int, parts: Any) -> None:
        if self.strikes(step):
            layer = next(iter(parts.trainer.roles[Role.POLICY].rewrites)).layers()[0]
            layer.module.register_forward_pre_hook(_with_infinity)


def _with_infinity(module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    first = args[0].clone()
    first[0, 0] = torch.inf
    return (first, *args[1:])


class Saturated(Injector):
    """Delayed scales are far too small: the largest numbers are cut."""

    name, family, expects = "fp8_saturated", Family.PRECISION, ("fp8-saturation",)
    body, strength = SORT_DELAYED, (20.0, 100.0)

    def before_update(self, step: int, parts: Any, rollouts: Any = None) -> None:
        if not self.is_ill(step):
            return
        for product in products(parts):
            history = product.input_amax
            if history.expected is not None:
                history.expected = history.values.amax().reshape(1) / self.dose.strength


class CoarseScale(Injector):
    """One number of a tensor is so large that its scale rounds most others to 0."""

    name, family = "fp8_outlier", Family.PRECISION
    expects = ("quantisation-underflow", "quantised-gradient-off")
    body = Body(
        "sort",
        "sft",
        steps=40,
        changes={"trainer.fp8": {"recipe": "tensorwise"}, "observe.precision_interval": 2},
    )
    strength = (3e6, 1e7)

    def before_step(self, step: int, parts: Any) -> None:
        if self.strikes(step):
            for layer in next(iter(parts.trainer.roles[Role.POLICY].rewrites)).layers():
                layer.module.register_forward_pre_hook(self._with_outlier)

    def _with_outlier(self, module: torch.nn.Module, args: tuple[Tensor, ...]) -> Any:
        first = args[0].clone()
        # The first token of a document sees no other, and nothing is learnt from it.
        first[0, 0] = self.dose.strength
        return (first, *args[1:])


class CollapseAfterSwitch(Injector):
    """The layers that begin in FP8 at a later step have scales that are far off."""

    name, family = "fp8_switch", Family.PRECISION
    expects = ("collapse-after-switch",)
    onset, strength = (14, 18), (200.0, 1000.0)
    body = Body("sort", "sft", steps=44, changes=DELAYED)
    cure, vital = Cure.ALL, "train/loss"

    def prepare(self, raw: Raw, folder: Path) -> None:
        put(raw, "trainer.fp8.start_step", self.dose.onset)

    def before_update(self, step: int, parts: Any, rollouts: Any = None) -> None:
        if not self.is_ill(step):
            return
        small = torch.tensor([1.0 / self.dose.strength])
        for product in products(parts):
            product.input_amax.expected = small


class NoLayer(Injector):
    """The skip list covers every layer: FP8 is on and does nothing."""

    name, family, expects = "fp8_no_layer", Family.PRECISION, ("precision-flag-without-effect",)
    body, onset = SORT_FP8, FROM_START

    def prepare(self, raw: Raw, folder: Path) -> None:
        put(raw, "trainer.fp8.skip_layers", ["lm_head", "embed", "layers"])


class EvaluationGap(Injector):
    """INT4 copies of the weights are rounded to a few values: bf16 is far better."""

    name, family = "int4_gap", Family.PRECISION
    expects = ("quantised-evaluation-gap",)
    body, onset = SORT_INT4, (4, 8)

    def started(self, parts: Any, session: Session) -> None:
        rewrite = next(iter(parts.trainer.roles[Role.POLICY].rewrites))
        refresh = rewrite.weights_changed

        def coarser() -> None:
            refresh()
            if not self.is_ill(parts.state.step + 1):
                return
            for copies in rewrite.copies.values():
                for rounded in copies.rounded:
                    rounded.copy_(rounded.sign() * rounded.abs().mean())

        rewrite.weights_changed = coarser


class GradientOff(Injector):
    """Gradients of FP8 layers are quantised by a scale that is far too large: few digits stay."""

    name, family = "fp8_gradients", Family.PRECISION
    expects = ("quantised-gradient-off", "quantisation-underflow")
    body, strength = SORT_DELAYED, (3e9, 1e10)

    def before_update(self, step: int, parts: Any, rollouts: Any = None) -> None:
        if not self.is_ill(step):
            return
        for product in products(parts):
            history = product.gradient_amax
            if history.expected is not None:
                history.expected = history.values.amax().reshape(1) * self.dose.strength


FAULTS: tuple[type[Injector], ...] = (
    ZeroScale,
    Saturated,
    CoarseScale,
    CollapseAfterSwitch,
    NoLayer,
    EvaluationGap,
    GradientOff,
)
