"""The loss at the start is higher than that of a uniform guess over all tokens.

## What it sees
The first records' loss (SFT, nats per token) is above ln(vocabulary) by `margin`; without a known
vocabulary, above that of the largest that is in use. It is only information once the loss has come
down to `usual`, because training has cured whatever was wrong; and if nothing shows that the loss
is that of a language model: neither a metric of tokens, nor the framework together with a loss of
little noise (`smooth`). A loss that is logged beside its parts is their sum, and is not judged: two
or more other losses add up to it or more, and one of them is below the limit.

## Why it matters
A pretrained model begins between 0.5 and 4. Worse than guessing means that it predicts with
confidence, and wrongly: the wrong tokenizer or template, shifted labels, weights that were loaded
to the wrong places, or a loss that is summed and not averaged.

## Likely causes
- loss-not-normalised-by-grad-accum: above `summed` the loss is rather a sum than a mean;
  see LRN012, which knows it for sure.
- weights-not-loaded: weights that were mixed up.
- chat-template-mismatch: tokens that this model was never trained on.

## What to do
Score a plain text with the model: about 2 to 4 is right. If it is, look at labels and masks; if it
is not, look at the checkpoint and the tokenizer.

## Known false alarms
A loss that is logged as a sum over a row. Models that were trained to fill gaps, such as mT5, begin
far above guessing when they first write whole texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed, raw_number
from homeostat.health.series.medians import median
from homeostat.health.series.noise import beside_trend
from homeostat.health.view import Kind, RunView

_LARGEST = 262_144


class Options(RuleOptions):
    margin: float = option(0.7, "Nats above guessing that are let pass.")
    min_records: int = option(3, "Number of records that are needed.")
    usual: float = option(4.0, "Loss of a pretrained model, in nats, at most.")
    smooth: float = option(0.08, "Noise of a mean over many tokens, as a share of the loss.")
    summed: float = option(40.0, "Nats above which the loss can hardly be a mean over tokens.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    loss = needed(view, "train/loss")
    head = loss.finite().head(5)
    if len(head) < options.min_records or view.setting("model.init") == "random":
        return
    vocabulary = raw_number(view, "vocab_size") or view.facts.get("vocab_size") or _LARGEST
    limit = math.log(vocabulary) + options.margin
    start = median(head.values)
    if start <= limit or _is_sum(view, start, limit):
        return
    is_over = median(loss.finite().tail(5).values) <= options.usual
    yield Sighting(
        level=Level.INFO if is_over or not _is_of_tokens(view, options) else Level.WARN,
        message=f"The loss begins at {start:.4g}; guessing gives {limit - options.margin:.3g} at "
        "most: the model is confident and wrong. Score a plain text with the model, then check the "
        "template, the labels and the checkpoint.",
        evidence=(f"train/loss {', '.join(f'{v:.4g}' for v in head.values[:3])} at the start",),
        causes=tuple(_causes(start, options)),
        fixes=(
            Fix("model.chat_template", "the model's own", "tokens that the model was trained on"),
            Fix("model.tokenizer", "the model's own", "ids that mean what the weights learned"),
        ),
        first_step=int(head.steps[0]),
        last_step=int(head.steps[-1]),
        value=start,
        limit=limit,
    )


def _is_of_tokens(view: RunView, options: Options) -> bool:
    """Return whether the log is known to be a language model's. Other losses may have any size.

    That is a log with a metric of tokens, or of a framework that trains such models, whose loss is
    a mean over so many tokens that neighbours hardly differ; the squared errors of a few rows do.
    """
    words = ("token", "perplex", "ppl", "vocab", "bpb")
    names = " ".join((*view.metrics, *view.raw_settings)).lower()
    if any(word in names for word in words):
        return True
    loss = needed(view, "train/loss").finite()
    is_smooth = beside_trend(loss.values) <= options.smooth * median(loss.values)
    return view.framework.name != "unknown" and is_smooth


def _is_sum(view: RunView, start: float, limit: float) -> bool:
    """Return whether parts of the loss are logged beside it. Their weights are not known."""
    firsts = [
        median(series.finite().head(5).values)
        for name, series in view.metrics.items()
        if name != "train/loss" and not name.startswith("eval") and "loss" in name.lower()
        if len(series.finite()) >= len(view.metrics["train/loss"].finite()) // 2
    ]
    parts = [part for part in firsts if part > 0.0]
    return len(parts) >= 2 and min(parts) <= limit and sum(parts) >= start


def _causes(start: float, options: Options) -> Iterator[Cause]:
    if start > options.summed:
        yield Cause(
            "loss-not-normalised-by-grad-accum",
            "no mean over tokens is that high: a sum over accumulated batches or rows",
        )
    yield Cause("initial-loss-implausible", "worse than guessing")


RULE = Rule(
    code="LRN013",
    name="initial-loss-implausible",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("train/loss",),
    kinds=(Kind.SFT,),
    options=Options,
)
