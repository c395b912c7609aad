"""Parse the statistics that inference engines print, under the engine's names.

Decode batch, #running-req: 6, token usage: 0.83, gen throughput (token/s): 452.1   SGLang
Engine 000: Avg generation throughput: 20.1 tokens/s, GPU KV cache usage: 12.3%     vLLM
SpecDecoding metrics: Draft acceptance rate: 62.0%, Mean acceptance length: 2.86    vLLM
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from homeostat.health.readers.rows.row import Row, RowKind
from homeostat.health.readers.values.numbers import VALUE, number

_STARTS = (
    "Decode batch",
    "Prefill batch",
    "Avg prompt throughput",
    "Avg generation throughput",
    "SpecDecoding metrics",
    "Speculative metrics",
)
_PLAIN = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?")
_PAIR = re.compile(
    rf"(?P<name>[#A-Za-z][\w #()/.-]{{0,60}}+)\s*+:\s*+(?P<value>{VALUE})\s*+(?P<percent>%?)"
)


def engine_row(body: str) -> Row | None:
    """Return the row of an engine's line. The line itself also stays in the log."""
    values = {}
    for _, pair in _pairs(body):
        value = number(pair["value"] + pair["percent"])
        if value is not None:
            values[pair["name"].strip()] = value
    return Row(values, kind=RowKind.ENGINE, form="engine") if values else None


def fields_in(line: bytes) -> tuple[tuple[str, int, int, float], ...]:
    """Return name, start, end and divisor of each number of an engine's line; () if one is not
    plain.
    """
    found = []
    for at, pair in _pairs(line.decode("ascii", errors="replace")):
        if not _PLAIN.fullmatch(pair["value"]):
            return ()
        divisor = 100.0 if pair["percent"] else 1.0
        found.append(
            (pair["name"].strip(), at + pair.start("value"), at + pair.end("value"), divisor)
        )
    return tuple(found)


def _pairs(body: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Yield where each part of an engine's line begins, with its name and value."""
    if "batch" not in body and "throughput" not in body and "metrics" not in body:
        return
    start = min((at for at in (body.find(word) for word in _STARTS) if at >= 0), default=-1)
    if start < 0 or len(body) > 20_000:
        return
    for piece in body[start:].split(", "):
        # "SpecDecoding metrics: Draft acceptance rate: 62.0%": the last name is that of the metric.
        pairs = list(_PAIR.finditer(piece))
        if pairs:
            yield start, pairs[-1]
        start += len(piece) + 2
