"""Set the data sources and rewards of a recipe."""

from __future__ import annotations

import re
from typing import Any, get_args

from homeostat.config.data import MESSAGE_KEYS, AnySource
from homeostat.config.hub_names import is_hub_name
from homeostat.importing.algorithms import is_rl
from homeostat.importing.draft import Draft
from homeostat.importing.entries import Given, Status
from homeostat.importing.rows import column_of, row_type, set_form, share_columns

_ALPACA = "instruction and input become a user turn, without Alpaca's own words around them"
# Keys of a source that say which part of a dataset with a name is meant.
_OF_NAMES = ("split", "config", "revision")
_OF_MESSAGES = "columns.messages."
_INDEX = re.compile(r"\[(\d+)\]")
_COLUMNS = "check that the columns are named so"
# Graders of frameworks that compare a mathematical answer with the expected one.
_MATH = ("accuracy", "accuracy_reward", "math", "deepscaler", "dapo", "gsm8k", "math_verify")


def fields_of_source(name: str) -> set[str]:
    """Return the keys that a type of source has."""
    classes = get_args(get_args(AnySource)[0])
    return {
        key
        for one in classes
        if name in get_args(one.model_fields["type"].annotation)
        for key in one.model_fields
    }


def set_sources(draft: Draft) -> None:
    """Set data.train and data.validation, with the columns that the file names."""
    for part in ("train", "validation"):
        sources: list[dict[str, Any]] = []
        origins: list[str] = []
        for given in draft.all(f"data.{part}.path"):
            for name, path in _paths(draft, given):
                sources.append({"type": row_type(draft), **({"name": name} if name else {})})
                sources[-1]["path"] = path
                origins.append(given.name)
                _look_at(draft, f"data.{part}.{len(sources) - 1}.path", path)
            draft.note(given, f"data.{part}", [one["path"] for one in sources])
        if sources:
            draft.set(f"data.{part}", sources)
            _set_types(draft, part, sources, origins)
            _set_columns(draft, part, sources, origins)
    for part in ("train", "validation"):
        if sources := draft.get(f"data.{part}"):
            if part == "validation":
                share_columns(draft, sources)
            set_form(draft, part, sources)
    if not draft.get("data.train"):
        draft.set("data.train", [{"type": row_type(draft), "path": "data/train.jsonl"}])
        draft.need("data.train.0.path", "the file names no data that can be read: name yours")


def _paths(draft: Draft, given: Given) -> list[tuple[str, str]]:
    """Return pairs of name (or empty) and path: frameworks write one, several, or both."""
    value = given.value
    if draft.framework.name in ("slime", "miles") and isinstance(value, list):
        # --eval-prompt-data has a name before each path.
        return [(str(name), str(path)) for name, path in zip(value[::2], value[1::2], strict=False)]
    if isinstance(value, list):
        return [("", str(one)) for one in value]
    separates = draft.framework.name in ("llama_factory", "openrlhf")
    return [("", one.strip()) for one in (str(value).split(",") if separates else [str(value)])]


def _look_at(draft: Draft, place: str, path: str) -> None:
    if draft.framework.name == "llama_factory":
        draft.need(place, "a name in dataset_info.json: name the file, and check type and columns")
    elif "$" in path:
        draft.need(place, "insert the value of the variable")


def _set_types(draft: Draft, part: str, sources: list[dict[str, Any]], origins: list[str]) -> None:
    for given in draft.all(f"data.{part}.type"):
        source = _of(given, sources, origins)
        name = str(given.value).partition(".")[0]
        place, kind, how = f"data.{part}", source["type"], _COLUMNS
        if name.startswith("alpaca") and kind == "messages":
            source["type"] = kind = "prompt_completion"
            source["columns"] = {"prompt": ["instruction", "input"], "completion": "output"}
            how = _ALPACA
        elif name in ("completion", "pretrain") and kind == "messages":
            source["type"] = kind = "text"
            how = ""
        elif name == "sharegpt" and kind == "messages":
            source["columns"] = {"messages": "conversations"}
            source["columns"] |= {"messages.role": "from", "messages.content": "value"}
            how = ""
        elif name == "chat_template":
            how = ""
        draft.note(given, f"{place}.type", kind, how=how)


def _of(given: Given, sources: list[dict[str, Any]], origins: list[str]) -> dict[str, Any]:
    """Return the source to which a setting belongs, by its place in a list."""
    index = _INDEX.search(given.name)
    start = given.name[: index.end()] if index else ""
    for source, origin in zip(sources, origins, strict=True):
        if start and origin.startswith(start):
            return source
    return sources[0]


def _set_columns(
    draft: Draft, part: str, sources: list[dict[str, Any]], origins: list[str]
) -> None:
    start = f"data.{part}."
    for given in draft:
        key = next((one for one in draft.keys(given) if one.startswith(start)), "")
        name = key.removeprefix(start)
        if not name or name in ("path", "type"):
            continue
        chosen = sources if _INDEX.search(given.name) is None else [_of(given, sources, origins)]
        if name.startswith(_OF_MESSAGES):
            _set_messages(draft, given, name.removeprefix("columns."), chosen)
            continue
        if name == "turns":
            _set_turns(draft, given)
            continue
        if chosen[0]["type"] == "preference":
            # The messages before the two answers.
            name = "prompt_column" if name == "messages_column" else name
        name = column_of(name, chosen[0]["type"])
        fitting = [one for one in chosen if name in fields_of_source(one["type"])]
        if name in _OF_NAMES:
            fitting = [one for one in fitting if is_hub_name(one["path"])]
        for source in fitting:
            _set_key(source, name, given.value)
        if fitting:
            draft.note(given, f"{start}{name}", given.value)
        elif name in _OF_NAMES:
            why = "the recipe names the files themselves: name that of this part"
            draft.leave(given, Status.NOT_NEEDED, why)
        else:
            why = f"a source of type {chosen[0]['type']} has no such key"
            draft.leave(given, Status.NOT_NEEDED, why)


def _set_messages(draft: Draft, given: Given, name: str, sources: list[dict[str, Any]]) -> None:
    """Set a key of messages, or the words for a role; those that we use anyway need no mention."""
    words = given.value if isinstance(given.value, list) else [given.value]
    other = [str(word) for word in words if word != name.removeprefix("messages.")]
    for source in sources if other else ():
        one_or_more = other[0] if name in MESSAGE_KEYS else other
        source.setdefault("columns", {})[name] = one_or_more
    draft.note(given, f"data.train.columns.{name}", words)


def _set_turns(draft: Draft, given: Given) -> None:
    if [str(role).lower() for role in given.value] in (["assistant"], ["gpt"]):
        draft.leave(given, Status.NOT_NEEDED, "the assistant's turns are those that are trained")
        return
    why = "the assistant's turns are trained; a message of another role says so by train: true"
    draft.leave(given, Status.UNKNOWN, why)


def _set_key(source: dict[str, Any], name: str, value: Any) -> None:
    """Set a key of a source; a column that `columns` names already is renamed there."""
    ours = name.removesuffix("_column")
    if ours in source.get("columns", ()) and ours != name:
        source["columns"][ours] = value
    else:
        source[name] = value


def set_rewards(draft: Draft) -> None:
    """Set the reward functions (RL)."""
    named, models = draft.all("rewards.names"), draft.all("rewards.model")
    columns, weights = draft.all("rewards.column"), draft.all("rewards.weights")
    if not is_rl(draft):
        for given in (*named, *models, *columns, *weights):
            draft.leave(given, Status.NOT_NEEDED, "nothing is sampled, so nothing has a reward")
        return
    column = str(columns[0].value) if columns else "answer"
    functions: list[dict[str, Any]] = []
    for given in models:
        functions.append({"type": "reward_model", "path": str(given.value)})
        draft.note(given, "rewards.functions", str(given.value))
        place = f"rewards.functions.{len(functions) - 1}.path"
        if draft.framework.name == "llama_factory":
            draft.need(
                place, "an adapter by default (reward_model_type): merge it, name the result"
            )
        elif "$" in str(given.value):
            draft.need(place, "insert the value of the variable")
    for given in named:
        _name_functions(draft, given, functions, column=column)
    if not functions:
        functions = [{"type": "math_verify", "column": column}]
        why = "the file names no reward that can be read: choose one (docs/guide)"
        draft.need("rewards.functions.0.type", why)
    given_weights = weights[0].value if weights else None
    if isinstance(given_weights, list) and len(given_weights) == len(functions):
        for function, weight in zip(functions, given_weights, strict=True):
            function["weight"] = weight
        draft.note(weights[0], "rewards.functions", given_weights)
    for given in columns:
        draft.note(given, "rewards.functions.0.column", column)
    draft.set("rewards.functions", functions)


def _name_functions(
    draft: Draft, given: Given, functions: list[dict[str, Any]], *, column: str
) -> None:
    names = given.value if isinstance(given.value, list) else [given.value]
    how = ""
    for name in map(str, names):
        if name.lower() in _MATH:
            functions.append({"type": "math_verify", "column": column})
            how = "math_verify compares answers in its own manner"
            continue
        function = re.sub(r"\W", "_", name.rpartition("/")[2].removesuffix(".py")) or "reward"
        path = name if name.endswith(".py") else "rewards.py"
        functions.append({"type": "function", "path": f"{path}:{function}"})
        place = f"rewards.functions.{len(functions) - 1}.path"
        draft.need(place, "write or copy this function: f(completions, **columns) -> floats")
        how = how or "a function of yours, called as TRL does"
    draft.note(given, "rewards.functions", names, how=how)
