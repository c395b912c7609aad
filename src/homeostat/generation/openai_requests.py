"""Requests in the form of OpenAI's completions API: checked in full, nothing is ignored.

    JSON body -> TextRequest (tokens, sampling, how to answer)

A field that would change the answer and that the engine does not have is refused by name. Fields
that only concern a provider's bookkeeping have no effect by definition and are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from homeostat.arrays import IntArray
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import DataError
from homeostat.generation.prompting import (
    SamplingOptions,
    chat_tokens,
    require_room,
    text_tokens,
)

_BOOKKEEPING = frozenset({"user", "metadata", "store", "model", "safety_identifier"})
# Fields whose only accepted values are those that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": ({}, None),
    "best_of": (1, None),
    "suffix": ("", None),
    "response_format": ({"type": "text"}, None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
}
_COMMON = frozenset(
    ("max_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed", "stream", "stream_options")
)
_TEXT_FIELDS = _COMMON | {"prompt", "echo", "logprobs"}
_CHAT_FIELDS = _COMMON | {"messages", "max_completion_tokens", "logprobs", "top_logprobs"}
_MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What a body asks for. `top_logprobs` is None where no log-probs are wanted."""

    prompts: tuple[IntArray, ...]
    options: SamplingOptions
    samples: int
    seed: int | None
    streams: bool
    with_usage: bool
    echo: bool
    top_logprobs: int | None
    is_chat: bool


def parse_text_request(body: Any, tokenizer: ChatTokenizer, *, context: int) -> TextRequest:
    """Return a request to /v1/completions. Raises DataError that names the field at fault."""
    fields = _fields(body, _TEXT_FIELDS)
    prompts = _prompts(fields.get("prompt"), tokenizer)
    wanted = fields.get("logprobs")
    if wanted is not None and (type(wanted) is not int or not 0 <= wanted <= 5):
        raise DataError("logprobs: a number from 0 to 5.")
    echo = _flag(fields, "echo")
    return _request(
        fields,
        prompts,
        context=context,
        max_tokens=_number(fields, "max_tokens", default=16, low=0 if echo else 1),
        echo=echo,
        top_logprobs=wanted,
        is_chat=False,
    )


def parse_chat_request(body: Any, tokenizer: ChatTokenizer, *, context: int) -> TextRequest:
    """Return a request to /v1/chat/completions. Raises DataError that names the field at fault."""
    fields = _fields(body, _CHAT_FIELDS)
    if "messages" not in fields:
        raise DataError("messages: the field is missing.")
    tokens_T = chat_tokens(fields["messages"], tokenizer)
    is_newer = fields.get("max_completion_tokens") is not None
    name = "max_completion_tokens" if is_newer else "max_tokens"
    room = require_room(len(tokens_T), context)
    top = _number(fields, "top_logprobs", default=0, low=0)
    if top > 5:
        raise DataError("top_logprobs: at most 5.")
    has_logprobs = _flag(fields, "logprobs")
    if top and not has_logprobs:
        raise DataError("top_logprobs: come with log-probs only. Set logprobs to true.")
    return _request(
        fields,
        (tokens_T,),
        context=context,
        max_tokens=_number(fields, name, default=room, low=1),
        echo=False,
        top_logprobs=top if has_logprobs else None,
        is_chat=True,
    )


def _request(
    fields: Mapping[str, Any],
    prompts: tuple[IntArray, ...],
    *,
    context: int,
    max_tokens: int,
    echo: bool,
    top_logprobs: int | None,
    is_chat: bool,
) -> TextRequest:
    for tokens_T in prompts:
        if len(tokens_T) + max_tokens > context:
            raise DataError(
                f"max_tokens: {len(tokens_T)} tokens of the prompt and {max_tokens} new ones are "
                f"more than the context of {context}."
            )
    streams = _flag(fields, "stream")
    if streams and (echo or top_logprobs is not None):
        raise DataError("stream: echo and logprobs come with whole answers only.")
    options = {} if fields.get("stream_options") is None else fields["stream_options"]
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise DataError("stream_options: an object with include_usage, or nothing.")
    seed = fields.get("seed")
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
        raise DataError("seed: a whole number from 0 on.")
    return TextRequest(
        prompts=prompts,
        options=SamplingOptions(
            max_new_tokens=max_tokens,
            temperature=_real(fields, "temperature", default=1.0, high=10.0),
            top_p=_real(fields, "top_p", default=1.0, high=1.0, above_zero=True),
            top_k=_top_k(fields),
            stop=_stops(fields.get("stop")),
        ),
        samples=_samples(fields),
        seed=seed,
        streams=streams,
        with_usage=_flag(options, "include_usage"),
        echo=echo,
        top_logprobs=top_logprobs,
        is_chat=is_chat,
    )


def _fields(body: Any, known: frozenset[str]) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise DataError("the body is a JSON object.")
    for name, value in body.items():
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise DataError(f"{name}: this server does not have it. Leave it out.")
        if name not in known and name not in _NEUTRAL and name not in _BOOKKEEPING:
            shown = ", ".join(sorted(known))
            raise DataError(f"{str(name)[:60]!r} is not a field of this API. Known: {shown}.")
    return {name: value for name, value in body.items() if name in known}


def _prompts(value: Any, tokenizer: ChatTokenizer) -> tuple[IntArray, ...]:
    many = value if isinstance(value, list) and value and not _is_tokens(value) else [value]
    found = []
    for one in many:
        if isinstance(one, str):
            found.append(text_tokens(one, tokenizer))
        elif _is_tokens(one):
            found.append(np.array(one, dtype=np.int64))
        else:
            raise DataError("prompt: a text, a list of token ids, or a list of either.")
    if len(found) > _MAX_CHOICES or any(len(tokens_T) == 0 for tokens_T in found):
        raise DataError(f"prompt: 1 to {_MAX_CHOICES} prompts, none of them empty.")
    return tuple(found)


def _is_tokens(value: Any) -> bool:
    small = isinstance(value, list) and all(type(one) is int and 0 <= one < 2**31 for one in value)
    return small and bool(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise DataError(f"{name}: true or false.")
    return value


def _number(fields: Mapping[str, Any], name: str, *, default: int, low: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int or value < low or value >= 2**31:
        raise DataError(f"{name}: a whole number from {low} on.")
    return value


def _real(
    fields: Mapping[str, Any], name: str, *, default: float, high: float, above_zero: bool = False
) -> float:
    value = fields.get(name)
    if value is None:
        return default
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= high or (above_zero and value == 0):
        raise DataError(f"{name}: a number from 0 to {high:g}.")
    return float(value)


def _top_k(fields: Mapping[str, Any]) -> int | None:
    # -1 and 0 mean "all tokens" in other servers.
    return (
        None if fields.get("top_k") in (None, -1, 0) else _number(fields, "top_k", default=1, low=1)
    )


def _samples(fields: Mapping[str, Any]) -> int:
    samples = _number(fields, "n", default=1, low=1)
    if samples > _MAX_CHOICES:
        raise DataError(f"n: at most {_MAX_CHOICES}.")
    return samples


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    is_sound = isinstance(stops, list) and len(stops) <= 16
    if not is_sound or not all(isinstance(stop, str) and 0 < len(stop) <= 200 for stop in stops):
        raise DataError("stop: a text, or a list of up to 16 texts of 1 to 200 characters.")
    return tuple(stops)
