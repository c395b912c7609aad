"""Turn one row of a source into tokens with loss weights, by the source's type.

    messages            chat.py; with turns: each as many rows as it has trained turns
    prompt_completion   chat: a user and an assistant turn, or lists of messages; else both texts
                        concatenated + eos
    text                the text + eos, all of it trained

The weight at n is that of predicting token n, so the first token's is always 0. A row that trains
on nothing is a BadRowError like any other defect.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from homeostat.arrays import FloatArray, IntArray
from homeostat.config.data import (
    LabelledSource,
    MessagesSource,
    PromptCompletionSource,
    SftSource,
    TextSource,
)
from homeostat.data.chat import (
    Chat,
    encode_chat,
    parse_chat,
    split_turns,
    straddles,
    with_system,
)
from homeostat.data.sources import BadRowError
from homeostat.data.tokenizer import ChatTokenizer

Encoded = tuple[IntArray, FloatArray]


def columns_of(source: SftSource) -> list[str]:
    """Return the columns that a source reads."""
    if isinstance(source, MessagesSource):
        tools = [] if source.tools_column is None else [source.tools_column]
        return [source.messages_column, *tools]
    if isinstance(source, PromptCompletionSource):
        return [source.prompt_column, source.completion_column]
    return [source.text_column]


def needs_chat_template(source: SftSource) -> bool:
    return isinstance(source, MessagesSource) or (
        isinstance(source, PromptCompletionSource) and source.chat
    )


def encode_row(
    row: dict[str, Any], *, source: SftSource, tokenizer: ChatTokenizer
) -> list[Encoded]:
    """Return tokens and weights of a row, or of the rows made from it. Raises BadRowError."""
    if isinstance(source, MessagesSource):
        messages = cell(row, source.messages_column, "a list of messages")
        tools = _tools(row, source.tools_column)
        chat = parse_chat(messages, turns=source.turns, tools=tools)
        # A chat that trains on nothing is not split, and is refused as such.
        chats = (source.turns == "each" and split_turns(chat)) or [chat]
        encoded = [encode_chat(chat, tokenizer) for chat in chats]
    elif isinstance(source, PromptCompletionSource):
        encoded = [_encode_pair(row, source, tokenizer)]
    else:
        assert isinstance(source, TextSource), source
        text = _text_cell(row, source.text_column)
        encoded = [close_document(text, 0, tokenizer)]
    return [require_trained(one, _why_nothing(one, tokenizer)) for one in encoded]


def truncate(encoded: Encoded, max_length: int) -> Encoded:
    """Keep the first `max_length` tokens, if something trained is among them."""
    tokens_T, weights_T = encoded
    kept = tokens_T[:max_length], weights_T[:max_length]
    return require_trained(kept, _nothing_within(max_length))


def _nothing_within(max_length: int) -> str:
    return f"nothing trained is left within the first data.max_length={max_length} tokens"


def _why_nothing(encoded: Encoded, tokenizer: ChatTokenizer) -> str:
    """Return why a row trains on nothing; of a truncated one only the beginning is known."""
    cut = tokenizer.cut_tokens
    if cut is not None and len(encoded[0]) > cut:
        return _nothing_within(cut)
    return "no token of the row has a loss weight"


def require_trained(encoded: Encoded, why: str) -> Encoded:
    tokens_T, weights_T = encoded
    weights_T = weights_T.astype(np.float32, copy=True)
    # Nothing predicts the first token of a row.
    weights_T[:1] = 0.0
    if not weights_T.any():
        raise BadRowError("trains on nothing", why)
    return tokens_T, weights_T


def _encode_pair(
    row: dict[str, Any], source: PromptCompletionSource, tokenizer: ChatTokenizer
) -> Encoded:
    prompt, completion = row.get(source.prompt_column), row.get(source.completion_column)
    if isinstance(prompt, list) or isinstance(completion, list):
        return _encode_conversation(row, source, tokenizer)
    prompt = _text_cell(row, source.prompt_column)
    completion = _text_cell(row, source.completion_column)
    if not source.chat:
        return close_document(prompt + completion, len(prompt), tokenizer)
    system = [{"role": "system", "content": source.system}] if source.system is not None else []
    messages = [
        *system,
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": completion},
    ]
    return encode_chat(Chat(messages, [0.0] * (len(messages) - 1) + [1.0]), tokenizer)


def _encode_conversation(
    row: dict[str, Any], source: PromptCompletionSource, tokenizer: ChatTokenizer
) -> Encoded:
    """Encode a prompt and a completion of which at least one is a list of messages."""
    prompt = cell(row, source.prompt_column, "a text or a list of messages")
    completion = cell(row, source.completion_column, "a text or a list of messages")
    if not isinstance(prompt, list):
        prompt = [{"role": "user", "content": _text_cell(row, source.prompt_column)}]
    if not isinstance(completion, list):
        answer = _text_cell(row, source.completion_column)
        completion = [{"role": "assistant", "content": answer}]
    return encode_answered(prompt, completion, source=source, tokenizer=tokenizer)


def encode_answered(
    prompt: list[Any],
    completion: list[Any],
    *,
    source: PromptCompletionSource | LabelledSource,
    tokenizer: ChatTokenizer,
) -> Encoded:
    """Encode a conversation of which only the completion is trained. Raises BadRowError."""
    tokenizer.require_chat_template(wanted_by=f"{source.type} source {source.path}")
    asked = with_system(prompt, source.system)
    chat = parse_chat([*asked, *completion], turns="all")
    # Assistant turns of the prompt are context.
    weights = [0.0] * len(asked) + chat.weights[len(asked) :]
    return encode_chat(Chat(chat.messages, weights), tokenizer)


def close_document(text: str, border: int, tokenizer: ChatTokenizer) -> Encoded:
    """Return prefix + text + eos, trained from character `border` on, without duplicate ends."""
    tokens_T, offsets_T2, _ = tokenizer.encode_head(text)
    crossing = (offsets_T2[:, 0] < border) & (offsets_T2[:, 1] > border)
    if crossing.any():
        where = "the border of prompt and completion"
        raise straddles(where, text, offsets_T2[crossing][0])
    weights_T = (offsets_T2[:, 0] >= border).astype(np.float32)
    prefix = opening(tokens_T, tokenizer)
    closed = len(tokens_T) > 0 and tokens_T[-1] == tokenizer.eos_id and weights_T[-1] > 0
    suffix = () if closed else (tokenizer.eos_id,)
    tokens_T = np.concatenate([_ids(prefix), tokens_T, _ids(suffix)])
    untrained, trained = np.zeros(len(prefix)), np.ones(len(suffix))
    return tokens_T, np.concatenate([untrained, weights_T, trained]).astype(np.float32)


def opening(tokens_T: IntArray, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """Return the tokens before a plain document, unless its text already begins with them."""
    prefix = tokenizer.prefix_ids
    return () if tuple(tokens_T[: len(prefix)]) == prefix else prefix


def _ids(tokens: tuple[int, ...]) -> IntArray:
    return np.array(tokens, dtype=np.int64)


def cell(row: dict[str, Any], column: str, wanted: str) -> Any:
    """Return the value of a column. Raises BadRowError if it is missing or null."""
    value = row.get(column)
    if value is None:
        what = f"column {column!r} is null" if column in row else f"no column is named {column!r}"
        has = ", ".join(list(row)[:12]) or "none"
        raise BadRowError("missing column", f"{what}, {wanted} is needed (columns: {has})")
    return value


def _tools(row: dict[str, Any], column: str | None) -> Any:
    """Return the tools of a row. A row without the column has none: the file as a whole has it."""
    if column is None or row.get(column) is None:
        return None
    return cell(row, column, "a list of tools")


def _text_cell(row: dict[str, Any], column: str) -> str:
    value = cell(row, column, "text")
    if not isinstance(value, str):
        raise BadRowError("wrong type", f"column {column!r} holds a {type(value).__name__}")
    return value
