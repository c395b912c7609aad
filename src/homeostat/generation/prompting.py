"""Prompts as the run's own were made: chats by the template, plain texts with their opening."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from homeostat.arrays import IntArray
from homeostat.data.chat import encode_prompt, parse_prompt
from homeostat.data.overlong import OverlongTextError
from homeostat.data.rows import opening
from homeostat.data.sources import BadRowError
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import DataError
from homeostat.rollout.engine import Sampling


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How a user asks for text. Temperature 0 takes the likeliest token."""

    max_new_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop: tuple[str, ...] = ()

    def for_engine(self, tokenizer: ChatTokenizer, *, room: int) -> Sampling:
        """Return the engine's settings; `room` is the number of tokens left in the context."""
        return Sampling(
            max_new_tokens=min(self.max_new_tokens, room),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_ids=tokenizer.stop_ids,
            stop_strings=self.stop,
        )


def require_template(tokenizer: ChatTokenizer, *, wanted_by: str) -> None:
    """Raise DataError with the options of the command line if chats cannot become text."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"{wanted_by}: the tokenizer has no chat template, so messages cannot become text. "
            "Start with --chat-template FILE or with --tokenizer of an instruct model, or let the "
            "model continue plain text: homeostat generate MODEL TEXT --raw, or /v1/completions."
        )


def chat_tokens(messages: Any, tokenizer: ChatTokenizer) -> IntArray:
    """Return a chat and the opening of the answer. Raises DataError with the template's reason."""
    require_template(tokenizer, wanted_by="messages")
    try:
        return encode_prompt(parse_prompt(messages), tokenizer)
    except BadRowError as error:
        raise DataError(f"messages: {error}.") from None
    except OverlongTextError as error:
        raise _too_long("messages", error, tokenizer) from None


def text_tokens(text: str, tokenizer: ChatTokenizer) -> IntArray:
    """Return a plain text, opened as in training (begin-of-sequence) and not closed."""
    try:
        tokens_T, _ = tokenizer.encode(text)
    except BadRowError as error:
        raise DataError(f"prompt: {error}.") from None
    except OverlongTextError as error:
        raise _too_long("prompt", error, tokenizer) from None
    first = np.array(opening(tokens_T, tokenizer), dtype=np.int64)
    return np.concatenate([first, tokens_T])


def _too_long(what: str, error: OverlongTextError, tokenizer: ChatTokenizer) -> DataError:
    return DataError(
        f"{what}: {error}, and the context has {tokenizer.max_tokens}. Shorten the text, or raise "
        "--context."
    )


def prompt_tokens(
    text: str, tokenizer: ChatTokenizer, *, as_chat: bool, system: str | None = None
) -> IntArray:
    """Return a prompt that a person typed: one user message, or a text to be continued."""
    if not as_chat:
        return text_tokens(text, tokenizer)
    messages: Sequence[Mapping[str, str]] = [{"role": "user", "content": text}]
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return chat_tokens(list(messages), tokenizer)


def require_room(num_tokens: int, context: int) -> int:
    """Return the tokens that are left for the answer. Raises DataError where there are none."""
    if num_tokens >= context:
        raise DataError(
            f"the prompt has {num_tokens} tokens, and the context {context}: nothing is left for "
            "an answer. Shorten the prompt, or raise --context."
        )
    return context - num_tokens
