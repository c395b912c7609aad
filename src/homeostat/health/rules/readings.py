"""Readings of a view that several rules share: settings, and how a series began and ended.

All are pure functions. They return None for what is not known, never a guess: "no adapter" and
"nothing is said of an adapter" are different answers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from homeostat.health.series.medians import median
from homeostat.health.series.noise import between_neighbours
from homeostat.health.view import Kind, RunView, Series, flat_settings

# Rates that guides and papers train with: (lowest, highest), by kind of run and adapter.
_RATES = {
    (Kind.SFT, False): (1e-5, 5e-5),
    (Kind.SFT, True): (1e-4, 3e-4),
    (Kind.RL, False): (1e-7, 2e-6),
    (Kind.RL, True): (1e-6, 1e-4),
    (Kind.PREFERENCE, False): (1e-7, 5e-6),
    (Kind.PREFERENCE, True): (5e-7, 5e-5),
    (Kind.REWARD_MODEL, False): (1e-6, 2e-5),
    (Kind.REWARD_MODEL, True): (1e-5, 3e-4),
}
_MOE_NAME = re.compile(r"moe|mixtral|\db-a\d|deepseek-?v[23]|kimi-?k2|moonlight|gpt-oss", re.I)
# Choices of our own settings that a model without experts refuses.
_MOE_CHOICES = ("aux", "sequence_aux", "bias", "ids", "weights")
# Sections of settings that are about an evaluation.
_OF_EVALUATION = frozenset({"eval", "evaluation", "val_kwargs", "validation"})
# Bytes of weights below which a model is a toy.
_TINY = 200e6
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_DTYPES = (
    ("bf16", ("bf16", "bfloat16")),
    ("fp16", ("fp16", "float16", "half", "16-true", "16-mixed")),
    ("fp32", ("fp32", "float32", "32-true")),
)
# Lines that trainers in fp16 log: only fp16 needs a loss scale.
_SAYS_FP16 = (
    "using 16bit automatic mixed precision",
    "attempted loss scale",
    "reducing loss scale",
    "reducing to loss scale",
    "mixed precision: fp16",
    "mixed_precision: fp16",
    "dtype: float16",
    "dtype: torch.float16",
    "in float16 precision",
    "torch_dtype=torch.float16",
    "bfloat16 is not supported on this gpu && float16",
)
_SAYS_MASKED = (
    "could not find response key",
    "could not find instruction key",
    "will be ignored in loss calculation",
    "all labels in your dataset are -100",
    "all labels are -100",
    "labels are all -100",
    "contains only -100",
    "all labels are masked",
    "every label is masked",
    "no trainable tokens",
    "no unmasked tokens",
    "every token is masked",
)


@dataclass(frozen=True, slots=True)
class Rates:
    """The band of usual learning rates, and what it was chosen by."""

    low: float
    high: float
    what: str


def needed(view: RunView, *names: str) -> Series:
    """Return a series that the rule's `needs` guarantees."""
    found = view.series(*names)
    assert found is not None, f"needs must say {names}"
    return found


def mean_since(view: RunView, *names: str, step: int) -> float | None:
    """Return the mean of a metric's finite values from a step on; None if there are none.

    The metric is the first of `names` that was logged.
    """
    series = view.series(*names)
    return _mean(series.since(step)) if series is not None else None


def mean_before(view: RunView, *names: str, step: int) -> float | None:
    """Return the mean of a metric's finite values before a step; None if there are none."""
    series = view.series(*names)
    return _mean(series.before(step)) if series is not None else None


def _mean(series: Series) -> float | None:
    values = series.finite().values
    return float(values.mean()) if len(values) else None


def ends(series: Series, *, share: float = 0.25) -> tuple[float, float]:
    """Return the medians of the first and last part of a series, of at least two values each."""
    count = max(2, int(len(series) * share))
    return median(series.values[:count]), median(series.values[-count:])


def rank_correlation(series: Series) -> float:
    """Return the rank correlation with time: 1 always rises, -1 always falls, 0 is constant.

    Equal values have equal ranks: a metric that fell to its floor and stays there has not risen.
    """
    return series.once(_rank_correlation)


def _rank_correlation(series: Series) -> float:
    values = series.finite().values
    if len(values) < 3 or np.ptp(values) == 0:
        return 0.0
    places = np.arange(len(values), dtype=np.float64)
    _, of_value, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - 0.5 * (counts + 1))[of_value]
    return float(np.corrcoef(places, ranks)[0, 1])


# Values that must be there to tell rounding.
_MIN_ROUNDED = 10
_MOST_DECIMALS = 20


def is_flat(series: Series, *, sigmas: float = 2.0) -> bool:
    """Return whether end and beginning differ by no more than the noise of their means."""
    finite = series.finite()
    if len(finite) < 6:
        return False
    half = len(finite) // 2
    first, last = finite.values[:half], finite.values[-half:]
    error = between_neighbours(finite.values) * (2 / half) ** 0.5
    return abs(float(last.mean() - first.mean())) <= sigmas * error


def prints_zero(view: RunView, name: str) -> bool:
    """Return whether a 0 of this metric may be a small number printed with few decimals."""
    decimals = view.decimals.get(name)
    return decimals is not None and decimals < 4


def is_rounded(view: RunView, name: str, scale: float) -> bool:
    """Return whether a metric was printed with too few decimals for values of this size."""
    decimals = view.decimals.get(name)
    if decimals is None:
        decimals = _seen_decimals(view.series(name))
    return decimals is not None and 0.5 * 10.0**-decimals > 1e-3 * scale


def _seen_decimals(series: Series | None) -> int | None:
    """Return the decimals to which values were rounded before they were logged, if it shows.

    It shows where all are multiples of one power of ten, and neighbours are equal now and then
    while the others change. Neighbours that are both 0 tell nothing: a schedule may have ended.
    """
    values = series.finite().values if series is not None else np.zeros(0)
    sizes = np.abs(values[values != 0])
    if len(sizes) < _MIN_ROUNDED:
        return None
    decimals = round(-math.log10(sizes.min()))
    if not 0 <= decimals <= _MOST_DECIMALS or sizes.max() > 1e12 * sizes.min():
        return None
    counts = sizes * 10.0**decimals
    changes = np.diff(values)[(values[1:] != 0) | (values[:-1] != 0)] != 0
    is_even = bool(np.all(np.abs(counts - np.round(counts)) < 1e-6 * counts))
    return decimals if is_even and 0.2 < float(changes.mean()) < 0.9 else None


def broken(view: RunView) -> Series | None:
    """Return a series over the records of loss and gradient norm; None if there are none.

    It is 1 where one of them is not finite, or is a 0 that a trainer printed in place of NaN.
    """
    parts = [view.series(name) for name in ("train/loss", "train/policy_loss", "grad_norm")]
    # Any further series that is called the loss, because our name may belong to another one.
    parts += [view.series(name) for name in ("loss", "raw/loss", "loss train")]
    found = [part for part in parts if part is not None]
    if not found:
        return None
    steps = found[0].steps
    if not all(np.array_equal(part.steps, steps) for part in found):
        steps = np.unique(np.concatenate([part.steps for part in found]))
    bad = np.zeros(len(steps))
    for part in found:
        if part.finite() is not part:
            bad[np.searchsorted(steps, part.steps)] += ~np.isfinite(part.values)
    loss = parts[0]
    if view.kind is Kind.SFT and loss is not None and bad.any():
        # Trainers that filter NaN out of their means print it as 0.
        bad[np.searchsorted(steps, loss.steps)] += loss.values == 0
    return Series(steps, np.minimum(bad, 1.0))


def raw(view: RunView, *names: str) -> Any:
    """Return a setting by its framework's own name, given whole or by its last parts.

    Dashes count as underscores. None if it is not set. Settings of an evaluation are ignored,
    because it may sample otherwise than training does.
    """
    known = view.once_of_settings(_by_last_parts)
    return next((known[name] for name in names if name in known), None)


def _by_last_parts(_: Mapping[str, Any], raw_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of training by their names, whole and without any of the first parts.

    Where several have the same last parts, the first of them that is set counts.
    """
    known = {
        name.lstrip("-").replace("-", "_").lower(): value
        for name, value in flat_settings(raw_settings)
    }
    found: dict[str, Any] = {}
    for name, value in known.items():
        parts = name.split(".")
        if value is not None and _OF_EVALUATION.isdisjoint(parts):
            for start in range(len(parts)):
                found.setdefault(".".join(parts[start:]), value)
    return found


def raw_number(view: RunView, *names: str) -> float | None:
    found = raw(view, *names)
    if isinstance(found, bool) or not isinstance(found, int | float | str):
        return None
    try:
        return float(found)
    except (ValueError, OverflowError):
        return None


def is_true(value: Any) -> bool:
    return str(value).lower() in _TRUE


def is_false(value: Any) -> bool:
    return str(value).lower() in _FALSE


def has_adapter(view: RunView) -> bool | None:
    """Return whether an adapter is trained in place of all weights; None if nothing says."""
    rank = view.number("lora.rank")
    if rank is not None:
        return rank > 0
    kind = str(raw(view, "train_type", "tuner_type", "finetuning_type", "adapter", "use_peft"))
    if kind.lower() in ("full", "false"):
        return False
    if kind.lower() in ("lora", "qlora", "dora", "true"):
        return True
    if view.once_of_settings(_sets_adapter):
        return True
    if view.framework.name == "homeostat" and view.settings:
        return False
    return None


def _sets_adapter(_: Mapping[str, Any], raw_settings: Mapping[str, Any]) -> bool:
    for name, value in flat_settings(raw_settings):
        *parts, last = name.lower().split(".")
        if (last.startswith("lora") or "peft" in parts) and value and not is_false(value):
            return True
    return False


def peak_rate(view: RunView) -> float | None:
    """Return the learning rate that was set, or else the largest that was used."""
    asked = view.number("trainer.lr")
    used = view.series("learning_rate")
    if asked is not None or used is None:
        return asked
    finite = used.finite().values
    return float(finite.max()) if len(finite) else None


def usual_rates(view: RunView) -> Rates | None:
    """Return the learning rates that are usual for such a run.

    None for a model that starts from random weights or is so small that no guide is about it.
    """
    if view.setting("model.init") == "random" or view.kind is Kind.UNKNOWN or is_tiny(view):
        return None
    adapter = has_adapter(view)
    low, high = _RATES[view.kind, bool(adapter)]
    if adapter is None:
        low, high = _RATES[view.kind, False][0], _RATES[view.kind, True][1]
    what = {True: "an adapter", False: "a whole model", None: "such a run"}[adapter]
    return Rates(low, high, what)


def is_tiny(view: RunView) -> bool:
    """Return whether the model is known to be far smaller than those that guides are about."""
    loaded = view.events_of("model_loaded")
    size = loaded[-1].fields.get("bytes") if loaded else view.facts.get("model_bytes")
    return isinstance(size, int | float) and size < _TINY


def is_climbing(view: RunView) -> bool:
    """Return whether the learning rate still rises at the end of the log, as in a warm-up."""
    rates = view.series("learning_rate")
    rates = rates.finite() if rates is not None else None
    if rates is None or len(rates) < 2 or rates.latest <= rates.values[-2]:
        return False
    return rates.latest >= float(rates.values.max())


def precision(view: RunView) -> str:
    """Return fp16, bf16 or fp32, or "" if nothing says."""
    said = str(view.setting("trainer.precision", default="")).lower()
    for name in ("fp16", "bf16"):
        if is_true(raw(view, name, f"{name}.enabled", f"{name}_enabled")):
            return name
    kind = str(raw(view, "dtype", "torch_dtype", "mixed_precision", "precision") or said).lower()
    for text in (said, kind):
        if text in ("16", "32"):
            return f"fp{text}"
        for name, spellings in _DTYPES:
            if any(spelling in text for spelling in spellings):
                return name
    return "fp16" if view.log.has(*_SAYS_FP16) else ""


def labels_masked(view: RunView) -> bool:
    """Return whether the log says that rows have no label, and nothing was ever learned."""
    loss = view.series("train/loss")
    learned = loss is not None and bool(np.any(np.isfinite(loss.values) & (loss.values != 0)))
    return loss is not None and not learned and view.log.has(*_SAYS_MASKED)


def is_moe(view: RunView) -> bool:
    """Return whether the model has experts, by its metrics, its settings or its name."""
    if any(name.startswith("moe/") for name in view.metrics):
        return True
    own = [view.setting(f"model.moe.{name}") for name in ("balancing", "router_replay")]
    if any(str(value) in _MOE_CHOICES for value in own):
        return True
    return view.once_of_settings(_sets_experts)


def _sets_experts(settings: Mapping[str, Any], raw_settings: Mapping[str, Any]) -> bool:
    for name, value in flat_settings({**raw_settings, **settings}):
        last = name.lower().replace("-", "_").rsplit(".", 1)[-1]
        named = "model" in name.lower() or last in ("path", "hf_checkpoint")
        if named and isinstance(value, str) and _MOE_NAME.search(value):
            return True
        if last in ("num_experts", "expert_model_parallel_size") and str(value) not in ("0", "1"):
            return True
        if last in ("use_rollout_routing_replay", "use_r3"):
            return True
    return False
