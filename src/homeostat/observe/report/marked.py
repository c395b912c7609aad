"""Mark on the curves where a finding began and where a remedy was applied.

A finding belongs to the metrics that its evidence and its message name; if it names none, to those
of its family. A finding that belongs to no plot is marked on the run's main plot. Findings that
only inform are not marked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from homeostat.observe import ailments
from homeostat.observe.report.illnesses import Illness, Remedy
from homeostat.observe.report.marks import Mark
from homeostat.observe.report.plots import Plot, Section

MAX_MARKS = 60
_MAX_TEXT = 5000
# Words that stand for a metric in texts that do not give its name.
_SPOKEN: tuple[tuple[str, str], ...] = (
    (r"mean length", "completions/mean_length"),
    (r"clipped_ratio|are cut", "completions/clipped_ratio"),
    (r"distinct", "completions/distinct_share"),
    (r"groups", "frac_reward_zero_std"),
    (r"(?<![\w/])loss(?!\w)", "train/loss"),
    (r"grad(?:ient)?[ _]norm", "grad_norm"),
    (r"learning rate|(?<![\w.])lr(?!\w)", "learning_rate"),
    (r"log-?probs?(?!\w)", "sampling/sampling_logp_difference/mean"),
    (r"clip fraction|clip_ratio", "clip_ratio/high_mean"),
    (r"staleness|steps old", "stale/updates/mean"),
    (r"tokens per second|tokens/s", "throughput/tokens_per_s"),
)
# Metrics that the findings of a family are about.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "data": ("train/loss", "data/trained_share"),
    "numerics": ("train/loss", "grad_norm"),
    "learning": ("train/loss", "grad_norm"),
    "reward": ("reward",),
    "policy": ("entropy", "kl"),
    "offpolicy": ("sampling/sampling_logp_difference/mean", "sampling/ess"),
    "sync": ("sampling/sampling_logp_difference/mean", "sync/seconds"),
    "precision": ("sampling/sampling_logp_difference/mean",),
    "generation": ("completions/mean_length", "completions/clipped_ratio"),
    "memory": ("memory/max_alloc", "memory/host_rss"),
    "moe": ("moe/max_violation", "sampling/sampling_logp_difference/mean"),
    "performance": ("time/step", "throughput/tokens_per_s"),
    "distributed": ("time/step", "throughput/tokens_per_s"),
}
# Settings that have their own curve.
_SETTINGS = {"trainer.lr": "learning_rate", "algorithm.kl.coefficient": "kl_coefficient"}


def with_marks(
    sections: Iterable[Section], illnesses: Iterable[Illness], others: Iterable[Remedy]
) -> list[Section]:
    """Return the sections with marks on the plots that they belong to.

    `others` are remedies of findings that are no longer on record.
    """
    sections = list(sections)
    plots = [plot for section in sections for plot in section.plots]
    found: list[list[Mark]] = [[] for _ in plots]
    ill = [illness for illness in illnesses if illness.is_ill]
    for illness in ill[-MAX_MARKS:]:
        metrics = spoken_of(illness.finding, plots)
        _put(_mark(illness), plots, found, metrics=metrics)
        for remedy in illness.remedies[-MAX_MARKS:]:
            _put(_remedy_mark(remedy), plots, found, metrics=metrics | _changed(remedy))
    for remedy in list(others)[-MAX_MARKS:]:
        _put(_remedy_mark(remedy), plots, found, metrics=_changed(remedy))
    marked = iter([replace(p, marks=m) for p, m in zip(plots, found, strict=True)])
    return [replace(one, plots=[next(marked) for _ in one.plots]) for one in sections]


def spoken_of(finding: ailments.Record, plots: Iterable[Plot]) -> frozenset[str]:
    """Return the metrics of these plots that a finding is about."""
    drawn = frozenset(name for plot in plots for name in plot.metrics)
    evidence = finding.get("evidence")
    said = [str(finding.get("message", "")), *(evidence if isinstance(evidence, list) else [])]
    if named := _named(" | ".join(map(str, said))[:_MAX_TEXT].lower(), drawn):
        return named
    return frozenset(_FAMILIES.get(str(finding.get("family")), ())) & drawn


def _named(text: str, drawn: frozenset[str]) -> frozenset[str]:
    spoken = {metric for pattern, metric in _SPOKEN if re.search(pattern, text)}
    words = set(re.split(r"[^\w/@.-]+", text))
    return drawn & (spoken | {name for name in drawn if name.lower() in words})


def _put(
    mark: Mark, plots: list[Plot], found: list[list[Mark]], *, metrics: frozenset[str]
) -> None:
    fitting = [number for number, plot in enumerate(plots) if plot.metrics & metrics]
    main = [number for number, plot in enumerate(plots) if plot.size == "main"]
    for number in fitting or main:
        found[number].append(mark)


def _mark(illness: Illness) -> Mark:
    finding = illness.finding
    end = "" if illness.cleared is None else f" (over at step {illness.cleared:,})"
    text = f"step {illness.began:,}: {illness.level} {ailments.label_of(finding)}{end}: "
    message = ailments.short(finding.get("message", ""))
    label = ailments.short(finding["code"])[:12]
    return Mark(float(illness.began), label, f"{text}{message}", illness.level)


def _remedy_mark(remedy: Remedy) -> Mark:
    told = "; ".join(part for part in (remedy.text, remedy.sequel) if part)
    text = f"step {remedy.step:,}: {told}"
    return Mark(float(remedy.step), remedy.name[:16], text, "remedy")


def _changed(remedy: Remedy) -> frozenset[str]:
    """Return the curve of the setting that a remedy changed."""
    metric = _SETTINGS.get(str(remedy.applied.get("path")))
    return frozenset({metric}) if metric else frozenset()
