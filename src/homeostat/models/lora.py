"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on any nn.Linear.

    y = x W^T + b + scale * dropout(x) A^T B^T,    scale = alpha / rank

Invariants: the base is frozen and keeps its parameter names; the adapter stays unmerged; A and B
have the base's dtype (fp32 masters belong to the optimizer). B starts at zero, so an untrained
adapter changes nothing. A value head (models/value_head.py) is trained and saved whole, as peft
does with `modules_to_save`.

rsLoRA (Kalajdzievski 2023, arXiv:2312.03732) scales by alpha / sqrt(rank). DoRA (Liu et al. 2024,
arXiv:2402.09353) trains the lengths of the rows of W + scale * B A apart:

    y = m / |W + scale * B A| * (x W^T + scale * dropout(x) A^T B^T) + b

where the norm is taken row by row and has no gradient. m starts as the norm of W.

The base may be stored in another format (ops/held.py): its weight is dequantised for each product.
The files of adapters are those of models/adapter_files.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from homeostat.config.model import LoraConfig
from homeostat.errors import ModelError
from homeostat.models.hub_names import hub_tensors
from homeostat.models.lora_layers import (
    ADAPTED_LAYERS,
    DoraLinear,
    HeldDoraLinear,
    HeldLoraLinear,
    LoraLinear,
    Whole,
    squares_of_rows,
    weight_place,
)
from homeostat.models.memory import require_memory
from homeostat.models.value_head import SCORE, value_weight
from homeostat.models.weights import Part, all_of_it, put
from homeostat.ops.held import HeldLinear, held_weights
from homeostat.ops.linear import Linear

ALL_LINEAR = "all-linear"

# Targets that stand for matrices of experts, in the spellings of all families.
_EXPERT_TARGETS = frozenset(
    (ALL_LINEAR, "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "experts")
)

# Maps that some families keep in one matrix: naming all of them names it.
_FUSED = {
    "qkv_proj": frozenset(("q_proj", "k_proj", "v_proj")),
    "gate_up_proj": frozenset(("gate_proj", "up_proj")),
}


def apply_lora(model: nn.Module, config: LoraConfig, *, seed: int) -> list[str]:
    """Freeze the model and add adapters to its targets. Return the targets' names."""
    base = model.causal_lm
    names = _target_names(base, model.output_weight(), config.targets)
    base.requires_grad_(False)
    head = value_weight(model)
    if head is not None:
        head.requires_grad_(True)
    linears = [base.get_submodule(name) for name in names]
    added = sum(config.rank * (linear.in_features + linear.out_features) for linear in linears)
    where = weight_place(linears[0])
    require_memory(added, what=f"lora.rank: {config.rank} makes", **where)
    for number, (name, linear) in enumerate(zip(names, linears, strict=True)):
        kind = ADAPTED_LAYERS[isinstance(linear, HeldLinear), config.dora]
        adapted = kind(linear, config, number=number, keys=model.dropout_keys)
        parent, _, child = name.rpartition(".")
        setattr(base.get_submodule(parent), child, adapted)
    if where["device"].type != "meta":
        draw_adapters(model, seed=seed)
    return names


def draw_adapters(model: nn.Module, *, seed: int, part: Part = all_of_it) -> None:
    """Initialise B to 0 and A Kaiming-uniform with a = sqrt(5), on the CPU so that devices
    agree; lengths of rows (DoRA) as they are.
    """
    # Drawn in the order of the modules from one generator, so the result depends only on the seed.
    generator = torch.Generator("cpu").manual_seed(seed)
    for _, adapted in lora_modules(model):
        fresh = torch.empty(adapted.lora_A.weight.shape)
        nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=generator)
        put(adapted.lora_A.weight, fresh, part)
        put(adapted.lora_B.weight, torch.zeros(adapted.lora_B.weight.shape), part)
        if isinstance(adapted, DoraLinear):
            norms = squares_of_rows(adapted.weight.detach()).sqrt_()
            put(adapted.lora_magnitude_vector, norms, part)


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Replace the adapted modules by plain ones whose weights contain the adapter.

    Over a held weight the adapter stays as it is: merged, it would be rounded away.
    """
    base = model.causal_lm
    for name, adapted in list(lora_modules(model)):
        if isinstance(adapted, HeldLoraLinear | HeldDoraLinear):
            continue
        sizes = adapted.in_features, adapted.out_features
        plain = Linear(*sizes, bias=False, numerics=adapted.numerics, device="meta")
        adapted.weight.copy_(adapted.merged_weight())
        plain.weight, plain.bias = adapted.weight, adapted.bias
        plain.product = adapted.product
        parent, _, child = name.rpartition(".")
        setattr(base.get_submodule(parent), child, plain)


def lora_modules(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Yield the modules that have an adapter, by name."""
    for name, module in model.causal_lm.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside the block."""
    adapted = [module for _, module in lora_modules(model)]
    assert adapted, "the model has no adapter"
    scalings = [module.scaling for module in adapted]
    for module in adapted:
        # A scale of 0 gives exactly the base, without moving any tensor.
        module.scaling = 0.0
    try:
        yield
    finally:
        for module, scaling in zip(adapted, scalings, strict=True):
            module.scaling = scaling


def adapter_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the adapter alone."""
    for name, module in lora_modules(model):
        for part, tensor in module.adapter.items():
            yield f"{name}.{part}", tensor


def saved_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of what an adapter's file holds: the adapter, and a value head."""
    yield from adapter_state(model)
    head = value_weight(model)
    if head is not None:
        yield SCORE, head


def merged_state(model: nn.Module, whole: Whole = Tensor.detach) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, tensor) of the whole model with adapters merged in.

    Tied tensors come once.
    """
    adapted = {f"{name}.weight": module for name, module in lora_modules(model)}
    others = {name for name, _ in adapter_state(model)}
    for place, held in held_weights(model.causal_lm).items():
        others |= {f"{place}.held.{part}" for part in held.state_dict()}
        name = f"{place}.weight"
        value = adapted[name].merged_weight(whole) if name in adapted else held.tensor()
        yield from hub_tensors(model.hub_experts, name, value)
    seen: set[int] = set()
    for name, tensor in model.causal_lm.state_dict(keep_vars=True).items():
        # Tied tensors appear under two names in state_dict, but checkpoints store them once.
        if name in others or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        value = adapted[name].merged_weight(whole) if name in adapted else whole(tensor)
        yield from hub_tensors(model.hub_experts, name, value)


def _target_names(base: nn.Module, head_weight: Tensor, targets: tuple[str, ...]) -> list[str]:
    linears = {
        name: module
        for name, module in base.named_modules()
        # Compare tensors, not names: the head may be tied to the embedding or have another name.
        if isinstance(module, nn.Linear)
        and (isinstance(module, HeldLinear) or module.weight is not head_weight)
    }
    _require_no_experts(base, linears, targets)
    if targets == (ALL_LINEAR,):
        return list(linears)
    targets = _with_fused(targets, linears)
    for target in targets:
        if not any(_is_target(name, target) for name in linears):
            known = sorted({name.rpartition(".")[2] for name in linears})
            raise ModelError(
                f"lora.targets: {target!r} matches no linear module of this model. "
                f"Known are {', '.join(known)}, or all-linear."
            )
    return [name for name in linears if any(_is_target(name, target) for target in targets)]


def _with_fused(targets: tuple[str, ...], linears: Collection[str]) -> tuple[str, ...]:
    """Replace maps by the one matrix that the model has for them, where all of it is named."""
    for fused, parts in _FUSED.items():
        if parts <= set(targets) and any(_is_target(name, fused) for name in linears):
            targets = (*(target for target in targets if target not in parts), fused)
    return targets


def _is_target(name: str, target: str) -> bool:
    """Return whether a module's name is the target or ends with it, as in peft."""
    return f".{name}".endswith(f".{target}")


def _require_no_experts(
    base: nn.Module, linears: Collection[str], targets: tuple[str, ...]
) -> None:
    """Raise ModelError if targets name the matrices of experts, which cannot have an adapter."""
    experts = [name for name, parameter in base.named_parameters() if parameter.ndim == 3]
    refused = [target for target in targets if target in _EXPERT_TARGETS] if experts else []
    if not refused:
        return
    inner = [name for name in linears if ".mlp." not in f".{name}."]
    names = sorted({name.rpartition(".")[2] for name in inner})
    shared = next((name for name in linears if ".shared_experts." in name), "")
    also = f" Shared experts can be adapted as {shared.split('.', 3)[-1]!r}." if shared else ""
    raise ModelError(
        f"lora.targets: {refused[0]!r} names matrices of this model's experts, too, which are "
        f"stacked in one parameter per layer ({experts[0]}) and cannot have an adapter here. Set "
        f"lora.targets=[{', '.join(names)}], or remove lora to train the experts.{also}"
    )
