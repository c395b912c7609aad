"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on any nn.Linear, in peft's file format.

    y = x W^T + b + (alpha / rank) * dropout(x) A^T B^T

Invariants: the base is frozen and keeps its parameter names; the adapter stays unmerged; A and B
have the base's dtype (fp32 masters belong to the optimizer). B starts at zero, so an untrained
adapter changes nothing. A value head (models/value_head.py) is trained and saved whole, as peft
does with `modules_to_save`.

Files: adapter_config.json, and adapter_model.safetensors with keys
`base_model.model.<name>.lora_A.weight`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from homeostat.config.model import LoraConfig
from homeostat.errors import ModelError
from homeostat.models.hf import read_json, require_plain
from homeostat.models.hub_names import hub_tensors
from homeostat.models.memory import require_memory
from homeostat.models.value_head import SCORE, value_weight
from homeostat.models.weights import Part, all_of_it, put
from homeostat.ops.dropout import DropoutKeys, dropout
from homeostat.ops.linear import Linear

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"

_PREFIX = "base_model.model."
# The value head's module, which peft saves beside an adapter.
_HEAD_MODULE = SCORE.removesuffix(".weight")
# Settings of other kinds of adapters that would change the computation.
_UNSUPPORTED = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
)
# Initialisations that leave the base unchanged. Others (pissa, olora ...) move a part of it into
# the adapter, which is then only valid with the remaining base.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")

# Targets that stand for matrices of experts, in the spellings of all families.
_EXPERT_TARGETS = frozenset(
    (ALL_LINEAR, "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "experts")
)

# Turns a parameter, of which only a shard may be on this rank, into the whole tensor.
Whole = Callable[[Tensor], Tensor]


class LoraLinear(Linear):
    """A frozen linear map with an adapter. It takes over the parameters of `base`."""

    def __init__(
        self, base: nn.Linear, config: LoraConfig, *, number: int, keys: DropoutKeys
    ) -> None:
        sizes = base.in_features, base.out_features
        flags = {"bias": False, "numerics": base.numerics if isinstance(base, Linear) else "fast"}
        # On the meta device, because the parameters of `base` replace these right away.
        super().__init__(*sizes, **flags, device="meta")
        self.weight, self.bias = base.weight, base.bias
        if isinstance(base, Linear):
            self.product = base.product
        flags |= {"dtype": base.weight.dtype, "device": base.weight.device}
        self.lora_A = Linear(base.in_features, config.rank, **flags)
        self.lora_B = Linear(config.rank, base.out_features, **flags)
        self.scaling = config.alpha / config.rank
        self.rate = config.dropout
        self.number = number
        self.keys = keys

    def forward(self, x: Tensor) -> Tensor:
        # The adapter stays unmerged, so that trainer and native engine compute the same.
        update = self.lora_B(self.lora_A(self._drop(x)))
        return super().forward(x) + update * self.scaling

    def _drop(self, x: Tensor) -> Tensor:
        keys_N = self.keys.keys_N
        if self.rate == 0 or keys_N is None:
            return x
        if x.shape[:-1].numel() != keys_N.shape[0]:
            raise ModelError(
                f"lora.dropout: a target module sees {x.shape[:-1].numel()} of {keys_N.shape[0]} "
                "tokens, so that it cannot tell which they are. Set lora.dropout=0 or leave the "
                "module out of lora.targets."
            )
        flat_NC = x.reshape(-1, x.shape[-1])
        return dropout(flat_NC, keys_N, module=self.number, rate=self.rate).view_as(x)

    @torch.no_grad()
    def merged_weight(self, whole: Whole = Tensor.detach) -> Tensor:
        """Return the weight with the adapter added, summed in fp32 and rounded once."""
        weight = whole(self.weight)
        # In fp32: a bf16 product and sum would round the small update away.
        update = whole(self.lora_B.weight).float() @ whole(self.lora_A.weight).float()
        return (weight.float() + update * self.scaling).to(weight.dtype)


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
    where = {"dtype": linears[0].weight.dtype, "device": linears[0].weight.device}
    require_memory(added, what=f"lora.rank: {config.rank} makes", **where)
    for number, (name, linear) in enumerate(zip(names, linears, strict=True)):
        adapted = LoraLinear(linear, config, number=number, keys=model.dropout_keys)
        parent, _, child = name.rpartition(".")
        setattr(base.get_submodule(parent), child, adapted)
    if not linears[0].weight.is_meta:
        draw_adapters(model, seed=seed)
    return names


def draw_adapters(model: nn.Module, *, seed: int, part: Part = all_of_it) -> None:
    """Initialise B to 0 and A Kaiming-uniform with a = sqrt(5), on the CPU so that devices
    agree.
    """
    # Drawn in the order of the modules from one generator, so the result depends only on the seed.
    generator = torch.Generator("cpu").manual_seed(seed)
    for _, adapted in lora_modules(model):
        fresh = torch.empty(adapted.lora_A.weight.shape)
        nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=generator)
        put(adapted.lora_A.weight, fresh, part)
        put(adapted.lora_B.weight, torch.zeros(adapted.lora_B.weight.shape), part)


def adapter_settings(settings: dict[str, Any], folder: Path) -> LoraConfig:
    """Return the settings of an adapter in peft's format, from its adapter_config.json."""
    rank, alpha, targets = (settings.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if isinstance(targets, str) and targets != ALL_LINEAR:
        raise ModelError(
            f"{folder / ADAPTER_CONFIG}: target_modules is the pattern {targets!r:.60}. Save the "
            "adapter with a list of module names, which peft writes unless a pattern was given."
        )
    try:
        names = (targets,) if isinstance(targets, str) else tuple(targets)
        return LoraConfig(rank=rank, alpha=alpha, targets=names, path=str(folder))
    except (TypeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise ModelError(f"{folder / ADAPTER_CONFIG}: not the settings of a LoRA: {why}.") from None


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Replace the adapted modules by plain ones whose weights contain the adapter."""
    base = model.causal_lm
    for name, adapted in list(lora_modules(model)):
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
        yield f"{name}.lora_A.weight", module.lora_A.weight
        yield f"{name}.lora_B.weight", module.lora_B.weight


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
    adapters = {name for name, _ in adapter_state(model)}
    seen: set[int] = set()
    for name, tensor in model.causal_lm.state_dict(keep_vars=True).items():
        # Tied tensors appear under two names in state_dict, but checkpoints store them once.
        if name in adapters or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        value = adapted[name].merged_weight(whole) if name in adapted else whole(tensor)
        yield from hub_tensors(model.hub_experts, name, value)


def save_adapter(
    model: nn.Module,
    folder: Path,
    config: LoraConfig,
    *,
    base_path: str | None = None,
    whole: Whole = Tensor.detach,
) -> None:
    """Write the adapter in peft's format."""
    state = {
        _PREFIX + name: whole(tensor).cpu().contiguous() for name, tensor in saved_parameters(model)
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    has_head = value_weight(model) is not None
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_head else "CAUSAL_LM",
        "modules_to_save": [_HEAD_MODULE] if has_head else None,
        "base_model_name_or_path": base_path,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted(name for name, _ in lora_modules(model)),
        "bias": "none",
        "inference_mode": True,
    }
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")


@torch.no_grad()
def load_adapter(
    model: nn.Module, folder: Path, config: LoraConfig, *, part: Part = all_of_it
) -> None:
    """Fill the adapters that `apply_lora` made from a peft folder of the same shape."""
    settings = read_json(folder / ADAPTER_CONFIG, setting="lora.path")
    has_head = value_weight(model) is not None
    _check_settings(settings, folder, config, has_head=has_head)
    path = folder / ADAPTER_WEIGHTS
    require_plain(path, setting="lora.path")
    try:
        stored = load_file(path)
    except FileNotFoundError:
        raise ModelError(f"lora.path: {path} does not exist.") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"lora.path: {path} cannot be read; it is corrupt or truncated ({error})."
        ) from None
    # The adapter of a causal LM holds no value head: a new one stays as it is.
    has_saved_head = has_head and _PREFIX + SCORE in stored
    own = saved_parameters(model) if has_saved_head else adapter_state(model)
    wanted = {_PREFIX + name: tensor for name, tensor in own}
    differing = sorted(stored.keys() ^ wanted.keys())
    if differing:
        side = "lacks" if differing[0] in wanted else "has"
        raise ModelError(
            f"lora.path: {path} {side} {differing[0]} ({len(differing)} such names in all): its "
            "targets are not those of lora.targets, or it belongs to another model."
        )
    for name, tensor in wanted.items():
        if stored[name].shape != tensor.shape:
            raise ModelError(
                f"lora.path: {path}: {name} has shape {tuple(stored[name].shape)}, and this model "
                f"with lora.rank={config.rank} needs {tuple(tensor.shape)}."
            )
        put(tensor, stored[name], part)


def _target_names(base: nn.Module, head_weight: Tensor, targets: tuple[str, ...]) -> list[str]:
    linears = {
        name: module
        for name, module in base.named_modules()
        # Compare tensors, not names: the head may be tied to the embedding or have another name.
        if isinstance(module, nn.Linear) and module.weight is not head_weight
    }
    _require_no_experts(base, linears, targets)
    if targets == (ALL_LINEAR,):
        return list(linears)
    for target in targets:
        if not any(_is_target(name, target) for name in linears):
            known = sorted({name.rpartition(".")[2] for name in linears})
            raise ModelError(
                f"lora.targets: {target!r} matches no linear module of this model. "
                f"Known are {', '.join(known)}, or all-linear."
            )
    return [name for name in linears if any(_is_target(name, target) for target in targets)]


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
    also = f" Shared experts can be adapted as {_last_two(shared)!r}." if shared else ""
    raise ModelError(
        f"lora.targets: {refused[0]!r} names matrices of this model's experts, too, which are "
        f"stacked in one parameter per layer ({experts[0]}) and cannot have an adapter here. Set "
        f"lora.targets=[{', '.join(names)}], or remove lora to train the experts.{also}"
    )


def _last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _check_settings(
    settings: dict[str, Any], folder: Path, config: LoraConfig, *, has_head: bool
) -> None:
    where = f"lora.path: {folder / ADAPTER_CONFIG}"
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"{where}: peft_type is {settings.get('peft_type')!r}, not LORA.")
    used = [name for name in _UNSUPPORTED if settings.get(name)]
    if has_head and settings.get("modules_to_save") == [_HEAD_MODULE]:
        used.remove("modules_to_save")
    if used or settings.get("bias", "none") != "none":
        raise ModelError(
            f"{where} uses {', '.join(used) or 'bias'}, which plain LoRA here does not have."
        )
    start = settings.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise ModelError(
            f"{where}: init_lora_weights is {start!r}, so that the adapter belongs to a base that "
            "was changed with it. Convert it with peft (path_initial_model_for_weight_conversion)."
        )
    for key, name, value in (("r", "rank", config.rank), ("lora_alpha", "alpha", config.alpha)):
        if settings.get(key) != value:
            raise ModelError(
                f"{where} has {key}={settings.get(key)!r}, and lora.{name} is {value}. Set "
                f"lora.{name} to the adapter's value: the update is scaled by alpha / rank."
            )
