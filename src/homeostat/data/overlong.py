"""Recognise texts that are too long from their length alone.

If such rows are dropped they are not tokenised; if they are truncated (data.overlong: truncate)
only their beginning is, because tokenising megabytes takes a minute and gigabytes of memory.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable

from tokenizers import Encoding, Tokenizer

# This many pieces of the pre-tokenizer before the first that may continue past a head could still
# be split differently, because the rule for white space looks at what follows it.
UNSURE_WORDS = 2


class OverlongTextError(Exception):
    """A text has too many tokens, as its length alone shows, so it was not tokenised."""

    def __init__(self, least_tokens: int) -> None:
        super().__init__(f"at least {least_tokens} tokens")
        self.least_tokens = least_tokens


def longest_token(backend: Tokenizer) -> int | None:
    """Return the most characters that one token covers, if that is bounded: in byte-level BPE.

    In other tokenizers a normaliser may drop text, an unknown word may be one token whatever its
    length, and a special token may take the spaces around it.
    """
    parts = json.loads(backend.to_str())
    splits = parts["pre_tokenizer"] or {}
    steps = splits.get("pretokenizers", [splits])
    is_plain = parts["normalizer"] is None and parts["model"].get("type") == "BPE"
    is_plain &= any(step.get("type") == "ByteLevel" for step in steps)
    is_plain &= not any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    is_plain &= all(step.get("behavior") != "Removed" for step in steps)
    # A symbol of the vocabulary is one byte, so a token has no more characters than symbols.
    return max(map(len, backend.get_vocab()), default=None) if is_plain else None


def exact_head(
    encode: Callable[[str], Encoding],
    text: str,
    *,
    min_tokens: int,
    longest: int,
    is_content: Callable[[int, str], bool],
) -> tuple[Encoding, int]:
    """Tokenise the beginning of a text.

    Returns the encoding, and how many of its tokens are those of the whole text: `min_tokens` or
    more, or all of them. The last of them is content (`is_content` is called with its id and text),
    so the end of a turn, a stop token and white space, is never split. Byte-level BPE only
    (`longest_token`).
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
    """Return how many tokens no text after the head can change.

    A special token that the head cuts in two cannot begin before character `limit`.
    """
    ends, words = [end for _, end in encoding.offsets], encoding.word_ids
    first_unsure = bisect_right(ends, limit)
    if first_unsure == len(words):
        return 0
    return bisect_left(words, words[first_unsure] - UNSURE_WORDS)
