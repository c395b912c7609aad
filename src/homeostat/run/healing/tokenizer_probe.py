"""Compare the tokenizer that a recipe names with the one in the model's folder.

Pretrained weights know each token by its id. Two tokenizers fit the same weights only if the tokens
that both of them know have the same ids; additional tokens after these do no harm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from homeostat.config.model import ModelConfig
from homeostat.json_text import parse_json

FILE = "tokenizer.json"
MAX_EXAMPLES = 3


def compare_tokenizers(model: ModelConfig) -> dict[str, Any] | None:
    """Return how many tokens both tokenizers know, how many of these differ in id, and examples.

    None if there are no two tokenizers to compare, or if the weights are random and fit any ids.
    """
    if model.tokenizer is None or model.init == "random":
        return None
    own = _token_ids(Path(model.path) / FILE)
    named = _token_ids(Path(model.tokenizer) / FILE)
    if not own or not named:
        return None
    shared = own.keys() & named.keys()
    moved = sorted(
        (token for token in shared if own[token] != named[token]), key=lambda one: own[one]
    )
    return {
        "shared": len(shared),
        "moved": len(moved),
        "known": min(len(own), len(named)),
        "examples": [f"{one!r}: {own[one]}, {named[one]}" for one in moved[:MAX_EXAMPLES]],
    }


def _token_ids(file: Path) -> dict[str, int]:
    """Return the id of each token; empty if the file is missing or has another form."""
    # No error here: loading the tokenizer for use reports what is wrong with the file.
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):
            # Unigram models list tokens with their scores, in the order of their ids.
            vocab = {token: number for number, (token, _) in enumerate(vocab)}
        added = {one["content"]: one["id"] for one in content.get("added_tokens") or ()}
        return {**vocab, **added}
    except (OSError, ValueError, LookupError, TypeError):
        return {}
