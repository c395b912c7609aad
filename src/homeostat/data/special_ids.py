"""Find ids that a tokenizer's files leave open: the pad token, and a document's prefix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from homeostat.config.model import ModelConfig
from homeostat.errors import ModelError
from homeostat.json_text import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def choose_pad_id(
    original: PreTrainedTokenizerFast, model: ModelConfig, eos_id: int
) -> tuple[int, tuple[str, ...]]:
    """Return the pad token; the end-of-sequence token will do, because padding is never trained."""
    own, wanted = original.pad_token_id, model.pad_token
    if wanted is not None:
        wanted_id = original.get_vocab().get(wanted)
        if wanted_id is None:
            raise ModelError(
                f"model.pad_token: {wanted!r} is not in the vocabulary, and a new token would "
                "need a new row of the embedding. Choose a token that the tokenizer already has."
            )
        if own is not None and own != wanted_id:
            raise ModelError(
                "model.pad_token: the tokenizer already has a pad token "
                f"({original.pad_token!r}), and another one would not match the model. Remove "
                "model.pad_token."
            )
        return wanted_id, (f"rows are padded with {wanted!r} (model.pad_token)",)
    if own is not None:
        return own, ()
    eos = original.convert_ids_to_tokens(eos_id)
    note = (
        f"the tokenizer has no pad token, so rows are padded with {eos!r}, which is still trained"
    )
    return eos_id, (note,)


def name_scoring_pad(
    original: PreTrainedTokenizerFast, folder: Path, *, ends: frozenset[int]
) -> None:
    """Give tokenizer and exported classifier a pad token with which no row ends; None if none is.

    transformers' classifiers score the last token that is not the pad token: if rows were padded
    with the token that ends them, they would be scored one token too early.
    """
    own = (original.pad_token_id, original.unk_token_id, original.bos_token_id)
    ids = (*own, *sorted(original.all_special_ids))
    chosen = next((one for one in ids if one is not None and one not in ends), None)
    file = folder / "config.json"
    # An adapter without its base model has no such file.
    if file.is_file():
        config = {**parse_json(file.read_text(encoding="utf-8")), "pad_token_id": chosen}
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    original.pad_token = None if chosen is None else original.convert_ids_to_tokens(chosen)


def find_prefix_ids(backend: Tokenizer) -> tuple[int, ...]:
    """Return the ids that the tokenizer puts before a document by default."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()
