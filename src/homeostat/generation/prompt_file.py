"""Prompts from a file: JSON lines with `prompt` or `messages`, or one text per line.

Bad lines are refused with their number before anything is generated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homeostat.arrays import IntArray
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import DataError
from homeostat.generation.prompting import chat_tokens, prompt_tokens
from homeostat.json_text import parse_json

_JSON_LINES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """A prompt, as its file has it and as tokens."""

    shown: Any
    tokens_T: IntArray


def read_prompts(
    file: Path, tokenizer: ChatTokenizer, *, as_chat: bool, system: str | None
) -> list[FilePrompt]:
    """Return all prompts of a file, in order. Raises DataError with the first line at fault."""
    if not file.is_file():
        raise DataError(f"{file.absolute()} does not exist or is not a file.")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}.") from None
    is_json = file.suffix.lower() in _JSON_LINES
    prompts: list[FilePrompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = _parsed(line) if is_json else line
            prompts.append(_prompt(value, tokenizer, as_chat=as_chat, system=system))
        except DataError as error:
            raise DataError(f"{file}:{number}: {error}") from None
    if not prompts:
        raise DataError(f"{file} has no prompts.")
    return prompts


def _parsed(line: str) -> Any:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"not JSON: {error}.") from None
    if not isinstance(row, dict) or not ({"prompt", "messages"} & row.keys()):
        raise DataError("a line is an object with `prompt` or `messages`.")
    return row["messages"] if "messages" in row else row["prompt"]


def _prompt(
    value: Any, tokenizer: ChatTokenizer, *, as_chat: bool, system: str | None
) -> FilePrompt:
    if isinstance(value, str):
        tokens_T = prompt_tokens(value, tokenizer, as_chat=as_chat, system=system)
        return FilePrompt(value, tokens_T)
    if not as_chat:
        raise DataError("messages need a chat template; --raw is for plain texts.")
    if system is not None:
        raise DataError("--system and messages exclude each other: messages have their own.")
    return FilePrompt(value, chat_tokens(value, tokenizer))
