"""Load a chosen model, in the form that the native engine decodes fastest.

Choice -> module with its weights -> checkpoint's weights over them -> adapter merged in
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch

from homeostat.config.int4 import Int4Config
from homeostat.config.model import ModelConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.data.tokenizer import ChatTokenizer, load_tokenizer
from homeostat.errors import EngineError, ModelError
from homeostat.generation.choice import Choice
from homeostat.generation.packed_model import load_packed
from homeostat.hub.resolve import resolve_model
from homeostat.models.adapter_files import adapter_dtype
from homeostat.models.build import LoadedModel, load_model
from homeostat.models.decoder import Decoder
from homeostat.models.hf import read_config
from homeostat.models.lora import merge_adapters
from homeostat.models.value_head import require_saved_head
from homeostat.precision.bases import base_rewrite
from homeostat.precision.int4 import fake_quantise
from homeostat.precision.int4_files import dequantised_tensors, read_group_size
from homeostat.precision.int4_rewrite import int4_choices
from homeostat.rollout.native.engine import NativeEngine
from homeostat.train.saving.shards import TensorReader, require_same_shapes

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16"]

# The memory that logits may take while prompts are scored.
_LOGITS_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
# The context that is used where the model's own is longer, unless the user asks for more: the
# native engine reserves room for whole requests.
USUAL_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model that is ready to generate text, and its tokenizer."""

    loaded: LoadedModel
    tokenizer: ChatTokenizer
    device: torch.device
    # Whether a prompt is a user's message, rather than a text to be continued.
    answers_chats: bool
    # How it computes where weights are quantised or the run computed otherwise, for people.
    note: str = ""

    @property
    def max_context(self) -> int | None:
        """Return the largest number of tokens that the model was made for, if its files say so."""
        value = self.loaded.sheet.source_config.get("max_position_embeddings")
        return value if isinstance(value, int) else None


def resolve_place(device: Device, precision: Precision) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype to compute in: a GPU in bf16 where there is one."""
    if device not in get_args(Device) or precision not in get_args(Precision):
        raise ModelError(
            f"device {device!r}, precision {precision!r}: known devices are "
            f"{', '.join(get_args(Device))}; known precisions are {', '.join(get_args(Precision))}."
        )
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ModelError("--device cuda: no CUDA device can be used here. See `homeostat env`.")
    place = torch.device("cuda", 0) if available and device != "cpu" else torch.device("cpu")
    if precision == "auto":
        precision = "bf16" if place.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return place, torch.bfloat16 if precision == "bf16" else torch.float32


def load_text_model(
    choice: Choice, *, device: Device = "auto", precision: Precision = "auto"
) -> TextModel:
    """Load a model to generate with. An adapter is merged, so that every decode path can serve;
    over a quantised base it stays beside it."""
    place, dtype = resolve_place(device, precision)
    if place.type == "cpu":
        # Products of numbers below 1e-38 take twenty times as long as those of zeros.
        torch.set_flush_denormal(True)
    choice.require_writer()
    tokenizer = load_tokenizer(choice.model)
    group_size = int4_group_size(choice.model)
    is_whole = choice.adapter is None and choice.checkpoint is None
    note = _precision_note(choice, dtype)
    if group_size is not None and is_whole and place.type == "cuda":
        how = {"group_size": group_size, "device": place, "dtype": dtype}
        loaded = load_packed(_inference_config(choice.model), **how)
        note = f"INT4 weights in groups of {group_size} stay packed on the GPU"
    else:
        loaded = load_weights(choice, device=place, dtype=dtype)
        merge_adapters(loaded.module)
        if group_size is not None:
            why = "a CPU has no INT4 kernels" if place.type == "cpu" else "an adapter is merged in"
            note = f"INT4 weights are dequantised to {_shown(dtype)}: {why}"
    chats = tokenizer.chat_template is not None and choice.was_trained_on_chats
    return TextModel(loaded, tokenizer, place, chats, note)


def int4_group_size(model: ModelConfig) -> int | None:
    """Return the group size of a checkpoint with packed INT4 weights; None of any other model."""
    folder = Path(model.path)
    if not folder.is_dir():
        return None
    return read_group_size(read_config(folder), source=f"model.path: {folder}")


def trained_int4(choice: Choice) -> Int4Config | None:
    """Return the INT4 settings that a model was trained with, or packed with; None without.

    An adapter moves packed weights off their grid: merged, they are not in INT4 any more.
    """
    if choice.int4 is not None or choice.checkpoint is not None or choice.adapter is not None:
        return choice.int4
    size = int4_group_size(choice.model)
    return None if size is None else Int4Config.model_validate({"group_size": size})


def load_weights(
    choice: Choice, *, device: torch.device, dtype: torch.dtype, rounds: bool = True
) -> LoadedModel:
    """Build the model with the weights that were chosen; an adapter stays beside them.

    Packed INT4 weights are dequantised. Those of a checkpoint of a run that trained for INT4 are
    rounded as the run computed with them, or with `rounds=False` as its optimizer had them.
    """
    is_whole = choice.adapter is None and choice.checkpoint is None
    if choice.scores and is_whole:
        require_saved_head(Path(choice.model.path))
    group_size, decode = int4_group_size(choice.model), None
    if group_size is not None:
        how = {"group_size": group_size, "source": f"model.path: {choice.model.path}"}
        decode = partial(dequantised_tensors, **how)
    loaded = load_model(
        _inference_config(choice.model),
        choice.adapter,
        dtype=dtype,
        device=device,
        seed=choice.seed,
        gradient_checkpointing=False,
        # Where it starts does not matter: the files hold the head.
        head="zero" if choice.scores else None,
        decode=decode,
        hold=base_rewrite(choice.model, values=_base_values(choice)),
    )
    kept = choice.exported if choice.int4 is not None and not rounds else None
    if (found := choice.checkpoint or kept) is not None:
        _take_checkpoint(loaded, found.path, int4=choice.int4 if rounds else None)
    loaded.module.requires_grad_(False)
    return loaded


def _inference_config(model: ModelConfig) -> ModelConfig:
    """Leave out what only training reads: routers' losses and replay."""
    return model.model_copy(update={"moe": type(model.moe)()})


def _base_values(choice: Choice) -> torch.dtype | None:
    """Return the dtype in which a run quantised the base of its adapter; None if it did not."""
    if choice.model.quantization is None or choice.adapter is None:
        return None
    if choice.checkpoint is not None:
        return stored_dtype(choice.checkpoint.path)
    assert choice.adapter.path is not None, "an adapter that no run trains has files"
    return adapter_dtype(Path(choice.adapter.path))


def _precision_note(choice: Choice, dtype: torch.dtype) -> str:
    """Say how the model computes where its run did not compute with plain weights."""
    if choice.model.quantization is not None:
        held = choice.model.quantization
        return f"the linear maps under the adapter are held in {held}, computed in {_shown(dtype)}"
    if choice.fp8 is not None:
        return (
            f"computed in {_shown(dtype)}; the run computes its linear layers in FP8 "
            f"({choice.fp8.recipe}), so that log-probs differ from its own by the FP8 rounding"
        )
    if choice.int4 is None or choice.checkpoint is None:
        return ""
    size = choice.int4.group_size
    return (
        f"weights are rounded to INT4 in groups of {size}, as in the run, computed in "
        f"{_shown(dtype)}"
    )


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def _take_checkpoint(loaded: LoadedModel, folder: Path, *, int4: Int4Config | None) -> None:
    """Replace the trained weights by those of the checkpoint; all others stay as they were."""
    stored = TensorReader(folder, "model")
    named = loaded.module.causal_lm.named_parameters()
    # Trained parameters are those of the adapter, or all: expert biases are stored if they moved.
    own = {name: p for name, p in named if p.requires_grad or name in stored.shapes}
    shapes = {name: tuple(p.shape) for name, p in own.items()}
    require_same_shapes(shapes, stored.shapes, what=f"weights of {folder}")
    rounded = set() if int4 is None else _rounded_names(loaded, int4)
    for name, parameter in own.items():
        tensor = stored.rows(name, 0, parameter.shape[0] if parameter.shape else 0)
        if int4 is not None and name in rounded:
            # In the run's own dtype, before any other rounding.
            tensor = fake_quantise(tensor, group_size=int4.group_size)
        parameter.copy_(tensor)


def _rounded_names(loaded: LoadedModel, int4: Int4Config) -> set[str]:
    chosen = (c.layer for c in int4_choices(loaded.module, int4) if not c.why_skipped)
    return {f"{layer.name}.{part}" for layer in chosen for part in layer.weights}


def stored_dtype(checkpoint: Path) -> torch.dtype:
    """Return the dtype of a checkpoint's weights: the one that the run computed in."""
    stored = TensorReader(checkpoint, "model")
    name = next(iter(stored.shapes))
    return stored.rows(name, 0, 0).dtype


def open_engine(
    model: TextModel,
    *,
    context: int | None = None,
    max_concurrency: int = 256,
    memory_share: float = 0.5,
) -> NativeEngine:
    """Open the native engine over the model. `context` is the most that a request may have."""
    module = model.loaded.module
    if not isinstance(module, Decoder):
        raise EngineError(
            "model.implementation is transformers, and text is generated by the native decoder. "
            "Use an export of the model with transformers' own generate()."
        )
    longest = model.max_context
    if context is not None and longest is not None and context > longest:
        raise ModelError(
            f"--context {context}: the model was made for {longest} tokens at most "
            "(max_position_embeddings). Lower it."
        )
    return NativeEngine(
        module,
        NativeEngineConfig(max_concurrency=max_concurrency, memory_share=memory_share),
        device=model.device,
        max_tokens=context or min(longest or USUAL_CONTEXT, USUAL_CONTEXT),
        decode=model.tokenizer.decode,
        chunk_bytes=_LOGITS_BYTES[model.device.type],
    )


def with_template(
    choice: Choice, *, tokenizer: str | None = None, chat_template: str | None = None
) -> Choice:
    """Return the choice with another tokenizer or chat template, where they are given.

    A tokenizer may be a name on the hub.
    """
    if tokenizer is not None:
        tokenizer = resolve_model(tokenizer, setting="--tokenizer", need="tokenizer")
    given = {"tokenizer": tokenizer, "chat_template": chat_template}
    update = {name: value for name, value in given.items() if value is not None}
    return replace(choice, model=choice.model.model_copy(update=update))
