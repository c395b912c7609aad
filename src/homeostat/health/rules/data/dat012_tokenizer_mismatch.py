"""The tokenizer is not the one that the model was trained with.

## What it sees
More than `max_share` of the pieces that both the model's own tokenizer and the one in use know have
another number; or the two share hardly any piece.

## Why it matters
The weights know pieces by their ids. With other ids a prompt is another text to the model, and its
answer is decoded as another text: it seems not to know the task at all, and at best learns
everything again.

## Likely causes
- tokenizer-mismatch: model.tokenizer names another model's tokenizer, or one of another version.

## What to do
Leave model.tokenizer empty, so that the tokenizer in the model's folder is used. For new tokens,
extend that tokenizer: the ids of known tokens must stay as they are.

## Known false alarms
Weights that were moved to another vocabulary, in a folder in which the old tokenizer was left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView


class Options(RuleOptions):
    max_share: float = option(
        0.01, "Largest share of the shared pieces that may have another number."
    )
    min_shared: float = option(0.05, "Share of the smaller vocabulary that both must know.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    found = _compared(view)
    if found is None:
        yield Unknown("nothing compared the tokenizer with the model's own")
        return
    shared, moved, known = (int(found[name]) for name in ("shared", "moved", "known"))
    strange = shared < options.min_shared * known
    share = 1.0 if strange else moved / max(shared, 1)
    if share <= options.max_share:
        return
    if strange:
        why = f"they share {shared} of {known} pieces"
    else:
        why = f"{moved} of the {shared} pieces that both know have another number"
    yield Sighting(
        message=f"The tokenizer is not the model's: {why}. The model reads and writes other texts "
        "than you see. Leave model.tokenizer empty to use the model's own.",
        evidence=tuple(f"number in the model, in use: {one}" for one in found.get("examples", ())),
        causes=(Cause("tokenizer-mismatch", why),),
        fixes=(Fix("model.tokenizer", "null", "the model's own has the numbers that it learned"),),
        first_step=1 if view.metrics else None,
        value=share,
        limit=options.max_share,
    )


def _compared(view: RunView) -> Mapping[str, Any] | None:
    """Return the comparison by the run's start or the preflight; None if there was none."""
    events = view.events_of("tokenizer_compared")
    found = events[-1].fields if events else view.facts.get("tokenizer_compared")
    is_whole = isinstance(found, Mapping) and all(
        type(found.get(name)) is int for name in ("shared", "moved", "known")
    )
    return found if is_whole else None


RULE = Rule(
    code="DAT012",
    name="tokenizer-mismatch",
    family=Family.DATA,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    options=Options,
    explains=(
        "RWD001", "RWD002", "RWD003", "RWD004", "RWD006", "RWD015", "LRN004", "LRN013",
        "GEN001", "GEN002", "GEN004", "POL002",
    ),
)  # fmt: skip
