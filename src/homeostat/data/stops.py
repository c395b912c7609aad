"""Decide which tokens end a completion, once for SFT, RL and every engine.

    eos_token_id of the model's files, and the token that ends a turn of the chat template

A base model's files name <|endoftext|> as the end of a sequence, while the template that is used
with it ends turns with <|im_end|>. A policy that learnt the template ends its answer with
<|im_end|>; an engine that does not stop there samples on until the limit. So the token that the
template itself puts after an assistant's answer, found by rendering one, is a stop token, too.
`load_tokenizer` puts all of them into `ChatTokenizer.stop_ids`, which everyone reads.

Only a token that the tokenizer knows as one of its added tokens qualifies. A template that ends a
turn with ordinary text, or with a marker that the tokenizer splits into pieces, has no such token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from homeostat.config.model import ModelConfig
from homeostat.data.sources import BadRowError
from homeostat.data.templates import render
from homeostat.errors import ModelError
from homeostat.json_text import parse_json

# Texts that no template writes itself.
_ANSWER = "qzjx vkwy"
MAX_SHOWN = 20
MAX_JSON_BYTES = 10_000_000


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The text after an assistant's answer. `token` is None if no single token ends the turn."""

    token: int | None
    text: str

    def refusal(self, *, wanted_by: str) -> ModelError:
        """Return the error for a chat that is to be sampled but that no token ends."""
        what = f"with {self.text!r}, which is not one" if self.text else "with nothing, not with a"
        return ModelError(
            f"{wanted_by}: the chat template ends a turn {what} a single special token, so the "
            "engine cannot tell where an answer ends, and every completion would run to "
            "rollout.max_new_tokens. Set rollout.stop to the text that ends a turn (or "
            "rollout.stop_token_ids), add the marker to the tokenizer as a special token, or set "
            "model.chat_template to a template that ends turns with eos_token."
        )


def find_turn_end(template: str, words: Mapping[str, Any], backend: Tokenizer) -> TurnEnd | None:
    """Return the end of a turn; None if the template changes a plain question and answer."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = render(template, messages, add_generation_prompt=False, words=words)
    except (BadRowError, ModelError):
        return None
    before, found, after = text.rpartition(_ANSWER)
    if not found:
        return None
    start = len(before) + len(found)
    encoding = backend.encode(text, add_special_tokens=False)
    added = backend.get_added_tokens_decoder()
    for token, (first, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if end <= start or (first >= start and not text[first:end].strip()):
            continue
        is_marker = first >= start and token in added
        return TurnEnd(token if is_marker else None, after.strip()[:MAX_SHOWN])
    return TurnEnd(None, "")


def configured_stops(model: ModelConfig) -> set[int]:
    """Return the end-of-sequence ids of the model's own config files."""
    found: set[int] = set()
    for folder in {Path(model.path), Path(model.tokenizer or model.path)}:
        for name in ("generation_config.json", "config.json"):
            file = folder / name
            found.update(_token_id(token, file) for token in _named_ids(_read_object(file)))
    return found


def name_stops(file: Path, stop_ids: frozenset[int]) -> None:
    """Add missing stop tokens to an exported generation_config.json.

    The exported model must stop where the run stopped.
    """
    content = _read_object(file)
    if not stop_ids <= set(_named_ids(content)):
        content["eos_token_id"] = sorted(stop_ids)
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _named_ids(content: Mapping[str, Any]) -> list[Any]:
    value = content.get("eos_token_id")
    return [token for token in (value if isinstance(value, list) else [value]) if token is not None]


def _token_id(value: Any, file: Path) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise ModelError(f"{file}: eos_token_id is {value!r:.60}, which is no token's number.")
    return value


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    if file.stat().st_size > MAX_JSON_BYTES:
        raise ModelError(f"{file}: larger than any such file should be.")
    try:
        value = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not JSON: {error}.") from None
    return value if isinstance(value, dict) else {}
