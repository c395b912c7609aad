"""Measurements of FP8 training for bench/precision_gpu.py.

    bits       quantised values and scales of CPU and GPU, bit by bit
    products   speed of bf16 and scaled FP8 products, and of quantising their operands
    stack      layers of an 8 B shape, trained in bf16 and in every FP8 recipe
    step       the whole update of 1.5 B, AdamW included, and its memory
    experts    a layer of experts, forward and backward

Every measurement has both sides in one run. Times are medians between CUDA events, after warm-up.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from shapes import DTYPES, SHAPES, Shape, random_decoder
from torch import Tensor

from homeostat.algorithms import sft
from homeostat.config.algorithm import SftConfig
from homeostat.config.fp8 import Fp8Config
from homeostat.config.trainer import AdamWConfig, TrainerConfig
from homeostat.models.build import LoadedModel, model_sheet
from homeostat.ops.experts import experts_of
from homeostat.precision.fp8 import Quantised, quantise
from homeostat.precision.fp8_experts import Fp8Experts
from homeostat.precision.operands import TensorCores
from homeostat.precision.recipe import BLOCK, E4M3, E5M2, Fp8Recipe
from homeostat.train.local import LocalTrainer
from homeostat.train.precision import rewritten
from homeostat.train.roles import RoleModel
from homeostat.train.runtime import Runtime
from homeostat.types import Role, TokenRow, TrainBatch

# Four layers of Llama-3's 8 B, with a small vocabulary: the layers are what is measured.
STACK = Shape(4, 4096, 32, 8, 128, 14336, vocab=4096)
# A micro-batch of the largest size that the trainer chooses by itself.
STACK_TOKENS, STEP_TOKENS, ROW_TOKENS = 32_768, 32_768, 2048
# Tokens of the products that are measured alone.
PRODUCT_TOKENS = 16_384
RECIPES: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "blockwise": {"recipe": "blockwise"},
    "rowwise": {"recipe": "rowwise"},
    "tensorwise": {"recipe": "tensorwise"},
    "tensorwise_delayed": {"recipe": "tensorwise", "scaling": "delayed"},
}
BLOCKS = {"1x128": (1, BLOCK), "128x128": (BLOCK, BLOCK), "row": (1, None), "all": (None, None)}


class Place(Protocol):
    """The device to measure on (bench/precision_gpu.py)."""

    device: torch.device
    is_tiny: bool


def bits(place: Place) -> dict[str, Any]:
    """Count differing bytes between the CPU's quantisation, the GPU's, and the fused kernel's."""
    sizes = (150, 300) if place.is_tiny else (1030, 2100)
    found: dict[str, Any] = {}
    for seed in range(2 if place.is_tiny else 5):
        x = _numbers(seed, sizes)
        for name, block in BLOCKS.items():
            for dtype in (E4M3, E5M2):
                for power_of_two in (False, True):
                    key = f"{name}, {str(dtype)[-6:]}, {'power of two' if power_of_two else 'fp32'}"
                    how = {"block": block, "dtype": dtype, "power_of_two": power_of_two}
                    here, there = quantise(x, **how), quantise(x.to(place.device), **how)
                    found[key] = found.get(key, 0) + _differing(here, there)
    result = {"bytes_that_differ": found, "values": int(np.prod(sizes)) * 5}
    if place.device.type == "cuda":
        result["kernel_bytes_that_differ"] = _kernel_bits(place, sizes)
    return result


def _numbers(seed: int, sizes: tuple[int, int]) -> Tensor:
    """Numbers of many magnitudes, with zeros, subnormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sizes, generator=generator)
    x *= torch.exp2(torch.randint(-40, 30, sizes, generator=generator).float())
    x[::11] = 0.0
    x[3, :4] = torch.tensor([1e-40, -1e-42, 2.0**-126, -0.0])
    if seed % 2:
        x[5, 7], x[6, 140], x[7, 3] = torch.inf, -torch.inf, torch.nan
    return x


def _differing(here: Quantised, there: Quantised) -> int:
    values = here.values.view(torch.uint8) != there.values.cpu().view(torch.uint8)
    scales = _same_nan(here.scales).view(torch.int32) != _same_nan(there.scales).view(torch.int32)
    return int(values.sum()) + int(scales.sum())


def _same_nan(scales: Tensor) -> Tensor:
    return torch.nan_to_num(scales.cpu(), nan=-1.0)


def _kernel_bits(place: Place, sizes: tuple[int, int]) -> dict[str, int]:
    found = {}
    for scaling in ("blockwise", "rowwise", "tensorwise"):
        for power_of_two in (False, True):
            recipe = Fp8Recipe(scaling, power_of_two=power_of_two)
            total = 0
            for seed in range(4):
                x = _numbers(seed, sizes)
                for is_weight in (False, True):
                    total += _kernel_differing(x, recipe, place.device, is_weight=is_weight)
            found[f"{scaling}, {'power of two' if power_of_two else 'fp32'}"] = total
    return found


def _kernel_differing(
    x: Tensor, recipe: Fp8Recipe, device: torch.device, *, is_weight: bool
) -> int:
    block = recipe.weights if is_weight else recipe.rows
    pair = TensorCores().operands(x.to(device), recipe, E4M3, is_weight=is_weight)
    total = 0
    for source, made in zip((x, x.t()), pair, strict=True):
        assert made is not None
        expected = quantise(source, block=block, power_of_two=recipe.power_of_two)
        values = made.values[: source.shape[0], : source.shape[1]].cpu()
        total += int((values.view(torch.uint8) != expected.values.view(torch.uint8)).sum())
        scales = made.scales.cpu()
        if recipe.scaling == "blockwise" and not is_weight:
            scales = scales.t()
        rows, columns = expected.scales.shape
        scales = scales.reshape(-1, scales.shape[-1] if scales.ndim > 1 else 1)[:rows, :columns]
        total += int((_same_nan(scales) != _same_nan(expected.scales)).sum())
    return total


def products(place: Place) -> dict[str, Any]:
    """Return TFLOP/s of the three products of two maps of 8 B, and GB/s of quantising."""
    if place.device.type != "cuda":
        return {"skipped": "a CPU has no FP8 products"}
    cores, found = TensorCores(), {}
    for name, (tokens, inputs, outputs) in {
        "gate": (PRODUCT_TOKENS, 4096, 14336),
        "down": (PRODUCT_TOKENS, 14336, 4096),
        "q": (PRODUCT_TOKENS, 4096, 4096),
    }.items():
        generator = torch.Generator(place.device).manual_seed(0)
        drawn = {"generator": generator, "device": place.device, "dtype": torch.bfloat16}
        x, weight = torch.randn(tokens, inputs, **drawn), torch.randn(outputs, inputs, **drawn)
        grad = torch.randn(tokens, outputs, **drawn)
        flops, one = 2.0 * tokens * inputs * outputs, {}
        bf16 = {
            "forward": lambda x=x, w=weight: x @ w.t(),
            "dgrad": lambda g=grad, w=weight: g @ w,
            "wgrad": lambda g=grad, x=x: g.t() @ x,
        }
        one["bf16"] = {key: flops / seconds(call) / 1e12 for key, call in bf16.items()}
        for scaling in ("blockwise", "rowwise", "tensorwise"):
            recipe = Fp8Recipe(scaling)
            (xr, xc), (wr, wc) = (
                cores.operands(x, recipe, E4M3),
                cores.operands(weight, recipe, E4M3, is_weight=True),
            )
            gr, gc_ = cores.operands(grad, recipe, E4M3)
            args = {
                "forward": (xr, wr, (tokens, outputs)),
                "dgrad": (gr, wc, (tokens, inputs)),
                "wgrad": (gc_, xc, (outputs, inputs)),
            }
            one[scaling] = {}
            for key, (a, b, sizes) in args.items():
                for fast in (False, True) if scaling != "blockwise" else (False,):

                    def call(a=a, b=b, sizes=sizes, recipe=recipe, fast=fast) -> Tensor:
                        return cores.product(a, b, recipe, sizes=sizes, fast=fast)

                    label = f"{key}{' fast' if fast else ''}"
                    one[scaling][label] = flops / seconds(call) / 1e12
            exact = bf16["forward"]()
            close = cores.product(xr, wr, recipe, sizes=(tokens, outputs), fast=True)
            one[scaling]["error"] = float((close - exact).norm() / exact.norm())

            def both(x=x, recipe=recipe) -> Any:
                return cores.operands(x, recipe, E4M3)

            # Read once in bf16, written twice in FP8.
            one[scaling]["quantise_gb_s"] = x.numel() * 4 / seconds(both) / 1e9
        found[name] = _rounded(one)
    return found


def seconds(call: Callable[[], Any], *, repeats: int = 10) -> float:
    """Return the median time of a call between CUDA events, after three calls."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def stack(place: Place) -> dict[str, Any]:
    """Train layers of 8 B in every recipe; ratios are to bf16."""
    shape = SHAPES["tiny"] if place.is_tiny else STACK
    return _training(place, shape, tokens=128 if place.is_tiny else STACK_TOKENS)


def step(place: Place) -> dict[str, Any]:
    """Train 1.5 B in every recipe; ratios are to bf16."""
    shape = SHAPES["tiny" if place.is_tiny else "1.5b"]
    return _training(place, shape, tokens=128 if place.is_tiny else STEP_TOKENS)


def _training(place: Place, shape: Shape, *, tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, settings in RECIPES.items():
        found[name] = _updates(place, shape, settings, tokens=tokens)
        print(" ", name, found[name], flush=True)
        base = found["bf16"]
        found[name]["speedup"] = round(base["update_s"] / found[name]["update_s"], 3)
        found[name]["speedup_of_gradient"] = round(
            base["gradient_s"] / found[name]["gradient_s"], 3
        )
        found[name]["memory_ratio"] = round(found[name]["peak_gb"] / max(base["peak_gb"], 1e-9), 3)
    return {"tokens": tokens, "layers": shape.layers, "recipes": found}


def _updates(
    place: Place, shape: Shape, settings: dict[str, Any] | None, *, tokens: int
) -> dict[str, Any]:
    """Return median seconds of an update and of its gradient, the peak memory and the losses."""
    device = place.device
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    trainer = _trainer(place, shape, settings)
    row_tokens, rng = min(ROW_TOKENS, tokens // 2), np.random.default_rng(0)
    rows = [
        TokenRow(index, rng.integers(0, shape.vocab, row_tokens), np.ones(row_tokens, np.float32))
        for index in range(tokens // row_tokens)
    ]
    batches, spec = [TrainBatch.of(rows)], sft.loss_spec(SftConfig(), rows)
    times, gradients, losses = [], [], []
    # Steps 1 to 3 and 10 are measured by the trainer's own probes.
    for number in (1, 2, 4, 5, 6, 7, 8):
        started = _now(device)
        trainer.accumulate(Role.POLICY, batches, spec, step=number)
        middle = _now(device)
        losses.append(trainer.apply(Role.POLICY, step=number, learning_rate=1e-5).loss)
        if number > 2:
            gradients.append(middle - started)
            times.append(_now(device) - started)
    report = trainer.device_report()
    trainer.close()
    return {
        "update_s": statistics.median(times),
        "gradient_s": statistics.median(gradients),
        "peak_gb": round(report.max_alloc / 1e9, 2),
        "losses": [round(loss, 4) for loss in losses],
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _trainer(place: Place, shape: Shape, settings: dict[str, Any] | None) -> LocalTrainer:
    device, dtype = place.device, DTYPES[place.device.type]
    torch.manual_seed(0)
    module = random_decoder(shape, device=device, dtype=dtype).train()
    sheet = model_sheet(module, shape.hf_config(dtype), None, {})
    runtime = Runtime(device, dtype, threads=1, pin_memory=device.type == "cuda")
    fp8 = None if settings is None else Fp8Config(**settings)
    config = TrainerConfig(optimizer=AdamWConfig(weight_decay=0.01), fp8=fp8)
    models = {Role.POLICY: RoleModel(LoadedModel(module, sheet), config)}
    models = rewritten(models, config, device=device)
    return LocalTrainer(models, config, runtime=runtime, seed=0)


def experts(place: Place) -> dict[str, Any]:
    """Time a layer of experts, forward and backward, in bf16 and in FP8; and its distance."""
    tokens, hidden, width, count, slots = 8192, 2048, 768, 128, 8
    if place.is_tiny:
        tokens, hidden, width, count, slots = 32, 64, 32, 8, 2
    device, dtype = place.device, DTYPES[place.device.type]
    generator = torch.Generator(device).manual_seed(0)
    drawn = {"generator": generator, "device": device}
    x = torch.randn(tokens, hidden, **drawn).to(dtype).requires_grad_()
    gate_up = (torch.randn(count, 2 * width, hidden, **drawn) * 0.02).to(dtype).requires_grad_()
    down = (torch.randn(count, hidden, width, **drawn) * 0.02).to(dtype).requires_grad_()
    chosen = torch.randn(tokens, count, **drawn).topk(slots)
    weights = chosen.values.softmax(-1)
    grad = torch.randn(tokens, hidden, **drawn).to(dtype)
    leaves = x, gate_up, down
    found, exact = {}, []
    for name, settings in RECIPES.items():
        if name == "bf16":
            layer = experts_of
        else:
            recipe = Fp8Recipe.of(Fp8Config(**{**settings, "format": "e4m3"}))
            layer = Fp8Experts(name, recipe, device=device)

        def call(layer=layer) -> list[Tensor]:
            out = layer(
                x, chosen.indices, weights, gate_up, down, numerics="fast", kernel="grouped"
            )
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

        made = call()
        exact = exact or made
        errors = [
            float((a - b).float().norm() / b.float().norm())
            for a, b in zip(made, exact, strict=True)
        ]
        spent = seconds(call, repeats=5) if device.type == "cuda" else 0.0
        found[name] = {"seconds": spent, "errors": [round(error, 5) for error in errors]}
        print(" ", name, found[name], flush=True)
    return found


def _rounded(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _rounded(value) for key, value in tree.items()}
    return round(tree, 4) if isinstance(tree, float) else tree
