"""A few words of what someone said, for evidence: whole words, in one line."""

from __future__ import annotations

import textwrap

MAX_CHARS = 160


def quote(text: str, limit: int = MAX_CHARS) -> str:
    """The beginning of a text, cut between words and marked where it was cut."""
    # A word that alone is too long is cut inside: better a part of it than nothing.
    most = limit // 2
    words = (word if len(word) <= most else f"{word[:most]}..." for word in text.split())
    return textwrap.shorten(" ".join(words), limit, placeholder=" ...")
