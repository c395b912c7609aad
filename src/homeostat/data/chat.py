"""Messages to tokens, with labels that are exact or refused.

A trained assistant turn i is what the model would have to write: the text between

    render(messages[:i], add_generation_prompt=True)   and   render(messages[:i + 1])

Both must be prefixes of the whole rendering; a template that rewrites earlier turns breaks that,
and the row is then refused rather than labelled by guess. The whole text is tokenised once, and
turns are mapped to tokens by character offsets; no token may straddle the border of a turn. The
turn's last stop token is trained, the white space a template puts after it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from homeostat.data.sources import BadRowError
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.types import FloatArray, IntArray

MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6
REWRITES = "the chat template rewrites earlier turns"
BAD_MESSAGE = "not a usable message"


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as the template takes them, and the loss weight of each."""

    messages: list[dict[str, Any]]
    weights: list[float]


def parse_chat(value: Any, *, turns: Literal["all", "last"]) -> Chat:
    """Check a list of messages and take `train` and `weight` out of them."""
    if not isinstance(value, list) or not value:
        raise BadRowError("no messages", "the column must hold a list of {role, content}")
    parsed = [_parse_message(number, item) for number, item in enumerate(value)]
    messages = [message for message, _ in parsed]
    is_assistant = [message["role"] == "assistant" for message in messages]
    if True not in is_assistant:
        raise BadRowError("trains on nothing", "no message has the role 'assistant'")
    last = len(messages) - 1 - is_assistant[::-1].index(True)
    weights = []
    for number, (_, own) in enumerate(parsed):
        default = float(is_assistant[number] and (turns == "all" or number == last))
        weights.append(default if own is None else own)
    return Chat(messages, weights)


def encode_chat(chat: Chat, tokenizer: ChatTokenizer) -> tuple[IntArray, FloatArray]:
    """Tokens of the whole chat, and the weight of predicting each."""
    text = tokenizer.render(chat.messages, add_generation_prompt=False)
    tokens_T, offsets_T2 = tokenizer.encode(text)
    weights_T = np.zeros(len(tokens_T), dtype=np.float32)
    for number, weight in enumerate(chat.weights):
        if weight > 0:
            start, end = _turn_span(chat.messages, number, text, tokenizer)
            first, stop = _turn_tokens(number, start, end, text, tokens_T, offsets_T2, tokenizer)
            weights_T[first : stop + 1] = weight
    return tokens_T, weights_T


def _parse_message(number: int, item: Any) -> tuple[dict[str, Any], float | None]:
    """The message without our keys, and the weight it gives itself."""
    if not isinstance(item, dict):
        raise BadRowError(BAD_MESSAGE, f"message {number} is a {type(item).__name__}")
    message = {
        name: field
        for name, field in item.items()
        if field is not None and name not in ("train", "weight")
    }
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRowError(BAD_MESSAGE, f"message {number} has no role")
    message["content"] = _text_content(number, message)
    weight = _own_weight(number, item)
    if weight and role != "assistant":
        raise BadRowError(
            BAD_MESSAGE,
            f"message {number} asks to be trained, but its role is {role!r}: only what the "
            "assistant says can be. Remove its train or weight",
        )
    return message, weight


def _text_content(number: int, message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    what = "has no content" if content is None else "has a content that is not text"
    raise BadRowError(BAD_MESSAGE, f"message {number} {what}")


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _own_weight(number: int, item: dict[str, Any]) -> float | None:
    train, weight = item.get("train"), item.get("weight")
    if train is not None and not isinstance(train, bool):
        raise BadRowError(BAD_MESSAGE, f"message {number}: train must be true or false")
    if weight is None:
        return None if train is None else float(train)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise BadRowError(BAD_MESSAGE, f"message {number}: weight must be a number")
    if not (weight == 0 or MIN_WEIGHT <= weight <= MAX_WEIGHT):
        limits = f"0, or from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        raise BadRowError(BAD_MESSAGE, f"message {number}: weight must be {limits}")
    if train is not None and train != (weight > 0):
        raise BadRowError(BAD_MESSAGE, f"message {number}: train and weight contradict each other")
    return float(weight)


def _turn_span(
    messages: list[dict[str, Any]], number: int, text: str, tokenizer: ChatTokenizer
) -> tuple[int, int]:
    """Where in the whole text turn `number` stands."""
    head = tokenizer.render(messages[:number], add_generation_prompt=True)
    is_last = number == len(messages) - 1
    through = text if is_last else _render_through(messages, number, tokenizer)
    if not text.startswith(through):
        raise _rewritten(number, "the turn itself reads differently once the chat goes on")
    if not through.startswith(head):
        before = tokenizer.render(messages[:number], add_generation_prompt=False)
        if not text.startswith(before):
            raise _rewritten(number, "what stands before it reads differently once it is there")
        raise BadRowError(
            "the generation prompt is not how the template renders a turn",
            f"message {number}: the template opens the assistant's turn with "
            f"{head[len(before) :][:60]!r} when it asks for one, but not when it shows one. Mend "
            "the template and name it in model.chat_template",
        )
    return len(head), len(through)


def _render_through(messages: list[dict[str, Any]], number: int, tokenizer: ChatTokenizer) -> str:
    return tokenizer.render(messages[: number + 1], add_generation_prompt=False)


def _rewritten(number: int, how: str) -> BadRowError:
    return BadRowError(
        REWRITES,
        f"message {number}: {how}, so no label of it would be right. Train the last turn only "
        "(turns: last on the source), or set train: false on the earlier messages",
    )


def _turn_tokens(
    number: int,
    start: int,
    end: int,
    text: str,
    tokens_T: IntArray,
    offsets_T2: IntArray,
    tokenizer: ChatTokenizer,
) -> tuple[int, int]:
    """First trained token of a turn, and the stop token that ends it."""
    starts_T, ends_T = offsets_T2[:, 0], offsets_T2[:, 1]
    touching = np.flatnonzero((ends_T > start) & (starts_T < end))
    stop_ids = tokenizer.stop_ids
    stop = next((int(n) for n in touching[::-1] if int(tokens_T[n]) in stop_ids), None)
    if stop is None or text[ends_T[stop] : end].strip():
        known = sorted(tokenizer.decode([token]) for token in stop_ids)
        raise BadRowError(
            "the turn has no end-of-turn token",
            f"message {number}: the template ends the turn with {text[start:end][-20:]!r}, and "
            f"generation stops at {', '.join(known)} only, so the model would never learn to "
            "stop. Set eos_token_id in generation_config.json to the template's end of turn, "
            "or name a template in model.chat_template that ends turns with eos_token",
        )
    first = int(touching[0])
    if starts_T[first] < start:
        raise straddles(f"the start of message {number}", text, offsets_T2[first])
    if ends_T[stop] > end:
        raise straddles(f"the end of message {number}", text, offsets_T2[stop])
    return first, stop


def straddles(border: str, text: str, offset: IntArray) -> BadRowError:
    shown = text[int(offset[0]) : int(offset[1])]
    return BadRowError(
        "a token straddles the border of a trained span",
        f"{shown!r} stands across {border}, so it is neither context nor answer. Move the "
        "white space at the border to the other side",
    )
