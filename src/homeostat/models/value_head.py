"""A scalar head on the native decoder: the model of a critic, and of a reward model.

    hidden_ND -> score.weight [1, D] -> one number per token

The format is that of transformers' `...ForSequenceClassification` with one label: the trunk under
its usual names, `score.weight`, and no output matrix. A causal LM becomes such a model by a new
head: zero, so that every value is 0 at first, or small random numbers. A token's value is that of
the text up to and including it. So there are two uses, and a forward pass gives both:

    value_M   per trained token, of the state in which it was chosen: the hidden state before it
    value_B   per row, at its last token: what a sequence classifier says of the whole row

Values are computed in fp32, because the values of similar states differ in digits that bf16 does
not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from homeostat.config.model import HeadInit
from homeostat.errors import ModelError
from homeostat.models.decoder import Decoder
from homeostat.models.hf import tensor_names
from homeostat.models.weights import HEAD, Part, all_of_it, put
from homeostat.ops.linear import Linear

SCORE = "score.weight"
_CLASSIFIER = "ForSequenceClassification"


def add_value_head(module: Decoder) -> None:
    """Give a decoder a value head in place of its output matrix, before it has weights."""
    if not module.config.tie_embeddings:
        del module.lm_head
    module.score = Linear(module.config.hidden_size, 1, bias=False, numerics=module.numerics)


def value_weight(model: nn.Module) -> Tensor | None:
    """Return the head's weight [1, D]; None if the model predicts tokens."""
    if not isinstance(model, Decoder) or model.score is None:
        return None
    return model.score.weight


def values(hidden_MD: Tensor, weight_1D: Tensor) -> Tensor:
    """Return the value of each hidden state, in fp32."""
    return functional.linear(hidden_MD.float(), weight_1D.float()).squeeze(1)


def start_head(module: Decoder, head: HeadInit, *, seed: int, part: Part = all_of_it) -> None:
    """Set the head to where a new one starts."""
    weight = value_weight(module)
    assert weight is not None, "add_value_head comes first"
    put(weight, _new_head(module, head, seed=seed), part)


def with_head(
    tensors: Iterable[tuple[str, Tensor]],
    module: Decoder,
    head: HeadInit,
    *,
    seed: int,
    source: str,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a value model: those of a sequence classifier as they are, those of a
    causal LM without its output matrix and with a new head."""
    is_classifier = False
    for name, tensor in tensors:
        if name == SCORE:
            is_classifier = True
            _require_one_label(tensor, source=source)
        if name != HEAD:
            yield name, tensor
    if not is_classifier:
        yield SCORE, _new_head(module, head, seed=seed)


def classifier_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the sequence classifier with the trunk of this model."""
    names = config.get("architectures") or ()
    given = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1}
    classes = [name.replace("ForCausalLM", _CLASSIFIER) for name in names]
    return {**config, **given, **({"architectures": classes} if classes else {})}


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a sequence classifier."""
    names = config.get("architectures")
    return isinstance(names, list) and any(str(n).endswith(_CLASSIFIER) for n in names)


def require_saved_head(folder: Path) -> None:
    """Raise ModelError if the files of a sequence classifier hold no head."""
    if SCORE not in tensor_names(folder):
        raise ModelError(
            f"{folder}: config.json is that of a sequence classifier, and the weights hold no "
            f"{SCORE}: its head was never trained. Name a trained one."
        )


def _new_head(module: Decoder, head: HeadInit, *, seed: int) -> Tensor:
    weight_1D = torch.zeros(1, module.config.hidden_size)
    if head == "random":
        generator = torch.Generator("cpu").manual_seed(seed)
        weight_1D.normal_(0.0, module.config.initializer_range, generator=generator)
    return weight_1D


def _require_one_label(tensor: Tensor, *, source: str) -> None:
    if tensor.shape[0] != 1:
        raise ModelError(
            f"{source}: {SCORE} has {tensor.shape[0]} rows: it is a classifier with so many labels "
            "(num_labels). A value is one number: name a checkpoint with num_labels 1, or a causal "
            "LM, which gets a new head."
        )
