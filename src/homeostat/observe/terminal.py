"""The console on which everything for people is printed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from homeostat.observe.safe_text import safe_text


class SafeConsole(Console):
    """A Rich console on which no text can control the terminal (see safe_text).

    Rich's own colours and cursor movements are not part of a segment's text, so they are
    unaffected. In a notebook it writes text to the stream that it was given, as everywhere: Rich
    would need widgets there.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(force_jupyter=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else safe_text(text), style, control)
