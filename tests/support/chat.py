"""Tokenizers with any chat template and its special tokens, and what is trained of a chat."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from homeostat.config.data import MessagesSource
from homeostat.config.model import ModelConfig
from homeostat.data.rows import Encoded, encode_row
from homeostat.data.tokenizer import ChatTokenizer, load_tokenizer

TINY = Path(__file__).parents[2] / "recipes" / "assets" / "tiny-chat"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Style:
    """A template, its special tokens, and how it shows an assistant turn."""

    template: str
    specials: tuple[str, ...]
    eos: str
    end: str
    stops: tuple[str, ...] = ()
    trims: bool = False
    lead: str = ""
    bos: str | None = None


def make_tokenizer(folder: Path, style: Style, **settings: Any) -> ChatTokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    backend = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(word, normalized=False) for word in style.specials])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": style.eos}
    if style.bos is not None:
        config["bos_token"] = style.bos
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    stops = [backend.token_to_id(word) for word in style.stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    (folder / "chat.jinja").write_text(style.template)
    template = str(folder / "chat.jinja")
    return load_tokenizer(ModelConfig(path=str(folder), chat_template=template, **settings))


def chat(*turns: tuple[str, str], **last: object) -> dict[str, object]:
    messages: list[dict[str, object]] = [{"role": role, "content": text} for role, text in turns]
    messages[-1].update(last)
    return {"messages": messages}


def encode(
    row: dict[str, object], tokenizer: ChatTokenizer, turns: str = "all", **settings: Any
) -> Encoded:
    source = MessagesSource(type="messages", path="x", turns=turns, **settings)  # type: ignore[arg-type]
    (encoded,) = encode_row(row, source=source, tokenizer=tokenizer)
    return encoded


def trained_text(encoded: Encoded, tokenizer: ChatTokenizer) -> str:
    return tokenizer.decode(encoded[0][encoded[1] > 0])
