"""The page's building blocks. Titles are ours; what comes from the run is escaped by these."""

from __future__ import annotations

from html import escape


def tile(label: str, value: str, note: str = "") -> str:
    return (
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b>'
        f"<small>{escape(note)}</small></div>"
    )


def block(title: str, note: str, text: str, *, is_open: bool = False) -> str:
    """Text that unfolds; nothing where there is none."""
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
    """A head that starts with `num:` stands over a column of numbers. Rows are HTML."""
    cells = "".join(
        f'<th class="num">{head[4:]}</th>' if head.startswith("num:") else f"<th>{head}</th>"
        for head in heads
    )
    return (
        f'{heading(title, note)}<div class="card scroll"><table>'
        f"<thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
