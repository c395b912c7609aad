"""Texts that are too long by their length alone.

Where such rows are dropped they are not tokenised; where they are cut (data.overlong: truncate)
only their head is: tokenising megabytes takes a minute and gigabytes.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable

from tokenizers import Encoding, Tokenizer

# So many pieces of the pre-tokenizer before the first that may go on past a head could still be
# split otherwise: white space looks at what follows it.
UNSURE_WORDS = 2


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


def exact_head(
    encode: Callable[[str], Encoding],
    text: str,
    *,
    min_tokens: int,
    longest: int,
    is_content: Callable[[int, str], bool],
) -> tuple[Encoding, int]:
    """Tokenise the head of a text. Returns the encoding, and how many of its tokens are those of
    the whole text: `min_tokens` or more, or all of them.

    The last of them is content (`is_content` is asked with its id and text), so that what ends a
    turn, a stop token and white space, is never cut in two. Byte-level BPE only (`longest_token`).
    """
    size = (min_tokens + 2) * longest
    while True:
        size *= 2
        encoding = encode(text[:size])
        if size >= len(text):
            return encoding, len(encoding.ids)
        num_tokens = _num_sure(encoding, limit=size - longest)
        while num_tokens > min_tokens:
            start, end = encoding.offsets[num_tokens - 1]
            if is_content(encoding.ids[num_tokens - 1], text[start:end]):
                return encoding, num_tokens
            num_tokens -= 1


def _num_sure(encoding: Encoding, *, limit: int) -> int:
    """How many tokens no text after the head can change, where a special token that the head cuts
    in two cannot begin before character `limit`."""
    ends, words = [end for _, end in encoding.offsets], encoding.word_ids
    first_unsure = bisect_right(ends, limit)
    if first_unsure == len(words):
        return 0
    return bisect_left(words, words[first_unsure] - UNSURE_WORDS)
