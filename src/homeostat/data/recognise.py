"""Recognise the kind of rows by their columns, so that a source needs no `type`.

    messages: [{role, content}], tools               OpenAI's messages, with or without tools
    conversations: [{from, value}]                   ShareGPT
    prompt, completion                               TRL's prompt-completion; texts or messages
    instruction, input, output                       Alpaca
    question, answer and other pairs of columns      question and answer
    text                                             plain text
    chosen, rejected, with or without prompt         TRL's preferences; texts or messages
    prompt, completion, label                        TRL's unpaired preferences
    prompt, completion, score                        scored completions
    prompt, question, problem ...                    prompts (RL)

The kind of the run decides between them: a preference run asks for pairs, RL for prompts. What is
recognised becomes a source with `type` and `columns`, exactly as a recipe could have said it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from homeostat.config.kind import RunKind

# Columns with a conversation, and with a question, in order of preference.
CHATS = ("messages", "conversations", "conversation", "chat", "dialogue", "dialog")
QUESTIONS = ("prompt", "question", "problem", "query", "instruction", "input")
# Columns that belong to the question, if a row has an instruction.
CONTEXTS = ("input", "context")
# Pairs of a question and its answer.
PAIRS = (
    ("Alpaca", "instruction", "output"),
    ("Alpaca", "instruction", "response"),
    ("question and answer", "question", "answer"),
    ("question and answer", "question", "response"),
    ("question and answer", "problem", "solution"),
    ("question and answer", "query", "response"),
    ("question and answer", "prompt", "response"),
    ("question and answer", "input", "output"),
)
_KEYS = {"role": "content", "from": "value"}

Columns = dict[str, str | tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Recognised:
    """The type of a source and the columns that it reads under other names; `title` for people."""

    title: str
    type: str
    columns: Columns = field(default_factory=dict)
    # The column with the tools of a chat.
    tools: str | None = None

    def describe(self) -> str:
        """Return one line that says what was recognised, as a recipe would write it."""
        shown = {name: list(v) if isinstance(v, tuple) else v for name, v in self.columns.items()}
        pairs = ", ".join(f"{name}: {_listed(value)}" for name, value in shown.items())
        tools = "" if self.tools is None else f", tools_column: {self.tools}"
        mapped = f", columns: {{{pairs}}}" if pairs else ""
        return f"{self.title} -> type: {self.type}{mapped}{tools}"

    def settings(self) -> dict[str, str]:
        """Return the settings of the source besides its type and columns."""
        return {} if self.tools is None else {"tools_column": self.tools}


def _listed(value: str | list[str]) -> str:
    return value if isinstance(value, str) else f"[{', '.join(value)}]"


def recognise(row: Mapping[str, Any], *, kind: RunKind, is_text: bool = False) -> Recognised | None:
    """Return what a row is; None if its columns are not known for this kind of run.

    `is_text` means that the run continues raw text (ebft.mode=strided).
    """
    if is_text:
        return _text(row)
    if kind is RunKind.RL:
        return _prompts(row)
    if kind is RunKind.SFT:
        return _chat(row) or _pair(row) or _text(row)
    return _preference(row) or _labelled(row)


def _chat(row: Mapping[str, Any]) -> Recognised | None:
    for name in CHATS:
        keys = message_keys(row.get(name))
        if keys is None:
            continue
        columns: Columns = {} if name == "messages" else {"messages": name}
        tools = "tools" if isinstance(row.get("tools"), list | str) else None
        if keys == ("role", "content"):
            return Recognised("OpenAI messages", "messages", columns, tools)
        columns |= {"messages.role": keys[0], "messages.content": keys[1]}
        return Recognised("ShareGPT", "messages", columns, tools)
    return None


def message_keys(value: Any) -> tuple[str, str] | None:
    """Return which keys of a list of messages hold role and content; None if it is no such list."""
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return None
    return next(((role, text) for role, text in _KEYS.items() if role in value[0]), None)


def _pair(row: Mapping[str, Any]) -> Recognised | None:
    if _has(row, "prompt", "completion"):
        chats = message_keys(row["prompt"]) or message_keys(row["completion"])
        title = "TRL prompt-completion" + (" (conversational)" if chats else "")
        return Recognised(title, "prompt_completion", _role_keys(row, "prompt", "completion"))
    for title, question, answer in PAIRS:
        if _has(row, question, answer):
            columns: Columns = {"prompt": _whole(row, question), "completion": answer}
            columns = {ours: name for ours, name in columns.items() if ours != name}
            return Recognised(title, "prompt_completion", columns)
    return None


def _whole(row: Mapping[str, Any], question: str) -> str | tuple[str, ...]:
    """Return the column of a question, with the one that an instruction is about."""
    more = next((name for name in CONTEXTS if name in row), None)
    is_alpaca = question == "instruction" and more is not None and _is_text(row[more])
    return (question, str(more)) if is_alpaca else question


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _text(row: Mapping[str, Any]) -> Recognised | None:
    return Recognised("plain text", "text") if isinstance(row.get("text"), str) else None


def _preference(row: Mapping[str, Any]) -> Recognised | None:
    if not _has(row, "chosen", "rejected"):
        return None
    asked = next((name for name in QUESTIONS if row.get(name) is not None), None)
    columns = _role_keys(row, "chosen", "rejected")
    if asked is not None and asked != "prompt":
        columns = {"prompt": _whole(row, asked), **columns}
    what = "TRL preferences" + (" (conversational)" if message_keys(row["chosen"]) else "")
    return Recognised(what if asked else f"{what}, prompt in both", "preference", columns)


def _labelled(row: Mapping[str, Any]) -> Recognised | None:
    if not _has(row, "prompt", "completion"):
        return None
    columns = _role_keys(row, "prompt", "completion")
    if "label" in row:
        return Recognised("TRL unpaired preferences", "unpaired_preference", columns)
    return Recognised("scored completions", "scored", columns) if "score" in row else None


def _prompts(row: Mapping[str, Any]) -> Recognised | None:
    for name in QUESTIONS:
        value = row.get(name)
        if isinstance(value, str) or message_keys(value) is not None:
            columns: Columns = {} if name == "prompt" else {"prompt": _whole(row, name)}
            return Recognised("prompts", "prompts", columns | _role_keys(row, name))
    return None


def _role_keys(row: Mapping[str, Any], *names: str) -> Columns:
    """Return the mapping of message keys, if one of the columns has messages with other keys."""
    for name in names:
        keys = message_keys(row.get(name))
        if keys is not None and keys != ("role", "content"):
            return {"messages.role": keys[0], "messages.content": keys[1]}
    return {}


def _has(row: Mapping[str, Any], *names: str) -> bool:
    return all(row.get(name) is not None for name in names)


def known_forms(kind: RunKind) -> Sequence[str]:
    """Return the columns that are recognised for a kind of run, for an error."""
    if kind is RunKind.RL:
        return QUESTIONS
    if kind is RunKind.SFT:
        return ("messages", "conversations", "prompt + completion", "instruction + output", "text")
    return ("chosen + rejected", "prompt + completion + label", "prompt + completion + score")
