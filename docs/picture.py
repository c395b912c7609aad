"""Makes the pictures of the README from a real run of the demo: SFT, then RL from its weights.

the RL run, with its live view on a recorded terminal  -> docs/run.svg
its report.html, in a headless chromium                -> docs/report.png

python docs/picture.py
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from homeostat.config import load_config
from homeostat.observe.jsonl import read_metrics
from homeostat.run.calling.start import train_recipe
from homeostat.run.session.session import open_session

DOCS = Path(__file__).resolve().parent
FIRST, SECOND = "recipes/tiny_sort_sft_cpu.yaml", "recipes/tiny_sort_grpo_cpu.yaml"
PANEL_CORNER = "╭"
WIDTH, HEIGHT = 96, 36
# Far enough for the curve to have risen, and the bar to be still on its way.
SHARE_SHOWN = 0.7
# rich's own frame, without the fonts it would fetch from a network.
SVG_FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}"
     xmlns="http://www.w3.org/2000/svg">
<style>
  .{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace;
    font-size: 20.8px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
  <clipPath id="{unique_id}-clip-terminal">
    <rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
  </clipPath>
{lines}
</defs>
<rect fill="#1b1d23" x="0.5" y="0.5" width="{width}" height="{height}" rx="10"/>
<g transform="translate(26,22)"><circle cx="0" cy="0" r="7" fill="#ff5f57"/>
<circle cx="22" cy="0" r="7" fill="#febc2e"/><circle cx="44" cy="0" r="7" fill="#28c840"/></g>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # The paths that are seen should be those of a clone.
        Path(folder, "recipes").symlink_to(DOCS.parent / "recipes")
        os.chdir(folder)
        run(FIRST, Console(file=io.StringIO()), "quiet")
        console = Console(
            file=io.StringIO(), record=True, width=WIDTH, height=HEIGHT, force_terminal=True,
            color_system="truecolor",
        )  # fmt: skip
        watcher = threading.Thread(target=capture, args=(console,), daemon=True)
        watcher.start()
        page = run(SECOND, console, "live") / "report.html"
        watcher.join(timeout=10)
        screenshot(page, DOCS / "report.png")


def command_of(recipe: str) -> str:
    return f"homeostat train {recipe}"


def run(recipe: str, console: Console, view: str) -> Path:
    """Train a recipe as the command line does. Returns its run directory."""
    config = load_config(recipe, [f"observe.console={view}"])
    with open_session(
        config,
        recipe=Path(recipe).read_text(),
        command=command_of(recipe).split(),
        console=console,
        log_level="info",
    ) as session:
        train_recipe(config, session)
    return config.run_dir.resolve()


def capture(console: Console) -> None:
    """Waits for the RL run to be well on its way, then keeps the frame that is drawn next."""
    config = load_config(SECOND, [])
    assert config.trainer.max_steps is not None, f"{SECOND} says how many steps it has"
    metrics, wanted = config.run_dir / "metrics.jsonl", SHARE_SHOWN * config.trainer.max_steps
    while not metrics.exists() or len(list(read_metrics(metrics))) < wanted:
        time.sleep(0.2)
    while console.export_text(clear=False).count(PANEL_CORNER) != 1:
        console.export_text(clear=True)
        time.sleep(0.2)
    frame = console.export_text(clear=True, styles=True)
    picture = Console(record=True, width=WIDTH, file=sys.stderr, force_terminal=True)
    picture.print(Text.assemble(("$ ", "green"), command_of(SECOND)))
    picture.print(Text.from_ansi(frame.rstrip("\n")))
    svg = picture.export_svg(title="", theme=MONOKAI, code_format=SVG_FORMAT, unique_id="run")
    (DOCS / "run.svg").write_text(svg, encoding="utf-8")


def screenshot(page: Path, target: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("chromium is needed for the picture of the report")
    with tempfile.TemporaryDirectory() as profile:
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-sync "
            "--disable-component-update --no-first-run --hide-scrollbars "
            f"--user-data-dir={profile} --window-size=1240,975 --screenshot={target}"
        )
        subprocess.run(
            [browser, *flags.split(), page.as_uri()], check=True, timeout=120, capture_output=True
        )


if __name__ == "__main__":
    main()
