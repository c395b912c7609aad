"""The pad token is also the end token, and its label is masked.

## What it sees
A pad token that is the end token (settings, or what the log says) together with a sign that the end
is not learned: its label is -100, or completions never end. Equal ids alone are common and
harmless, and not reported.

## Why it matters
The end of an answer is never trained, so the model keeps writing until it is cut off.

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

_PAIR = re.compile(
    r"pad_token(?:_id)?\W{1,4}(\S[^\s,;)'\"]{0,80}+)[\s,;)'\"]"
    r"(?>.{0,300}?eos_token(?:_id)?)\W{1,4}(\S{1,80})",
    re.I,
)
# One of both alone on a line: "PAD: 2 / </s>", "eos_token: <|end|>".
_NAMED = re.compile(r"\b(pad|eos)(?:[ _]?token)?(?:[ _]?id)?\s*+:\s*+(\S[^\n]{0,60})$", re.I)
# Sayings of scripts and trainers that give the end token to the padding.
_SAID = (
    "pad_token = tokenizer.eos_token",
    "pad_token=tokenizer.eos_token",
    "pad_token = eos_token",
    "pad_token to eos_token",
    "pad token to eos token",
    "eos_token as pad",
    "eos token as pad",
    "pad_token is set to eos",
    "pad_token set to eos",
    "setting pad_token to eos",
    "pad_token is None && eos_token",
)
_END = r"(?:</s>|eos\w{0,20}|end[- ]of[- ]\w{1,20}|<\|\w{1,40}\|>|<end_of_turn>)"
_ENDED = (
    re.compile(
        rf"end\w{{0,20}} (?:with|by|on|in) {_END}\D{{0,20}}0\s?(?:/|of|out of)\s?([1-9]\d{{0,9}})",
        re.I,
    ),
    re.compile(rf"\b0\s?(?:/|of|out of)\s?([1-9]\d{{0,9}})\b[^\n]{{0,40}}?{_END}", re.I),
    re.compile(
        r"\b([1-9]\d{0,9})\s?(?:/|of|out of)\s?\1\b[^\n]{0,20}"
        r"(?:generat|complet|output|response|answer)[^\n]{0,40}"
        r"(?:by length|length limit|truncated|max_new_tokens|max_tokens|never (?:end|stop))",
        re.I,
    ),
    re.compile(
        r"\b(?:none|no one) of (?:the )?(\d{1,9})[^\n]{0,30}(?:ended|stopped|emitted)", re.I
    ),
    re.compile(r"all (\d{1,9})[^\n]{0,40}(?:hit|reach|ran to|stopped (?:at|by))[^\n]{0,20}"
               r"(?:max|length|limit)", re.I),
)  # fmt: skip
_MASKED = re.compile(
    r"label[^\n]{0,44}(?:</s>|eos|<\|end\w{0,40}\|>|<\|im_end\|>)[^\n]{0,12}-100", re.I
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
        fixes=(
            Fix(
                "model.pad_token",
                "<pad>",
                "padding then differs from the end of an answer",
                Grade.UNSAFE,
            ),
        ),
        first_step=None,
    )


def _signs(view: RunView) -> _Signs | None:
    same = _same(view)
    if not same:
        return None
    harm = []
    for line in view.log.lines:
        if _MASKED.search(line.text):
            harm.append("the label of the end token is -100")
            continue
        found = next((hit for one in _ENDED if (hit := one.search(line.text))), None)
        if found:
            harm.append(f"none of {found[1]} completions ends")
    return _Signs(same, tuple(dict.fromkeys(harm)))


def _same(view: RunView) -> str:
    """Return the evidence that both tokens are the same; "" if there is none."""
    for name in ("pad_token_id", "pad_token"):
        pad, end = raw(view, name), raw(view, name.replace("pad", "eos"))
        if pad is not None and pad == end:
            return f"pad and end token are both {pad}"
    for line in view.log.find("eos_token && pad_token"):
        found = _PAIR.search(line.text + " ")
        if found and found[1].strip("'\"`") == found[2].strip("'\"`.,;)"):
            return f"pad and end token are both {found[1]}"
    named: dict[str, str] = {}
    for line in (*view.log.find("pad*:"), *view.log.find("eos*:")):
        found = _NAMED.search(line.text)
        if found:
            named.setdefault(found[1].lower(), found[2].strip())
    if named.get("pad") and named.get("pad") == named.get("eos"):
        return f"pad and end token are both {named['pad']}"
    said = view.log.first(*_SAID)
    return f"the end token is used for padding (line {said.number})" if said else ""


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
