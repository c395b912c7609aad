"""Read the settings of a file: YAML, a shell script, or a Python script. Nothing is executed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from homeostat.config.loading.yaml_file import MAX_FILE_BYTES, parse_yaml
from homeostat.errors import ConfigError, Problem
from homeostat.importing.entries import ForeignFile, Given
from homeostat.importing.python_script import read_python
from homeostat.importing.shell import read_shell

_YAML = (".yaml", ".yml", ".json")


def read_foreign(path: Path) -> ForeignFile:
    """Return the settings of a file. Raises ConfigError if it cannot be read."""
    text = _text(path)
    if path.suffix == ".py":
        return read_python(text, name=str(path))
    if path.suffix in _YAML:
        return _read_yaml(text, name=str(path))
    return read_shell(text)


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            raise ConfigError([Problem("", "there is no such file.")], file=str(path))
        if path.stat().st_size > MAX_FILE_BYTES:
            why = f"it has more than {MAX_FILE_BYTES} bytes, which no config has."
            raise ConfigError([Problem("", why)], file=str(path))
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError([Problem("", f"cannot read it: {reason}.")], file=str(path)) from None


def _read_yaml(text: str, *, name: str) -> ForeignFile:
    raw, _ = parse_yaml(text, name=name, old_words=True)
    if not isinstance(raw, dict):
        raise ConfigError([Problem("", "it is no mapping of settings.")], file=name)
    return ForeignFile(text, tuple(flatten(raw)))


def flatten(raw: Any, prefix: str = "") -> Iterator[Given]:
    """Yield settings under dotted names; items of a list of mappings as `name[0].key`."""
    if isinstance(raw, dict) and raw:
        for key, value in raw.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(raw, list) and raw and all(isinstance(one, dict) for one in raw):
        for index, value in enumerate(raw):
            yield from flatten(value, f"{prefix}[{index}]")
    else:
        yield Given(prefix, raw)
