"""Hold the resources of one `train` call: locked run directory, logs, recorder, signal handlers.

However a run ends, its directory says how: events.jsonl has `run_finished`, `run_stopped` or
`run_failed`, an exception's traceback is in traceback.txt, and report.html is written.
"""

from __future__ import annotations

import logging
import shlex
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from homeostat.arrays import FloatArray64
from homeostat.config.loading.shareable import shared_at, shared_override
from homeostat.config.run import RunConfig
from homeostat.errors import HomeostatError, RunDirError
from homeostat.observe.console import make_view
from homeostat.observe.environment import summarise_environment
from homeostat.observe.expert_load import LoadHistory
from homeostat.observe.jsonl import is_event, is_finding, iter_jsonl, read_metrics
from homeostat.observe.logs import logging_to
from homeostat.observe.recorder import Recorder, View, Views
from homeostat.observe.report import write_report
from homeostat.observe.run_dir import RunDir
from homeostat.observe.sinks import build_sinks
from homeostat.observe.timeline import Timeline
from homeostat.observe.transcript import RunLabel
from homeostat.run.healing.healer import Healing, RollBackError
from homeostat.run.healing.ledger import keep_healing, kept_healing
from homeostat.run.healing.watch import Watch, sound_state
from homeostat.run.session.resume import ResumePoint, find_resume_point
from homeostat.run.session.signals import StopRequest
from homeostat.train.saving.checkpoint import CheckpointStore
from homeostat.types import UpdateReport

log = logging.getLogger(__name__)


class Session:
    """The run directory and everything that the training loop writes to.

    `begin` opens the recorder, once the number of steps is known.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        resume: ResumePoint,
        *,
        console: Console,
        stop: StopRequest,
        audience: View | None = None,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.resume = resume
        self.console = console
        self.stop = stop
        self.audience = audience
        self.checkpoints = CheckpointStore(run_dir.checkpoints)
        self.timeline = Timeline(run_dir.trace if config.observe.timeline else None)
        self.healing = Healing()
        self._recorder: Recorder | None = None
        self._watch: Watch | None = None
        self._load_history = LoadHistory(0)
        # The state of healing that a rollback left, until a later checkpoint holds it.
        self._carried: Mapping[str, Any] | None = None
        # Whether the steps ahead are the first ones after a rollback.
        self._has_gone_back = False

    @property
    def watch(self) -> Watch:
        assert self._watch is not None, "call begin() first"
        return self._watch

    @property
    def recorder(self) -> Recorder:
        assert self._recorder is not None, "call begin() first"
        return self._recorder

    @property
    def must_end(self) -> bool:
        """Return whether a signal, or a finding with health.on_error=halt, asks the run to end."""
        return self.stop.requested or (self._watch is not None and self._watch.halting is not None)

    @property
    def start_step(self) -> int:
        """Return the step of the checkpoint that the run resumed from; 0 for a new run."""
        return self.resume.found.step if self.resume.found is not None else 0

    @property
    def last_step(self) -> int:
        """Return the newest step of this run, completed in this call or before it."""
        done = self._recorder.last_step if self._recorder is not None else 0
        return max(done, self.start_step)

    def begin(self, *, total_steps: int, model_line: str) -> Recorder:
        """Remove records after the resume point, and open the recorder, its sinks and its view."""
        found = self.resume.found
        # A run that starts over keeps no records, not even of the evaluation at step 0.
        self.run_dir.truncate_after(found.step if found is not None else -1)
        if found is not None:
            self.checkpoints.set_aside_after(found.step)
        sinks = build_sinks(
            self.config.observe.sinks,
            self.run_dir,
            run_name=self.config.name,
            resumed_from=found.step if found is not None else None,
        )
        label = RunLabel(self.config.name, model_line, total_steps, self.start_step)
        view = make_view(
            self.config.observe.console,
            self.console,
            label=label,
            history=read_metrics(self.run_dir.metrics),
            findings=iter_jsonl(self.run_dir.findings, is_sound=is_finding),
            events=iter_jsonl(self.run_dir.events, is_sound=is_event),
        )
        if self.audience is not None:
            view = Views((view, self.audience))
        self._recorder = Recorder(
            self.run_dir, sinks, log_interval=self.config.observe.log_interval, view=view
        )
        self._load_history = LoadHistory(self.start_step)
        self._begin_watch(total_steps)
        self._recorder.event("training", self.start_step, total_steps=total_steps)
        return self._recorder

    def _begin_watch(self, total_steps: int) -> None:
        found = self.resume.found
        saved = found.section("health") if found is not None and "health" in found.state else {}
        place = str(found.state_file) if found is not None else ""
        self.healing = self._healing(saved.get("healing", {}), place=place)
        restored = sound_state(saved.get("monitor", {}), place=place)
        self._watch = Watch(self.config, self.recorder, total_steps=total_steps, state=restored)
        self._watch.begin(self.run_dir, start_step=self.start_step)

    def _healing(self, saved: Mapping[str, Any], *, place: str) -> Healing:
        """Return the state of healing: what the run knew as it went back, or the checkpoint's."""
        file = self.run_dir.healing
        if self._carried is None and self.run_dir.was_used:
            self._carried = kept_healing(file, step=self.start_step)
        if self._carried is not None:
            saved, place = self._carried, str(file)
        return Healing.from_json(saved, place=place)

    def health_state(self) -> dict[str, Any]:
        """Return the state of monitor and healing, for a checkpoint."""
        return {"monitor": self.watch.state(), "healing": self.healing.as_json()}

    def go_back(self, back: RollBackError) -> None:
        """Roll back to an earlier checkpoint, as if the run had been restarted from it.

        Step 0 is the beginning of the run, which has no checkpoint.
        """
        self.close()
        self._recorder = self._watch = None
        self._carried = back.healing.as_json()
        self._has_gone_back = True
        keep_healing(self.run_dir.healing, self._carried, step=back.step)
        self.checkpoints.set_aside_after(back.step)
        self.resume = ResumePoint(self.checkpoints.at_step(back.step) if back.step else None, ())

    @property
    def changes_course(self) -> bool:
        """Return whether the steps ahead have other settings than when they were first trained:
        keys were changed, or a remedy edited some as the run went back."""
        if self._carried is None or not self._has_gone_back:
            return bool(self.resume.changes)
        found = self.resume.found
        saved = {} if found is None else found.state.get("health", {}).get("healing", {})
        return self._carried["overlay"] != saved.get("overlay", {})

    def last_saved(self) -> ResumePoint:
        """Return where the run would resume now: its last checkpoint, or where it began."""
        if self._recorder is None:
            # Nothing was trained: the run begins where it was to begin.
            return self.resume
        return ResumePoint(self.checkpoints.newest_valid(), ())

    def resume_from(self, point: ResumePoint) -> None:
        """Resume within this call, as a second call would."""
        # Between two set-ups no step is in progress: a signal ends the run at once.
        self.stop.end_at_once()
        self.close()
        if self._recorder is not None:
            # The journal has no groups from before the rollback any more.
            self._has_gone_back = False
        if point.found is not None and point.found.step > self.start_step:
            self._carried = None
        self._recorder = self._watch = None
        self.resume = point

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Record an event. This works before `begin` too."""
        if self._recorder is not None:
            self._recorder.event(kind, step, **fields)
        else:
            self.run_dir.append_event(kind, step, **fields)

    def keep_row_losses(self, report: UpdateReport) -> None:
        """Write the loss of each row of an update, if observe.row_losses asks for it."""
        if self.config.observe.row_losses:
            self.run_dir.append_row_losses(
                report.step, row_ids=report.row_ids_B.tolist(), losses=report.row_losses_B.tolist()
            )

    def keep_expert_load(self, step: int, load_LE: FloatArray64 | None) -> None:
        """Add the load of a step's experts to the history; None if the model has none."""
        record = None if load_LE is None else self._load_history.add(step, load_LE)
        if record is not None:
            self.run_dir.append_expert_load(record)

    def finish(self) -> None:
        """Report what can only be known once the run is complete."""
        # A call that trained no step, because the run was complete already, reports nothing twice.
        if self._watch is not None and self.recorder.last_step > 0:
            self._watch.finish(self.last_step)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        if (record := self._load_history.rest()) is not None:
            self.run_dir.append_expert_load(record)


@contextmanager
def open_session(
    config: RunConfig,
    *,
    recipe: str,
    command: list[str],
    console: Console,
    log_level: str,
    audience: View | None = None,
) -> Iterator[Session]:
    """Lock the run directory and record how the block starts and ends.

    An exception that ends the block is recorded before it propagates. `audience` gets all that
    the view on the console gets.
    """
    stop = StopRequest()
    with RunDir(config.run_dir) as run_dir:
        resume = find_resume_point(config, run_dir)
        run_dir.protect(config.model_dump(mode="json"))
        run_dir.write_config(config.model_dump_json(indent=2) + "\n", recipe=recipe)
        session = Session(config, run_dir, resume, console=console, stop=stop, audience=audience)
        with (
            logging_to(
                console,
                level=log_level,
                console_log=run_dir.console_log,
                scrubber=run_dir.scrubber,
            ),
            stop.listening(),
        ):
            _record_start(session, command)
            try:
                yield session
            except BaseException as error:
                _record_failure(session, error)
                raise
            else:
                _record_end(session)
            finally:
                session.close()
                session.timeline.close()
                if config.observe.report:
                    _report(run_dir)


def _report(run_dir: RunDir) -> None:
    """Write report.html."""
    # A failure to write it is only logged: raising would hide the exception that ended the run.
    try:
        write_report(run_dir.path)
    except (OSError, RunDirError) as error:
        log.error("%s was not written: %s", run_dir.report, error)


def _record_start(session: Session, command: list[str]) -> None:
    found = session.resume.found
    text = shlex.join([*command[:2], *(shared_override(word) for word in command[2:])])
    environment = summarise_environment(session.run_dir.path)
    for name, count in session.run_dir.set_aside.items():
        log.warning("%s had %d damaged lines: they were moved to %s.damaged", name, count, name)
        step = found.step if found is not None else 0
        fields = {"file": name, "lines": count, "kept_in": f"{name}.damaged"}
        session.event("records_set_aside", step, **fields)
    if found is None:
        session.event("run_started", 0, command=text, environment=environment)
        return
    for name, why in found.passed_over:
        log.warning("skipped the broken checkpoint %s: %s", name, why)
        session.event("checkpoint_skipped_invalid", found.step, name=name, why=why)
    for change in session.resume.changes:
        old, new = (shared_at(change.path, value) for value in (change.old, change.new))
        log.warning("%s was %r, is now %r", change.path, old, new)
        fields = {"path": change.path, "old": old, "new": new}
        session.event("config_changed", found.step, **fields)
    log.info("resuming after step %d (%s)", found.step, found.path)
    fields = {"command": text, "checkpoint": str(found.path), "environment": environment}
    session.event("run_resumed", found.step, **fields)


def _record_end(session: Session) -> None:
    last = session.last_step
    if session.stop.requested:
        session.event("run_stopped", last, signal=session.stop.by)
        text = "stopped by %s after step %d; run the same command to resume from there"
        log.warning(text, session.stop.by, last)
    else:
        session.finish()
        session.event("run_finished", last)


def _record_failure(session: Session, error: BaseException) -> None:
    last = session.last_step
    if session.stop.signal is not None and isinstance(error, SystemExit):
        name = session.stop.signal.name
        session.event("run_stopped", last, signal=name)
        log.warning("ended at once by %s; run the same command to resume from the last save", name)
        return
    try:
        session.run_dir.write_traceback("".join(traceback.format_exception(error)))
    except OSError as why:
        log.error("%s was not written: %s", session.run_dir.traceback, why)
    # The error is shown where it is caught, on a terminal or in a cluster's log, so private values
    # must be removed from its text first. Its paths stay: they say what to repair.
    error.args = tuple(session.run_dir.terminal_scrubber.tree(error.args))
    session.event("run_failed", last, error=type(error).__name__, message=str(error))
    if not isinstance(error, HomeostatError):
        log.error("the run failed: %s: %s", type(error).__name__, error)
