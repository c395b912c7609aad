"""The vital signs of a run, which are read before anything else is judged.

They are how it ended, which of its vital metrics are not finite, zero, frozen or missing, whether
it makes progress, and how much of the log was understood. They are read from any run of any
framework: "no illness" is only reported if they are good. The rules of rules/vital report them as
findings.

    ending       finished, exception, killed, stopped, open (the log ends before the last step and
                 does not say why: it is running, or was killed), unknown
    vital        the loss; the gradient norm; in RL the reward; in preference training the margin
    frozen       exactly the same number, record after record: no optimizer does that
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from homeostat.health.log import LogLine
from homeostat.health.names import FOREIGN, unprefixed
from homeostat.health.tracebacks import Traceback
from homeostat.health.view import Kind, RunView, Series
from homeostat.health.words import rough_time
from homeostat.observe.names import describe
from homeostat.types import FloatArray64

# Number of records that other ranks or a retry may still print after the fatal exception.
MAX_STEPS_AFTER = 2
# Number of lines from the end in which the last exception, or a kill, counts as what ended the
# run; number of lines before the last exception in which others belong to the same end.
LAST_LINES = 50
MAX_CLUSTER = 400
# Number of records that must be exactly equal before a metric counts as frozen or zero.
MIN_FROZEN = 10
MIN_ZERO = 3
# Seconds without a line after which a run without an end counts as dead: longer than any step,
# evaluation or checkpoint that is not ill itself.
MAX_QUIET_S = 3600.0
# Frameworks whose setting for the number of steps counts those of one epoch.
_STEPS_OF_EPOCH = ("torchtune",)
# Known metrics that say nothing about a run's health.
_TRIVIAL = ("epoch", "num_tokens", "step", "time", "time/", "memory/", "throughput/")
_LOSSES = ("train/loss", "train/policy_loss")
_KILLED = (
    "signal 9 (sigkill)", "exitcode: -9", "exitcode : -9", "oom-kill", "oom_kill",
    "cancelled at*due to", "due to time limit", "due to preemption",
    "out of memory: killed process",
)  # fmt: skip
_FINISHED = ("training completed", "training finished", "training is complete", "train_runtime",
             "***** train metrics *****", "training complete")  # fmt: skip


class End(StrEnum):
    """The end of a run, as far as it is known."""

    FINISHED = "finished"
    EXCEPTION = "exception"
    KILLED = "killed"
    STOPPED = "stopped"
    OPEN = "open"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run with its evidence: `line` of the log, or `traceback` of an exception.

    `is_early` means that it ended by itself, well before the planned number of steps; `is_stale`
    that nothing was written to the log for so long that the run cannot be going on.
    """

    how: End
    words: str
    line: LogLine | None = None
    traceback: Traceback | None = None
    is_early: bool = False
    is_stale: bool = False

    @property
    def is_death(self) -> bool:
        return self.how in (End.EXCEPTION, End.KILLED)


@dataclass(frozen=True, slots=True)
class Vitals:
    """All vital signs. Names are those of the metrics as rules read them."""

    ending: Ending
    not_finite: tuple[str, ...]
    zero: tuple[str, ...]
    frozen: tuple[str, ...]
    missing: tuple[str, ...]
    understood: tuple[str, ...]
    not_understood: tuple[str, ...]
    course: str

    @property
    def are_good(self) -> bool:
        """Return whether the run is alive as far as is known, and its vital metrics are sound."""
        return not (self.ending.is_death or self.not_finite or self.zero or self.frozen)

    @property
    def is_little_known(self) -> bool:
        """Return whether so little was understood that the absence of findings means nothing."""
        num, others = len(self.understood), len(self.not_understood)
        return num < 2 or (others > 0 and num < 3) or others > 3 * num


def vital_signs(view: RunView) -> Vitals:
    """Return all vital signs of a run. Pure, and cheap enough to call again."""
    known = [name for name in view.metrics if _is_known(name)]
    return Vitals(
        ending=ending_of(view),
        not_finite=tuple(not_finite(view)),
        zero=tuple(zero(view)),
        frozen=tuple(frozen(view)),
        missing=tuple(name for name in vital_names(view.kind) if _series(view, name) is None),
        understood=tuple(name for name in known if not name.startswith(_TRIVIAL)),
        not_understood=tuple(
            name
            for name in view.metrics
            if name not in known and not _is_told_twice(name, view)
            if not name.startswith(_TRIVIAL)
        ),
        course=_course(view),
    )


def vital_names(kind: Kind) -> tuple[str, ...]:
    """Return the vital metrics of a run of this kind, most informative first."""
    return {
        Kind.RL: ("reward", "train/loss", "grad_norm"),
        Kind.PREFERENCE: ("train/loss", "preference/margin", "grad_norm"),
        Kind.REWARD_MODEL: ("train/loss", "reward_model/accuracy", "grad_norm"),
    }.get(kind, ("train/loss", "grad_norm"))


def _series(view: RunView, name: str) -> Series | None:
    return view.series(*_LOSSES) if name == "train/loss" else view.series(name)


def _is_known(name: str) -> bool:
    return name in FOREIGN or describe(name) is not None


def _is_told_twice(name: str, view: RunView) -> bool:
    """Return whether a tracker logged it again with a prefix: train/grad_norm and grad_norm."""
    plain = unprefixed(name.removeprefix("raw/"))
    others = {plain, f"train/{plain}"} - {name}
    return plain != name and any(other in view.metrics for other in others)


def ending_of(view: RunView) -> Ending:
    """Return how the run ended: by its own events, by an exception, a kill, or its last step."""
    own = view.events_of("run_started", "run_resumed", "run_stopped", "run_finished", "run_failed")
    last = own[-1] if own else None
    if last is not None and last.kind == "run_finished":
        return Ending(End.FINISHED, "it finished")
    if last is not None and last.kind == "run_stopped":
        return Ending(End.STOPPED, f"a signal ({last.fields.get('signal', '?')}) stopped it")
    fatal = fatal_traceback(view)
    if fatal is not None:
        return _by_exception(fatal)
    if last is not None and last.kind == "run_failed":
        error = f"{last.fields.get('error', '')}: {last.fields.get('message', '')}".strip(": ")
        return Ending(End.EXCEPTION, f"it ended in an error: {error}")
    killed = _kill_line(view)
    if killed is not None:
        return Ending(End.KILLED, f"it was killed (line {killed.number})", killed)
    if last is not None:
        # A run of ours records its end, whatever that is.
        reach = _reach(view)
        return _without_end(view, reach.words if reach is not None else "its start")
    return _by_steps(view)


def _by_exception(found: Traceback) -> Ending:
    if found.kind.rpartition(".")[2] == "KeyboardInterrupt":
        return Ending(End.STOPPED, "somebody stopped it (KeyboardInterrupt)", found.end, found)
    words = f"it ended in an exception (line {found.end.number}): {found.error}"
    return Ending(End.EXCEPTION, words, found.end, found)


def _by_steps(view: RunView) -> Ending:
    reach = _reach(view)
    says = view.log.last(*_FINISHED) if view.log else None
    if "summary" in view.facts or says is not None:
        # The last records of a run are not always printed; a tenth of it is more than those.
        if reach is not None and reach.is_short and reach.share < 0.9:
            return Ending(End.FINISHED, "it ended by itself, before its time", says, is_early=True)
        return Ending(End.FINISHED, "it finished", says)
    if reach is None:
        return Ending(End.UNKNOWN, "the log does not say how it ended")
    if not reach.is_short:
        return Ending(End.FINISHED, f"it reached its end, {reach.words}")
    return _without_end(view, reach.words)


def _without_end(view: RunView, where: str) -> Ending:
    """The log ends before the run does, and no line says why."""
    words = f"it did not reach its end: the log ends at {where} and does not say why"
    quiet_s = view.facts.get("quiet_s")
    if quiet_s is None:
        return Ending(End.OPEN, f"{words}; the run may still be going on")
    ago = rough_time(quiet_s)
    if quiet_s < MAX_QUIET_S:
        words += f"; the newest line came {ago} ago, so the run may still be going on"
        return Ending(End.OPEN, words)
    words += f", and nothing was written for {ago}: it was killed without a word, or hangs"
    return Ending(End.OPEN, words, is_stale=True)


@dataclass(frozen=True, slots=True)
class _Reach:
    """The part of its plan that a run has done. `is_short`: an interval of records is missing."""

    words: str
    share: float
    is_short: bool


def _reach(view: RunView) -> _Reach | None:
    """By steps, or by epochs where their number alone is known; None where no plan is known."""
    step, total = view.last_step, view.total_steps or _planned_steps(view)
    if step is not None and total:
        words = f"step {step:,} of {total:,}"
        return _Reach(words, step / total, step + _interval(view) <= total)
    epoch, epochs = view.series("epoch"), view.number("trainer.epochs")
    if epoch is None or len(epoch) < 3 or not epochs or not 0 < epochs < 1e6:
        return None
    # Some frameworks count whole epochs, from 0 or from 1: these do not say how far it is.
    if not np.isfinite(epoch.values).all() or not (epoch.values % 1.0).any():
        return None
    gap = float(np.median(np.diff(epoch.values)))
    words = f"epoch {epoch.latest:.3g} of {epochs:.3g}"
    return _Reach(words, epoch.latest / epochs, epoch.latest + 1.5 * gap <= epochs)


def _planned_steps(view: RunView) -> int | None:
    """The number of steps that the settings ask for; -1 and the like mean that epochs count."""
    planned = view.number("trainer.max_steps")
    if planned is None or not 0 < planned < 1e12 or view.framework.name in _STEPS_OF_EPOCH:
        return None
    return int(planned)


def _interval(view: RunView) -> int:
    """Return the number of steps between records of what is logged most often."""
    gaps = [int(np.median(np.diff(s.steps))) for s in view.metrics.values() if len(s) > 2]
    return max(1, min(gaps, default=1))


def fatal_traceback(view: RunView) -> Traceback | None:
    """Return the exception that ended the run: the first of the last ones without a later step."""
    if not view.tracebacks or _goes_on(view):
        return None
    last = view.tracebacks[-1].end.number
    if view.log.lines[-1].number - last > LAST_LINES:
        return None
    late = [
        one
        for one in view.tracebacks
        if num_steps_after(view, one.end) <= MAX_STEPS_AFTER
        and last - one.end.number <= MAX_CLUSTER
        and not one.kind.endswith(("SystemExit", "StopIteration"))
    ]
    told = [one for one in late if not one.is_report]
    return (told or late or [None])[0]


def _goes_on(view: RunView) -> bool:
    """Return whether something after the last traceback says that training finished."""
    says = view.log.last(*_FINISHED)
    return says is not None and says.number > view.tracebacks[-1].end.number


def num_steps_after(view: RunView, line: LogLine) -> int:
    """Return the number of records that were logged after the step of a line."""
    before = line.step if line.step is not None else -1
    return max((int((series.steps > before).sum()) for series in view.metrics.values()), default=0)


def _kill_line(view: RunView) -> LogLine | None:
    lines = view.log.lines[-LAST_LINES:]
    plain = [line for line in lines if line.text.strip() == "Killed"]
    found = plain[-1] if plain else view.log.last(*_KILLED)
    if found is None or num_steps_after(view, found) > MAX_STEPS_AFTER:
        return None
    return found


def not_finite(view: RunView) -> Iterable[str]:
    """Return vital metrics that are NaN or infinite now: in the newest record and in two of four.

    A reward function that does not apply to a batch is logged as NaN by some trainers, so only an
    infinite reward counts. The same is true of a standard deviation, which a single sample does not
    have.
    """
    for name in (*_LOSSES, "grad_norm", "reward", "kl", "entropy", "eval/loss"):
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

    The loss of GRPO prints as 0 by construction, so in RL only the gradient is checked.
    """
    names = ["grad_norm"]
    if view.kind is not Kind.RL:
        names += [*_LOSSES, "train/token_accuracy"]
    for name in names:
        series = view.series(name)
        least = MIN_ZERO if name in _LOSSES else 5
        if series is None or len(series) < least or view.decimals.get(name, 9) < 4:
            continue
        if not series.values.any() and not _is_rate_zero(view, int(series.steps[0])):
            yield name


def zero_since(view: RunView) -> int | None:
    """Return the step from which the loss of fine-tuning is exactly 0 after ordinary values.

    Some trainers print a loss that is not finite as 0. None if there is no such step.
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
    """Return losses that are the same non-zero number in the newest records although the rate is
    not 0.

    Gradient norms are left out: some trainers print them after clipping.
    """
    for name, least in (("train/loss", MIN_FROZEN), ("eval/loss", 4)):
        series = view.series(name)
        if series is None or len(series) < least or view.decimals.get(name, 9) < 3:
            continue
        newest = series.values[-least:]
        # If few digits are printed, a value may repeat by chance, so it must stay longer.
        newest = newest if _digits(newest) >= 4 else series.values[-2 * least :]
        if len(newest) < least or newest[-1] == 0.0 or not np.isfinite(newest).all():
            continue
        if _digits(newest) < 4 and len(newest) < 2 * least:
            continue
        if float(np.ptp(newest)) == 0.0 and not _is_rate_zero(view, int(series.steps[-least])):
            yield name


def _digits(values: FloatArray64) -> int:
    """Return the significant digits of the newest value as it was printed."""
    return len(f"{values[-1]:.9g}".replace(".", "").replace("-", "").strip("0"))


def _course(view: RunView) -> str:
    """Describe whether the run makes progress: how the first of its vital metrics moved."""
    for name in vital_names(view.kind):
        series = _series(view, name)
        finite = series.finite() if series is not None else None
        if finite is None or len(finite) < 4:
            continue
        count = max(2, len(finite) // 4)
        start, end = float(finite.values[:count].mean()), float(finite.values[-count:].mean())
        words = "loss" if name == "train/loss" else name
        moved = "stays at" if start == end else "went from"
        to = f"{start:.4g}" if start == end else f"{start:.4g} to {end:.4g}"
        return f"the {words} {moved} {to}"
    return ""
