"""The files of signatures: the TOML that people edit, and what is compiled from it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
COMPILED = "compiled.json"
# The parser's own code counts as an input: compiled.json must not outlive a change of it.
PARSER = Path(__file__).with_name("source.py")

# A stanza in plain data.
Row = dict[str, Any]


def toml_texts(folder: Path = FOLDER) -> dict[str, bytes]:
    """Read every TOML file of a folder: file name -> content."""
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.toml"))}


def checksums(texts: Mapping[str, bytes]) -> dict[str, int]:
    """Return a checksum for each file that compiled.json is made from, by its name."""
    return {name: zlib.crc32(text) for name, text in _with_parser(texts).items()}


def _with_parser(texts: Mapping[str, bytes]) -> dict[str, bytes]:
    return {**texts, PARSER.name: PARSER.read_bytes()}
