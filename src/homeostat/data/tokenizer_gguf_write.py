"""Write a tokenizer into the metadata of a GGUF file.

A GGUF file stores the tokens, their kinds and the merges, and names the rule that splits a text
before merges are applied (`tokenizer.ggml.pre`). llama.cpp knows these rules by name only, so a
tokenizer whose rule has no name there cannot be written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import ModelError

# Kinds of tokens in a GGUF file.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The expression that splits a text -> its name in llama.cpp.
_SPLITS = {
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}": "qwen2",
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
}


def add_tokenizer(writer: Any, tokenizer: ChatTokenizer, *, vocab_size: int) -> None:
    """Give the tokenizer's metadata to a GGUFWriter. `vocab_size` is the rows of the embedding."""
    description = tokenizer.description()
    model, added = description["model"], description["added_tokens"]
    if tokenizer.vocab_size > vocab_size:
        raise ModelError(
            f"--format gguf: the tokenizer has {tokenizer.vocab_size} tokens, and the model's "
            f"embedding {vocab_size} rows."
        )
    require_writable_tokenizer(tokenizer)
    if model["byte_fallback"]:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        # Only the order of the scores matters: tokens are ordered like the merges.
        writer.add_token_scores([-float(number) for number in range(vocab_size)])
        writer.add_add_space_prefix(_adds_space(description))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split_name(description))
        writer.add_token_merges([" ".join(_pair(merge)) for merge in model["merges"]])
    tokens, kinds = _tokens(model, added, vocab_size)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    _add_special(writer, tokenizer, tokens)


def require_writable_tokenizer(tokenizer: ChatTokenizer) -> None:
    """Raise unless the tokenizer can be written as GGUF."""
    description = tokenizer.description()
    model = description["model"]
    if model["type"] != "BPE":
        raise ModelError(
            f"--format gguf: the tokenizer is a {model['type']} model, and GGUF export supports "
            "only BPE tokenizers. Export it with --format hf."
        )
    if model["byte_fallback"]:
        _require_order(model)
    elif split_name(description) is None:
        raise ModelError(
            "--format gguf: llama.cpp has no name for the rule by which this tokenizer splits a "
            "text before it merges characters. Known: those of GPT-2, Llama 3, Qwen2 and SmolLM. "
            "Export it with --format hf."
        )


def split_name(description: dict[str, Any]) -> str | None:
    """Return llama.cpp's name of the rule that splits a text; None if it has none."""
    parts = list(_parts(description["pre_tokenizer"]))
    expressions = [part["pattern"]["Regex"] for part in parts if part["type"] == "Split"]
    types = [part["type"] for part in parts]
    if types == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        return _SPLITS.get(expressions[0])
    by_regex = parts and parts[-1]["type"] == "ByteLevel" and parts[-1].get("use_regex", True)
    if not by_regex or parts[-1].get("add_prefix_space"):
        return None
    if types == ["Digits", "ByteLevel"] and parts[0]["individual_digits"]:
        return "smollm"
    return "gpt-2" if types == ["ByteLevel"] else None


def _parts(pre_tokenizer: Any) -> Iterator[dict[str, Any]]:
    if isinstance(pre_tokenizer, dict) and pre_tokenizer["type"] == "Sequence":
        yield from pre_tokenizer["pretokenizers"]
    elif isinstance(pre_tokenizer, dict):
        yield pre_tokenizer


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _require_order(model: dict[str, Any]) -> None:
    """Refuse merges in another order than the tokens: a GGUF file stores only the latter."""
    made = [model["vocab"]["".join(_pair(merge))] for merge in model["merges"]]
    if made != sorted(made):
        raise ModelError(
            "--format gguf: this tokenizer merges in an order that differs from the order of its "
            "tokens, which a GGUF file cannot express. Export it with --format hf."
        )


def _adds_space(description: dict[str, Any]) -> bool:
    """Return whether a text is opened with a space, by the normaliser or the splitting rule."""
    text = json.dumps([description["normalizer"], description["pre_tokenizer"]])
    signs = ('"Prepend"', '"prepend_scheme": "first"', '"prepend_scheme": "always"')
    return any(sign in text for sign in signs)


def _tokens(
    model: dict[str, Any], added: list[dict[str, Any]], vocab_size: int
) -> tuple[list[str], list[int]]:
    """Return the text and kind of every row of the embedding."""
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    kinds = [_UNUSED] * vocab_size
    for token, number in model["vocab"].items():
        is_byte = model["byte_fallback"] and _BYTE_TOKEN.fullmatch(token)
        tokens[number] = token
        kinds[number] = _BYTE if is_byte else _NORMAL
        if model["byte_fallback"] and token == model["unk_token"]:
            kinds[number] = _UNKNOWN
    for token in added:
        number = token["id"]
        tokens[number] = token["content"]
        if kinds[number] != _UNKNOWN:
            kinds[number] = _CONTROL if token["special"] else _USER_DEFINED
    return tokens, kinds


def _add_special(writer: Any, tokenizer: ChatTokenizer, tokens: list[str]) -> None:
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_pad_token_id(tokenizer.pad_id)
    end = tokenizer.special.turn_end
    if end is not None and end.token is not None and end.token != tokenizer.eos_id:
        writer.add_eot_token_id(end.token)
    # A template may write the opening token although plain texts do not begin with it.
    named = tokenizer.special.words.get("bos_token")
    opening = tokenizer.prefix_ids or [number for number, t in enumerate(tokens) if t == named]
    writer.add_add_bos_token(bool(tokenizer.prefix_ids))
    if opening:
        writer.add_bos_token_id(opening[0])
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
