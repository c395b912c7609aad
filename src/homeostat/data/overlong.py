"""Texts that are too long by their length alone: they are dropped without being tokenised."""

from __future__ import annotations

import json

from tokenizers import Tokenizer


class OverlongTextError(Exception):
    """A text has more tokens than wanted, as its length alone shows: it was not tokenised."""

    def __init__(self, least_tokens: int) -> None:
        super().__init__(f"at least {least_tokens} tokens")
        self.least_tokens = least_tokens


def longest_token(backend: Tokenizer) -> int | None:
    """The most characters that one token covers, where that is bounded: in byte-level BPE.

    Elsewhere a normaliser may drop text, an unknown word may be one token whatever its length, and
    a special token may take the spaces around it.
    """
    parts = json.loads(backend.to_str())
    splits = parts["pre_tokenizer"] or {}
    steps = splits.get("pretokenizers", [splits])
    is_plain = parts["normalizer"] is None and parts["model"].get("type") == "BPE"
    is_plain &= any(step.get("type") == "ByteLevel" for step in steps)
    is_plain &= not any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    is_plain &= all(step.get("behavior") != "Removed" for step in steps)
    # A letter of the vocabulary is one byte, so a token has no more characters than letters.
    return max(map(len, backend.get_vocab()), default=None) if is_plain else None
