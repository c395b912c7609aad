"""Rows that are held out are also trained on.

## What it sees
The share of held-out rows (in RL: prompts) that occur among the training rows is above `max_share`;
from `warn_share` on it is a warning. Our own runs compare them when they start. In other logs a
file that the settings name both for training and for evaluation is found; it is information as long
as the log shows no evaluation.

## Why it matters
An evaluation on rows that were trained on measures memorisation. Its loss falls while the model
gets no better at anything new, so overfitting, the best checkpoint and early stopping are all
judged wrongly.

## Likely causes
- validation-overlap: the same file, or the same rows twice in the source, on both sides.

## What to do
Name another file under data.validation, or remove copies from the source before
data.validation_share splits it.

## Known false alarms
Short prompts of a small task (sorting five digits) repeat by chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.view import RunView

_FILE = re.compile(r"\.(?:parquet|jsonl?|csv|arrow|txt)$", re.IGNORECASE)


class Options(RuleOptions):
    max_share: float = option(0.1, "Largest share of held-out rows that may be trained on, too.")
    warn_share: float = option(0.3, "Share from which on it is a warning.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    share = _compared(view)
    if share is None:
        yield from _by_settings(view)
        return
    if share <= options.max_share:
        return
    yield Sighting(
        message=f"{share:.0%} of the held-out rows are also trained on (limit "
        f"{options.max_share:.0%}): their score will not show overfitting. Hold out other rows.",
        evidence=(f"validation_overlap {share:.2f}",),
        causes=(Cause("validation-overlap", f"{share:.0%} of the held-out rows occur in both"),),
        fixes=(Fix("data.validation", "rows of another file", "an honest evaluation"),),
        first_step=1 if view.metrics else None,
        value=share,
        limit=options.max_share,
        level=Level.INFO if share < options.warn_share else None,
    )


def _compared(view: RunView) -> float | None:
    """Return the share that the run's start or the preflight measured; None if nothing did."""
    events = view.events_of("rows_compared")
    found = (events[-1].fields if events else view.facts).get("validation_overlap")
    return float(found) if isinstance(found, int | float) else None


def _by_settings(view: RunView) -> Iterator[Sighting | Unknown]:
    """Judge by the files that the settings name."""
    trained, held_out = _files(view, "data.train"), _files(view, "data.validation")
    if not trained or not held_out:
        yield Unknown("nothing compared the held-out rows with the training rows")
        return
    shared = [name for name in held_out if name in trained]
    if not shared or view.setting("data.train.split") != view.setting("data.validation.split"):
        return
    is_evaluated = any(name.startswith("eval/") for name in view.metrics)
    yield Sighting(
        message=f"{shared[0]} is trained on and evaluated on: the evaluation measures what was "
        "memorised, and will not show overfitting. Hold out other rows.",
        evidence=tuple(f"the settings name {name} for both" for name in shared[:3]),
        causes=(Cause("validation-overlap", "the same file is on both sides"),),
        fixes=(Fix("data.validation", "rows of another file", "an honest evaluation"),),
        value=len(shared) / len(held_out),
        level=None if is_evaluated and 2 * len(shared) >= len(held_out) else Level.INFO,
    )


def _files(view: RunView, key: str) -> list[str]:
    """Return the files that a setting names, or LLaMA-Factory's names of datasets.

    The name of a dataset in a hub does not tell which of its rows are meant.
    """
    value = view.setting(f"{key}.path")
    names = value if isinstance(value, list) else re.split(r"[,\s]+", str(value or "").strip("[] "))
    texts = [str(name).strip(" '\"") for name in names]
    is_registered = view.framework.name == "llama_factory"
    return [text for text in texts if text and (is_registered or _FILE.search(text))]


RULE = Rule(
    code="DAT011",
    name="validation-overlap",
    family=Family.DATA,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    options=Options,
)
