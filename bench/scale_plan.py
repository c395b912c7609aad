"""Plan 7 B, 70 B and a 235 B MoE on 8, 64 and 1,024 GPUs, beside published figures.

Nothing is trained or measured: the simulator (src/homeostat/simulator) computes it from rates that
were measured. The tables and the picture of docs/guide/scale.md are written by this file; a test
says when they are stale.

    python bench/scale_plan.py            # writes the tables into the guide, and the picture
    python bench/scale_plan.py --print    # only prints the tables
"""

from __future__ import annotations

import argparse
import sys
from functools import cache
from pathlib import Path

from curves import HEIGHT, LEFT, WIDTH, caption, head

from homeostat.cli.plan_view import split_text
from homeostat.config import load_config
from homeostat.errors import DoesNotFitError
from homeostat.run.sizing.scale import Assumed, plan_recipe, read_shape
from homeostat.simulator.plan import Plan
from homeostat.simulator.published import compare

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "guide" / "scale.md"
PICTURE = ROOT / "docs" / "guide" / "scale.svg"
RECIPE = ROOT / "recipes" / "qwen2.5_7b_math_grpo_h200.yaml"
MODELS = ("qwen2.5-7b", "llama3.1-70b", "qwen3-235b-a22b")
GPUS = (8, 64, 1024)
MEAN_TOKENS = 4000
MARKS = {name: (f"<!-- {name} -->", f"<!-- end of {name} -->") for name in ("plans", "published")}
COLOURS = {
    "generate": "#0f766e",
    "rewards": "#ca8a04",
    "train": "#1d4ed8",
    "publish, other": "#94a3b8",
}


@cache
def plan_of(model: str, gpus: int) -> Plan | str:
    """Return the plan, or why there is none."""
    assumed = Assumed(mean_tokens=MEAN_TOKENS)
    try:
        return plan_recipe(load_config(RECIPE), gpus=gpus, shape=model, assumed=assumed)
    except DoesNotFitError as error:
        return str(error)


def plan_table() -> str:
    """Return the table of all models and numbers of GPUs."""
    lines = [
        "| model | GPUs | split | memory of a GPU | step | generate, train | tokens/s per GPU "
        "| binds first | would help |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [plan_row(model, gpus) for model in MODELS for gpus in GPUS]
    return "\n".join(lines)


def plan_row(model: str, gpus: int) -> str:
    """Return the line of one plan."""
    plan = plan_of(model, gpus)
    if isinstance(plan, str):
        sums = plan.split(": ", 1)[1].split(";", maxsplit=1)[0]
        least = plan.split("It fits from ")[1].split(" on.")[0]
        return f"| {model} | {gpus:,} | does not fit: {sums}; from {least} | | | | | memory | |"
    step, memory = plan.best.step, plan.best.memory
    binds = plan.first
    if plan.binds and plan.first == plan.binds[0].name:
        binds += f" (twice as much: -{plan.binds[0].saved:.0%})"
    helps = "; ".join(f"{gain.name} -{gain.saved:.0%}" for gain in plan.helps[:2])
    cells = [
        model,
        f"{gpus:,}",
        split_text(plan.best.layout),
        f"{max(memory.training, memory.sampling) / 1e9:,.0f} GB",
        f"{step.step_s:,.0f} s",
        f"{step.generate_s:,.0f} s, {step.train_s:,.0f} s",
        f"{step.tokens_per_s / gpus:,.0f}",
        binds,
        helps,
    ]
    return f"| {' | '.join(cells)} |"


def published_table(*, only: str | None = None) -> str:
    """Return the table of published figures beside ours, of all models or of one."""
    lines = [
        "| source | model | GPUs | what | theirs | simulated | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in compare(read_shape, only=only):
        theirs, ours = f"{row.theirs_s:,.1f} s", f"{row.ours_s:,.1f} s"
        cells = [row.source, row.shape, f"{row.gpus}", row.what, theirs, ours, f"{row.ratio:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """Return the page with both tables as they are now."""
    for name, table in (("plans", plan_table()), ("published", published_table())):
        first, last = MARKS[name]
        before, rest = page.split(first)
        page = f"{before}{first}\n\n{table}\n\n{last}{rest.split(last)[1]}"
    return page


def picture() -> str:
    """Return a bar for each plan: shares of a step by stage, with its seconds."""
    right, top, height, gap = 150, 70, 24, 12
    parts = [*head("Where a step's time goes (512 x 16 completions, 4,000 tokens in the mean)")]
    for number, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + 150 + 150 * number
        parts.append(f'<rect x="{x}" y="38" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="49" fill="#0f172a">{name}</text>')
    y = top
    for model in MODELS:
        for gpus in GPUS:
            parts += _bar(model, gpus, y, height=height, right=right)
            y += height + gap
    assert y < HEIGHT, "the bars do not fit the picture"
    return "\n".join([*parts, caption("Synchronous steps; H200, simulated."), "</svg>\n"])


def _bar(model: str, gpus: int, y: int, *, height: int, right: int) -> list[str]:
    begin, end = LEFT + 150, WIDTH - right
    text = f'<text x="{begin - 10}" y="{y + 16}" text-anchor="end" fill="#0f172a">'
    parts = [f"{text}{model} on {gpus:,}</text>"]
    plan = plan_of(model, gpus)
    if isinstance(plan, str):
        why = f'<text x="{begin}" y="{y + 16}" fill="#b91c1c">does not fit in memory</text>'
        return [*parts, why]
    step = plan.best.step
    stages = {
        "generate": step.generate_s,
        "rewards": step.reward_s,
        "train": step.score_s + step.train_s,
        "publish, other": step.publish_s + step.other_s,
    }
    x = float(begin)
    for name, seconds in stages.items():
        width = (end - begin) * seconds / sum(stages.values())
        where = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"'
        parts.append(f'<rect {where} fill="{COLOURS[name]}"/>')
        x += width
    label = f"{step.step_s:,.0f} s a step"
    parts.append(f'<text x="{end + 10}" y="{y + 16}" fill="#0f172a">{label}</text>')
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="print the tables, write nothing")
    if parser.parse_args().print:
        sys.stdout.write(f"{plan_table()}\n\n{published_table()}\n")
        return
    GUIDE.write_text(filled(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
