"""The loss says that the model learns, yet what it writes is wrong.

## What it sees
The evaluation loss is below `low_loss` nats per token, while the error rate of the texts that the
model writes (word or character errors, in percent) is above `wrong` in the last `evals`
evaluations. Error rates that are logged as a share are not judged: 0.9 may be 90 % or 0.9 %. It is
seen as well if a score of texts (BLEU, ROUGE, exact match, F1) is exactly 0 in all of `zeros`
evaluations or more, while the loss fell by half.

## Why it matters
The loss is computed with the right answer up to each token in sight; the score is computed from
what the model writes alone. If one is perfect and the other is not, one of them does not measure
what it is meant to. Training on does not help.

## Likely causes
- score-contradicts-loss: the labels can be seen in the input, so that the model copies them (they
  are shifted twice, or not at all, or begin with a token that the model adds itself), or the score
  is computed from other texts: another tokenizer, another language or task token, padding.

## What to do
Let the model write the answer to one row and print it beside the reference, both as tokens. If it
is sensible, look at the function of the score; if it repeats or ends at once, look at how labels
become the decoder's input.

## Known false alarms
None are known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import ends, needed
from homeostat.health.view import Kind, RunView, Series

_RATES = ("wer", "cer")
# Some misspell the first one.
_SCORE = re.compile(
    r"(?:^|[/_ .-])(?:(?:sacre)?bl(?:eu|ue)(?:[-_]?4)?|rouge[-_]?(?:[12l]|lsum)?|exact_match|em"
    r"|f1)$",
    re.IGNORECASE,
)


class Options(RuleOptions):
    low_loss: float = option(0.1, "Loss, in nats per token, at which hardly a token is mistaken.")
    wrong: float = option(50.0, "Error rate, in percent, of texts that are mostly wrong.")
    evals: int = option(2, "Evaluations in a row that must show it.")
    zeros: int = option(10, "Evaluations without a single point that show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    if (never := _never_scored(view, options)) is not None:
        yield never
        return
    rate = _error_rate(view)
    if rate is None:
        yield Unknown("no error rate of written texts is logged")
        return
    name, errors = rate
    loss, late = needed(view, "eval/loss").finite(), errors.tail(options.evals)
    if len(loss) < options.evals or len(late) < options.evals:
        return
    highest, lowest = float(loss.tail(options.evals).values.max()), float(late.values.min())
    if not 0.0 <= highest < options.low_loss or lowest <= options.wrong:
        return
    yield Sighting(
        message=f"Evaluation loss is {loss.latest:.2g}, as if every token were known, and {name} "
        f"is {errors.latest:.3g} % at step {int(errors.steps[-1])}: one of the two is not what it "
        "is meant to be. Let the model write one row and compare it with the reference, token by "
        "token: a sensible text points to the score, anything else to how labels become inputs.",
        evidence=(
            f"eval/loss {loss.first:.2g} -> {loss.latest:.2g}",
            f"{name} {errors.first:.3g} -> {errors.latest:.3g} %",
        ),
        causes=(
            Cause("score-contradicts-loss", "the labels may be visible to the model"),
            Cause("tokenizer-mismatch", "if texts are decoded with another tokenizer"),
        ),
        fixes=(Fix("data.train", "labels that the input does not hold", "look at one row first"),),
        first_step=int(late.steps[0]),
        last_step=int(late.steps[-1]),
        value=errors.latest,
        limit=options.wrong,
    )


def _never_scored(view: RunView, options: Options) -> Sighting | None:
    """Report a score of texts that is 0 at every evaluation, although the loss falls."""
    first, last = ends(needed(view, "eval/loss").finite())
    if not 0.0 < last < 0.5 * first:
        return None
    for name, series in view.metrics.items():
        score = series.finite()
        if _SCORE.search(name) and len(score) >= options.zeros and not score.values.any():
            said = f"{name} is exactly 0 in all {len(score)} evaluations, and the loss falls"
            return Sighting(
                message=f"{said} from {first:.3g} to {last:.3g}. Print a few texts of the model "
                "beside what is expected, as the score gets them.",
                evidence=(said,),
                causes=(
                    Cause("score-contradicts-loss", "the score gets other texts than it should"),
                    Cause("task-too-hard", "if the printed texts are merely wrong"),
                ),
                first_step=int(score.steps[0]),
                last_step=int(score.steps[-1]),
                value=0.0,
                limit=0.0,
            )
    return None


def _error_rate(view: RunView) -> tuple[str, Series] | None:
    """Return the error rate of held-out texts by its name in the log."""
    for name, series in view.metrics.items():
        part, _, last = name.replace("/", "_").rpartition("_")
        if last.lower() in _RATES and part.startswith(("eval", "val", "test")):
            found = series.finite()
            return (name, found) if len(found) else None
    return None


RULE = Rule(
    code="LRN031",
    name="score-contradicts-loss",
    family=Family.LEARNING,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("eval/loss",),
    kinds=(Kind.SFT,),
    options=Options,
)
