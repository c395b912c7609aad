"""Show the mismatch of engine and trainer, the age of tokens, and the effect of the correction.

    columns, events -> one line of text, always
                    -> plots, each only if it has something to show

A run whose engine differs only by rounding and is never behind gets only the line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from homeostat.observe import format as fmt
from homeostat.observe.report import chart_parts as parts
from homeostat.observe.report.facts import RunFacts
from homeostat.observe.report.plots import Line, Marker, Plot, Section
from homeostat.observe.report.series import Array, Series

Columns = dict[str, Series]

# Up to this limit a difference is rounding in float32 and changes no ratio by more than 0.01
# percent, so a plot of it would show noise.
CALM_NATS = 1e-4
# An effective sample size above this counts as the whole sample.
WHOLE_SHARE = 0.995
_DIFFERENCE = "sampling/sampling_logp_difference/"
_RATIO = "sampling/importance_sampling_ratio/"


def engine_section(facts: RunFacts, markers: list[Marker]) -> Section:
    """Return the section on the engine."""
    columns = facts.columns
    plots = [
        *(_difference_plots(facts, markers) if _is_apart(columns) else []),
        *_ess_plots(columns, markers),
        *_stale_plots(columns, markers),
        *_corrected_plots(columns, markers),
        *_sent_plots(columns, markers),
        Plot("Error against float64", "nats, largest of a check", _dots(columns, parts.labelled(
            columns, r"verify/([^/]+)/error_max")), prefer_log=True, markers=markers,
             about=parts.about("verify/engine/error_max")),
        Plot("Replayed against then", "nats, of log-probs", parts.many(columns, {
            "replay/logp_difference/max": "largest", "replay/logp_difference/mean": "mean"}),
             prefer_log=True, markers=markers, about=parts.about("replay/logp_difference/mean")),
    ]  # fmt: skip
    note = "the same tokens, computed twice"
    kind, checked = _last_check(facts)
    is_off = kind == "logprobs_off"
    text = engine_text(facts) if is_off else f"{engine_text(facts)} {checked}".strip()
    return Section("Engine and trainer", plots, note, text, alarm=checked if is_off else "")


def engine_text(facts: RunFacts) -> str:
    """Summarise the whole section in a line; nothing if the two were never compared."""
    told = [*_difference_text(facts.columns)]
    if told:
        told += [_corrected_text(facts.columns), *_stale_text(facts.columns)]
    told += _sent_text(facts)
    text = f"{', '.join(told)}." if told else ""
    return text[:1].upper() + text[1:]


def _last_check(facts: RunFacts) -> tuple[str, str]:
    """Return the newest verdict against float64: the event's kind and a sentence; else nothing."""
    for event in reversed(facts.events):
        if event["kind"] in ("logprobs_off", "logprobs_verified"):
            verdict = fmt.one_line(str(event.get("verdict", "unknown")))
            return event["kind"], f"Against float64 at step {event['step']:,}: {verdict}."
    return "", ""


def _difference_text(columns: Columns) -> Iterator[str]:
    largest = columns.get(f"{_DIFFERENCE}max")
    if largest is None:
        return
    broken = len(largest.y) - largest.finite.size
    if broken:
        yield f"difference not a number at {broken:,} of {len(largest.y):,} records"
    if largest.finite.size:
        top = float(largest.finite.max())
        exact = "not a bit of difference" if not broken else "else none"
        yield f"largest difference {top:.2g} nats" if top else exact


def _corrected_text(columns: Columns) -> str:
    found = [_values(columns, name) for name in parts.labelled(columns, r"correction/tokens/(.+)")]
    top = max((float(one.max()) for one in found if one.size), default=0.0)
    return f"up to {fmt.percent(top)} of the tokens corrected" if top else "nothing corrected"


def _stale_text(columns: Columns) -> Iterator[str]:
    steps, updates = (_values(columns, f"stale/{unit}/max") for unit in ("steps", "updates"))
    if steps.size and not steps.any():
        yield "always on-policy"
    elif steps.any():
        age = float((updates if updates.size else steps).max())
        yield f"sampled by weights up to {_counted(age, 'update' if updates.size else 'step')} old"


def _sent_text(facts: RunFacts) -> Iterator[str]:
    events = [event for event in facts.events if event["kind"] == "weights_published"]
    if not events:
        return
    sizes = {event.get("bytes") for event in events}
    size = sizes.pop() if len(sizes) == 1 else None
    each = f", {fmt.byte_size(size)} each" if isinstance(size, (int, float)) else ""
    yield f"weights sent {_counted(len(events), 'time')}{each}"


def _counted(count: float, noun: str) -> str:
    return f"{count:,.0f} {noun}{'' if count == 1 else 's'}"


def _is_apart(columns: Columns) -> bool:
    """Return whether the two ever differed by more than rounding, or by NaN."""
    found = [columns[name].y for name in (f"{_DIFFERENCE}max", f"{_DIFFERENCE}mean")
             if name in columns]  # fmt: skip
    return any(not (values <= CALM_NATS).all() for values in found)


def _difference_plots(facts: RunFacts, markers: list[Marker]) -> list[Plot]:
    columns = facts.columns
    difference = {f"{_DIFFERENCE}max": "largest", f"{_DIFFERENCE}mean": "mean"}
    ratios = {f"{_RATIO}max": "largest", f"{_RATIO}mean": "mean", f"{_RATIO}min": "smallest"}
    return [
        Plot("Difference", "nats, of log-probs", parts.many(columns, difference), prefer_log=True,
             markers=markers, about=parts.about(f"{_DIFFERENCE}mean")),
        Plot("Ratio", "trainer over engine, of a token", parts.many(columns, ratios),
             prefer_log=True, limit=_bound(facts), markers=markers,
             about=parts.about(f"{_RATIO}mean")),
        Plot("KL of trainer from engine", "nats per token, k3", parts.one(columns, "sampling/k3"),
             prefer_log=True, markers=markers, about=parts.about("sampling/k3")),
    ]  # fmt: skip


def _bound(facts: RunFacts) -> tuple[float, str] | None:
    """Return the upper bound of token weights, if there is one."""
    weight = facts.config_value("algorithm", "correction", "weight")
    if not isinstance(weight, dict) or weight.get("type") != "token":
        return None
    high, outside = weight.get("high"), weight.get("outside")
    if not isinstance(high, (int, float)):
        return None
    return float(high), f"{'masked' if outside == 'mask' else 'truncated'} above {high:g}"


def _ess_plots(columns: Columns, markers: list[Marker]) -> list[Plot]:
    names = {"sampling/ess": "of tokens", "sampling/ess_sequence": "of completions"}
    if not any((_values(columns, name) < WHOLE_SHARE).any() for name in names):
        return []
    return [
        Plot("Effective sample", "percent that the ratios leave", parts.many(
            columns, names, factor=100.0), from_zero=True, markers=markers,
             about=parts.about("sampling/ess")),
    ]  # fmt: skip


def _stale_plots(columns: Columns, markers: list[Marker]) -> list[Plot]:
    # In every run, later updates of a step are behind its own beginning, so that is not shown.
    if not _values(columns, "stale/steps/max").any():
        return []
    names = {"stale/updates/max": "oldest token", "stale/updates/mean": "mean"}
    return [
        Plot("Staleness", "updates since the weights that sampled", parts.many(columns, names),
             from_zero=True, markers=markers, about=parts.about("stale/updates/mean")),
    ]  # fmt: skip


def _corrected_plots(columns: Columns, markers: list[Marker]) -> list[Plot]:
    """Return plots of lines, not stacks, because several parts may act on one token."""
    plots: list[Plot] = []
    for kind, title in (("tokens", "Tokens corrected"), ("sequences", "Completions corrected")):
        names = parts.labelled(columns, rf"correction/{kind}/(.+)")
        names = {name: label.replace("_", "-") for name, label in names.items()}
        lines = parts.unless_zero(columns, names, factor=100.0)
        about = f"Share of the {kind} that each part of the correction acted on."
        unit = _unit("percent", lines)
        plots.append(Plot(title, unit, lines, about, from_zero=True, markers=markers))
    return plots


def _sent_plots(columns: Columns, markers: list[Marker]) -> list[Plot]:
    sizes = _values(columns, "sync/bytes")
    same = float(sizes[0]) if sizes.size and (sizes == sizes[0]).all() else None
    unit = "seconds" if same is None else f"seconds for {fmt.byte_size(same)}"
    plots = [
        Plot("Weights sent", unit, _dots(columns, {"sync/seconds": "seconds"}), from_zero=True,
             markers=markers, about=parts.about("sync/seconds")),
    ]  # fmt: skip
    if same is None:
        lines = _dots(columns, {"sync/bytes": "MiB"}, factor=2.0**-20)
        plots.append(Plot("Size of the weights sent", "MiB", lines, from_zero=True,
                          markers=markers, about=parts.about("sync/bytes")))  # fmt: skip
    return plots


def _dots(columns: Columns, names: dict[str, str], *, factor: float = 1.0) -> list[Line]:
    """Return a dotted line, for values that do not exist at every step."""
    lines = parts.many(columns, names, factor=factor)
    return [replace(line, label=line.label.replace("_", " "), style="dots") for line in lines]


def _unit(unit: str, lines: list[Line]) -> str:
    """Return the unit with the name of a line that stands alone and so has no legend."""
    return f"{unit}, {lines[0].label}" if len(lines) == 1 else unit


def _values(columns: Columns, name: str) -> Array:
    return columns[name].finite if name in columns else np.zeros(0)
