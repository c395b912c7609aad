"""Helpers of verbs that show text from data files on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.rule import Rule
from rich.text import Text


def printable(text: str, *, newline: str) -> str:
    """Return a text with control characters as escapes and line ends and tabs visible.

    Data must not control the terminal. This is stricter than `safe_text`, because someone who looks
    at single tokens wants to see every odd space.
    """
    shown = (
        f"{newline}\n" if char == "\n" else char if char.isprintable() else repr(char)[1:-1]
        for char in text
    )
    return "".join(shown)


def marks(console: Console) -> tuple[str, str, str]:
    return ("⟦", "⟧", "↵") if is_unicode(console) else ("[[", "]]", "\\n")


def is_unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def heading(name: str, console: Console) -> None:
    dash = "─" if is_unicode(console) else "-"
    console.print(Rule(Text(name, style="bold"), align="left", characters=dash, style="dim"))
