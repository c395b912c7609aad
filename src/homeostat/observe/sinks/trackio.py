"""Log to trackio, a local store (in TRACKIO_DIR) that `trackio show` displays."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping

from homeostat.config.observe import TrackioSink as TrackioConfig
from homeostat.errors import MissingDependencyError
from homeostat.observe.sinks.base import SentMark, SinkContext


class TrackioSink:
    """Send records to a trackio run."""

    name = "trackio"

    def __init__(self, config: TrackioConfig, context: SinkContext) -> None:
        try:
            import trackio
        except ImportError:
            raise MissingDependencyError.of(
                "trackio", extra="trackio", needed_for="observe.sinks: trackio"
            ) from None
        mark = context.run_dir.sinks / "trackio.step"
        if context.resumed_from is None:
            mark.unlink(missing_ok=True)
        self._sent = SentMark(mark, service=self.name, resumed_from=context.resumed_from)
        self._trackio = trackio
        # trackio prints a greeting on stdout, which is reserved for our own output (`--format
        # json`).
        with contextlib.redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=config.project,
                name=config.name or context.run_name,
                resume="never" if context.resumed_from is None else "allow",
                embed=False,
                # We already log gpu/ metrics ourselves.
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._sent.is_new(step):
            self._run.log(dict(metrics), step=step)
            self._sent.move_to(step)

    def close(self) -> None:
        # The module's own finish also tells its exit hook that nothing is left to do.
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()
