"""Shares and medians over a round of the clinic, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.table import Table

from homeostat.clinic.injector import Cure
from homeostat.clinic.rounds import Report
from homeostat.clinic.verdict import Verdict


def summarise(report: Report) -> dict[str, Any]:
    """Return the figures of a round. A share of nothing is None."""
    faults = report.faults
    late = [one.steps_late for one in faults if one.steps_late is not None]
    return {
        "num_faults": len(faults),
        "noticed": _share([one.noticed for one in faults]),
        "right_first": _share([one.right_first for one in faults]),
        "median_steps_late": median(late) if late else None,
        "alarms_before_onset": sum(len(one.false_alarms) for one in faults),
        "num_healthy": len(report.healthy),
        "healthy_with_alarms": sum(bool(one.false_alarms) for one in report.healthy),
        "healthy_unfinished": sum(one.ended != "finished" for one in report.healthy),
        "cured_safe": _cured(faults, Cure.SAFE),
        "cured_all": _cured(faults, Cure.ALL),
        "seconds": report.seconds,
    }


def as_json(report: Report) -> dict[str, Any]:
    return {
        "summary": summarise(report),
        "faults": [asdict(one) for one in report.faults],
        "healthy": [_of_healthy(one) for one in report.healthy],
    }


def fault_table(faults: Sequence[Verdict]) -> Table:
    table = Table("fault", "onset", "noticed", "first finding", "steps late", "cured", "s")
    for one in sorted(faults, key=lambda one: (one.right_first, one.noticed, one.name)):
        first = one.first or "none"
        table.add_row(
            one.name if one.seed == 1 else f"{one.name} #{one.seed}",
            str(one.onset),
            _mark(one.noticed),
            first if one.right_first else f"[red]{first}[/red]",
            "" if one.steps_late is None else str(one.steps_late),
            "" if one.cured is None else f"{_mark(one.cured)} ({one.cure})",
            f"{one.seconds:.0f}",
        )
    return table


def healthy_table(healthy: Sequence[Verdict]) -> Table:
    table = Table("healthy run", "ended", "false alarms", "s")
    for one in healthy:
        alarms = ", ".join(one.false_alarms)
        table.add_row(one.name, one.ended, f"[red]{alarms}[/red]" if alarms else "none",
                      f"{one.seconds:.0f}")  # fmt: skip
    return table


def summary_lines(report: Report) -> list[str]:
    figures = summarise(report)
    return [
        f"{figures['num_faults']} faults: {_percent(figures['noticed'])} noticed, "
        f"{_percent(figures['right_first'])} by the right rule first, "
        f"median {figures['median_steps_late']} steps after the onset, "
        f"{figures['alarms_before_onset']} alarms before it",
        f"{figures['num_healthy']} healthy runs: {figures['healthy_with_alarms']} with false "
        f"alarms, {figures['healthy_unfinished']} unfinished",
        f"cured: {_percent(figures['cured_safe'])} with health.heal=safe, "
        f"{_percent(figures['cured_all'])} with health.heal=all",
        f"{figures['seconds']:.0f} s",
    ]


def _of_healthy(one: Verdict) -> dict[str, Any]:
    return {name: getattr(one, name) for name in ("name", "seed", "ended", "false_alarms",
                                                  "seconds")}  # fmt: skip


def _cured(faults: Sequence[Verdict], cure: Cure) -> float | None:
    return _share([bool(one.cured) for one in faults if one.cure == cure and one.cured is not None])


def _share(values: Sequence[bool]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _mark(value: bool) -> str:
    return "yes" if value else "[red]no[/red]"
