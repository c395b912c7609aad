"""Find the accepted name that a refused name was probably meant to be.

Many errors list all names that they would accept:

    template_type: 'qwen25' not in ['chatml', 'llama3', 'qwen2_5', ...]  ->  qwen2_5

The refused name comes before the list. It is quoted, or follows a word such as "column", or is the
first word with a digit or a sign in it. An error about an unknown setting has no list; there the
known settings of the framework are used. All functions are pure.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterable, Sequence

from homeostat.health.finding import Finding, Fix, Level
from homeostat.health.frameworks import Framework
from homeostat.health.frameworks.known import known
from homeostat.health.view import RunView

_MAX_CHARS = 50_000
_NAME = r"[A-Za-z][\w./+-]{1,79}"
_LIST = re.compile(rf"(['\"]){_NAME}\1(?:\s{{0,3}},\s{{0,3}}(['\"]){_NAME}\2){{1,}}")
_ITEM = re.compile(rf"['\"]({_NAME})['\"]")
_QUOTED = re.compile(rf"['\"`]({_NAME})['\"`]")
_WORD = re.compile(r"(?<![\w./-])[A-Za-z][\w-]{1,79}")
_SIGNS = re.compile(r"[\d_-]")
_AFTER_ITS_KIND = re.compile(
    rf"(?i:\b(?:column|key|field|option|choice|name|method|type|value|metric|backend|optimizer"
    rf"|scheduler|activation|template|format|dtype))(?: is)?[ :=]{{1,3}}({_NAME})"
)
_REFUSES = re.compile(
    r"(?i)\b(?:not|invalid|unknown|unsupported|unrecogni[sz]ed|must be|should be|expected|choose"
    r"|cannot)\b"
)
# Errors about a setting that a parser, a function or a schema does not know.
_UNKNOWN_SETTING = re.compile(
    r"unexpected keyword argument '(\w{5,80})'|unrecognized arguments?: --([\w.-]{5,80})"
    r"|[Nn]o such option:? --([\w.-]{5,80})|[Kk]ey '([\w.]{5,80})' (?:is )?not in\b"
)
# Names less alike than this are taken for different names. The second limit is for settings: a
# framework has many, and not all are known.
_ALIKE, _SURELY_ALIKE = 0.7, 0.88
# Errors that refuse more names compare two lists, such as the keys of weights. Comparing all pairs
# would take minutes.
_MAX_REFUSED, _MAX_ACCEPTED = 3, 2_000


def nearest_name(text: str) -> tuple[str, str, int] | None:
    """Return a refused name, the accepted name most like it, and how many names the text lists."""
    text = text[:_MAX_CHARS]
    found = max(_LIST.finditer(text), key=lambda one: len(one[0]), default=None)
    if found is None or not _REFUSES.search(text[: found.start()]):
        return None
    accepted = dict.fromkeys(_ITEM.findall(found[0]))
    refused = _refused(text[: found.start()])
    if len(refused) > _MAX_REFUSED or len(accepted) > _MAX_ACCEPTED:
        return None
    near = _most_alike(refused, accepted, least=_ALIKE)
    return (*near, len(accepted)) if near is not None else None


def nearest_setting(text: str, settings: Collection[str]) -> tuple[str, str] | None:
    """Return a setting that was refused, and the known setting that is nearly the same."""
    found = _UNKNOWN_SETTING.search(text[:_MAX_CHARS])
    if found is None:
        return None
    name = next(part for part in found.groups() if part)
    return _most_alike([name], [one.lstrip("-") for one in settings], least=_SURELY_ALIKE)


def with_near_name(
    findings: Sequence[Finding], quoted: Sequence[int], view: RunView
) -> list[Finding]:
    """Return the findings. If a quoted line refuses a name, the first one advises the nearest name.

    `quoted` are the numbers of the lines that the first finding quotes.
    """
    if not findings or not quoted or findings[0].level is Level.INFO:
        return list(findings)
    first, wanted = findings[0], set(quoted)
    texts = [line.text for line in view.log.lines if line.number in wanted]
    why = next((why for text in texts if (why := _advice(text, view.framework))), "")
    if not why:
        return list(findings)
    return [dataclasses.replace(first, fixes=(Fix("", "", why), *first.fixes)), *findings[1:]]


def _advice(text: str, framework: Framework) -> str:
    listed = nearest_name(text)
    if listed is not None:
        name, other, count = listed
        return f"write {other} in place of {name}: it is the nearest of the {count} accepted names"
    own, base = known(framework.name).settings or {}, known(framework.base).settings or {}
    setting = nearest_setting(text, {**own, **base})
    if setting is None:
        return ""
    name, other = setting
    return f"write {other} in place of {name}: {framework.title} has a setting of that name"


def _most_alike(
    names: Iterable[str], accepted: Collection[str], *, least: float
) -> tuple[str, str] | None:
    """Return the name that is not accepted and the accepted one that are most alike."""
    pairs = (
        (difflib.SequenceMatcher(None, _plain(name), _plain(other)).ratio(), name, other)
        for name in names
        if name not in accepted
        for other in accepted
    )
    alike, name, other = max(pairs, default=(0.0, "", ""))
    return (name, other) if alike >= least else None


def _refused(before: str) -> list[str]:
    """Return the names that may be the refused one, found in the most certain way that works."""
    names = _QUOTED.findall(before) or _AFTER_ITS_KIND.findall(before)
    if not names:
        names = [word for word in _WORD.findall(before) if _SIGNS.search(word)][:1]
    return [name.rstrip(".") for name in names]


def _plain(name: str) -> str:
    """Return a name in lower case, without the signs between its words."""
    return re.sub(r"[-_.]", "", name.lower())
