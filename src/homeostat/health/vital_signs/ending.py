"""Find out how a run of any framework ended.

finished    it reports that it finished, or it reached its last step
exception   a traceback, a crash of compiled code, or a failure that a launcher reports
killed      by a signal, the kernel or a scheduler
hung        a watchdog reports it, or the log continues for long without a further step
stopped     by a person
open        the log ends before the last step without a reason: it still runs, or was killed
unknown     the planned length of the run is not known
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from homeostat.health.failures.end_lines import LAUNCHER, MAX_CLUSTER, End, EndLine, error_at_end
from homeostat.health.failures.first_failure import first_failure, is_aftermath
from homeostat.health.failures.lone_errors import lone_error
from homeostat.health.failures.tracebacks import Traceback
from homeostat.health.frameworks import HOMEOSTAT
from homeostat.health.log import LogLine
from homeostat.health.series.medians import median
from homeostat.health.view import RunView
from homeostat.health.words import rough_time, shortened

# Number of records that other ranks, or a retry, may still log after the fatal exception.
MAX_STEPS_AFTER = 2
# An exception within this many lines of the end of the log counts as the end of the run.
LAST_LINES = 50
# A run whose log has no end counts as dead after this many seconds without a line. No healthy step,
# evaluation or checkpoint takes that long.
MAX_QUIET_S = 3600.0
# Frameworks whose setting for the number of steps is the number in one epoch.
_STEPS_OF_EPOCH = ("torchtune",)
_FINISHED = ("training completed", "training finished", "training is complete", "train_runtime",
             "***** train metrics *****", "training complete", "final validation metrics",
             "training done", "finished training", "done training in ",
             "`trainer.fit` stopped: `max_", "rl trainer finished")  # fmt: skip
_WATCHDOG = "watchdog caught collective operation timeout"
_SIGNAL = re.compile(r"got signal: (\d{1,2})")
_SIGNALS = {1: "SIGHUP", 2: "SIGINT", 9: "SIGKILL", 15: "SIGTERM"}


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run, with the evidence: a `line` of the log, or the `traceback` of an
    exception.

    `is_early`: it ended normally, but well before the planned number of steps. `is_stale`: nothing
    was written to the log for so long that the run cannot still be running. `quote` is the part of
    `words` that is quoted from the log.
    """

    how: End
    words: str
    line: LogLine | None = None
    traceback: Traceback | None = None
    is_early: bool = False
    is_stale: bool = False
    quote: str = ""

    @property
    def brief(self) -> str:
        """Return `words` without the quotation."""
        return self.words.removesuffix(f": {self.quote}")

    @property
    def is_death(self) -> bool:
        return self.how in (End.EXCEPTION, End.KILLED, End.HUNG)


def ending_of(view: RunView) -> Ending:
    """Return how the run ended, from its own events, an exception, a kill, or its last step."""
    own = view.events_of("run_started", "run_resumed", "run_stopped", "run_finished", "run_failed")
    # Logs of other frameworks also report that a run was resumed; only our runs record their start.
    last = own[-1] if any(event.kind != "run_resumed" for event in own) else None
    if last is not None and last.kind == "run_finished":
        return Ending(End.FINISHED, "it finished")
    if last is not None and last.kind == "run_stopped":
        by = last.fields.get("signal", "?")
        who = "the code that called it" if by == "the caller" else f"a signal ({by})"
        return Ending(End.STOPPED, f"{who} stopped it")
    fatal, told = fatal_traceback(view), _end_line(view)
    only_reported = fatal.is_report if fatal is not None else told is not None
    if fatal is not None and _is_watchdogs(fatal, view):
        # The watchdog ended a process that waited for another one, whose output gives the reason.
        fatal = _reason(_lone_error(view, before=fatal.start), told) or fatal
    elif only_reported and (told is None or not _says_more(told)):
        # The launcher only reports that a process failed; the output of that process gives the
        # reason.
        fatal = _reason(_lone_error(view), told) or fatal
    if fatal is not None and not (fatal.is_report and told is not None and _says_more(told)):
        return _by_exception(fatal)
    if last is not None and last.kind == "run_failed":
        error = f"{last.fields.get('error', '')}: {last.fields.get('message', '')}".strip(": ")
        return Ending(End.EXCEPTION, f"it ended in an error: {error}")
    if told is not None:
        crash = _crash_at(view, told.line)
        at = told.line.number
        return Ending(told.how, f"{told.what} (line {at})", told.line, crash)
    if last is not None:
        # A run of homeostat records every end that it notices, so this one was not noticed.
        reach = _reach(view)
        return _without_end(view, reach.words if reach is not None else "its start")
    return _by_steps(view)


def _lone_error(view: RunView, *, before: LogLine | None = None) -> Traceback | None:
    """Return the error without a traceback with which the log ends, or what comes before a line of
    it; None if it ends otherwise.
    """
    lines = view.log.lines
    if before is not None:
        lines = lines[: bisect_left(lines, before.number, key=lambda line: line.number)]
    lone = lone_error(lines[-LAST_LINES:])
    is_last = lone is not None and num_steps_after(view, lone.end) <= MAX_STEPS_AFTER
    return lone if is_last else None


def _is_watchdogs(crash: Traceback, view: RunView) -> bool:
    """Return whether NCCL's watchdog ended a process that had waited for another one."""
    if not crash.is_native:
        return False
    said = view.log.last(_WATCHDOG)
    return said is not None and 0 <= crash.start.number - said.number <= LAST_LINES


def _reason(lone: Traceback | None, told: EndLine | None) -> Traceback | None:
    """Return the error without a traceback, if it says more than the launcher's report."""
    if lone is None or lone.is_report or is_aftermath(lone):
        return None
    is_launchers = told is not None and told.line == lone.end and lone.kind == "Error"
    return None if is_launchers else lone


def _says_more(told: EndLine) -> bool:
    """Return whether a line says more than that some process failed."""
    return told.how is not End.EXCEPTION or LAUNCHER not in told.what


def _by_exception(found: Traceback) -> Ending:
    name, at = found.kind.rpartition(".")[2], found.end.number
    if name == "KeyboardInterrupt":
        return Ending(End.STOPPED, "somebody stopped it (KeyboardInterrupt)", found.end, found)
    sent = _SIGNAL.search(found.message) if name == "SignalException" else None
    if sent is not None:
        number = int(sent[1])
        signal = _SIGNALS.get(number, f"signal {number}")
        how = End.STOPPED if number == 2 else End.KILLED
        return Ending(how, f"{signal} ended it (line {at})", found.end, found)
    what = "crashed in compiled code" if found.is_native else "ended in an exception"
    quote = shortened(found.error, 300)
    words = f"it {what} (line {at}): {quote}"
    return Ending(End.EXCEPTION, words, found.end, found, quote=quote)


def _by_steps(view: RunView) -> Ending:
    reach = _reach(view)
    says = view.log.last(*_FINISHED) if view.log else None
    if "summary" in view.facts or says is not None:
        # Not every run prints its last records, but no run leaves out a tenth of them.
        if reach is not None and reach.is_short and reach.share < 0.9:
            words = f"it ended by itself before its planned end, at {reach.words}"
            return Ending(End.FINISHED, words, says, is_early=True)
        return Ending(End.FINISHED, "it finished", says)
    if reach is not None and not reach.is_short:
        return Ending(End.FINISHED, f"it reached its end, {reach.words}")
    stalled = view.stalled_s
    if stalled is not None:
        at = f" after {reach.words}" if reach is not None else ""
        words = f"it hangs: the log continues for {rough_time(stalled)}{at} without a further step"
        return Ending(End.HUNG, words, view.log.lines[-1])
    lone = _lone_error(view)
    if lone is not None:
        return _by_exception(lone)
    error = error_at_end(view.log.lines)
    if error is not None and num_steps_after(view, error) <= MAX_STEPS_AFTER:
        quote = shortened(error.text.strip(), 200)
        words = f"the log ends in an error (line {error.number}): {quote}"
        return Ending(End.EXCEPTION, words, error, quote=quote)
    if reach is not None:
        return _without_end(view, reach.words)
    bar = view.facts.get("open_bar")
    if bar is not None:
        return _without_end(view, f"a progress bar at {bar[0]:,} of {bar[1]:,}")
    if _is_cut_in_record(view):
        return _without_end(view, "a record that is cut off")
    return Ending(End.UNKNOWN, "the log does not say how it ended")


def _without_end(view: RunView, where: str) -> Ending:
    """Return the ending of a log that stops before its run does and does not say why."""
    if view.facts.get("is_saved_state"):
        words = f"the file is the state that was saved at {where}; how the run ended is not in it"
        return Ending(End.OPEN, words)
    words = f"it did not reach its end: the log ends at {where} and does not say why"
    quiet_s = view.facts.get("quiet_s")
    if quiet_s is None:
        return Ending(End.OPEN, f"{words}; the run may still be going on")
    ago = rough_time(quiet_s)
    if quiet_s < MAX_QUIET_S:
        words += f"; the newest line came {ago} ago, so the run may still be going on"
        return Ending(End.OPEN, words)
    reading = view.facts.get("reading")
    if reading is not None and reading.num_lines == 0 and view.framework is not HOMEOSTAT:
        # The file has metrics only. An interrupt or error would be in the console log.
        return Ending(End.OPEN, f"{words}; it holds metrics only, so the reason may be elsewhere")
    words += f", and nothing was written for {ago}: it was killed without a message, or hangs"
    if view.framework is not HOMEOSTAT and not view.events_of("run_started"):
        words += "; or its owner ended it, or this is a copy from the middle of the run"
    return Ending(End.OPEN, words, is_stale=True)


def _is_cut_in_record(view: RunView) -> bool:
    """Return whether the file's last line is an incomplete record."""
    if not view.log.lines:
        return False
    last, reading = view.log.lines[-1], view.facts.get("reading")
    if reading is None or last.number < reading.num_lines:
        return False
    return last.text.count("{") > last.text.count("}")


@dataclass(frozen=True, slots=True)
class _Reach:
    """The part of its plan that a run has done. `is_short`: at least one more record was due."""

    words: str
    share: float
    is_short: bool


def _reach(view: RunView) -> _Reach | None:
    """Return how far the run came, in steps or else in epochs; None if the plan is not known."""
    step, total = view.last_step, view.total_steps or _planned_steps(view)
    if step is not None and total:
        words = f"step {step:,} of {total:,}"
        return _Reach(words, step / total, step + _interval(view) <= total)
    epoch, epochs = view.series("epoch"), view.number("trainer.epochs")
    if epoch is None or len(epoch) < 3 or not epochs or not 0 < epochs < 1e6:
        return None
    # Some frameworks log whole epochs, counted from 0 or from 1. These do not show the progress.
    if not np.isfinite(epoch.values).all() or not (epoch.values % 1.0).any():
        return None
    gap = median(np.diff(epoch.values))
    words = f"epoch {epoch.latest:.3g} of {epochs:.3g}"
    return _Reach(words, epoch.latest / epochs, epoch.latest + 1.5 * gap <= epochs)


def _planned_steps(view: RunView) -> int | None:
    """Return the number of steps from the settings; None for values such as -1 (epochs count)."""
    planned = view.number("trainer.max_steps")
    if planned is None or not 0 < planned < 1e12 or view.framework.name in _STEPS_OF_EPOCH:
        return None
    return int(planned)


def _interval(view: RunView) -> int:
    """Return the number of steps between two records of the metric that is logged most often."""
    gaps = [int(median(np.diff(s.steps))) for s in view.metrics.values() if len(s) > 2]
    return max(1, min(gaps, default=1))


def fatal_traceback(view: RunView) -> Traceback | None:
    """Return the exception or crash that ended the run: the first one that no step follows."""
    cluster = last_failures(view)
    return first_failure(cluster, view.log) if cluster else None


def last_failures(view: RunView) -> list[Traceback]:
    """Return the exceptions and crashes at the end of the log; [] if the run continued."""
    crashes = [one for one in view.crashes if num_steps_after(view, one.end) <= MAX_STEPS_AFTER]
    found = sorted((*view.tracebacks, *crashes), key=lambda one: one.end.number)
    if not found or _goes_on(view, found[-1]):
        return []
    last = found[-1].end.number
    if view.log.lines[-1].number - last > LAST_LINES and _end_line(view) is None:
        return []
    cluster = [
        one
        for one in found
        if num_steps_after(view, one.end) <= MAX_STEPS_AFTER
        and last - one.end.number <= MAX_CLUSTER
        and not _is_plain_exit(one)
    ]
    # Another exception usually follows a StopIteration. If none does, it ended the run.
    return [one for one in cluster if one.name != "StopIteration"] or cluster


def _is_plain_exit(found: Traceback) -> bool:
    return found.name == "SystemExit" and found.message in ("", "0", "None")


def _goes_on(view: RunView, last: Traceback) -> bool:
    """Return whether a line after the last traceback reports that training finished."""
    says = view.log.last(*_FINISHED)
    return says is not None and says.number > last.end.number


def num_steps_after(view: RunView, line: LogLine) -> int:
    """Return the number of records logged after the step to which a line belongs."""
    before = line.step if line.step is not None else -1
    return max((int((series.steps > before).sum()) for series in view.metrics.values()), default=0)


def _end_line(view: RunView) -> EndLine | None:
    """Return the first line near the end of the log that reports how the run ended."""
    says = view.log.last(*_FINISHED) if view.end_lines else None
    for found in view.end_lines:
        is_over = says is not None and says.number > found.line.number
        if is_over or (found.is_mild and (says is not None or "summary" in view.facts)):
            continue
        if num_steps_after(view, found.line) <= MAX_STEPS_AFTER:
            return found
    return None


def _crash_at(view: RunView, line: LogLine) -> Traceback | None:
    near = [one for one in view.crashes if abs(one.start.number - line.number) <= LAST_LINES]
    return near[0] if near else None
