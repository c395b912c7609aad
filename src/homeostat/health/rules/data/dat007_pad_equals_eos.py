"""The token that pads is the token that ends, and its label is masked.

## What it sees
A pad token id that equals the id of the end token (settings or log) together with a sign that the
end is not learned: its label is -100, or completions never end. Equal ids alone are common and
harmless, and not reported.

## Why it matters
The end of an answer is never trained: the model writes on until it is cut.

## Likely causes
- pad-equals-eos: the collator masks by token id, and cannot tell padding from the end.

## What to do
Give the tokenizer another pad token (an unused one, or a new one). Our own runs mask by position,
so equal ids do no harm.

## Known false alarms
None where the label of the end token is seen to be masked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import raw
from homeostat.health.view import Kind, RunView

_PAIR = re.compile(r"pad_token_id\W{1,3}(\d+)\b.*?eos_token_id\W{1,3}(\d+)\b", re.I)
_ENDED = re.compile(r"end\w* with (?:</s>|eos|<\|\w+\|>)\D*0\s*(?:/|of)\s*([1-9]\d*)", re.I)
_MASKED = re.compile(
    r"label\w*[^\n]{0,24}(?:</s>|eos|<\|end\w*\|>|<\|im_end\|>)[^\n]{0,12}-100", re.I
)


@dataclass(frozen=True)
class _Signs:
    same: str
    harm: tuple[str, ...]


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    signs = _signs(view)
    if signs is None or not signs.harm:
        return
    yield Sighting(
        message=f"{signs.same}, and {signs.harm[0]}: the end of an answer is masked as padding and "
        "never learned. Use another pad token.",
        evidence=signs.harm,
        causes=(Cause("pad-equals-eos", signs.same),),
        fixes=(Fix("model.pad_token", "<pad>", "padding is told from the end", Grade.UNSAFE),),
        first_step=None,
    )


def _signs(view: RunView) -> _Signs | None:
    pad, end = raw(view, "pad_token_id"), raw(view, "eos_token_id")
    same = f"pad and end token are both {pad}" if pad is not None and pad == end else ""
    harm = []
    for line in view.log.find("token_id && pad") if not same else ():
        found = _PAIR.search(line.text)
        if found and found[1] == found[2]:
            same = f"pad and end token are both {found[1]}"
    if not same:
        return None
    for line in view.log.lines:
        if _MASKED.search(line.text):
            harm.append("the label of the end token is -100")
        elif found := _ENDED.search(line.text):
            harm.append(f"none of {found[1]} completions ends")
    return _Signs(same, tuple(dict.fromkeys(harm)))


RULE = Rule(
    code="DAT007",
    name="pad-equals-eos",
    family=Family.DATA,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("log",),
    kinds=(Kind.SFT, Kind.PREFERENCE),
)
