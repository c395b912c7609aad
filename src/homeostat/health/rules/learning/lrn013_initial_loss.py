"""The loss at the start is higher than that of a uniform guess over all tokens, or almost 0.

## What it sees
The first records' loss (SFT, nats per token) is above ln(vocabulary) by `margin`; without a known
vocabulary, above that of the largest that is in use. It is only information once the loss has come
down to `usual`, because training has cured whatever was wrong; and if nothing shows that the loss
is that of a language model: neither a metric of tokens, nor the framework together with a loss of
little noise (`smooth`). A loss that is logged beside its parts is their sum, and is not judged: two
or more other losses add up to it or more, and one of them is below the limit. The other side: in a
log with a metric of tokens that begins at the run's start, the loss lies below `nothing` from the
second record on, and no teacher or KL is logged or set.

## Why it matters
A pretrained model begins with a loss between 0.5 and 4. A loss above that of guessing means that
the model makes confident but wrong predictions: the wrong tokenizer or template, shifted labels,
weights that were loaded to the wrong places, or a loss that is summed and not averaged. A loss of
almost 0 at once means that nothing is left to predict: only tokens that never change are trained,
or the answer stands in the input.

## Likely causes
- loss-not-normalised-by-grad-accum: above `summed`, or where the model predicts a share of `right`
  of the tokens rightly, the loss is rather a sum than a mean; see LRN012, which knows it for sure.
- weights-not-loaded: weights were loaded to the wrong places.
- chat-template-mismatch: the rows have tokens that this model was never trained on.
- trained-share-tiny: (almost 0) the labels cover only a few tokens that never change.

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

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed, raw_number
from homeostat.health.series.medians import median
from homeostat.health.series.noise import beside_trend
from homeostat.health.view import Kind, RunView, Series

_LARGEST = 262_144
# Words of metrics and settings that only language models have, and those of distances to a teacher.
_OF_TOKENS = ("token", "perplex", "ppl", "vocab", "bpb")
_OF_TEACHERS = ("teacher", "distil", "kl", "jsd", "gkd")


class Options(RuleOptions):
    margin: float = option(0.7, "Nats above guessing that are let pass.")
    min_records: int = option(3, "Number of records that are needed.")
    usual: float = option(4.0, "Loss of a pretrained model, in nats, at most.")
    nothing: float = option(0.01, "Loss, in nats per token, at which nothing is to be learned.")
    smooth: float = option(0.08, "Noise of a mean over many tokens, as a share of the loss.")
    summed: float = option(40.0, "Nats above which the loss can hardly be a mean over tokens.")
    right: float = option(0.4, "Share of rightly predicted tokens at which the mean is below that.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    loss = needed(view, "train/loss")
    # In a log of few records the fifth one tells what training has made of it.
    few = max(3, min(5, len(loss.finite()) // 4))
    head = loss.finite().head(few)
    if len(head) < options.min_records or view.setting("model.init") == "random":
        return
    vocabulary = raw_number(view, "vocab_size") or view.facts.get("vocab_size") or _LARGEST
    limit = math.log(vocabulary) + options.margin
    start = median(head.values)
    if _is_nothing(view, loss.finite(), options):
        yield _nothing(head, options)
        return
    if start <= limit or _is_sum(view, start, limit):
        return
    is_over = median(loss.finite().tail(few).values) <= options.usual
    yield Sighting(
        level=Level.INFO if is_over or not _is_of_tokens(view, options) else Level.WARN,
        message=f"The loss begins at {start:.4g}; guessing gives {limit - options.margin:.3g} at "
        f"most: {_meaning(view, options)}",
        evidence=(f"train/loss {', '.join(f'{v:.4g}' for v in head.values[:3])} at the start",),
        causes=tuple(_causes(view, start, options)),
        fixes=(
            Fix("model.chat_template", "the model's own", "tokens that the model was trained on"),
            Fix("model.tokenizer", "the model's own", "ids that mean what the weights learned"),
        ),
        first_step=int(head.steps[0]),
        last_step=int(head.steps[-1]),
        value=start,
        limit=limit,
    )


def _is_nothing(view: RunView, loss: Series, options: Options) -> bool:
    """Return whether a language model's loss is almost 0 from the run's second record on."""
    early = loss.values[1:9]
    if len(early) < 5 or loss.steps[0] > 10 * median(np.diff(loss.steps)):
        return False  # too few records, or the log begins amid a run
    # An exact 0 is a loss without labels: see DAT001.
    if not 0.0 < early.min() <= early.max() < options.nothing:
        return False
    known = _names(view)
    return any(word in known for word in _OF_TOKENS) and not any(w in known for w in _OF_TEACHERS)


def _nothing(head: Series, options: Options) -> Sighting:
    return Sighting(
        message=f"The loss is {median(head.values[1:]):.2g} from the second record on, and a "
        "pretrained model begins between 0.5 and 4: nothing is left to predict. Look at a row with "
        "its labels: do they cover the answers, and is the answer not part of the input?",
        evidence=(f"train/loss {', '.join(f'{v:.4g}' for v in head.values[:3])} at the start",),
        causes=(
            Cause("trained-share-tiny", "the labels may cover only tokens that never change"),
            Cause("initial-loss-implausible", "no model knows its new rows by heart"),
        ),
        fixes=(Fix("data.train", "rows whose answers are trained", "look at them first"),),
        first_step=int(head.steps[0]),
        last_step=int(head.steps[-1]),
        value=median(head.values[1:]),
        limit=options.nothing,
    )


def _names(view: RunView) -> str:
    return " ".join((*view.metrics, *view.raw_settings)).lower()


def _is_of_tokens(view: RunView, options: Options) -> bool:
    """Return whether the log is known to be a language model's. Other losses may have any size.

    That is a log with a metric of tokens, or of a framework that trains such models, whose loss is
    a mean over so many tokens that neighbours hardly differ; the squared errors of a few rows do.
    """
    names = _names(view)
    if any(word in names for word in _OF_TOKENS):
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


def _share_right(view: RunView) -> float:
    """Return the share of tokens that the model held most likely at the start; 0 if not logged."""
    share = view.series("train/token_accuracy")
    return median(share.finite().head(5).values) if share is not None else 0.0


def _meaning(view: RunView, options: Options) -> str:
    share = _share_right(view)
    if share >= options.right:
        return (
            f"yet the model holds {share:.0%} of the tokens most likely, so the loss is a sum and "
            "not a mean. Check what it is divided by, and update the library."
        )
    return (
        "the model is confident and wrong. Score a plain text with the model, then check the "
        "template, the labels and the checkpoint."
    )


def _causes(view: RunView, start: float, options: Options) -> Iterator[Cause]:
    share = _share_right(view)
    if start > options.summed or share >= options.right:
        why = "no mean over tokens is that high: a sum over accumulated batches or rows"
        if share >= options.right:
            why = f"{share:.0%} of the tokens are predicted rightly: a sum over accumulated batches"
        yield Cause("loss-not-normalised-by-grad-accum", why)
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
