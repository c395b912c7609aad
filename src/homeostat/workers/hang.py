"""Report on a hang: which rank is behind, in which call, and the stacks of all ranks.

guardians -> WorkerReport of each rank -> hangs/<group>_<n>.txt, and a summary for the error
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from homeostat.workers.activity import Doing
from homeostat.workers.reports import WorkerReport

FOLDER = "hangs"

log = logging.getLogger(__name__)


def report_hang(
    group_name: str, reports: Mapping[int, WorkerReport | None], *, folder: Path
) -> str:
    """Write the report of a group and return its summary. A rank without a report has None."""
    known = [report for report in reports.values() if report is not None]
    silent = [rank for rank, report in reports.items() if report is None]
    lines = [*who_lags(known), *(f"rank {rank}: its guardian does not answer." for rank in silent)]
    lines += [line_of(report) for report in known]
    summary = "\n".join(lines)
    try:
        file = _write(group_name, summary, known, folder=folder / FOLDER)
    except OSError as error:
        # The report of a hang must not fail for lack of disk space: the summary is in the error.
        log.error("the stacks of %s were not written: %s", group_name, error)
        return summary
    return f"{summary}\nThe stacks of all threads are in {file}."


def who_lags(reports: Sequence[WorkerReport]) -> list[str]:
    """Return a line for each rank that the others wait for; none if that is unknown."""
    stopped = [report for report in reports if report.is_stopped]
    if stopped:
        return [f"rank {one.rank} lags: its process is {one.state}." for one in stopped]
    last = {one.rank: one.activity.collective for one in reports}
    numbers = {rank: doing.number if doing is not None else 0 for rank, doing in last.items()}
    most = max(numbers.values(), default=0)
    if len(reports) < 2 or most == 0:
        return []
    ahead = next(doing for doing in last.values() if doing is not None and doing.number == most)
    behind = [rank for rank, number in numbers.items() if number < most]
    if behind:
        return [
            f"rank {rank} lags: it has begun {numbers[rank]} collectives, others {most}; they wait "
            f"for it in {ahead.name!r}."
            for rank in behind
        ]
    done = [rank for rank, doing in last.items() if doing is not None and doing.is_over]
    if done and len(done) < len(reports):
        return [f"rank {rank} has finished {ahead.name!r}; others wait in it." for rank in done]
    return []


def line_of(report: WorkerReport) -> str:
    """Describe a rank in one line: its state, call, last collective, and place in the code."""
    activity = report.activity
    parts = [f"{report.state}, {report.cpu_seconds:.1f} s of CPU time"]
    parts.append(_described("call", activity.call))
    parts.append(_described("last collective", activity.collective))
    if place := innermost(report.stacks):
        parts.append(f"at {place}")
    return f"rank {report.rank}: " + "; ".join(part for part in parts if part) + "."


def innermost(stacks: str) -> str:
    """Return where the main thread is: the first frame of the last thread that is printed."""
    _, found, frames = stacks.rpartition("(most recent call first):\n")
    return frames.partition("\n")[0].strip() if found else ""


def _described(what: str, doing: Doing | None) -> str:
    if doing is None:
        return f"no {what} yet"
    size = f", {doing.num_bytes:,} bytes" if doing.num_bytes else ""
    when = "finished" if doing.is_over else "not known to be finished"
    begun = f"begun {doing.seconds:.1f} s ago, {when}"
    return f"{what} {doing.number} {doing.name!r}{size}, {begun}"


def _write(group_name: str, summary: str, reports: Sequence[WorkerReport], *, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + sum(1 for _ in folder.glob(f"{group_name}_*.txt"))
    file = folder / f"{group_name}_{number}.txt"
    blocks = [f"== {group_name} rank {one.rank}\n{one.stacks or 'no stack'}" for one in reports]
    file.write_text("\n\n".join([summary, *blocks]) + "\n")
    return file
