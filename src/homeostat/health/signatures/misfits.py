"""Predicates about tensors that do not fit: what their shapes tell of how the file was made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice

from homeostat.health.view import RunView

# Tensors that are looked at.
_MAX_SHAPES = 50
# Messages that name a tensor with two shapes, one of the file and one of the model.
_MISFITS = (
    "size mismatch for",
    "set a tensor of shape",
    "load weights of size",
    "ckpt: torch.Size",
)  # fmt: skip
_SHAPE = re.compile(r"torch\.Size\(\[(\d{1,12}(?:, \d{1,12}){0,4})\]\)")
_MISFIT_NAME = re.compile(r"size mismatch for ([\w.]{1,200})")
# Two values of 4 bits lie in a byte, and bitsandbytes stores the bytes in a single column.
_LEAST_PACKED = 1024
_EMBEDDINGS = ("embed", "lm_head", "wte", "output_layer")
_OTHER_EMBEDDINGS = ("position", "patch", "token_type", "segment")
_ATTENTION = ("attn", "attention", "query_key_value", "qkv")
_FEED_FORWARD = ("mlp", "h_to_4h", "4h_to_h", "feed_forward", "ffn", "fc1", "fc2")


def _misfits(view: RunView) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return names, shapes in the file and shapes in the model of tensors that do not fit."""
    found: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for line in islice((x for text in _MISFITS for x in view.log.find(text)), _MAX_SHAPES):
        shapes = [tuple(map(int, each.split(", "))) for each in _SHAPE.findall(line.text)]
        name = _MISFIT_NAME.search(line.text)
        if len(shapes) == 2:
            found.append((name[1].lower() if name is not None else "", shapes[0], shapes[1]))
    return found


def four_bits_packed(view: RunView) -> bool:
    """Return whether a weight is packed on one side, two values in a byte, and plain elsewhere."""
    return any(_packs(a, b) or _packs(b, a) for _, a, b in _misfits(view))


def _packs(packed: Sequence[int], plain: Sequence[int]) -> bool:
    is_column = len(packed) == 2 and packed[1] == 1 and packed[0] >= _LEAST_PACKED
    return is_column and len(plain) == 2 and plain[1] > 1 and plain[0] * plain[1] == 2 * packed[0]


def token_rows_differ(view: RunView) -> bool:
    """Return whether an embedding or head differs in its rows alone, or no shapes are printed.

    The rows of a table of positions or patches are no tokens, and where the width differs, too, it
    is another model.
    """
    found = [
        (saved, model)
        for name, saved, model in _misfits(view)
        if any(part in name for part in _EMBEDDINGS)
        and not any(part in name for part in _OTHER_EMBEDDINGS)
    ]
    if not found:
        return not any(name for name, _, _ in _misfits(view))
    return any(saved[0] != model[0] and saved[1:] == model[1:] for saved, model in found)


def cut_for_other_ranks(view: RunView) -> bool:
    """Return whether all tensors that do not fit are cut in a whole number of parts on one side.

    Tensor parallelism cuts some weights by rows and others by columns, all in as many parts. That
    a vocabulary alone is a multiple of another one says it only under Megatron's name.
    """
    found = _misfits(view)
    cuts = {_cut(saved, model) for _, saved, model in found}
    factors = {cut and cut[1] for cut in cuts}
    if len(factors) != 1 or None in factors:
        return False
    names = [name for name, _, _ in found]
    if all("word_embeddings" in name for name in names):
        return True
    in_both = any(cut and cut[0] == 0 for cut in cuts) and any(cut and cut[0] > 0 for cut in cuts)
    parts = (_ATTENTION, _FEED_FORWARD)
    return in_both and all(any(p in name for p in part for name in names) for part in parts)


def _cut(saved: Sequence[int], model: Sequence[int]) -> tuple[int, float] | None:
    """Return the one axis that differs, and by what factor if the lengths are multiples."""
    axes = [at for at, (a, b) in enumerate(zip(saved, model, strict=False)) if a != b]
    if len(saved) != len(model) or len(axes) != 1:
        return None
    a, b = saved[axes[0]], model[axes[0]]
    return (axes[0], b / a) if min(a, b) > 0 and max(a, b) % min(a, b) == 0 else None
