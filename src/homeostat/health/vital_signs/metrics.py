"""Judge the vital metrics of a run: which are not finite, zero, frozen, or no longer logged.

vital        the loss; the gradient norm; in RL the reward; in preference training the margin
zero         exactly 0 from the first record on, where that cannot be right
frozen       exactly the same number in many records in a row: no optimizer causes that
gone         logged at first, then no longer, while other metrics still are
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView, Series

# Number of records that must be exactly equal before a metric counts as frozen or zero.
MIN_FROZEN = 10
MIN_ZERO = 3
# A metric is not judged as frozen if a unit of its last decimal exceeds this share of its value.
# With at most this many decimals, a slow fall may not show.
_COARSE, _FEW_DECIMALS = 0.004, 5
# A metric counts as gone after this many records of other metrics without it.
MIN_GONE = 8
LOSSES = ("train/loss", "train/policy_loss")
# Metrics that must be finite at every step.
_FINITE = (*LOSSES, "grad_norm", "reward", "kl", "entropy", "eval/loss")
# Metrics that are logged at every step or never.
_STEADY = (*LOSSES, "grad_norm", "reward", "kl", "entropy", "completions/mean_length",
           "preference/margin")  # fmt: skip


def vital_names(kind: Kind) -> tuple[str, ...]:
    """Return the vital metrics of a run of this kind, most informative first."""
    return {
        Kind.RL: ("reward", "train/loss", "grad_norm"),
        Kind.PREFERENCE: ("train/loss", "preference/margin", "grad_norm"),
        Kind.REWARD_MODEL: ("train/loss", "reward_model/accuracy", "grad_norm"),
    }.get(kind, ("train/loss", "grad_norm"))


def vital_series(view: RunView, name: str) -> Series | None:
    """Return a vital metric. If the loss is not logged, the policy's loss takes its place."""
    return view.series(*LOSSES) if name == "train/loss" else view.series(name)


def not_finite(view: RunView) -> Iterable[str]:
    """Return metrics that are NaN or infinite now: in the newest record, and in two of the last
    four.

    Some trainers log NaN for a reward function that does not apply to a batch, so the mean of a
    single reward function counts only if it is infinite. Standard deviations do not count, because
    a single sample has none.
    """
    for name in _FINITE:
        series = view.series(name)
        if series is not None and _is_bad_now(~np.isfinite(series.values)):
            yield name
    for name, series in view.matching("rewards/", "/mean").items():
        if _is_bad_now(np.isinf(series.values)):
            yield f"rewards/{name}/mean"


def _is_bad_now(bad: np.ndarray) -> bool:
    return bool(bad[-1]) and (len(bad) == 1 or int(bad[-4:].sum()) >= 2)


def zero(view: RunView) -> Iterable[str]:
    """Return vital metrics that are exactly 0 from the first record on.

    In RL only the gradient norm is checked, because GRPO's loss is printed as 0 by construction.
    """
    names = ["grad_norm"]
    if view.kind is not Kind.RL:
        names += [*LOSSES, "train/token_accuracy"]
    for name in names:
        series = view.series(name)
        least = MIN_ZERO if name in LOSSES else 5
        if series is None or len(series) < least or view.decimals.get(name, 9) < 4:
            continue
        if series.values.any() or _is_rate_zero(view, int(series.steps[0])):
            continue
        if name == "train/token_accuracy" and _has_gradients(view):
            # The accuracy may be 0 early in training. If every label were masked, there would be no
            # gradient.
            continue
        yield name


def _has_gradients(view: RunView) -> bool:
    norms, loss = view.series("grad_norm"), view.series("train/loss")
    if norms is None or loss is None:
        return False
    return bool((norms.finite().values > 0).any() and (loss.finite().values > 0).any())


def zero_since(view: RunView) -> int | None:
    """Return the first step from which the loss is exactly 0 after ordinary values; None if none.

    Some trainers print a loss that is not finite as 0. Runs of RL are not judged.
    """
    loss = view.series("train/loss")
    if view.kind is Kind.RL or loss is None or view.decimals.get("train/loss", 9) < 4:
        return None
    alive = np.flatnonzero(loss.values != 0.0)
    if not len(alive) or len(loss) - 1 - int(alive[-1]) < 5 or not loss.values[alive[-1]] > 0.3:
        return None
    return int(loss.steps[alive[-1] + 1])


def _is_rate_zero(view: RunView, step: int) -> bool:
    rates = view.series("learning_rate")
    return rates is not None and not rates.since(step).values.any()


def frozen(view: RunView) -> Iterable[str]:
    """Return losses that are the same non-zero number in the newest records, unless the rate is 0.

    Gradient norms are not checked, because some trainers print them after clipping.
    """
    for name, least in (("train/loss", MIN_FROZEN), ("eval/loss", 4)):
        series = view.series(name)
        if series is None or len(series) < least or view.decimals.get(name, 9) < 3:
            continue
        newest = series.values[-least:]
        # With few digits, a value may repeat by chance, so more equal records are needed.
        if _digits(newest) < 4:
            newest = series.values[-2 * least :]
        elif name == "eval/loss" and _is_settled(series.values, view.decimals.get(name)):
            newest = series.values[-MIN_FROZEN:]
        if len(newest) < least or newest[-1] == 0.0 or not np.isfinite(newest).all():
            continue
        if _is_coarse(series.values, view.decimals.get(name)):
            continue
        if _digits(newest) < 4 and len(newest) < 2 * least:
            continue
        if float(np.ptp(newest)) != 0.0 or _is_carried_forward(series.values):
            continue
        if not _is_rate_zero(view, int(series.steps[-least])):
            yield name


def _is_carried_forward(values: FloatArray64) -> bool:
    """Return whether every value is repeated until the next one is known, as at other places.

    Loops that write a row per step, but learn the loss every tenth step, repeat it in between.
    """
    starts = np.flatnonzero(np.diff(values, prepend=np.nan) != 0.0)
    held = np.diff(starts, append=len(values))
    return len(held) > 2 and int(held[-1]) <= 1.5 * median(held[:-1])


def _is_coarse(values: FloatArray64, decimals: int | None) -> bool:
    """Return whether one unit of the last decimal is a large part of the newest value.

    A loss that converges then prints the same number again and again.
    """
    return 10.0 ** -_decimals(values, decimals) > _COARSE * abs(float(values[-1]))


def _is_settled(values: FloatArray64, decimals: int | None) -> bool:
    """Return whether a loss with few decimals has changed before: it may repeat near its end."""
    return float(np.ptp(values)) > 0.0 and _decimals(values, decimals) <= _FEW_DECIMALS


def _decimals(values: FloatArray64, known: int | None) -> int:
    """Return the number of decimals that were printed; if unknown, the most that any value has."""
    if known is not None:
        return known
    newest = values[-200:][np.isfinite(values[-200:])]
    if bool(np.all(newest == newest.astype(np.float32))):
        # Event files hold 32-bit numbers, whose decimals show only in that precision.
        newest = newest.astype(np.float32)
    texts = (np.format_float_positional(v, trim="-") for v in newest)
    return max((len(text.partition(".")[2]) for text in texts), default=0)


def _digits(values: FloatArray64) -> int:
    """Return the number of significant digits of the newest value as printed."""
    return len(f"{values[-1]:.9g}".replace(".", "").replace("-", "").strip("0"))


def ends_not_finite(view: RunView) -> Iterable[str]:
    """Return vital metrics whose newest value is not finite, even if it is a single one.

    A summary at the end of a run also counts, because trainers print the mean loss there.
    """
    for name in _FINITE:
        series = view.series(name)
        if series is not None and not np.isfinite(series.latest):
            yield name
    for name, series in view.metrics.items():
        # A loss under an unknown name must be finite, too.
        if name not in _FINITE and "loss" in name.lower() and len(series):
            if _is_bad_now(~np.isfinite(series.values)):
                yield name
    for name, value in view.facts.get("summary", {}).items():
        if name.endswith("loss") and not np.isfinite(value):
            yield f"{name} of the whole run"


def gone(view: RunView) -> Iterable[tuple[str, int]]:
    """Return metrics that are no longer logged, each with its last step.

    Other metrics must continue, because a run that ends stops logging all of them.
    """
    steady = {name: one for name in _STEADY if (one := view.series(name)) is not None}
    newest = max((one.steps[-1] for one in steady.values()), default=0)
    for name, one in steady.items():
        if len(one) < MIN_GONE or one.steps[-1] == newest:
            continue
        gaps = np.diff(one.steps)
        # A metric that is logged irregularly may be due later than the usual interval.
        interval = max(median(gaps), 2.0 * float(gaps.max()) / MIN_GONE)
        others = [len(other.since(int(one.steps[-1]) + 1)) for other in steady.values()]
        if max(others) >= MIN_GONE and newest - one.steps[-1] >= MIN_GONE * interval:
            yield name, int(one.steps[-1])
