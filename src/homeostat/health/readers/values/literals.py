"""Parse Python and JSON literals as logs print them, without evaluating anything.

    {'loss': 0.5, 'reward': np.float64(0.1)}      {"loss": NaN}
    Namespace(lr=1e-06, name='run')               GRPOConfig(beta=0.0, ...)
    <IntervalStrategy.STEPS: 'steps'>

A call with keywords becomes a mapping of them; a call with one number becomes that number. Depth
and length are limited, so the time is proportional to the text's length, whatever the text is.
"""

from __future__ import annotations

import re
from typing import Any

from homeostat.health.readers.values.numbers import number
from homeostat.json_text import parse_json

MAX_CHARS = 1_000_000
_MAX_DEPTH = 24
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_WHOLE = re.compile(r"[-+]?[0-9]+")
_WORD = re.compile(r"[^\s,:={}\[\]()'\"<>][^,={}\[\]()'\"<>\n]*|[^\s,={}\[\]()'\"<>]")
_STRING = re.compile(r"'([^'\\]*+(?:\\.[^'\\]*+)*+)'|\"([^\"\\]*+(?:\\.[^\"\\]*+)*+)\"", re.DOTALL)
_BARE_KEY = re.compile(r"[^:,{}\[\]()'\"\n]++")
_SPACE = re.compile(r"\s*")
_ESCAPE = re.compile(
    r"\\(x[\da-fA-F]{2}|u[\da-fA-F]{4}|U00(?:0[\da-fA-F]|10)[\da-fA-F]{4}|.)", re.DOTALL
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_NUMERIC_CALLS = re.compile(r"(?:\w+\.)*(?:float|int|tensor|array)\d*")
_ENUM = re.compile(r"<[^<>\n]*>")
_PYTHON_WORDS = (
    (": nan", ": NaN"),
    (": inf", ": Infinity"),
    (": -inf", ": -Infinity"),
    (": None", ": null"),
    (": True", ": true"),
    (": False", ": false"),
)


class _TornError(Exception):
    """The text ends in the middle of a literal, or continues with something that is not allowed."""


def mapping_at(text: str, start: int = 0) -> tuple[dict[str, Any], int] | None:
    """Return the mapping that begins at a position ("{" or a call), and its end.

    None if there is no mapping.
    """
    if len(text) - start > MAX_CHARS:
        return None
    quick = _quick(text, start)
    if quick is not None:
        return quick
    try:
        value, end = _value(text, start, 0)
    except _TornError:
        return None
    return (value, end) if isinstance(value, dict) else None


def is_json_object(text: str, start: int) -> bool:
    """Return whether the rest of a text is an object that the C parser accepts."""
    return start >= 0 and text.rstrip().endswith("}") and _quick(text, start) is not None


def plain_value(text: str) -> Any:
    """Return the value of a setting: parsed if it is a literal, else the text.

    Literals are booleans, None, numbers, quoted texts and lists.
    """
    stripped = text.strip()
    if len(stripped) <= MAX_CHARS and stripped[:1] in {"[", "(", "{", "'", '"'}:
        try:
            value, end = _value(stripped, 0, 0)
        except _TornError:
            return stripped
        return value if end == len(stripped) else stripped
    return _word_value(stripped)


def _quick(text: str, start: int) -> tuple[dict[str, Any], int] | None:
    """Parse a mapping with the C parser, which accepts most rows of logs."""
    end = text.rfind("}") + 1
    body = text[start:end]
    if not body.startswith("{"):
        return None
    if "'" in body and body[1:2] != '"':
        if '"' in body or "\\" in body:
            return None
        body = body.replace("'", '"')
        for theirs, ours in _PYTHON_WORDS:
            body = body.replace(theirs, ours)
    try:
        found = parse_json(body)
    except ValueError:
        return None
    return (found, end) if isinstance(found, dict) else None


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    at = _skip(text, at)
    if at >= len(text) or depth > _MAX_DEPTH:
        raise _TornError
    head = text[at]
    if head == "{":
        return _braces(text, at + 1, depth)
    if head in "[(":
        items, _, end = _items(text, at + 1, "]" if head == "[" else ")", depth)
        return items, end
    if head in "'\"":
        return _string(text, at)
    if head == "<":
        enum = _ENUM.match(text, at)
        if not enum:
            raise _TornError
        return enum.group(), enum.end()
    return _word(text, at, depth)


def _string(text: str, at: int) -> tuple[str, int]:
    found = _STRING.match(text, at)
    if not found:
        raise _TornError
    inner = found[1] if found[1] is not None else found[2]
    if "\\" in inner:
        inner = _ESCAPE.sub(_unescaped, inner)
    return inner, found.end()


def _unescaped(found: re.Match[str]) -> str:
    escape = found[1]
    return chr(int(escape[1:], 16)) if len(escape) > 1 else _ESCAPES.get(escape, escape)


def _word(text: str, at: int, depth: int) -> tuple[Any, int]:
    found = _WORD.match(text, at)
    if not found:
        raise _TornError
    word, end = found.group().strip(), found.end()
    if text[end : end + 1] != "(":
        return _word_value(word), end
    items, named, end = _items(text, end + 1, ")", depth)
    if items and _NUMERIC_CALLS.fullmatch(word):
        return items[0], end
    return (named if named or not items else word), end


def _word_value(word: str) -> Any:
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    digits = word.lstrip("+-")
    if digits[:1].isdigit() and word.isascii() and len(word) < 24:
        whole = word.replace(",", "") if number(word) is not None else word
        if _WHOLE.fullmatch(whole):
            return int(whole)
    # A number with a unit is a text: the setting "8b" is not 8.
    if word[-1:].isdigit() or word[-1:] == "." or word.lower().endswith(("nan", "inf")):
        value = number(word)
        return word if value is None else value
    return word


def _braces(text: str, at: int, depth: int) -> tuple[Any, int]:
    found: dict[str, Any] = {}
    while True:
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return found, at + 1
        key, at = _key(text, at)
        at = _skip(text, at)
        if text[at : at + 1] == ":":
            found[key], at = _value(text, at + 1, depth + 1)
            at = _skip(text, at)
        # Without a colon it is a set; its members become keys without values.
        elif text[at : at + 1] in {",", "}"}:
            found[key] = None
        if text[at : at + 1] == ",":
            at += 1
        elif text[at : at + 1] != "}":
            raise _TornError


def _key(text: str, at: int) -> tuple[str, int]:
    if text[at : at + 1] in {"'", '"'}:
        return _string(text, at)
    found = _BARE_KEY.match(text, at)
    if found is None:
        raise _TornError
    return found.group().strip(), found.end()


def _items(text: str, at: int, close: str, depth: int) -> tuple[list[Any], dict[str, Any], int]:
    """Return the items between brackets: values in order, and values with `name=` before them."""
    items: list[Any] = []
    named: dict[str, Any] = {}
    while True:
        at = _skip(text, at)
        if text[at : at + 1] == close:
            return items, named, at + 1
        value, at = _value(text, at, depth + 1)
        at = _skip(text, at)
        if text[at : at + 1] == "=" and isinstance(value, str):
            named[value], at = _value(text, at + 1, depth + 1)
            at = _skip(text, at)
        else:
            items.append(value)
        if text[at : at + 1] == ",":
            at += 1
        elif text[at : at + 1] != close:
            raise _TornError
