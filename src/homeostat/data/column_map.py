"""Rename the columns of rows to those that a source reads (`columns` of a source).

    {prompt: question}                  a column under another name
    {prompt: [instruction, input]}      several columns, joined by a blank line, without empty ones
    {messages: conversations,           messages whose keys have other names, as in ShareGPT's
     messages.role: from,               form; the roles become user, assistant, system and tool
     messages.content: value}
    {messages.assistant: [agent, bot]}  words of the file for a role, beside those known already

Columns that are not named keep their names, so rewards still receive them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from homeostat.config.data import MESSAGE_KEYS, ROLE_NAMES
from homeostat.data.sources import BadRowError, RowSource

ROLE, CONTENT = MESSAGE_KEYS
_INSIDE_MESSAGES = frozenset((*MESSAGE_KEYS, *ROLE_NAMES))
ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}

Columns = Mapping[str, str | Sequence[str]]


def theirs(names: Sequence[str], mapping: Columns) -> list[str]:
    """Return the columns of the file that stand for our names, each once."""
    found: dict[str, None] = {}
    for name in names:
        if name not in _INSIDE_MESSAGES:
            found.update(dict.fromkeys(_named(name, mapping)))
    return list(found)


def _named(name: str, mapping: Columns) -> Sequence[str]:
    value = mapping.get(name, name)
    return (value,) if isinstance(value, str) else value


class MappedRows:
    """Rows with other names for their columns."""

    def __init__(self, rows: RowSource, mapping: Columns) -> None:
        self.rows, self.brackets = rows, rows.brackets
        self._ours = {
            name: _named(name, mapping) for name in mapping if name not in _INSIDE_MESSAGES
        }
        self._keys = (mapping.get(ROLE), mapping.get(CONTENT))
        self._roles = _roles(mapping)

    def __len__(self) -> int:
        return len(self.rows)

    def number(self, index: int) -> int:
        return self.rows.number(index)

    def row(self, index: int) -> dict[str, Any]:
        return self.renamed(self.rows.row(index))

    def renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row under our names. Raises BadRowError."""
        used = {name for names in self._ours.values() for name in names}
        found = {name: value for name, value in row.items() if name not in used}
        for ours, names in self._ours.items():
            if len(names) > 1:
                found[ours] = _joined(row, names)
            elif names[0] in row:
                found[ours] = row[names[0]]
        if self._roles is None and self._keys == (None, None):
            return found
        return {name: self._messages(value) for name, value in found.items()}

    def _messages(self, value: Any) -> Any:
        """Return messages with role and content; any other value as it is."""
        if isinstance(value, dict) and self._keys[0] in value:
            return self._message(value)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            return value
        return [self._message(item) for item in value]

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        role, content = self._keys
        made = {name: held for name, held in message.items() if name not in (role, content)}
        for ours, name in (("role", role), ("content", content)):
            if name in message:
                made[ours] = message[str(name)]
        given = made.get("role")
        if isinstance(given, str) and self._roles is not None:
            if given.lower() not in self._roles:
                known = ", ".join(sorted(self._roles))
                raise BadRowError(
                    "unknown role",
                    f"{given!r:.60} is not a known name of a role ({known}). Add it to columns, "
                    f"for example {{messages.user: [{given:.60}]}}",
                )
            made["role"] = self._roles[given.lower()]
        return made


def _roles(mapping: Columns) -> dict[str, str] | None:
    """Return the role of each word for one; None where messages have the usual words already."""
    own = [name for name in ROLE_NAMES if name in mapping]
    if not own and mapping.get(ROLE) is None:
        return None
    words = {word.lower(): name for name in own for word in _named(name, mapping)}
    return ROLES | {word: name.removeprefix("messages.") for word, name in words.items()}


def _joined(row: dict[str, Any], names: Sequence[str]) -> str | None:
    """Return the texts of several columns as one; null if the first one is missing or null."""
    values = [row.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if value is not None and not isinstance(value, str):
            kind = type(value).__name__
            raise BadRowError("wrong type", f"column {name!r} holds a {kind}; texts can be joined")
    if values[0] is None:
        return None
    return "\n\n".join(value for value in values if value)
