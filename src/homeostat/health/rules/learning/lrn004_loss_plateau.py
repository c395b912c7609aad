"""Training loss has stopped falling while it is still high.

## What it sees
Over the last half of at least `min_records` records the loss changed by less than its noise, it is
above `min_loss`, and it fell by less than `min_fall` in all. It is a warning if loss and accuracy
are those of guessing (ln(k) and 1/k for some number k of classes), or if the loss is above
`high_loss` and has moved by less than `no_fall` since the run began; also in a short run if the
loss is above `blind_loss`. A loss between `blind_loss` and `guessing_loss` at the end of a run is a
warning as well, if it fell by less than `small_fall`: knowing the frequencies of tokens alone gives
a lower loss. So is a loss that fell within the first `soon` share of the run and stands above
`unigram_loss` since. In a run of any length it is a warning if a held-out accuracy or F1 is one
number at all of `same_scores` evaluations or more, while the loss is above `guessed_loss` and
changed by less than `same_loss`: a classifier that gives every row the same answer.

## Why it matters
A run that does not learn costs as much as one that does.

## Likely causes
- lr-too-low: the rate is below what is usual for what is trained.
- lr-too-high: the rate is above what is usual, and what was learned before is destroyed.
- weight-decay-high-for-lora: the decay pulls the adapter back.
- loss-plateau: no particular cause is known; look at labels and masks next.

## What to do
Raise the rate 2 to 5 times; check that the trained tokens are the right ones (`homeostat inspect`);
use the usual weight decay of 0.01.

## Known false alarms
A model that is already good at the data: its loss is at its floor from the first step on. That is
why the finding is only information, unless the model guesses or is far from good.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import (
    ends,
    has_adapter,
    is_flat,
    needed,
    peak_rate,
    usual_rates,
)
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series

# How near to guessing, as a share, accuracy and loss are.
_CLOSE_ACCURACY, _CLOSE_LOSS = 0.1, 0.03
_HELD_SCORE = re.compile(
    r"^(?:eval|val|valid|validation|dev|test)(?:[/_ .-].*)?[/_ .-](?:acc|accuracy|f1)$",
    re.IGNORECASE,
)


class Options(RuleOptions):
    min_records: int = option(20, "Number of records that are needed.")
    min_loss: float = option(1.0, "Loss below which a plateau is a good end.")
    min_fall: float = option(0.05, "Fall in all, as a share, below which nothing was learned.")
    high_loss: float = option(3.0, "Loss that no trained model has.")
    no_fall: float = option(0.02, "Change in all, as a share, that is none.")
    few: int = option(10, "Number of records that are enough where the loss is beyond doubt.")
    blind_loss: float = option(8.0, "Loss of a language model that knows no token's frequency.")
    guessing_loss: float = option(13.0, "Loss of guessing among the tokens of a large vocabulary.")
    small_fall: float = option(0.15, "Fall in all, as a share, that is little from there.")
    unigram_loss: float = option(5.0, "Loss of a model that knows only how frequent tokens are.")
    soon: float = option(0.3, "Share of the run after which such a model has stopped learning.")
    same_scores: int = option(3, "Evaluations with one score that show a single answer.")
    good_score: float = option(0.95, "Score that a good model may have again and again.")
    same_loss: float = option(0.1, "Change in all, as a share, that a single answer leaves.")
    guessed_loss: float = option(0.25, "Loss below which a classifier does not guess.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    loss = needed(view, "train/loss")
    loss = loss.finite()
    if len(loss) < 2:
        return
    first, last = ends(loss)
    classes = _guessed_classes(view, last) if len(loss) >= options.min_records else None
    if classes is None and (told := _one_answer(view, loss, options)) is not None:
        yield told
        return
    if len(loss) < options.few:
        return
    late = loss.tail(len(loss) // 2)
    is_blind = _is_blind(view, loss, options)
    if (stuck := _stuck(loss, options)) is not None:
        yield _at_unigrams(view, loss, stuck, options)
        return
    if last > 1.1 * first or (first - last > options.min_fall * first and not is_blind):
        return
    if classes is None and not is_blind:
        if len(loss) < options.min_records or last < options.min_loss or not is_flat(late):
            return
    is_far = last > options.high_loss and abs(first - last) < options.no_fall * first
    is_ill = classes is not None or is_blind or (is_far and _is_whole(view, loss))
    causes = tuple(_causes(view))
    start = int(late.steps[0])
    advice = "Check that the trained tokens are the right ones, then raise the rate."
    evidence = [f"train/loss {first:.4g} -> {last:.4g} over {len(loss)} records"]
    if classes is not None:
        advice = f"The model guesses among {classes} classes: try another learning rate."
        evidence.append(f"ln({classes}) = {math.log(classes):.4g}, and the accuracy is 1/{classes}")
    yield Sighting(
        message=f"Training loss is {last:.4g} and has not moved since step {start} (it began at "
        f"{first:.4g}). {advice}",
        level=Level.WARN if is_ill else Level.INFO,
        evidence=tuple(evidence),
        causes=causes,
        fixes=(
            Fix("trainer.lr", "3 times it", "larger steps", Grade.UNSAFE),
            Fix(
                "trainer.optimizer.weight_decay", "0.01", "restrains the weights less", Grade.UNSAFE
            ),
        ),
        first_step=start,
        last_step=int(loss.steps[-1]),
        value=last,
        limit=first * (1 - (options.small_fall if is_blind else options.min_fall)),
    )


def _one_answer(view: RunView, loss: Series, options: Options) -> Sighting | None:
    """Report a classifier that gives every held-out row the same answer, at each evaluation."""
    found = next(_same_scores(view, options), None)
    if found is None:
        return None
    name, score = found
    first, last = ends(loss)
    if last < options.guessed_loss or abs(first - last) > options.same_loss * first:
        return None
    return Sighting(
        message=f"{name} is {score.latest:.6g} at all {len(score)} evaluations, and training loss "
        f"has hardly moved ({first:.4g} -> {last:.4g}): the model gives every row the same "
        "answer. Start again with another learning rate.",
        level=Level.WARN,
        evidence=(
            f"{name} {score.latest:.6g} {len(score)} times",
            f"train/loss {first:.4g} -> {last:.4g} over {len(loss)} records",
        ),
        causes=tuple(_causes(view)),
        fixes=(
            Fix("trainer.lr", "2e-5", "usual for a classifier on all weights", Grade.UNSAFE),
            Fix("trainer.schedule.warmup_share", "0.1", "a gentler start", Grade.UNSAFE),
        ),
        first_step=int(score.steps[0]),
        last_step=int(score.steps[-1]),
        value=last,
        limit=first * (1 - options.same_loss),
    )


def _stuck(loss: Series, options: Options) -> int | None:
    """Return the step since which a loss stands at what the frequencies of tokens alone give.

    It fell before, so the run began there and was not resumed.
    """
    start = int(options.soon * len(loss))
    if len(loss) - start < options.min_records or start < 3:
        return None
    since, last = loss.tail(len(loss) - start), ends(loss)[1]
    then = median(since.values[: max(3, len(since) // 10)])
    began = median(loss.values[:2])
    is_still = abs(then - last) < options.min_fall * then
    is_high = options.unigram_loss <= last < options.blind_loss
    return int(since.steps[0]) if is_still and is_high and began > 1.2 * last else None


def _at_unigrams(view: RunView, loss: Series, since: int, options: Options) -> Sighting:
    last = ends(loss)[1]
    return Sighting(
        message=f"Training loss fell to {last:.3g} and has stood there since step {since}: that "
        "is what a language model reaches by the frequencies of its tokens alone. It does not use "
        "the context. Look at attention masks, positions and the shift of the labels, then at the "
        "learning rate.",
        level=Level.WARN,
        evidence=(f"train/loss {loss.first:.4g} at first, {last:.4g} since step {since}",),
        causes=tuple(_causes(view)),
        fixes=(Fix("trainer.lr", "3 times it, or a third", "other steps", Grade.UNSAFE),),
        first_step=since,
        last_step=int(loss.steps[-1]),
        value=last,
        limit=options.unigram_loss,
    )


def _same_scores(view: RunView, options: Options) -> Iterator[tuple[str, Series]]:
    """Yield held-out scores that are one number at every evaluation, and not a round one.

    Few held-out rows often have the same score by chance: three decimals tell of them.
    """
    for name, series in view.metrics.items():
        if _HELD_SCORE.search(name) is None:
            continue
        score = series.finite()
        if len(score) < options.same_scores or float(np.ptp(score.values)) > 0:
            continue
        share = score.latest / (100.0 if score.latest > 1.0 else 1.0)
        if 0.0 < share < options.good_score and abs(share * 1e3 - round(share * 1e3)) > 1e-6:
            yield name, score


def _is_blind(view: RunView, loss: Series, options: Options) -> bool:
    """Return whether the loss is so high, and has moved so little, that nothing was learned.

    Such a loss is never that of a run which was resumed.
    """
    first, last = ends(loss)
    if last <= options.blind_loss:
        return False
    if abs(first - last) < options.no_fall * first:
        return True
    is_little = abs(first - last) < options.small_fall * first
    return is_little and last < options.guessing_loss and _is_whole(view, loss)


def _is_whole(view: RunView, loss: Series) -> bool:
    """Return whether the records are of a run from its beginning to well after its warm-up.

    The loss of a pretraining that was resumed is high and hardly moves, too.
    """
    epoch, total = view.series("epoch"), view.total_steps
    if total is not None:
        return int(loss.steps[0]) <= 0.1 * total and int(loss.steps[-1]) >= 0.5 * total
    return epoch is not None and epoch.first <= 0.1 and epoch.latest >= 0.5


def _guessed_classes(view: RunView, loss: float) -> int | None:
    """Return the number of classes that the model guesses among; None if it does not guess."""
    accuracy = view.latest("eval/score/accuracy")
    if accuracy is None or not 0.0 < accuracy <= 0.6:
        return None
    classes = round(1 / accuracy)
    is_chance = abs(accuracy * classes - 1) < _CLOSE_ACCURACY
    is_uniform = abs(loss / math.log(classes) - 1) < _CLOSE_LOSS if classes > 1 else False
    return classes if is_chance and is_uniform else None


def _causes(view: RunView) -> Iterator[Cause]:
    rate, usual = peak_rate(view), usual_rates(view)
    if rate is not None and usual is not None and rate < usual.low:
        yield Cause("lr-too-low", f"rate {rate:.2g}; {usual.what}: from {usual.low:.2g}")
    if rate is not None and usual is not None and rate > usual.high:
        yield Cause("lr-too-high", f"rate {rate:.2g}; {usual.what}: up to {usual.high:.2g}")
    decay = view.number("trainer.optimizer.weight_decay")
    if decay is not None and decay > 0.1 and has_adapter(view):
        yield Cause("weight-decay-high-for-lora", f"weight decay {decay:g} on an adapter")
    yield Cause("loss-plateau", "the loss does not move")


RULE = Rule(
    code="LRN004",
    name="loss-plateau",
    family=Family.LEARNING,
    level=Level.INFO,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("train/loss",),
    kinds=(Kind.SFT,),
    options=Options,
)
