"""Check the messages and tools of a row, and bring them into the form that templates expect."""

from __future__ import annotations

from typing import Any

from homeostat.data.sources import BadRowError
from homeostat.json_text import parse_json

MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6
BAD_MESSAGE = "not a usable message"


def parse_messages(value: Any) -> list[tuple[dict[str, Any], float | None]]:
    """Return each message without our keys, and the weight that it gives itself."""
    if not isinstance(value, list) or not value:
        raise BadRowError("no messages", "the column must hold a list of {role, content}")
    return [_parse_message(number, item) for number, item in enumerate(value)]


def _parse_message(number: int, item: Any) -> tuple[dict[str, Any], float | None]:
    """Return the message without our keys, and the weight that it gives itself."""
    if not isinstance(item, dict):
        raise BadRowError(BAD_MESSAGE, f"message {number} is a {type(item).__name__}")
    message = {
        name: field
        for name, field in item.items()
        # Arrow adds missing keys as null, and to many templates a null key is present.
        if field is not None and name not in ("train", "weight")
    }
    role = message.get("role")
    if not isinstance(role, str) or not role:
        keys = ", ".join(map(str, list(item)[:6]))
        raise BadRowError(BAD_MESSAGE, f"message {number} has no role (its keys: {keys})")
    calls = message.get("tool_calls")
    if calls and not isinstance(calls, list):
        raise BadRowError(BAD_MESSAGE, f"message {number}: tool_calls must be a list")
    message["content"] = _text_content(number, message)
    weight = _own_weight(number, item)
    if weight and role != "assistant":
        raise BadRowError(
            BAD_MESSAGE,
            f"message {number} has train or weight, but its role is {role!r}: only messages of "
            "the assistant can be trained. Remove its train or weight",
        )
    return message, weight


def _text_content(number: int, message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    # A turn of only tool calls has no content in many data sets.
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    what = "has no content" if content is None else "has a content that is not text"
    raise BadRowError(BAD_MESSAGE, f"message {number} {what}")


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _own_weight(number: int, item: dict[str, Any]) -> float | None:
    train, weight = item.get("train"), item.get("weight")
    if train is not None and not isinstance(train, bool):
        raise BadRowError(BAD_MESSAGE, f"message {number}: train must be true or false")
    if weight is None:
        return None if train is None else float(train)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise BadRowError(BAD_MESSAGE, f"message {number}: weight must be a number")
    if not (weight == 0 or MIN_WEIGHT <= weight <= MAX_WEIGHT):
        limits = f"0, or from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        raise BadRowError(BAD_MESSAGE, f"message {number}: weight must be {limits}")
    if train is not None and train != (weight > 0):
        raise BadRowError(BAD_MESSAGE, f"message {number}: train and weight contradict each other")
    return float(weight)


def parse_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return a list of tool descriptions, given as a list or as JSON text."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise BadRowError("not a list of tools", f"its text is not JSON: {error}") from None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRowError("not a list of tools", "the column must hold a list of objects")
    return value


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with JSON texts of tool-call arguments parsed into objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_object(call["function"])}
    try:
        arguments = parse_json(call["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call
