"""Find the accepted name that a refused one was probably meant to be.

Many errors print all names that they would accept:

    template_type: 'qwen25' not in ['chatml', 'llama3', 'qwen2_5', ...]  ->  qwen2_5

The refused name stands before the list. It is quoted, follows a word such as "column", or else is
the first word with a digit or a sign in it. Pure.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence

from homeostat.health.finding import Finding, Fix, Level
from homeostat.health.log import Log

_MAX_CHARS = 50_000
_NAME = r"[A-Za-z][\w./+-]{1,79}"
_LIST = re.compile(rf"(['\"]){_NAME}\1(?:\s{{0,3}},\s{{0,3}}(['\"]){_NAME}\2){{1,}}")
_ITEM = re.compile(rf"['\"]({_NAME})['\"]")
_QUOTED = re.compile(rf"['\"`]({_NAME})['\"`]")
_WITH_A_SIGN = re.compile(r"(?<![\w./])(?=[\w-]*[\d_-])([A-Za-z][\w-]{1,79})")
_AFTER_ITS_KIND = re.compile(
    rf"(?i:\b(?:column|key|field|option|choice|name|method|type|value|metric|backend|optimizer"
    rf"|scheduler|activation|template|format|dtype))(?: is)?[ :=]{{1,3}}({_NAME})"
)
_REFUSES = re.compile(
    r"(?i)\b(?:not|invalid|unknown|unsupported|unrecogni[sz]ed|must be|should be|expected|choose"
    r"|cannot)\b"
)
# Two names that are less alike than this are different names.
_ALIKE = 0.7


def nearest_name(text: str) -> tuple[str, str, int] | None:
    """Return a refused name, the accepted one most like it, and how many the text lists."""
    text = text[:_MAX_CHARS]
    found = max(_LIST.finditer(text), key=lambda one: len(one[0]), default=None)
    if found is None or not _REFUSES.search(text[: found.start()]):
        return None
    accepted = dict.fromkeys(_ITEM.findall(found[0]))
    pairs = (
        (difflib.SequenceMatcher(None, _plain(name), _plain(other)).ratio(), name, other)
        for name in _refused(text[: found.start()])
        if name not in accepted
        for other in accepted
    )
    alike, name, other = max(pairs, default=(0.0, "", ""))
    return (name, other, len(accepted)) if alike >= _ALIKE else None


def with_near_name(findings: Sequence[Finding], quoted: Sequence[int], log: Log) -> list[Finding]:
    """Return the findings; the first one advises the nearest name if a line that it quotes has it.

    `quoted` are the numbers of these lines.
    """
    if not findings or not quoted or findings[0].level is Level.INFO:
        return list(findings)
    first, wanted = findings[0], set(quoted)
    near = (nearest_name(line.text) for line in log.lines if line.number in wanted)
    found = next((one for one in near if one is not None), None)
    if found is None or any(found[1] in fix.value for fix in first.fixes):
        return list(findings)
    name, other, count = found
    why = f"write {other} in place of {name}: it is the nearest of the {count} accepted names"
    return [dataclasses.replace(first, fixes=(Fix("", "", why), *first.fixes)), *findings[1:]]


def _refused(before: str) -> list[str]:
    """Return the names that may be the refused one, of the surest kind that there is."""
    names = _QUOTED.findall(before) or _AFTER_ITS_KIND.findall(before)
    return [name.rstrip(".") for name in names or _WITH_A_SIGN.findall(before)[:1]]


def _plain(name: str) -> str:
    """Return a name without case and without the signs between its words."""
    return re.sub(r"[-_.]", "", name.lower())
