"""A profiler window: a trace for chrome://tracing or Perfetto, and a memory snapshot on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from homeostat.config.observe import ProfilerConfig


class StepProfiler:
    """Traces the steps that were asked for, each into files of its own."""

    def __init__(
        self, config: ProfilerConfig | None, run_dir: Path, *, device: torch.device
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.device = device

    @contextmanager
    def around(self, step: int) -> Iterator[list[str]]:
        """Yields a list that holds the files written once the step is over."""
        written: list[str] = []
        if self.config is None or step not in self.config.steps:
            yield written
            return
        folder = self.run_dir / self.config.folder
        folder.mkdir(parents=True, exist_ok=True)
        on_gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        with profile(
            activities=activities, profile_memory=self.config.memory, record_shapes=True
        ) as profiler:
            yield written
        trace = folder / f"step_{step:08d}.json"
        profiler.export_chrome_trace(str(trace))
        table = folder / f"step_{step:08d}_top.txt"
        sort_by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
        table.write_text(profiler.key_averages().table(sort_by=sort_by, row_limit=30))
        written += [trace.name, table.name]
        if on_gpu and self.config.memory:
            snapshot = folder / f"step_{step:08d}_memory.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            written.append(snapshot.name)
