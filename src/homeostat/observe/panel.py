"""The lines of the live panel, and which of them a small terminal still shows.

    Progress, events, samples, status -> [Item(line, rank)] -> the items that fit -> LiveView

Every item is one line that never wraps, so the height is known before anything is drawn: the curve
takes the space that the others leave, and if there is still too little space, the items of highest
rank are dropped first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from homeostat.observe import curves, time_bar
from homeostat.observe import format as fmt
from homeostat.observe.progress import Progress
from homeostat.observe.samples import Row, best_and_worst_prompts
from homeostat.observe.transcript import off_policy_signs, passes, status_text

MIN_CURVE_LINES, MAX_CURVE_LINES = 4, 8
NUM_SAMPLES = 2  # number of best samples, and of worst ones
LABEL_WIDTH = 9


@dataclass(frozen=True, slots=True)
class Item:
    """A line of the panel. Items of higher rank are dropped first."""

    line: Text
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """The space that the terminal offers inside the panel's frame."""

    width: int
    height: int
    blocks: bool = True

    @property
    def bars(self) -> Mapping[str, str]:
        """Return arguments for a sparkline that this terminal can show."""
        return {} if self.blocks else {"bars": fmt.ASCII_BARS}


def fit(items: Sequence[Item], height: int) -> list[Item]:
    """Return the items that fit, in their order."""
    surplus = max(0, len(items) - height)
    leaving = sorted(range(len(items)), key=lambda i: (items[i].rank, i), reverse=True)[:surplus]
    return [item for i, item in enumerate(items) if i not in leaving]


def blank() -> Item:
    return Item(Text(""), rank=9)


def status_line(status: tuple[str, int, int], room: Room) -> Text:
    """Describe what the current step is doing, with a progress bar if that is counted."""
    text, done, total = status
    line = Text(status_text(text, done, total), style="dim")
    if total > 0 and room.width >= 50:
        width = 16
        full = min(width, max(0, done) * width // total)
        mark = "━" if room.blocks else "-"
        line = Text.assemble((mark * full, "cyan"), (mark * (width - full), "bright_black"), " ",
                             line)  # fmt: skip
    return line


def sft_items(progress: Progress, room: Room) -> list[Item]:
    latest, items = progress.latest, []
    if "train/loss" in latest:
        width = max(8, min(60, room.width - 20))
        spark = fmt.sparkline(progress.curves["train/loss"].means, width, **room.bars)
        loss = latest["train/loss"]
        style = "bold" if math.isfinite(loss) else "bold red"
        value = Text.assemble((f"{fmt.loss(loss):<8}", style), (spark, "cyan"))
        items.append(Item(labelled("loss", [value], room)))
    if "eval/loss" in latest:
        cells = [Text(f"{fmt.loss(latest['eval/loss']):<6}", "bold"), *_best_cell(progress)]
        items.append(Item(labelled("eval", cells, room)))
    groups = {"pairs": (_PREFERENCE, 3), "train": (_TRAIN, 3), "speed": (_SPEED, 4)}
    return items + _rows(progress, room, groups) + time_items(progress, room, rank=5)


def rl_items(progress: Progress, room: Room) -> list[Item]:
    groups = {"policy": (_POLICY, 3), "length": (_LENGTH, 4)}
    others = {"train": (_TRAIN, 7), "speed": (_SPEED, 7)}
    engine, times = _engine_items(progress, room), time_items(progress, room, rank=5)
    return [*_rows(progress, room, groups), *engine, *times, *_rows(progress, room, others)]


def time_items(progress: Progress, room: Room, *, rank: int) -> list[Item]:
    """Return where the time of the newest step went: a bar, and the share of each part."""
    found = time_bar.shares(progress.latest)
    if not found:
        return []
    width = max(10, min(40, room.width // 3))
    bar = Text()
    for at, ((part, _), num) in enumerate(zip(found, time_bar.widths(found, width), strict=True)):
        # Neighbours also differ without colours.
        mark = "█▓"[at % 2] if room.blocks else part.letter
        bar.append(mark * num, style=part.style)
    cells = [Text.assemble(bar, (f" {fmt.duration(progress.latest['time/step'])}", "bold"))]
    largest = sorted(found, key=lambda one: -one[1])
    for part, share in largest:
        name = part.name if room.blocks else f"{part.letter} {part.name}"
        cells.append(Text.assemble((f"{name} ", part.style), (fmt.percent(share), "bold")))
    return [Item(labelled("time", cells, room), rank=rank)]


def _engine_items(progress: Progress, room: Room) -> list[Item]:
    """Return the engine's lines; if there is little room, staleness comes before traffic."""
    cells = _cells(_ENGINE, progress, room)
    cells += [_pair(*sign, style="yellow") for sign in off_policy_signs(progress.latest)]
    cells += _cells(_SENT, progress, room)
    return [Item(labelled("engine", cells, room), rank=6)] if cells else []


def reward_headline(progress: Progress, room: Room, *, spark: bool) -> Text:
    """Return the newest reward, and the newest and best of the held-out prompts.

    `spark` adds a sparkline, for panels without room for the curve.
    """
    latest, cells = progress.latest, []
    if "reward" in latest:
        style = "bold cyan" if math.isfinite(latest["reward"]) else "bold red"
        cells.append(Text.assemble(("reward ", "dim"), (f"{latest['reward']:.3f}", style)))
        if "reward_std" in latest:
            cells[-1].append(f" +-{latest['reward_std']:.2f}", style="dim")
        if spark:
            bars = fmt.sparkline(progress.curves["reward"].means, 16, **room.bars)
            cells[-1].append(f" {bars}", style="cyan")
    if "eval/reward" in latest:
        cells.append(_pair("held-out", f"{latest['eval/reward']:.3f}", "bold yellow"))
        cells += [_pair(name[5:], fmt.percent(latest[name]), "yellow") for name in passes(latest)]
        cells += _best_cell(progress)
    return _in_width(Text(""), cells, room.width)


def reward_curve(progress: Progress, room: Room, num_lines: int) -> list[Text]:
    """Draw the reward over the run as an area, with held-out rewards as dots and an axis below."""
    reward, held_out = progress.curves["reward"], progress.curves["eval/reward"]
    low, high = curves.bounds([*reward.means, *held_out.means])
    labels = {0: f"{high:.3g}", num_lines - 2: f"{low:.3g}"}
    margin = max(map(len, labels.values()))
    width = max(4, room.width - margin - 2)
    step = max(progress.step, 1)
    last = curves.span_of(step, width=width, total_steps=progress.total_steps)
    columns = reward.columns(width, last_step=last)
    drawn = curves.area(columns, num_lines - 1, low=low, high=high, blocks=room.blocks)
    rows = [Text(row, style="cyan") for row in drawn]
    for at, value in held_out.points:
        if math.isfinite(value):
            up = round(curves.share_of(value, low=low, high=high) * (8 * len(rows) - 1)) // 8
            _put_dot(rows, curves.column_of(at, width=width, last_step=last), up, room)
    wall, corner, floor = ("│", "└", "─") if room.blocks else ("|", "+", "-")
    lines = [
        Text.assemble((f"{labels.get(i, ''):>{margin}} {wall}", "dim"), row)
        for i, row in enumerate(rows)
    ]
    end = f" step {last:,}"
    axis = f"{'':>{margin}} {corner}{floor * max(0, width - len(end))}{end}"
    return [*lines, Text(axis, style="dim")]


def _put_dot(rows: list[Text], column: int, up: int, room: Room) -> None:
    row = rows[len(rows) - 1 - up]
    plain = row.plain
    marked = Text(plain[:column] + ("●" if room.blocks else "o") + plain[column + 1 :], row.style)
    marked.spans = [*row.spans]
    marked.stylize("bold yellow", column, column + 1)
    rows[len(rows) - 1 - up] = marked


class SampleBoard:
    """The completions shown last, and the range of rewards seen, which sets their colours."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, float, str]] = []
        self._low, self._high = math.inf, -math.inf

    def take(self, rows: Iterable[Row]) -> None:
        best, worst = best_and_worst_prompts(list(rows), NUM_SAMPLES)
        shown = [*best, *reversed(worst)]  # from the best to the worst
        for row in shown:
            self._low, self._high = min(self._low, row["reward"]), max(self._high, row["reward"])
        self._rows = [
            (_clean(row["prompt"]), _clean(row["completion"]), float(row["reward"]),
             fmt.one_line(str(row.get("stop_reason", ""))))
            for row in shown
        ]  # fmt: skip

    def items(self, room: Room) -> list[Item]:
        rows = self._rows
        if not rows:
            return []
        rewards = [f"{reward:.2f}" for _, _, reward, _ in rows]
        size = max(map(len, rewards))
        prompt_width = max(cell_len(prompt) for prompt, _, _, _ in rows)
        prompt_width = max(1, min(prompt_width, (room.width - size - 6) * 2 // 5))
        answer_width = max(6, room.width - size - prompt_width - 6)
        items = []
        for number, (text, row) in enumerate(zip(rewards, rows, strict=True)):
            prompt, answer, reward, stop = row
            cut = f" ({stop})" if stop and not stop.startswith("stop") else ""
            line = Text.assemble(
                (f"{text:>{size}}", self._style(reward)), "  ",
                (set_cell_size(_elided(prompt, prompt_width), prompt_width), "dim"),
                (" → " if room.blocks else " > ", "dim"),
                (_elided(answer, answer_width - len(cut)), self._style(reward)), (cut, "dim"),
            )  # fmt: skip
            # The very best and the very worst are dropped last.
            items.append(Item(line, rank=2 if number in (0, len(rows) - 1) else 6))
        return items

    def _style(self, reward: float) -> str:
        """Return green for the upper half of the rewards seen, red for the lower.

        There is no colour if all are equal.
        """
        if not self._low < self._high:
            return ""
        middle = self._low / 2 + self._high / 2
        return "green" if reward >= middle else "red"


def _clean(text: Any) -> str:
    # Cut long texts before searching them: only their ends are ever shown.
    text = str(text)
    return fmt.one_line(text if len(text) <= 2000 else f"{text[:1000]} ... {text[-1000:]}")


def _elided(text: str, width: int) -> str:
    """Return the beginning and end of a text, which tell more than the beginning alone."""
    if cell_len(text) <= width:
        return text
    head = max(1, (width - 3) // 2)
    tail = max(0, width - 3 - head)
    end = set_cell_size(text[::-1], tail)[::-1] if tail else ""
    return set_cell_size(f"{set_cell_size(text, head).rstrip()}...{end.lstrip()}", width).rstrip()


Show = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Cell:
    """A metric in a line of the panel. `spark` adds a sparkline if there is room."""

    metric: str
    label: str
    show: Show
    hide_zero: bool = False
    style: str = "bold"
    spark: bool = False


def _short(value: float) -> str:
    return f"{value:.3g}"


def _brief(value: float) -> str:
    return f"{value:.2g}"


_POLICY = (
    Cell("entropy", "entropy", _short, spark=True),
    Cell("kl", "kl", _short),
    Cell("clip_ratio/region_mean", "clipped", fmt.percent),
)
_ENGINE = (
    Cell("sampling/sampling_logp_difference/mean", "diff", _brief),
    Cell("sampling/sampling_logp_difference/max", "largest", _brief),
)
_SENT = (Cell("sync/seconds", "weights sent in", lambda value: f"{value:.2g} s"),)
_LENGTH = (
    Cell("completions/mean_length", "mean", lambda value: f"{value:.4g}", spark=True),
    Cell("completions/max_length", "max", lambda value: f"{value:.0f}"),
    Cell("completions/clipped_ratio", "cut", fmt.percent),
)
_TRAIN = (
    Cell("learning_rate", "lr", _short),
    Cell("grad_norm", "grad norm", _short),
    Cell("epoch", "epoch", lambda value: f"{value:.2f}"),
    Cell("train/skipped_steps", "skipped", lambda v: f"{v:.0f}", hide_zero=True, style="yellow"),
)
_PREFERENCE = (
    Cell("preference/accuracy", "accuracy", fmt.percent),
    Cell("preference/margin", "margin", _short),
    Cell("preference/chosen_reward", "chosen", _short),
    Cell("preference/rejected_reward", "rejected", _short),
)
_SPEED = (
    Cell("throughput/tokens_per_s", "tokens/s", fmt.count),
    Cell("num_tokens", "tokens", fmt.count),
    Cell("memory/max_alloc", "peak", fmt.byte_size, hide_zero=True),
    Cell("memory/host_rss", "host", fmt.byte_size),
)


def _rows(
    progress: Progress, room: Room, groups: Mapping[str, tuple[tuple[Cell, ...], int]]
) -> list[Item]:
    rows = ((name, _cells(cells, progress, room), rank) for name, (cells, rank) in groups.items())
    return [Item(labelled(name, cells, room), rank) for name, cells, rank in rows if cells]


def _cells(cells: Sequence[Cell], progress: Progress, room: Room) -> list[Text]:
    found = []
    for cell in cells:
        value = progress.latest.get(cell.metric)
        if value is None or (cell.hide_zero and value == 0):
            continue
        text = _pair(cell.label, cell.show(value), cell.style)
        if cell.spark and room.width >= 84:
            means = progress.curves[cell.metric].means
            text.append(f" {fmt.sparkline(means, 16, **room.bars)}", style="cyan")
        found.append(text)
    return found


def labelled(label: str, cells: Sequence[Text], room: Room) -> Text:
    """Return a line of the panel: its label, and as many cells as fit."""
    return _in_width(Text.assemble((f"{label:<{LABEL_WIDTH}}", "dim")), cells, room.width)


def _in_width(line: Text, cells: Sequence[Text], width: int) -> Text:
    """Return the line with as many whole cells after it as fit, at least one."""
    for number, cell in enumerate(cells):
        gap = "   " if number else ""
        if number and line.cell_len + len(gap) + cell.cell_len > width:
            break
        line.append(gap)
        line.append_text(cell)
    return line


def _best_cell(progress: Progress) -> list[Text]:
    if progress.best_eval is None:
        return []
    return [Text(f"best {fmt.loss(progress.best_eval)} at step {progress.best_step}", "green")]


def _pair(name: str, value: str, style: str = "bold") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, style))
