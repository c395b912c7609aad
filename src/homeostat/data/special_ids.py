"""Find ids that a tokenizer's files leave open: the pad token, and a document's prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from homeostat.config.model import ModelConfig
from homeostat.errors import ModelError

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
                "need a new row of the embedding. Choose a token the tokenizer has."
            )
        if own is not None and own != wanted_id:
            raise ModelError(
                f"model.pad_token: the tokenizer has a pad token already "
                f"({original.pad_token!r}), and another one would disagree with the model. "
                "Remove model.pad_token."
            )
        return wanted_id, (f"rows are padded with {wanted!r} (model.pad_token)",)
    if own is not None:
        return own, ()
    eos = original.convert_ids_to_tokens(eos_id)
    return eos_id, (f"the tokenizer has no pad token, so {eos!r} pads rows, and stays trained",)


def find_prefix_ids(backend: Tokenizer) -> tuple[int, ...]:
    """Return the ids that the tokenizer puts before a document by default."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()
