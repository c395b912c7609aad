"""Parts of the pictures that benchmarks draw: curves over steps, as SVG."""

from __future__ import annotations

from collections.abc import Iterable

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 860, 420, 56, 52, 46


def head(title: str) -> list[str]:
    """Return the first lines of a picture."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="600" fill="#0f172a">{title}</text>',
    ]


def place(share_x: float, share_y: float, *, right: int) -> tuple[float, float]:
    """Return where a point of the plot is; shares of its width and height, from the lower left."""
    x = LEFT + (WIDTH - LEFT - right) * share_x
    return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share_y


def grid_line(share_y: float, text: str, *, right: int) -> str:
    """Return a horizontal line with its value on the left."""
    (x, y), (end, _) = place(0, share_y, right=right), place(1, share_y, right=right)
    return (
        f'<path d="M{x:.1f},{y:.1f}L{end:.1f},{y:.1f}" stroke="#e2e8f0"/>'
        f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#475569">{text}</text>'
    )


def step_labels(steps: Iterable[int], *, last: int, right: int) -> list[str]:
    """Return numbers of steps below the plot, whose width is `last` steps."""
    places = [(step, place(step / last, 0, right=right)) for step in steps]
    return [
        f'<text x="{x:.1f}" y="{y + 20:.0f}" text-anchor="middle" fill="#475569">{step}</text>'
        for step, (x, y) in places
    ]


def caption(text: str) -> str:
    """Return the line below the plot."""
    return f'<text x="{LEFT}" y="{HEIGHT - 8}" fill="#475569">{text}</text>'


def curve(points: Iterable[tuple[float, float]], colour: str) -> str:
    """Return a line through points."""
    line = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2.2"/>'


def end_labels(ends: Iterable[tuple[float, str, str]], *, right: int) -> list[str]:
    """Return the names of curves beside their ends: (height, name, colour) each, kept apart."""
    parts, last = [], 0.0
    for y, name, colour in sorted(ends):
        last = max(y, last + 18)
        parts.append(
            f'<text x="{WIDTH - right + 10}" y="{last + 4:.1f}" fill="{colour}" '
            f'font-weight="600">{name}</text>'
        )
    return parts
