"""The live panel: Rich redraws it in place, log lines scroll above it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from homeostat.observe import format as fmt
from homeostat.observe.events import mood_of
from homeostat.observe.progress import Progress, event_line
from homeostat.observe.transcript import RunLabel, Transcript

_MOOD_STYLES = {"": "", "good": "green", "warn": "yellow", "bad": "bold red"}
NUM_EVENTS_SHOWN = 4


class LiveView:
    """A panel of at most a dozen lines that fits from 60 columns up."""

    def __init__(self, console: Console, label: RunLabel, progress: Progress) -> None:
        self._label = label
        self._console = console
        self._progress = progress
        self._transcript = Transcript(progress)
        self._events: deque[tuple[str, int, dict[str, Any]]] = deque(maxlen=NUM_EVENTS_SHOWN)
        self._live = Live(
            get_renderable=self.render, console=console, refresh_per_second=4, transient=False
        )
        self._live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.on_step(step, metrics, now=self._transcript.clock())

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self._transcript.record(step, metrics)

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        self._events.append((kind, step, dict(fields)))
        self._transcript.event(kind, step, fields)

    def close(self) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        width = min(self._console.width, 120)
        inner = width - 4
        parts: list[RenderableType] = [self._progress_row(inner), "", self._numbers(inner)]
        if self._events:
            parts += ["", self._event_rows(inner)]
        title = Text(self._label.run_name, style="bold")
        model = Text(self._label.model_line, style="dim", overflow="ellipsis", no_wrap=True)
        return Panel(
            Group(*parts), title=title, subtitle=model, title_align="left",
            subtitle_align="right", border_style="cyan", width=width,
        )  # fmt: skip

    def _progress_row(self, width: int) -> RenderableType:
        progress, now = self._progress, self._transcript.clock()
        remaining = progress.remaining_s(now)
        done = progress.step >= progress.total_steps
        eta = "done" if done else f"eta {fmt.duration(remaining)}" if remaining else "eta -"
        times = Text.assemble(
            (f" {progress.share_done:4.0%}  ", "bold"),
            (eta, "cyan"),
            (f"  elapsed {fmt.duration(progress.elapsed_s(now))}", "dim"),
        )
        steps = Text(f"step {progress.step}/{progress.total_steps} ", style="bold")
        bar_width = max(8, width - steps.cell_len - times.cell_len)
        bar = ProgressBar(
            total=max(1, progress.total_steps),
            completed=progress.step,
            width=bar_width,
            complete_style="cyan",
            finished_style="green",
        )
        row = Table.grid(expand=False)
        row.add_row(steps, bar, times)
        return row

    def _numbers(self, width: int) -> RenderableType:
        latest, progress = self._progress.latest, self._progress
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", min_width=5, no_wrap=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        room = max(10, width - 8)
        if "train/loss" in latest:
            spark = fmt.sparkline(list(progress.losses), max(8, min(60, room - 12)))
            loss = latest["train/loss"]
            style = "bold" if math.isfinite(loss) else "bold red"
            grid.add_row("loss", Text.assemble((f"{fmt.loss(loss):<8}", style), (spark, "cyan")))
        if "eval/loss" in latest:
            best = f"best {fmt.loss(progress.best_eval)} at step {progress.best_step}"
            value = f"{fmt.loss(latest['eval/loss']):<8}"
            grid.add_row("eval", Text.assemble((value, "bold"), (best, "green")))
        for name, cells in (("train", self._train_cells()), ("speed", self._speed_cells())):
            if cells:
                grid.add_row(name, Text("   ").join(cells))
        return grid

    def _train_cells(self) -> list[Text]:
        shown = {
            "learning_rate": lambda value: _pair("lr", f"{value:.3g}"),
            "grad_norm": lambda value: _pair("grad norm", f"{value:.3g}"),
            "epoch": lambda value: _pair("epoch", f"{value:.2f}"),
            "train/skipped_steps": lambda value: (
                _pair("skipped", f"{value:.0f}", "yellow") if value else None
            ),
        }
        return self._cells(shown)

    def _speed_cells(self) -> list[Text]:
        shown = {
            "throughput/tokens_per_s": lambda value: _pair("tokens/s", fmt.count(value)),
            "num_tokens": lambda value: _pair("tokens", fmt.count(value)),
            "memory/max_alloc": lambda value: (
                _pair("peak", fmt.byte_size(value)) if value else None
            ),
            "memory/host_rss": lambda value: _pair("host", fmt.byte_size(value)),
        }
        return self._cells(shown)

    def _cells(self, shown: Mapping[str, Any]) -> list[Text]:
        latest = self._progress.latest
        cells = [show(latest[name]) for name, show in shown.items() if name in latest]
        return [cell for cell in cells if cell is not None]

    def _event_rows(self, width: int) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(justify="right", style="dim", width=len(str(self._label.total_steps)))
        grid.add_column(no_wrap=True, overflow="ellipsis", max_width=width - 8)
        for kind, step, fields in list(self._events):
            text = event_line(kind, fields, max_length=width)
            grid.add_row(str(step), Text(text, style=_MOOD_STYLES[mood_of(kind)]))
        return grid


def _pair(name: str, value: str, style: str = "bold") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, style))
