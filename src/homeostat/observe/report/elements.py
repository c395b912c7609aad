"""Building blocks of the HTML page. They escape all text that comes from the run."""

from __future__ import annotations

from html import escape


def tile(label: str, value: str, note: str = "") -> str:
    return (
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b>'
        f"<small>{escape(note)}</small></div>"
    )


def block(title: str, note: str, text: str, *, is_open: bool = False) -> str:
    """Return text that unfolds; nothing if it is empty."""
    if not text:
        return ""
    opened = " open" if is_open else ""
    return (
        f'<details class="card"{opened}><summary>{title}<small>{note}</small></summary>'
        f"<pre>{escape(text)}</pre></details>"
    )


def heading(title: str, note: str = "") -> str:
    return f"<h2>{title}<small>{escape(note)}</small></h2>"


def table(title: str, note: str, heads: list[str], rows: list[str]) -> str:
    """Return a table. A head that starts with `num:` marks a column of numbers. Rows are HTML."""
    cells = "".join(
        f'<th class="num">{head[4:]}</th>' if head.startswith("num:") else f"<th>{head}</th>"
        for head in heads
    )
    return (
        f'{heading(title, note)}<div class="card scroll"><table>'
        f"<thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
