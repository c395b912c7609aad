"""The special tokens that a GGUF file names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from homeostat.errors import MissingDependencyError, ModelError
from homeostat.ops.gguf_reader import open_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The name in GGUF's metadata -> our name; None where transformers' choice is kept.
GGUF_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": None}


def read_gguf_special_tokens(file: Path, *, setting: str) -> dict[str, int]:
    """Read the special tokens of the file.

    Some releases of transformers fill in others, and end in an IndexError over an id that is no
    token's.
    """
    reader = open_gguf(file)
    tokens = reader.get_field("tokenizer.ggml.tokens")
    if tokens is None:
        raise ModelError(
            f"{setting}: {file} has no tokenizer (tokenizer.ggml.tokens). Set model.tokenizer to "
            "the folder of the model's tokenizer."
        )
    found = {}
    for field, name in GGUF_SPECIAL_TOKENS.items():
        key = f"tokenizer.ggml.{field}_token_id"
        value = reader.get_field(key)
        if value is not None:
            number = value.contents()
            if type(number) is not int or not 0 <= number < len(tokens.data):
                raise ModelError(
                    f"{setting}: {file}: {key} is {number!r:.60}, which is not the id of a token "
                    f"(tokenizer.ggml.tokens holds {len(tokens.data)})."
                )
            if name is not None:
                found[name] = number
    return found


def take_gguf_special_tokens(original: PreTrainedTokenizerFast, special: dict[str, int]) -> None:
    for name, number in special.items():
        setattr(original, f"{name}_token", original.convert_ids_to_tokens(number))


def require_gguf(setting: str) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        needed_for = f"{setting}: a .gguf file"
        raise MissingDependencyError.of("gguf", extra="gguf", needed_for=needed_for) from None
