"""Choose the transformers class that loads a tokenizer, as AutoTokenizer would.

If that is known to be the plain class, AutoTokenizer is not used: it imports all models, torch's
compiler and more, which takes seconds at every start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from homeostat.errors import ModelError

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Families whose configured tokenizer class is used as it is.
_TRUSTED_FAMILIES = ("llama",)
# Suffixes of the files that transformers may read with a tokenizer.
_READ = (".json", ".jinja", ".txt", ".model")


def require_plain_files(folder: Path, *, setting: str) -> None:
    """Refuse a pipe or a device in the place of a file: reading it may never end."""
    for file in sorted(folder.iterdir()):
        if file.suffix in _READ and file.exists() and not (file.is_file() or file.is_dir()):
            raise ModelError(f"{setting}: {file} is not a plain file.")


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
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
