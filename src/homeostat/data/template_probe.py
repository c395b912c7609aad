"""Compare the chat template of a run with the tokenizer and with the model's own template.

A template that was written for another model still renders every chat. Its markers then become
unknown tokens or pieces of ordinary text, or the model meets turns in a form that it never saw.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import Any

from homeostat.config.data import DataConfig, MessagesSource
from homeostat.data.sources import BadRowError
from homeostat.data.templates import render
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import ModelError

# Texts that no template writes itself.
_TEXTS = ("qzjx", "vkwy")
_CHAT = [{"role": "user", "content": _TEXTS[0]}, {"role": "assistant", "content": _TEXTS[1]}]
_MARKER = re.compile(r"<\|[^|<>\s]{1,40}\|>|<(?:start|end)_of_turn>")


def uses_chat(data: DataConfig) -> bool:
    """Return whether a source of the run's rows or prompts is rendered by the chat template."""
    return any(
        isinstance(source, MessagesSource) or bool(getattr(source, "chat", False))
        for source in data.train
    )


def probe_template(tokenizer: ChatTokenizer) -> dict[str, Any] | None:
    """Return what becomes of the template's own text; None if there is none, or it refuses a chat.

    tokens    number of tokens that the template adds to a question and an answer
    unknown   how many of them the tokenizer does not know
    split     markers of turns that are several tokens, of a template that is not the model's own
    alike     share of these tokens that the model's own template has in the same order, relative to
              the shorter of the two; None if it is the model's own, or the model has none
    """
    used = _added(tokenizer, tokenizer.chat_template)
    if used is None:
        return None
    text, ids = used
    is_own = tokenizer.own_template == tokenizer.chat_template
    own = None if is_own else _added(tokenizer, tokenizer.own_template)
    markers = () if is_own else sorted(set(_MARKER.findall(text)))
    return {
        "tokens": len(ids),
        "unknown": _num_unknown(tokenizer, ids),
        "split": [one for one in markers if len(tokenizer.encode(one)[0]) > 1],
        "alike": None if own is None else _alike(own[1], ids),
    }


def _added(tokenizer: ChatTokenizer, template: str | None) -> tuple[str, list[int]] | None:
    """Return the text that a template makes of a chat, and the tokens of what it adds."""
    if template is None:
        return None
    words = tokenizer.special.words
    try:
        text = render(template, _CHAT, add_generation_prompt=False, words=words)
    except (BadRowError, ModelError):
        # Rows that the template refuses are reported when they are prepared.
        return None
    spans = [(start, start + len(one)) for one in _TEXTS if (start := text.find(one)) >= 0]
    ids_T, offsets_T2 = tokenizer.encode(text)
    pairs = zip(ids_T.tolist(), offsets_T2.tolist(), strict=True)
    return text, [
        token
        for token, (first, end) in pairs
        if text[first:end].strip()
        and not any(first < stop and end > start for start, stop in spans)
    ]


def _num_unknown(tokenizer: ChatTokenizer, ids: list[int]) -> int:
    word = tokenizer.special.words.get("unk_token")
    # Tokenizers that fall back to bytes name no such token, or never use it.
    unknown = tokenizer.encode(word)[0].tolist() if isinstance(word, str) else []
    return ids.count(unknown[0]) if len(unknown) == 1 else 0


def _alike(own: list[int], used: list[int]) -> float:
    matcher = SequenceMatcher(None, own, used, autojunk=False)
    shared = sum(block.size for block in matcher.get_matching_blocks())
    return shared / max(1, min(len(own), len(used)))
