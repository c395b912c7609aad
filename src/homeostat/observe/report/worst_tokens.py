"""The tokens on which engine and trainer disagreed most, with the text around them.

    events `worst_tokens` -> their tokens, duplicates removed -> the worst of the run, the latest

The text was written by a model: it is escaped, and characters that would affect the text around
them are shown as escapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from homeostat.observe import format as fmt
from homeostat.observe.report.elements import table
from homeostat.observe.report.facts import RunFacts
from homeostat.observe.safe_text import safe_text

NUM_SHOWN = 8
MAX_CONTEXT = 120
_BREAKS = str.maketrans({"\n": "\\n", "\t": "\\t"})


@dataclass(frozen=True, slots=True)
class _Token:
    """A token of an event. `num_alike` samples have it at the same place."""

    step: int
    told: dict[str, Any]
    num_alike: int = 1

    def logp(self, party: str) -> float:
        value = self.told.get(f"{party}_logp")
        return value if isinstance(value, float) else math.nan

    @property
    def difference(self) -> float:
        return self.logp("trainer") - self.logp("engine")

    @property
    def distance(self) -> float:
        """Return the absolute difference; infinite if it is not a number."""
        distance = abs(self.difference)
        return math.inf if math.isnan(distance) else distance


def worst_tokens_table(facts: RunFacts) -> str:
    events = [event for event in facts.events if event["kind"] == "worst_tokens"]
    found = [_tokens_of(event) for event in events]
    worst = _furthest(token for tokens in found for token in tokens)
    if not worst:
        return ""
    shown = {id(token) for token in worst}
    latest = [token for token in _furthest(found[-1]) if id(token) not in shown]
    rows = [_row(token) for token in worst]
    if latest:
        told = f"Also at step {latest[0].step:,}, the latest that was told"
        rows += [f'<tr><td class="apart" colspan="7">{told}</td></tr>', *map(_row, latest)]
    heads = ["num:Step", "Text", "num:Engine", "num:Trainer", "num:Difference",
             "num:Policy version", "num:Prompt"]  # fmt: skip
    note = "probabilities, and log-probs below them; the worst of the run first"
    return table("Tokens that engine and trainer disagree on most", note, heads, rows)


def _tokens_of(event: dict[str, Any]) -> list[_Token]:
    """Return the tokens without duplicates.

    Samples of a group that begin alike have the same token, with the same numbers, many times.
    """
    told = event.get("tokens")
    tokens = [token for token in told if isinstance(token, dict)] if isinstance(told, list) else []
    alike: dict[str, list[dict[str, Any]]] = {}
    for token in tokens:
        parts = ("prompt_id", "position", "token_id", "before", "policy_version")
        alike.setdefault(repr([token.get(part) for part in parts]), []).append(token)
    return [_Token(int(event["step"]), group[0], len(group)) for group in alike.values()]


def _furthest(tokens: Iterable[_Token]) -> Sequence[_Token]:
    return sorted(tokens, key=lambda token: token.distance, reverse=True)[:NUM_SHOWN]


def _row(token: _Token) -> str:
    alike = f"<small>{token.num_alike} samples</small>" if token.num_alike > 1 else ""
    return (
        f'<tr><td class="num">{token.step:,}</td><td class="wrap">{_text(token.told)}</td>'
        f"{_likely(token.logp('engine'))}{_likely(token.logp('trainer'))}"
        f'<td class="num">{escape(_signed(token.difference))}</td>'
        f'<td class="num">{_number(token.told.get("policy_version"))}</td>'
        f'<td class="num">{_number(token.told.get("prompt_id"))}{alike}</td></tr>'
    )


def _text(told: dict[str, Any]) -> str:
    before, text, after = (_plain(told.get(part)) for part in ("before", "text", "after"))
    # Some tokens, such as the one that ends a completion, may have no text.
    marked = escape(text[:MAX_CONTEXT]) or f"<i>token {escape(str(told.get('token_id')))}</i>"
    parts = (
        f"<bdi>{escape(before[-MAX_CONTEXT:])}</bdi>",
        f"<mark>{marked}</mark>",
        f"<bdi>{escape(after[:MAX_CONTEXT])}</bdi>",
    )
    return f'<span class="token">{"".join(parts)}</span>'


def _plain(text: Any) -> str:
    # The reader turns a text that reads "nan" or "inf" into a number.
    return safe_text(str(text)).translate(_BREAKS) if isinstance(text, (str, float)) else ""


def _likely(logp: float) -> str:
    return f'<td class="num">{_probability(logp)}<small>{_fixed(logp)}</small></td>'


def _probability(logp: float) -> str:
    if math.isnan(logp):
        return "-"
    probability = math.exp(min(logp, 700.0))
    # Not fmt.percent, because the size of a tiny probability matters here.
    return f"{100 * probability:.1f} %" if 1e-3 <= probability < 10 else f"{probability:.1e}"


def _fixed(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else fmt.number(value)


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{_fixed(value)}"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"
