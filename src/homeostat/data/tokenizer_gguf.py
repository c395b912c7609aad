"""The special tokens that a GGUF file names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from homeostat.errors import MissingDependencyError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Our name -> the name in GGUF's metadata.
GGUF_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}


def take_gguf_special_tokens(original: PreTrainedTokenizerFast, file: Path) -> None:
    """Use the special tokens of the file: some releases of transformers fill in others."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    for name, field in GGUF_SPECIAL_TOKENS.items():
        found = reader.get_field(f"tokenizer.ggml.{field}_token_id")
        if found is not None:
            number = found.contents()
            if type(number) is not int or not 0 <= number < len(original):
                raise ModelError(f"{file}: the {name} token is {number!r:.60}: no token's number.")
            setattr(original, f"{name}_token", original.convert_ids_to_tokens(number))


def require_gguf(setting: str) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        needed_for = f"{setting}: a .gguf file"
        raise MissingDependencyError.of("gguf", extra="gguf", needed_for=needed_for) from None
