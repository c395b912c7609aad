"""Write TensorBoard event files without torch or TensorFlow.

Each file starts with a session-start event: TensorBoard then drops what earlier files of the run
contain from that step on, so a step that was computed twice is shown once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

from homeostat.config.observe import TensorboardSink as TensorboardConfig
from homeostat.errors import MissingDependencyError
from homeostat.observe.sinks.base import SinkContext


class TensorboardSink:
    """Write records to TensorBoard event files in the run directory."""

    name = "TensorBoard"

    def __init__(self, config: TensorboardConfig, context: SinkContext) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise MissingDependencyError.of(
                "tensorboard", extra="tensorboard", needed_for="observe.sinks: tensorboard"
            ) from None
        events, summaries = cast(Any, event_pb2), cast(Any, summary_pb2)  # generated, untyped
        self._event, self._summary = events.Event, summaries.Summary
        folder = context.run_dir.inside(config.folder)
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        step = 0 if context.resumed_from is None else context.resumed_from + 1
        start = events.SessionLog(status=events.SessionLog.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()
        ]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()
