"""Say what the rows of a source are, as each framework reads them: their type, columns and form."""

from __future__ import annotations

import copy
from typing import Any

from homeostat.importing.algorithms import is_rl
from homeostat.importing.draft import Draft
from homeostat.importing.entries import Given, Status
from homeostat.importing.recognise import fold

# The source that the rows of an algorithm have, where a file does not say which.
_OF_ALGORITHM = {
    "kto": "unpaired_preference",
    **dict.fromkeys(("dpo", "ipo", "orpo", "simpo", "reward_model"), "preference"),
}
# They read a text as it is, unless they are told to make a chat of it.
_BY_SWITCH = ("openrlhf", "slime", "miles")
_TEMPLATE = "apply_chat_template"
# verl's older trainer reads pairs, unless it is told to read chats; the newer one reads chats.
_PAIRS_OF_VERL = "fsdp_sft_trainer"
# What those settings name in a row of another type.
_COLUMN_OF_TYPE = {"messages": "messages_column", "text": "text_column"}


def row_type(draft: Draft) -> str:
    """Return the type of the sources of a file."""
    if is_rl(draft):
        return "prompts"
    if draft.value("algorithm.type") == "pt":
        return "text"
    kind = _OF_ALGORITHM.get(draft.get("algorithm.type"), "messages")
    if kind == "messages" and _has_pairs(draft):
        return "prompt_completion"
    if kind == "messages" and draft.framework.name == "openrlhf" and not _switch(draft, _TEMPLATE):
        return "text"
    return kind


def _has_pairs(draft: Draft) -> bool:
    if draft.framework.name != "verl":
        return draft.has("data.train.completion_column")
    is_chat = draft.value("rollout.multi_turn") is True or draft.has("data.train.messages_column")
    return not is_chat and (
        draft.has("data.train.completion_column") or _PAIRS_OF_VERL in draft.file.text
    )


def _switch(draft: Draft, name: str) -> Given | None:
    """Return the setting of a switch that is on, by the last word of its name."""
    for given in draft.file.settings:
        if fold(given.name).rpartition(".")[2] == name and given.value is True:
            return given
    return None


def column_of(name: str, kind: str) -> str:
    """Return the key for the one column that a framework names, in a source of this type."""
    return _COLUMN_OF_TYPE.get(kind, name) if name == "prompt_column" else name


def share_columns(draft: Draft, sources: list[dict[str, Any]]) -> None:
    """Give held-out rows the columns of the training rows, where a file names them for both."""
    trained = draft.get("data.train")
    if not trained or draft.framework.name == "axolotl":
        return
    for source in sources:
        for name, value in trained[0].items():
            if name.endswith(("_column", "columns")) and trained[0]["type"] == source["type"]:
                source.setdefault(name, copy.copy(value))


def set_form(draft: Draft, part: str, sources: list[dict[str, Any]]) -> None:
    """Set what a framework does with rows by default: their columns, and whether they are chats."""
    for given in draft:
        name = fold(given.name)
        if draft.framework.name == "verl" and name.endswith("_dict_keys"):
            column = f"data.{part}.0.{'prompt' if 'prompt' in name else 'completion'}_column"
            draft.need(
                column, f"make {given.value} of this column a column of its own, and name it"
            )
            draft.leave(given, Status.UNKNOWN, "columns have no names inside a column")
    for index, source in enumerate(sources):
        for name, value in _defaults(draft, source["type"]).items():
            if name not in source:
                source[name] = value
                why = f"the default of {draft.framework.title}"
                draft.comments[f"data.{part}.{index}.{name}"] = why
    if draft.framework.name not in _BY_SWITCH:
        return
    for given in draft.left:
        name = fold(given.name).rpartition(".")[2]
        if name == _TEMPLATE and given.value is True:
            draft.note(given, f"data.{part}", "rows become chats")
        elif name == "input_template" and given.value:
            why = "write its words into the column, or use the chat template (chat: true)"
            draft.leave(given, Status.UNKNOWN, why)


def _defaults(draft: Draft, kind: str) -> dict[str, Any]:
    framework, found = draft.framework.name, dict[str, Any]()
    if framework == "verl" and kind == "prompt_completion":
        return {"prompt_column": "question", "completion_column": "answer"}
    if framework not in _BY_SWITCH:
        return found
    if kind in ("messages", "text", "prompts", "prompt_completion"):
        found[column_of("prompt_column", kind)] = "input"
    if kind == "messages" and _switch(draft, "multiturn") is None:
        found["turns"] = "last"
    elif kind not in ("messages", "text") and _switch(draft, _TEMPLATE) is None:
        found["chat"] = False
    return found
