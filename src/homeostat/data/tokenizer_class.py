"""Check a tokenizer's files and choose the transformers class that loads them.

The class is the one that AutoTokenizer would choose.

If that is known to be the plain class, AutoTokenizer is not used: it imports all models, torch's
compiler and more, which takes seconds at every start.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from homeostat.errors import ModelError
from homeostat.json_text import parse_json
from homeostat.ops.gguf_reader import fast_reading

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Families whose configured tokenizer class is used as it is.
_TRUSTED_FAMILIES = ("llama",)
# Suffixes of the files that transformers may read with a tokenizer.
_READ = (".json", ".jinja", ".txt", ".model")
# The files of a tokenizer that hold a JSON object, in the order in which they are asked about.
_JSON_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
    "config.json",
)


def require_plain_files(folder: Path, *, setting: str) -> None:
    """Refuse a pipe or a device in the place of a file: reading it may never end."""
    for file in sorted(folder.iterdir()):
        if file.suffix in _READ and file.exists() and not (file.is_file() or file.is_dir()):
            raise ModelError(f"{setting}: {file} is not a plain file.")


def require_tokenizer_file(folder: Path, *, setting: str) -> None:
    """Raise if the folder has no tokenizer file: transformers would report a misleading reason."""
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
    )
    if not any((folder / name).is_file() for name in names):
        raise ModelError(
            f"{setting}: {folder} has no tokenizer.json. Name the folder of a whole HF "
            "checkpoint, or set model.tokenizer to the folder of its tokenizer."
        )


def find_broken_json(path: Path) -> str:
    """Say which JSON file of a tokenizer's folder cannot be read, and why; empty if all can."""
    for name in _JSON_FILES:
        file = path / name
        if file.is_file():
            try:
                found = parse_json(file.read_bytes())
            except (OSError, ValueError) as error:
                return f"{file} is not valid JSON: {error}"
            if not isinstance(found, dict):
                return f"{file} must hold a JSON object"
    return ""


def template_place(path: Path) -> str:
    """The file that holds the chat template of a tokenizer, for errors about it."""
    if path.is_file():
        return f"{path} (tokenizer.chat_template)"
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    return str(next((path / name for name in names if (path / name).is_file()), path))


def tokenizer_from(folder: Path, options: Mapping[str, Any]) -> Any:
    """Load a tokenizer from its folder with transformers, by `options` of its from_pretrained."""
    is_gguf = "gguf_file" in options
    with fast_reading() if is_gguf else nullcontext():
        return tokenizer_class(folder, is_gguf=is_gguf).from_pretrained(str(folder), **options)


def tokenizer_class(folder: Path, *, is_gguf: bool) -> Any:
    """Return the class that loads the tokenizer in this folder."""
    if not is_gguf and _is_plain(folder):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _is_plain(folder: Path) -> bool:
    """Return whether the config explicitly names the plain class and brings no custom code."""
    tokenizer, model = (_read(folder / name) for name in ("tokenizer_config.json", "config.json"))
    return (
        tokenizer.get("tokenizer_class") in _PLAIN_CLASSES
        and model.get("model_type") in _TRUSTED_FAMILIES
        and "auto_map" not in tokenizer
    )


def _read(file: Path) -> dict[str, Any]:
    """Read a JSON file; empty if it is missing or broken, which transformers will report."""
    try:
        found = parse_json(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
