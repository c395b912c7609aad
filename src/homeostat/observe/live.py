"""The panel of a run, and the live view: Rich redraws it in place, log lines scroll above it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from homeostat.observe import format as fmt
from homeostat.observe import panel
from homeostat.observe.ailments import REMEDY_EVENTS
from homeostat.observe.events import mood_of
from homeostat.observe.health_board import HealthBoard
from homeostat.observe.panel import Item, Room, SampleBoard
from homeostat.observe.progress import Progress, event_line
from homeostat.observe.transcript import QUIET_EVENTS, RunLabel, Transcript

_MOOD_STYLES = {"": "", "good": "green", "warn": "yellow", "bad": "bold red"}
NUM_EVENTS_KEPT, NUM_EVENTS_SHOWN = 12, 4
# RL shows fewer of these: its curve needs the lines and already shows the same.
NUM_EVENTS_SHOWN_IN_RL = 2
_SAID_BY_THE_PICTURE = ("eval_done", "new_best", "checkpoint_pruned")
_SAID_BY_HEALTH = QUIET_EVENTS | REMEDY_EVENTS
MAX_WIDTH, MAX_HEIGHT = 120, 32
# Lines of RL's numbers and samples that are kept before the curve shrinks to a line of bars.
_FEWEST_LINES = 6
# Frame, progress row, and one free line of the terminal.
_LINES_TAKEN = 4


class PanelView:
    """A panel that fits from 60 columns and 8 lines up; smaller terminals lose its lesser lines.

    It takes in everything that is recorded, and `render` draws it. Derived views show it.
    """

    def __init__(
        self, console: Console, label: RunLabel, progress: Progress, health: HealthBoard
    ) -> None:
        self._label = label
        self._console = console
        self._progress = progress
        self._transcript = Transcript(progress)
        self._events: deque[Event] = deque(maxlen=NUM_EVENTS_KEPT)
        self._status: tuple[str, int, int] | None = None
        self._board = SampleBoard()
        self._health = health

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.on_step(step, metrics, now=self._transcript.clock())

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self._transcript.record(step, metrics)

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        if kind not in _SAID_BY_HEALTH:
            self._events.append((kind, step, dict(fields)))
        self._health.event(kind, step, fields)
        self._transcript.event(kind, step, fields)

    def status(self, text: str, done: int, total: int) -> None:
        self._status = (text, done, total)
        self._transcript.status(text, done, total)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._board.take(rows)

    def finding(self, step: int, finding: Mapping[str, Any]) -> None:
        self._health.finding(step, finding)
        self._transcript.finding(step, finding)

    def close(self) -> None:
        if self._status is not None:
            self._status = ("", 0, 0)

    @property
    def room(self) -> Room:
        """Return the space that the terminal offers at this moment."""
        size = self._console.size
        width = max(1, min(size.width, MAX_WIDTH) - 4)
        height = max(1, min(size.height, MAX_HEIGHT) - _LINES_TAKEN)
        return Room(width, height, blocks=not self._console.options.ascii_only)

    def render(self) -> RenderableType:
        room = self.room
        items = self._rl_items(room) if self._progress.is_rl else self._sft_items(room)
        lines = [item.line for item in panel.fit(items, room.height)]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis" if room.blocks else "crop"
        title = Text(fmt.one_line(self._label.run_name), style="bold")
        model = Text(self._label.model_line, style="dim", overflow="ellipsis", no_wrap=True)
        return Panel(
            Group(self._progress_row(room), *lines), title=title, subtitle=model,
            title_align="left", subtitle_align="right", border_style=self._health.border,
            width=room.width + 4,
        )  # fmt: skip

    def _sft_items(self, room: Room) -> list[Item]:
        events = self._event_items(room, NUM_EVENTS_SHOWN)
        numbers = panel.sft_items(self._progress, room)
        health = self._health.items(room, step=self._progress.step)
        above = [*self._status_items(room), panel.blank(), *numbers]
        return [*above, *_apart(health), *_apart(events)]

    def _rl_items(self, room: Room) -> list[Item]:
        progress = self._progress
        # The curve gets a third of the panel, and whatever the other lines leave.
        can_draw = room.height >= _FEWEST_LINES + panel.MIN_CURVE_LINES
        head = panel.reward_headline(progress, room, spark=not can_draw)
        above = [*self._status_items(room), panel.blank(), Item(head)]
        below = [
            *_apart(self._health.items(room, step=progress.step)),
            *_apart(panel.rl_items(progress, room)),
            *_apart(self._board.items(room)),
            *_apart(self._event_items(room, NUM_EVENTS_SHOWN_IN_RL)),
        ]
        if not can_draw:
            return [*above, *below]
        wanted = max(panel.MIN_CURVE_LINES, min(panel.MAX_CURVE_LINES, room.height // 3))
        below = panel.fit(below, room.height - len(above) - wanted)
        free = room.height - len(above) - len(below)
        curve = panel.reward_curve(progress, room, min(panel.MAX_CURVE_LINES, free))
        return [*above, *(Item(line) for line in curve), *below]

    def _status_items(self, room: Room) -> list[Item]:
        """Return the status line, which stays once it was shown, so the panel does not jump."""
        return [] if self._status is None else [Item(panel.status_line(self._status, room), rank=1)]

    def _event_items(self, room: Room, count: int) -> list[Item]:
        shown = list(self._events)
        if self._progress.is_rl:
            shown = [event for event in shown if event[0] not in _SAID_BY_THE_PICTURE]
        shown = _to_show(shown, count)
        width = len(str(self._label.total_steps))
        items = []
        for number, (kind, step, fields) in enumerate(shown):
            text = event_line(kind, fields, max_length=max(20, room.width - width - 2))
            line = Text.assemble((f"{step:>{width}}  ", "dim"), (text, _MOOD_STYLES[mood_of(kind)]))
            items.append(Item(line, rank=1 if _is_trouble(kind) else 8 - number))
        return items

    def _progress_row(self, room: Room) -> RenderableType:
        progress, now = self._progress, self._transcript.clock()
        remaining = progress.remaining_s(now)
        done = progress.step >= progress.total_steps
        eta = (
            "done"
            if done
            else f"eta {fmt.duration(remaining)}"
            if remaining is not None
            else "eta -"
        )
        times = Text.assemble((f" {progress.share_done:4.0%}  ", "bold"), (eta, "cyan"))
        if room.width >= 54:
            times.append(f"  elapsed {fmt.duration(progress.elapsed_s(now))}", style="dim")
        steps = Text(f"step {progress.step}/{progress.total_steps} ", style="bold")
        bar = ProgressBar(
            total=max(1, progress.total_steps),
            completed=progress.step,
            width=max(8, room.width - steps.cell_len - times.cell_len),
            complete_style="cyan",
            finished_style="green",
        )
        row = Table.grid(expand=False)
        for _ in range(3):
            row.add_column(no_wrap=True, overflow="crop")
        row.add_row(steps, bar, times)
        return row


class LiveView(PanelView):
    """The panel in a terminal, redrawn four times a second."""

    def __init__(
        self, console: Console, label: RunLabel, progress: Progress, health: HealthBoard
    ) -> None:
        super().__init__(console, label, progress, health)
        self._live = Live(
            get_renderable=self.render, console=console, refresh_per_second=4, transient=False
        )
        self._live.start()

    def close(self) -> None:
        super().close()
        self._live.stop()


Event = tuple[str, int, dict[str, Any]]


def _to_show(events: Sequence[Event], count: int) -> list[Event]:
    """Return the newest events; problems come before other events that are older."""
    newest = len(events) - 1

    def weight(place: int) -> tuple[bool, bool, int]:
        return place == newest, _is_trouble(events[place][0]), place

    chosen = sorted(range(len(events)), key=weight, reverse=True)[:count]
    return [events[place] for place in sorted(chosen)]


def _is_trouble(kind: str) -> bool:
    return mood_of(kind) in ("warn", "bad")


def _apart(items: list[Item]) -> list[Item]:
    """Return the items with a blank line before them, if there are any."""
    return [panel.blank(), *items] if items else []
