"""Turn a row with preferences into tokenised completions, each with its label.

    preference            prompt, chosen, rejected -> the chosen row, then the rejected one
    unpaired_preference   prompt, completion, label -> one row
    scored                prompt, completion, score -> one row

Prompt and completions are texts or lists of messages. A row without a prompt has it in both
completions: the messages with which both begin, or, in plain text, the tokens. The label of a row
is 1 if its completion is to become more likely and -1 otherwise; only completions are trained. For
a reward model the label is the score itself, or the margin of a pair with the sign of its side.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from homeostat.config.data import LabelledSource, PreferenceSource, ScoredSource
from homeostat.data.rows import Encoded, cell, close_document, encode_answered, require_trained
from homeostat.data.sources import BadRowError
from homeostat.data.tokenizer import ChatTokenizer

CHOSEN, REJECTED = 1.0, -1.0
# A tokenised row and its label.
Labelled = tuple[Encoded, float]
NOTHING = "no token of the completion has a loss weight"


def labelled_columns(source: LabelledSource) -> list[str] | None:
    """Return the columns that a source reads; None for all, where one of them may be missing."""
    if isinstance(source, PreferenceSource):
        return None
    if isinstance(source, ScoredSource):
        return [source.prompt_column, source.completion_column, source.score_column]
    return [source.prompt_column, source.completion_column, source.label_column]


def needed_columns(source: LabelledSource) -> list[str]:
    """Return the columns without which no row of a source can be used."""
    if not isinstance(source, PreferenceSource):
        return []
    margin = [] if source.margin_column is None else [source.margin_column]
    return [source.chosen_column, source.rejected_column, *margin]


def encode_labelled(
    row: dict[str, Any], *, source: LabelledSource, tokenizer: ChatTokenizer
) -> list[Labelled]:
    """Return the tokenised completions of a row, which stay together. Raises BadRowError."""
    if isinstance(source, PreferenceSource):
        chosen = _completion(row, source.chosen_column)
        rejected = _completion(row, source.rejected_column)
        if type(chosen) is not type(rejected):
            raise BadRowError("wrong type", "one completion is a text, the other has messages")
        if chosen == rejected:
            raise BadRowError("equal completions", "chosen and rejected are the same")
        both = _encode_pair(row.get(source.prompt_column), chosen, rejected, source, tokenizer)
        margin = _margin(row, source)
        labels = (CHOSEN * margin, REJECTED * margin)
    else:
        prompt = cell(row, source.prompt_column, "a text or a list of messages")
        completion = _completion(row, source.completion_column)
        both, labels = (_encode(prompt, completion, source, tokenizer),), (_label(row, source),)
    return [
        (require_trained(encoded, NOTHING), label)
        for encoded, label in zip(both, labels, strict=True)
    ]


def _encode_pair(
    prompt: Any, chosen: Any, rejected: Any, source: LabelledSource, tokenizer: ChatTokenizer
) -> tuple[Encoded, Encoded]:
    """Encode both completions, after finding the prompt in them if the row has none."""
    if isinstance(chosen, list):
        shared = _num_shared(chosen, rejected)
        # Some data sets have the prompt as text, too, beside whole conversations.
        if prompt is None or (isinstance(prompt, str) and shared):
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
            if not prompt:
                raise BadRowError("no prompt", "the two conversations begin with other messages")
    elif prompt is None:
        if source.chat:
            raise BadRowError(
                "no prompt",
                "the row has no prompt, and in two plain texts it is unknown where the user's "
                "turn ends. Add a prompt column, or set chat: false on the source",
            )
        return _plain_pair(chosen, rejected, tokenizer)
    return (
        _encode(prompt, chosen, source, tokenizer),
        _encode(prompt, rejected, source, tokenizer),
    )


def _plain_pair(chosen: str, rejected: str, tokenizer: ChatTokenizer) -> tuple[Encoded, Encoded]:
    """Encode two texts, of which the tokens that both begin with are the prompt."""
    pair = close_document(chosen, 0, tokenizer), close_document(rejected, 0, tokenizer)
    shared = _num_shared(pair[0][0].tolist(), pair[1][0].tolist())
    for _, weights_T in pair:
        weights_T[:shared] = 0.0
    return pair


def _num_shared(first: list[Any], second: list[Any]) -> int:
    """Return with how many equal elements both lists begin."""
    same = [a == b for a, b in zip(first, second, strict=False)]
    return [*same, False].index(False)


def _encode(
    prompt: Any, completion: Any, source: LabelledSource, tokenizer: ChatTokenizer
) -> Encoded:
    if isinstance(prompt, str) and not prompt.strip():
        raise BadRowError("empty prompt", "the prompt holds no text")
    is_text = isinstance(prompt, str) and isinstance(completion, str)
    if is_text and not source.chat:
        return close_document(prompt + completion, len(prompt), tokenizer)
    if not isinstance(prompt, str | list):
        kind = type(prompt).__name__
        raise BadRowError("wrong type", f"column {source.prompt_column!r} holds a {kind}")
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    return encode_answered(asked, completion, source=source, tokenizer=tokenizer)


def _completion(row: dict[str, Any], column: str) -> str | list[Any]:
    value = cell(row, column, "a text or a list of messages")
    if isinstance(value, dict):
        # axolotl's data sets have the one message of an answer without a list around it.
        value = [value]
    if not isinstance(value, str | list):
        raise BadRowError("wrong type", f"column {column!r} holds a {type(value).__name__}")
    if isinstance(value, list) and not value:
        raise BadRowError("empty completion", f"column {column!r} holds no message")
    return value


def _margin(row: dict[str, Any], source: PreferenceSource) -> float:
    """Return the margin of a pair, 1 if the source has none."""
    if source.margin_column is None:
        return 1.0
    margin = _number(row, source.margin_column)
    if margin < 0:
        what = f"column {source.margin_column!r} holds {margin:g}"
        raise BadRowError("negative margin", f"{what}: the chosen completion is the better one")
    return margin


def _number(row: dict[str, Any], column: str) -> float:
    value = _plain_value(cell(row, column, "a number"))
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise BadRowError("wrong type", f"column {column!r} holds {value!r:.40}: not a number")
    return float(value)


def _plain_value(value: Any) -> Any:
    """Return the number or truth value that a text stands for: cells of a CSV file are texts."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        return value


def _label(row: dict[str, Any], source: LabelledSource) -> float:
    assert not isinstance(source, PreferenceSource)
    if isinstance(source, ScoredSource):
        return _number(row, source.score_column)
    value = _plain_value(cell(row, source.label_column, "true or false"))
    if isinstance(value, np.bool_ | bool) or (isinstance(value, int) and value in (0, 1)):
        return CHOSEN if value else REJECTED
    raise BadRowError(
        "wrong type", f"column {source.label_column!r} holds {value!r:.40}: not true or false"
    )
