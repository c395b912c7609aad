"""The chat template is not the one that the model and its tokenizer know.

## What it sees
Our own runs render one chat and look at what the template adds to it: more than `max_unknown` of
these tokens are unknown to the tokenizer; or a template that was set in place of the model's own
shares less than `min_alike` of them with it; or its markers are split into pieces of ordinary text.
Of other frameworks: a template that is named after another family than the model is.

## Why it matters
No error says so. The model meets turns in a form that it was never shown: it does not know whose
turn it is or where one ends, answers worse than it could, and learns the form before the task.

## Likely causes
- chat-template-mismatch: a template that was copied from a recipe for another model, or a default
  of the framework.

## What to do
Use the template of the model's own tokenizer. If you want to teach another one, do it by SFT, and
add its markers to the tokenizer as special tokens first.

## Known false alarms
SFT that teaches a new template on purpose: there, a template that differs is information only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import raw
from homeostat.health.view import Kind, RunView

_FAMILIES = ("llama", "qwen", "gemma", "mistral", "phi", "deepseek", "glm", "internlm", "baichuan")
# Names of models that are of a family without being called so.
_ALSO = {"mistral": ("mixtral", "ministral", "magistral", "codestral"), "qwen": ("qwq",)}
_IS_TAUGHT = re.compile(r"instruct|chat|-it\b|distill|-r1", re.I)


class Options(RuleOptions):
    max_unknown: float = option(0.2, "Share of the template's tokens that may be unknown.")
    min_alike: float = option(0.6, "Share that it must have in common with the model's own.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    found = _probed(view)
    if found is not None:
        yield from _measured(view, found, options)
        return
    named = _named(view)
    if named is None:
        yield Unknown("nothing probed the chat template, and the settings name none")
        return
    why, is_taught = named
    if why:
        yield _sighting(
            view, why, level=None if is_taught else Level.INFO, confidence=Confidence.INFERRED
        )


def _measured(view: RunView, found: Mapping[str, Any], options: Options) -> Iterator[Sighting]:
    tokens, unknown = int(found["tokens"]), int(found["unknown"])
    alike, split = found.get("alike"), list(found.get("split") or ())
    is_new = view.setting("model.init") == "random"
    # Only SFT can teach another form.
    teaches = Level.INFO if view.kind is Kind.SFT else None
    if tokens and unknown > options.max_unknown * tokens:
        why = f"the tokenizer does not know {unknown} of the {tokens} tokens that it adds to a chat"
        yield _sighting(view, why, value=unknown / tokens, limit=options.max_unknown)
    elif isinstance(alike, int | float) and alike < options.min_alike and not is_new:
        why = f"of the tokens that it adds, {alike:.0%} are in the model's own template"
        limit = options.min_alike
        yield _sighting(view, why, value=float(alike), limit=limit, level=teaches)
    elif split:
        why = f"the tokenizer splits its markers into pieces: {', '.join(map(str, split[:3]))}"
        yield _sighting(view, why, level=teaches)


def _sighting(
    view: RunView,
    why: str,
    *,
    level: Level | None = None,
    value: float | None = None,
    limit: float | None = None,
    confidence: Confidence | None = None,
) -> Sighting:
    return Sighting(
        message=f"The chat template does not fit the model: {why}. Use the template of the model's "
        "own tokenizer.",
        evidence=(why,),
        causes=(Cause("chat-template-mismatch", why),),
        fixes=(
            Fix(
                "model.chat_template",
                "the model's own",
                "turns in the form that the model was taught",
                theirs={"llama_factory": "template"},
            ),
        ),
        first_step=1 if view.metrics else None,
        last_step=view.last_step,
        value=value,
        limit=limit,
        level=level,
        confidence=confidence,
    )


def _probed(view: RunView) -> Mapping[str, Any] | None:
    """Return what the run's start or the preflight measured; None if nothing did."""
    events = view.events_of("chat_template_probed")
    found = events[-1].fields if events else view.facts.get("chat_template_probed")
    is_whole = isinstance(found, Mapping) and all(
        type(found.get(name)) is int for name in ("tokens", "unknown")
    )
    return found if is_whole else None


def _named(view: RunView) -> tuple[str, bool] | None:
    """Return why a template's name is not the model's, and whether the model was taught chats.

    The reason is empty if the names agree or say nothing; None if one of the two is not known.
    """
    template = raw(view, "template", "chat_template")
    model = view.setting("model.path") or raw(view, "model_name_or_path", "base_model", "model")
    if view.framework.name == "homeostat" or not isinstance(template, str):
        return None
    if not isinstance(model, str) or len(template) > 40:
        # A long text is the template itself.
        return None
    of_template, of_model = _families(template), _families(model.rstrip("/").rsplit("/", 1)[-1])
    if not of_template or not of_model:
        return None
    why = f"it is {template!r}, and the model is {model!r}" if not of_template & of_model else ""
    return why, _IS_TAUGHT.search(model) is not None


def _families(name: str) -> set[str]:
    lowered = name.lower()
    return {
        family
        for family in _FAMILIES
        if any(word in lowered for word in (family, *_ALSO.get(family, ())))
    }


RULE = Rule(
    code="DAT014",
    name="chat-template-mismatch",
    family=Family.DATA,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    options=Options,
    explains=(
        "RWD001", "RWD002", "RWD015", "LRN013", "GEN001", "GEN002", "GEN003", "GEN004", "POL002",
    ),
)  # fmt: skip
