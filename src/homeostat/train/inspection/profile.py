"""A profiler window: a trace for chrome://tracing or Perfetto, and a memory snapshot on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from homeostat.config.observe import ProfilerConfig
from homeostat.observe.run_dir import RunPaths
from homeostat.train.events import EmitEvent
from homeostat.train.memory import recorded_allocations

log = logging.getLogger(__name__)


class StepProfiler:
    """Traces the configured steps, each into separate files."""

    def __init__(
        self, config: ProfilerConfig | None, run_dir: RunPaths, *, device: torch.device
    ) -> None:
        if config is not None:
            run_dir.inside(config.folder)  # one outside is refused before the first step
        self.config = config
        self.run_dir = run_dir
        self.device = device

    @contextmanager
    def around(self, step: int, *, emit: EmitEvent) -> Iterator[None]:
        """Trace the step if it is configured, and report the files that were written."""
        if self.config is None or step not in self.config.steps:
            yield
            return
        folder = self.run_dir.inside(self.config.folder)
        on_gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        record = recorded_allocations(self.device) if self.config.memory else nullcontext()
        with record:
            with profile(
                activities=activities, profile_memory=self.config.memory, record_shapes=True
            ) as profiler:
                yield
            try:
                folder.mkdir(parents=True, exist_ok=True)
                written = self._write_trace(profiler, folder, step, on_gpu=on_gpu)
            except OSError as error:
                log.error("the trace of step %d was not written: %s", step, error)
                return
        emit("profiler_trace", step, folder=str(folder), files=written)

    def _write_trace(
        self, profiler: profile, folder: Path, step: int, *, on_gpu: bool
    ) -> list[str]:
        """The trace for a viewer, the thirty costliest operations as text, GPU memory."""
        trace = folder / f"step_{step:08d}.json"
        profiler.export_chrome_trace(str(trace))
        table = folder / f"step_{step:08d}_top.txt"
        sort_by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        table.write_text(profiler.key_averages().table(sort_by=sort_by, row_limit=30))
        written = [trace.name, table.name]
        if on_gpu and self.config is not None and self.config.memory:
            snapshot = folder / f"step_{step:08d}_memory.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            written.append(snapshot.name)
        return written
