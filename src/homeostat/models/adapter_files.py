"""Adapters in peft's file format.

Files: adapter_config.json, and adapter_model.safetensors with keys
`base_model.model.<name>.lora_A.weight`; DoRA also has `....lora_magnitude_vector`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from homeostat.config.hub_names import cached_path
from homeostat.config.loading.beside import not_there
from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.errors import ModelError
from homeostat.models.hf import read_json, require_plain
from homeostat.models.lora import ALL_LINEAR, adapter_state, lora_modules, saved_parameters
from homeostat.models.lora_layers import Whole
from homeostat.models.value_head import SCORE, value_weight
from homeostat.models.weights import Part, all_of_it, put

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Key of the weights' metadata with the file name of a GGUF base: peft's settings have none.
GGUF_FILE = "gguf_file"
# Keys of the metadata that say in how many bits the base was held (model.quantization).
_BASE_QUANTIZATION = "base_quantization"
_BASE_DOUBLE = "base_double_quantization"

_PREFIX = "base_model.model."
# The value head's module, which peft saves beside an adapter.
_HEAD_MODULE = SCORE.removesuffix(".weight")
# peft itself names the heads of all architectures, whichever of them a model has.
_HEAD_MODULES = frozenset((_HEAD_MODULE, "classifier"))
# Settings of other kinds of adapters that would change the computation.
_UNSUPPORTED = (
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
        kinds = {name: bool(settings.get(f"use_{name}")) for name in ("rslora", "dora")}
        return LoraConfig(rank=rank, alpha=alpha, targets=names, path=str(folder), **kinds)
    except (TypeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise ModelError(f"{folder / ADAPTER_CONFIG}: not the settings of a LoRA: {why}.") from None


def has_value_head(settings: Mapping[str, Any]) -> bool:
    """Return whether an adapter's file holds a value head, too: it is one of a reward model."""
    saved = settings.get("modules_to_save")
    return isinstance(saved, list) and _HEAD_MODULE in saved and set(saved) <= _HEAD_MODULES


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The base model of an adapter, as peft looks for it.

    `place` is a folder or a name on the hub. peft is to be given the file of a GGUF base:
    `AutoPeftModelForCausalLM.from_pretrained(adapter, gguf_file=...)`.
    """

    place: str | None
    revision: str | None = None
    gguf_file: str | None = None


def adapter_base(path: str | None) -> AdapterBase:
    """Return how adapter_config.json names a base model so that peft finds it from any folder."""
    if path is None:
        return AdapterBase(None)
    held = cached_path(path)
    is_gguf = path.lower().endswith(".gguf")
    if held is not None:
        return AdapterBase(held.name, held.commit, held.file if is_gguf else None)
    absolute = Path(path).absolute()
    if is_gguf:
        return AdapterBase(str(absolute.parent), None, absolute.name)
    return AdapterBase(str(absolute))


def find_base(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the path or name of an adapter's base model, a .gguf file included."""
    place = settings.get("base_model_name_or_path")
    if not isinstance(place, str) or not place:
        return None
    name = _metadata(folder).get(GGUF_FILE)
    return f"{place}/{name}" if name else place


def base_quantization(folder: Path) -> dict[str, Any]:
    """Return the settings of a model that say how an adapter's base was held while it trained.

    Empty if it was not quantised, or if another library wrote the adapter: peft does not say it.
    """
    found = _metadata(folder)
    if _BASE_QUANTIZATION not in found:
        return {}
    is_double = found.get(_BASE_DOUBLE) == "true"
    return {"quantization": found[_BASE_QUANTIZATION], "double_quantization": is_double}


def differing_base(folder: Path, base: ModelConfig) -> str | None:
    """Return the base that an adapter names, if its last part is not that of the model's path.

    The folders before it differ from machine to machine.
    """
    settings = read_json(folder / ADAPTER_CONFIG, setting="lora.path")
    named, own = find_base(folder, settings), adapter_base(base.path)
    place = f"{own.place}/{own.gguf_file}" if own.gguf_file else own.place
    if named is None or place is None or PurePath(named).name == PurePath(place).name:
        return None
    return named


def adapter_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of an adapter's tensors: the one that its run computed in."""
    path = folder / ADAPTER_WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(next(iter(file.keys()))).dtype
    except (OSError, SafetensorError, StopIteration) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from None


def _metadata(folder: Path) -> dict[str, str]:
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def save_adapter(
    model: nn.Module,
    folder: Path,
    config: LoraConfig,
    *,
    base: ModelConfig | None = None,
    whole: Whole = Tensor.detach,
) -> None:
    """Write the adapter in peft's format. `base` is the model that it was trained over."""
    state = {
        _PREFIX + name: whole(tensor).cpu().contiguous() for name, tensor in saved_parameters(model)
    }
    place = adapter_base(None if base is None else base.path)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", **({GGUF_FILE: place.gguf_file} if place.gguf_file else {})}
    if base is not None and base.quantization is not None:
        metadata[_BASE_QUANTIZATION] = base.quantization
        metadata[_BASE_DOUBLE] = str(base.double_quantization).lower()
    save_file(state, folder / ADAPTER_WEIGHTS, metadata=metadata)
    has_head = value_weight(model) is not None
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_head else "CAUSAL_LM",
        "modules_to_save": [_HEAD_MODULE] if has_head else None,
        "base_model_name_or_path": place.place,
        "revision": place.revision,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted(name for name, _ in lora_modules(model)),
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "bias": "none",
        "inference_mode": True,
    }
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")


@torch.no_grad()
def load_adapter(
    model: nn.Module,
    folder: Path,
    config: LoraConfig,
    *,
    base: ModelConfig,
    part: Part = all_of_it,
) -> None:
    """Fill the adapters that `apply_lora` made from a peft folder of the same shape."""
    wanted = require_adapter(model, folder, config, base=base)
    path = folder / ADAPTER_WEIGHTS
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None
    for name, tensor in wanted.items():
        put(tensor, stored[name], part)


def require_adapter(
    model: nn.Module, folder: Path, config: LoraConfig, *, base: ModelConfig
) -> dict[str, Tensor]:
    """Raise ModelError unless the files in a peft folder fit the adapters that `apply_lora` made.

    Returns the model's tensors by their names in the file, of which only the header is read.
    """
    settings = read_json(folder / ADAPTER_CONFIG, setting="lora.path")
    has_head = value_weight(model) is not None
    _check_settings(settings, folder, config, has_head=has_head)
    path = folder / ADAPTER_WEIGHTS
    shapes = _stored_shapes(path)
    _require_same_base(folder, base)
    # The adapter of a causal LM holds no value head: a new one stays as it is.
    has_saved_head = has_head and has_value_head(settings)
    own = saved_parameters(model) if has_saved_head else adapter_state(model)
    wanted = {_PREFIX + name: tensor for name, tensor in own}
    differing = sorted(shapes.keys() ^ wanted.keys())
    if differing:
        side = "lacks" if differing[0] in wanted else "has"
        raise ModelError(
            f"lora.path: {path} {side} {differing[0]} ({len(differing)} such names in all): its "
            "targets are not those of lora.targets, or it belongs to another model."
        )
    for name, tensor in wanted.items():
        if shapes[name] != tensor.shape:
            raise ModelError(
                f"lora.path: {path}: {name} has shape {tuple(shapes[name])}, and this model "
                f"with lora.rank={config.rank} needs {tuple(tensor.shape)}."
            )
    return wanted


def _stored_shapes(path: Path) -> dict[str, torch.Size]:
    require_plain(path, setting="lora.path")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ModelError(f"lora.path: {not_there(path)}") from None
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(f"lora.path: {path} cannot be read; it is corrupt or truncated ({error}).")


def _require_same_base(folder: Path, base: ModelConfig) -> None:
    """Raise ModelError if the adapter was trained over a base in other bits than this one."""
    trained = base_quantization(folder)
    now = {name: getattr(base, name) for name in trained}
    if now == trained:
        return
    differing = {name: value for name, value in trained.items() if value != now[name]}
    wanted = ", ".join(f"model.{name}={_as_written(value)}" for name, value in differing.items())
    raise ModelError(
        f"lora.path: {folder} was trained over a base held in {_in_words(trained)}, and here the "
        f"base is {_in_words(now)}: the adapter makes up for errors of its own base, and over "
        f"another one the model differs from the one that was trained. Set {wanted}. To leave that "
        "base, merge the adapter with homeostat export, set model.path to the result and remove "
        "lora.path."
    )


def _in_words(quantization: Mapping[str, Any]) -> str:
    name = quantization["quantization"]
    double = " with double quantisation" if quantization["double_quantization"] else ""
    return "not quantised" if name is None else f"{name}{double}"


def _as_written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_settings(
    settings: dict[str, Any], folder: Path, config: LoraConfig, *, has_head: bool
) -> None:
    where = f"lora.path: {folder / ADAPTER_CONFIG}"
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"{where}: peft_type is {settings.get('peft_type')!r}, not LORA.")
    used = [name for name in _UNSUPPORTED if settings.get(name)]
    if has_head and has_value_head(settings):
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
    for key, name, value in (
        ("r", "rank", config.rank),
        ("lora_alpha", "alpha", config.alpha),
        ("use_rslora", "rslora", config.rslora),
        ("use_dora", "dora", config.dora),
    ):
        if (settings.get(key) or False) != value:
            raise ModelError(
                f"{where} has {key}={settings.get(key)!r}, and lora.{name} is {value}. Set "
                f"lora.{name} to the adapter's value: it decides how the update is scaled."
            )
