"""What inference engines print about themselves, under the names that they print.

Decode batch, #running-req: 6, token usage: 0.83, gen throughput (token/s): 452.1   SGLang
Engine 000: Avg generation throughput: 20.1 tokens/s, GPU KV cache usage: 12.3%     vLLM
SpecDecoding metrics: Draft acceptance rate: 62.0%, Mean acceptance length: 2.86    vLLM
"""

from __future__ import annotations

import re

from homeostat.health.readers.numbers import VALUE, number
from homeostat.health.readers.rows import Row, RowKind

_STARTS = (
    "Decode batch",
    "Prefill batch",
    "Avg prompt throughput",
    "Avg generation throughput",
    "SpecDecoding metrics",
    "Speculative metrics",
)
_PAIR = re.compile(
    rf"(?P<name>[#A-Za-z][\w #()/.-]{{0,60}}+)\s*+:\s*+(?P<value>{VALUE})\s*+(?P<percent>%?)"
)


def engine_row(body: str) -> Row | None:
    """The row of an engine's line; the line itself stays in the log."""
    if "batch" not in body and "throughput" not in body and "metrics" not in body:
        return None
    start = min((at for at in (body.find(word) for word in _STARTS) if at >= 0), default=-1)
    if start < 0 or len(body) > 20_000:
        return None
    values = {}
    for piece in body[start:].split(", "):
        # "SpecDecoding metrics: Draft acceptance rate: 62.0%": the last name is the metric's.
        pairs = list(_PAIR.finditer(piece))
        value = number(pairs[-1]["value"] + pairs[-1]["percent"]) if pairs else None
        if value is not None:
            values[pairs[-1]["name"].strip()] = value
    return Row(values, kind=RowKind.ENGINE, form="engine") if values else None
