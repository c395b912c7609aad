"""Overfitting without a rise (for LRN001): held-out rows gain nothing, training rows do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.health.finding import Cause, Fix, Grade, Sighting
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series

# Evaluations that are needed, and the share of them after which held-out rows gain nothing.
_LEAST, _EARLY = 8, 0.4
# Gain of a held-out loss, as a share, and of an accuracy, that is none.
_NO_GAIN, _NO_POINTS = 0.01, 0.01
# What is left of the training loss: as a share of what it was then, and of the held-out loss.
_LEFT = 0.4
# Training loss as a share of the held-out loss at which the rows are known by heart.
_BY_HEART = 0.1
_STILL_HIGH = 0.3
# Lead of the training accuracy over the held-out one, and its own growth, that are large.
_LEAD, _GROWTH = 0.2, 0.05


def memorised(view: RunView, held: Series, train: Series) -> Iterator[Sighting]:
    """Report that only the training rows are still learned. Stop at the first sign."""
    if len(held) < _LEAST:
        return
    turn = int(_EARLY * len(held))
    step = int(held.steps[turn])
    then, now = (
        _level_at(train, step, len(held)),
        median(train.tail(max(3, len(train) // 8)).values),
    )
    best, later = float(held.values[:turn].min()), float(held.values[turn:].min())
    is_stalled = later >= best * (1.0 - _NO_GAIN)
    evidence = (
        f"eval/loss at best {best:.4g} until step {step}, {later:.4g} since",
        f"train/loss {then:.4g} -> {now:.4g} since then",
    )
    scores = _scores(view)
    if is_stalled and 0.0 < now < _LEFT * min(then, held.latest):
        fell = f"while training loss fell from {then:.4g} to {now:.4g}"
        what = f"Evaluation loss has gained nothing since step {step}, {fell}"
        yield _sighting(view, held, step, what, evidence)
    elif scores is not None and is_stalled and now < then:
        yield from _by_scores(view, held, *scores)
    elif 0.0 < now < min(_BY_HEART, _BY_HEART * held.latest) and held.latest > _STILL_HIGH:
        losses = f"training loss is {now:.3g}, and evaluation loss {held.latest:.3g}"
        what = f"The training rows are known by heart ({losses})"
        yield _sighting(view, held, int(train.steps[0]), what, evidence)


def _level_at(train: Series, step: int, evaluations: int) -> float:
    """Return the training loss at a step: the median of about one evaluation's records."""
    before = train.before(step + 1)
    return median((before if len(before) else train).tail(max(3, len(train) // evaluations)).values)


def _scores(view: RunView) -> tuple[FloatArray64, Series] | None:
    """Return training and held-out accuracy as shares of 1, if there are enough of them."""
    train, held = view.series("train/accuracy"), view.series("eval/score/accuracy")
    if train is None or held is None:
        return None
    train, held = train.finite(), held.finite()
    if len(train) < _LEAST or len(held) < _LEAST:
        return None
    unit = 100.0 if max(float(train.values.max()), float(held.values.max())) > 1.5 else 1.0
    return train.values / unit, Series(held.steps, held.values / unit)


def _by_scores(
    view: RunView, held_loss: Series, train: FloatArray64, held: Series
) -> Iterator[Sighting]:
    turn = int(_EARLY * len(held))
    count = max(3, len(train) // 8)
    last = median(train[-count:])
    then = median(train[int(_EARLY * len(train)) :][:count])
    best, later = float(held.values[:turn].max()), float(np.median(held.values[turn:]))
    if later - best > _NO_POINTS or last - later < _LEAD or last - then < _GROWTH:
        return
    yield _sighting(
        view,
        held_loss,
        int(held.steps[turn]),
        f"The accuracy on training rows grew from {then:.1%} to {last:.1%}, that on held-out rows "
        f"stays at {later:.1%}",
        (f"eval/score/accuracy at best {best:.1%} until step {int(held.steps[turn])}",),
    )


def _other_cause(view: RunView) -> Cause:
    if view.kind is Kind.PREFERENCE:
        return Cause("preference-labels-noise", "labels by chance can only be learned by heart")
    return Cause("data-repeated", "if the same rows are passed over many times")


def _sighting(
    view: RunView, held: Series, since: int, what: str, evidence: tuple[str, ...]
) -> Sighting:
    lowest = int(held.steps[int(np.argmin(held.values))])
    return Sighting(
        message=f"{what}: the run overfits. More passes teach nothing that carries over; the "
        f"evaluation was best at step {lowest}.",
        evidence=evidence,
        causes=(Cause("overfitting", "only the training rows get better"), _other_cause(view)),
        fixes=(
            Fix("trainer.epochs", "1", "fewer passes over the same rows", Grade.UNSAFE),
            Fix("eval.patience", "3", "ends the run when evaluations stop improving", Grade.UNSAFE),
        ),
        first_step=since,
        last_step=int(held.steps[-1]),
        value=held.latest,
    )
