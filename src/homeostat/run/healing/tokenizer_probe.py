"""Does the tokenizer that a recipe names belong to the model? Told by the model's own tokenizer.

Pretrained weights know a piece of text by its number. Two tokenizers fit the same weights only
where the pieces that both know have the same numbers; new pieces behind them are no harm.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from homeostat.config.model import ModelConfig

FILE = "tokenizer.json"
MAX_EXAMPLES = 3


def compare_tokenizers(model: ModelConfig) -> dict[str, Any] | None:
    """How many pieces both tokenizers know, how many of them have another number, and examples.
    None where there are no two to compare, or the weights never learned any numbers."""
    if model.tokenizer is None or model.init == "random":
        return None
    own = _pieces(Path(model.path) / FILE)
    named = _pieces(Path(model.tokenizer) / FILE)
    if not own or not named:
        return None
    shared = own.keys() & named.keys()
    moved = sorted(
        (piece for piece in shared if own[piece] != named[piece]), key=lambda one: own[one]
    )
    return {
        "shared": len(shared),
        "moved": len(moved),
        "known": min(len(own), len(named)),
        "examples": [f"{one!r}: {own[one]}, {named[one]}" for one in moved[:MAX_EXAMPLES]],
    }


def _pieces(file: Path) -> dict[str, int]:
    """Piece -> number; empty where the file is not there or not of the usual form: whoever loads
    it for use says what is wrong with it."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):
            # Unigram: pieces with their scores, in the order of their numbers.
            vocab = {piece: number for number, (piece, _) in enumerate(vocab)}
        added = {one["content"]: one["id"] for one in content.get("added_tokens") or ()}
        return {**vocab, **added}
    except (OSError, ValueError, LookupError, TypeError):
        return {}
