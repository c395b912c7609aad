"""Fill parameters from a stream of named tensors, or draw them from a seed.

Invariant: after `fill` every parameter has a value that came from the stream. A tensor that is
missing, unknown or of another shape is refused by name, and so is a separate output matrix if the
config says that it is tied to the embedding. Nothing else has state: the native decoder has no
buffers. A caller that holds only a part of each parameter passes a `Part` that selects its share of
a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from homeostat.errors import ModelError
from homeostat.models.norms import RMSNorm
from homeostat.ops.held import HeldWeight, held_weights

_NAMES_SHOWN = 5
_ADVICE = (
    "The weights do not belong to this config (config.json; of a .gguf file its metadata): check "
    "model.path."
)
HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Old checkpoints also store rotary frequencies, which follow from the config.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


class Part(Protocol):
    """The share of each parameter that a caller holds."""

    def shape(self, parameter: Tensor) -> torch.Size:
        """Return the shape of the whole parameter."""
        ...

    def __call__(self, parameter: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the memory to fill, and the part of the whole tensor for it."""
        ...


class WholePart:
    """Selects the whole tensor for a parameter. Implements `Part`."""

    def shape(self, parameter: Tensor) -> torch.Size:
        return parameter.shape

    def __call__(self, parameter: Tensor, tensor: Tensor) -> tuple[Tensor, Tensor]:
        return parameter, tensor


all_of_it = WholePart()


@torch.no_grad()
def put(parameter: Tensor, tensor: Tensor, part: Part) -> None:
    """Copy a tensor into a parameter."""
    target, value = part(parameter, tensor)
    target.copy_(value)


@torch.no_grad()
def fill(
    module: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    source: str,
    without: Collection[str] = (),
    part: Part = all_of_it,
) -> int:
    """Copy the stream into the parameters, with a cast if needed. Return the bytes read.

    `without` names parameters that are not part of the checkpoint. A weight that is held in another
    format (ops/held.py) takes its tensor as it comes.
    """
    held = {f"{name}.weight": weight for name, weight in held_weights(module).items()}
    own = {id(parameter) for weight in held.values() for parameter in weight.parameters()}
    parameters: dict[str, Tensor | HeldWeight] = {
        name: parameter
        for name, parameter in module.named_parameters()
        if name not in without and id(parameter) not in own
    }
    parameters |= held
    head: Tensor | None = None
    filled: set[str] = set()
    unknown: list[str] = []
    num_bytes = 0
    for name, tensor in tensors:
        if name in parameters:
            target = parameters[name]
            shape = target.shape if isinstance(target, HeldWeight) else part.shape(target)
            _check(shape, tensor, name=name, source=source)
            if not isinstance(target, HeldWeight):
                put(target, tensor, part)
            elif not tensor.is_meta:
                target.take(tensor)
            filled.add(name)
            num_bytes += tensor.nbytes
        elif name == HEAD:
            # A tied model has no separate head, but many checkpoints store one: compare it below.
            head = tensor
        elif not _DERIVED.search(name):
            unknown.append(name)
    missing = [name for name in parameters if name not in filled]
    if missing or unknown:
        raise ModelError(f"{source}: {_mismatch(missing, unknown)}. {_ADVICE}")
    # Without data (a preview on the meta device) there is nothing to compare.
    if head is not None and not head.is_meta:
        embedding = parameters[_EMBEDDING]
        assert isinstance(embedding, Tensor), "embeddings are never held in another format"
        _require_tied(embedding, head, part, source=source)
    return num_bytes


@torch.no_grad()
def draw(module: nn.Module, *, std: float, seed: int, part: Part = all_of_it) -> None:
    """Draw weights ~ N(0, std), norms 1, biases 0: the same on every device and in every dtype.

    A norm that multiplies by 1 + weight starts at 0.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    centred = {
        f"{name}.weight"
        for name, norm in module.named_modules()
        if isinstance(norm, RMSNorm) and norm.centred
    }
    for name, parameter in module.named_parameters():
        shape = part.shape(parameter)
        if name.endswith("bias") or name in centred:
            drawn = torch.zeros(shape)
        elif parameter.ndim == 1:
            drawn = torch.ones(shape)
        else:
            # Always in fp32 on the CPU, so that all devices and dtypes start from the same numbers.
            drawn = torch.empty(shape).normal_(0.0, std, generator=generator)
        put(parameter, drawn, part)


def _check(shape: torch.Size, tensor: Tensor, *, name: str, source: str) -> None:
    if shape != tensor.shape:
        raise ModelError(
            f"{source}: {name} has shape {tuple(tensor.shape)}, and the config asks for "
            f"{tuple(shape)}. {_ADVICE}"
        )
    if not tensor.is_floating_point():
        raise ModelError(
            f"{source}: {name} holds {tensor.dtype}, which is no plain weight; it looks "
            "quantised. Name an unquantised checkpoint in model.path."
        )


def _require_tied(embedding: Tensor, head: Tensor, part: Part, *, source: str) -> None:
    own, value = part(embedding, head)
    if head.shape != embedding.shape or not torch.equal(value.to(own), own):
        raise ModelError(
            f"{source}: config.json ties the output matrix to the embedding, and the weights hold "
            f"an {HEAD} that differs from it. Set tie_word_embeddings to false in config.json."
        )


def _mismatch(missing: list[str], unknown: list[str]) -> str:
    parts = []
    for what, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            parts.append(f"{what} {', '.join(names[:_NAMES_SHOWN])}{more}")
    return "; ".join(parts)
