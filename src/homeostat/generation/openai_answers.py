"""Answers in the form of OpenAI's completions API. Pure functions from completions to JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from homeostat.data.tokenizer import ChatTokenizer
from homeostat.generation.scoring import TokenScores
from homeostat.types import StopReason


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `tokens` are all tokens that log-probs are shown of, `scores` theirs."""

    index: int
    text: str
    stop_reason: StopReason
    tokens: Sequence[int] = ()
    scores: TokenScores | None = None


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all parts of one response have in common."""

    id: str
    created: int
    model: str
    is_chat: bool

    def head(self, *, is_chunk: bool = False) -> dict[str, Any]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def finish_reason(reason: StopReason) -> str:
    """Return OpenAI's word for the end of an answer."""
    return "stop" if reason in (StopReason.STOP, StopReason.STOP_STRING) else "length"


def usage(num_prompt: int, num_new: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }


def whole_answer(
    envelope: Envelope,
    choices: Sequence[Choice],
    tokenizer: ChatTokenizer,
    counts: Mapping[str, int],
) -> dict[str, Any]:
    """Return the response that is sent at once."""
    shown = [_choice(envelope, choice, tokenizer) for choice in choices]
    return {**envelope.head(), "choices": shown, "usage": dict(counts)}


def chunk(envelope: Envelope, index: int, text: str, reason: StopReason | None) -> dict[str, Any]:
    """Return one event of a streamed response."""
    body = {"delta": {"content": text}} if envelope.is_chat else {"text": text, "logprobs": None}
    ended = None if reason is None else finish_reason(reason)
    one = {"index": index, **body, "finish_reason": ended}
    return {**envelope.head(is_chunk=True), "choices": [one]}


def opening_chunk(envelope: Envelope, index: int) -> dict[str, Any]:
    """Return the first event of a streamed chat, which names the author."""
    one = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    return {**envelope.head(is_chunk=True), "choices": [one]}


def usage_chunk(envelope: Envelope, counts: Mapping[str, int]) -> dict[str, Any]:
    return {**envelope.head(is_chunk=True), "choices": [], "usage": dict(counts)}


def error_answer(message: str, *, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _choice(envelope: Envelope, choice: Choice, tokenizer: ChatTokenizer) -> dict[str, Any]:
    ended = finish_reason(choice.stop_reason)
    if envelope.is_chat:
        message = {"role": "assistant", "content": choice.text}
        logprobs = _chat_logprobs(choice, tokenizer)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": ended,
        }
    logprobs = _text_logprobs(choice, tokenizer)
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": logprobs,
        "finish_reason": ended,
    }


def _text_logprobs(choice: Choice, tokenizer: ChatTokenizer) -> dict[str, Any] | None:
    """The oldest form: parallel lists. The first token of a text has no log-prob."""
    if choice.scores is None:
        return None
    missing = len(choice.tokens) - len(choice.scores.logprobs)
    texts = [tokenizer.decode([token]) for token in choice.tokens]
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    top = [_by_text(found, tokenizer) for found in choice.scores.top]
    return {
        "tokens": texts,
        "token_logprobs": [None] * missing + choice.scores.logprobs,
        "top_logprobs": [None] * missing + top,
        "text_offset": offsets,
    }


def _by_text(found: Mapping[int, float], tokenizer: ChatTokenizer) -> dict[str, float]:
    """Return log-probs by text; of tokens with one text (bytes of characters), the largest."""
    values: dict[str, float] = {}
    for token, value in found.items():
        text = tokenizer.decode([token])
        values[text] = max(value, values.get(text, value))
    return values


def _chat_logprobs(choice: Choice, tokenizer: ChatTokenizer) -> dict[str, Any] | None:
    if choice.scores is None:
        return None
    content = [
        {
            **_one(token, value, tokenizer),
            "top_logprobs": [_one(other, v, tokenizer) for other, v in found.items()],
        }
        for token, value, found in zip(
            choice.tokens, choice.scores.logprobs, choice.scores.top, strict=True
        )
    ]
    return {"content": content}


def _one(token: int, value: float, tokenizer: ChatTokenizer) -> dict[str, Any]:
    text = tokenizer.decode([token])
    return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8"))}
