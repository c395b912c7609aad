"""Parse JSON that others wrote. Whatever is wrong with a text, the error is a ValueError.

Python's own parser raises RecursionError for a text that nests about a thousand levels. A text that
nests a little less is parsed, but every function that then walks through its value overflows the
stack. So a text that nests deeper than any sound file is refused here, once for all who read JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

# Sound files nest a few dozen levels; tokenizers and safetensors refuse more than 128.
MAX_DEPTH = 100
_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"


def parse_json(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text. Raises ValueError."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if _num_opened(text) > MAX_DEPTH and _is_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


def _num_opened(text: str | bytes | bytearray) -> int:
    """Return the number of brackets that open: few texts have enough of them to nest deeply."""
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in _inner(one) if isinstance(inner, (dict, list))]
        if not level:
            return False
    return True


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
