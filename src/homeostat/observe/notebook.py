"""The panel of a run in the output of a notebook's cell, rewritten in place.

    step, event, finding ... -> PanelView.render -> HTML -> the cell's display, updated

IPython's own display is used, so no widgets have to be installed, and the last state of the panel
is kept in the notebook's file. A front end without HTML shows the same panel as text.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from homeostat.observe.health_board import HealthBoard
from homeostat.observe.live import PanelView
from homeostat.observe.progress import Progress
from homeostat.observe.terminal import SafeConsole
from homeostat.observe.transcript import RunLabel

# A notebook is updated through its server: more often than this is only traffic.
SECONDS_BETWEEN_UPDATES = 0.25
_WIDTH, _HEIGHT = 100, 28
_PAGE = (
    '<pre style="white-space:pre;line-height:1.25;overflow-x:auto;margin:0;'
    "font-family:Menlo,'DejaVu Sans Mono',Consolas,monospace\">{code}</pre>"
)


class Shown(Protocol):
    """A display that can be rewritten: IPython's DisplayHandle."""

    def update(self, data: Mapping[str, str], *, raw: bool) -> None: ...


# IPython.display.display, as far as it is used: display(data, raw=True, display_id=True).
Display = Callable[..., Shown]


def find_display() -> Display | None:
    """Return the display of the notebook that this process computes; None elsewhere.

    IPython in a terminal has no kernel, and shows the panel as any terminal does.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if ipython is None or getattr(shell, "kernel", None) is None:
        return None
    return ipython.display.display


class NotebookView(PanelView):
    """The panel as the output of a cell."""

    def __init__(
        self,
        display: Display,
        label: RunLabel,
        progress: Progress,
        health: HealthBoard,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._canvas = SafeConsole(
            file=io.StringIO(), width=_WIDTH, height=_HEIGHT, record=True,
            force_terminal=True, color_system="standard",
        )  # fmt: skip
        super().__init__(self._canvas, label, progress, health)
        self._clock = clock
        self._drawn_at = clock()
        self._shown = display(self._drawn(), raw=True, display_id=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        self._redraw()

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        super().event(kind, step, fields)
        self._redraw()

    def status(self, text: str, done: int, total: int) -> None:
        super().status(text, done, total)
        self._redraw()

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        super().samples(step, rows)
        self._redraw()

    def finding(self, step: int, finding: Mapping[str, Any]) -> None:
        super().finding(step, finding)
        # Show this at once, because the run may end soon after it.
        self._redraw(now=True)

    def close(self) -> None:
        super().close()
        self._redraw(now=True)

    def _redraw(self, *, now: bool = False) -> None:
        if not now and self._clock() - self._drawn_at < SECONDS_BETWEEN_UPDATES:
            return
        self._drawn_at = self._clock()
        self._shown.update(self._drawn(), raw=True)

    def _drawn(self) -> dict[str, str]:
        """Return the panel in the forms that a front end may choose from."""
        self._canvas.print(self.render())
        text = self._canvas.export_text(clear=False)
        page = self._canvas.export_html(inline_styles=True, code_format=_PAGE)
        # The printed text is recorded, so the stream itself is not needed.
        self._canvas.file = io.StringIO()
        return {"text/html": page, "text/plain": text}
