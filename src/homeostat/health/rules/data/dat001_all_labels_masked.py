"""No token has a loss: every label is masked.

## What it sees
The share of trained tokens, or of rows that have such tokens, is 0; or, in SFT, the loss is exactly
0 from the first record on, at an ordinary learning rate, with a gradient that is 0 or not logged;
or the log says that labels are missing, and the loss is 0 or NaN throughout. (A gradient that is
NaN without such words, or a loss that fell to 0 later, is another illness.)

## Why it matters
The run reads its data but trains nothing.

## Likely causes
- all-labels-masked: the markers by which a template finds the answers do not occur in the tokens;
  or prompts are so long that the answers are cut away.
- chat-template-mismatch: the template is another model's.
- rows-truncated: rows are cut before the answer begins.

## What to do
Look at one row with its labels (`homeostat inspect`). Give the exact markers of this model's
template, or a longer limit.

## Known false alarms
A trainer that prints NaN as 0 and logs no gradient norm; the causes then name both illnesses.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import labels_masked, peak_rate, prints_zero, usual_rates
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    min_records: int = option(3, "Number of records that must show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    trained = view.series("data/trained_share")
    empty = view.series("data/rows_without_training")
    if (
        trained is not None
        and len(trained) >= options.min_records
        and not trained.tail(3).values.any()
    ):
        yield _sighting(view, "no token of the newest rows has a loss", int(trained.steps[-1]))
        return
    if empty is not None and len(empty) >= options.min_records and empty.tail(3).values.min() >= 1:
        yield _sighting(view, "no row has a token with a loss", int(empty.steps[-1]))
        return
    loss, norm = view.series("train/loss"), view.series("grad_norm")
    if loss is not None and len(loss) >= options.min_records and labels_masked(view):
        why = "the log says that labels are missing, and the loss is 0 or NaN throughout"
        yield _sighting(view, why, int(loss.steps[0]))
        return
    if loss is None or len(loss) < options.min_records or loss.values.any():
        return
    rate, usual = peak_rate(view), usual_rates(view)
    if prints_zero(view, "train/loss") or (norm is not None and np.any(norm.values != 0)):
        return
    if rate is not None and usual is not None and rate > 4 * usual.high:
        return
    yield _sighting(view, "the loss is exactly 0 from the first record on", int(loss.steps[0]))


def _sighting(view: RunView, why: str, first: int) -> Sighting:
    return Sighting(
        message=f"Nothing is trained: {why}. Every label is masked. Look at one row with its "
        "labels, and at the markers by which answers are found.",
        evidence=(why,),
        causes=(Cause("all-labels-masked", why),),
        fixes=(
            Fix(
                "model.chat_template",
                "the model's own",
                "answers are found by the template's markers",
            ),
            Fix("data.max_length", "longer", "answers are not cut away"),
        ),
        first_step=first,
        last_step=view.last_step,
        value=0.0,
    )


RULE = Rule(
    code="DAT001",
    name="all-labels-masked",
    family=Family.DATA,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("train/loss|data/trained_share|data/rows_without_training",),
    kinds=(Kind.SFT,),
    options=Options,
    explains=("LRN008", "LRN011", "DAT002", "DAT003", "ERR453"),
)
