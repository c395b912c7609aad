"""Reference answers in tokens: what the policy should have written after a prompt.

They are tokenised with the prompt, as the same pair is in SFT, up to the token that ends the
answer; then the prompt's tokens are taken off. A row whose prompt is tokenised otherwise with its
answer than without is refused: the policy could never write that answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from homeostat.config.data import RlSource
from homeostat.data.chat import Chat, encode_chat
from homeostat.data.rows import cell, close_document
from homeostat.data.sources import BadRowError
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.types import Prompt


@dataclass(frozen=True, slots=True)
class References:
    """The column with the reference answers, and the most tokens that one may have."""

    column: str
    max_tokens: int


def with_reference(
    prompt: Prompt,
    messages: list | None,
    source: RlSource,
    *,
    references: References,
    tokenizer: ChatTokenizer,
) -> Prompt:
    """Return the prompt with its reference answer. Raises BadRowError.

    `messages` are those of a chat, as the template takes them; None for a plain text.
    """
    answer = cell(dict(prompt.columns), references.column, "a reference answer")
    if not isinstance(answer, str) or not answer.strip():
        what = "an empty text" if isinstance(answer, str) else f"a {type(answer).__name__}"
        raise BadRowError("no reference", f"column {references.column!r} holds {what}")
    if messages is None:
        assert isinstance(prompt.prompt, str), "a list of messages is a chat"
        tokens_T, weights_T = close_document(prompt.prompt + answer, len(prompt.prompt), tokenizer)
    else:
        said = [*messages, {"role": "assistant", "content": answer}]
        tokens_T, weights_T = encode_chat(Chat(said, [0.0] * len(messages) + [1.0]), tokenizer)
    size = len(prompt.tokens_T)
    if not np.array_equal(tokens_T[:size], prompt.tokens_T) or weights_T[:size].any():
        raise BadRowError(
            "the reference changes the prompt",
            f"with the answer in column {references.column!r} the prompt is tokenised in another "
            "way than without it",
        )
    reference_T = tokens_T[size : int(np.flatnonzero(weights_T).max()) + 1]
    if len(reference_T) > references.max_tokens:
        raise BadRowError(
            "the reference is too long",
            f"column {references.column!r} holds {len(reference_T)} tokens, and a completion has "
            f"at most rollout.max_new_tokens={references.max_tokens}",
        )
    return replace(prompt, reference_T=reference_T)
