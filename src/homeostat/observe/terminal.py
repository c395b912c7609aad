"""The console on which everything for people is printed."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from homeostat.observe.safe_text import safe_text


class SafeConsole(Console):
    """A Rich console on which no text can control the terminal (see safe_text).

    Rich's own colours and cursor movements are not part of a segment's text, so they are
    unaffected.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else safe_text(text), style, control)
