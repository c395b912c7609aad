"""Makes the pictures of the README from a real run of the demo recipe.

the run, with its live view on a recorded terminal  -> docs/run.svg
its report.html, in a headless chromium             -> docs/report.png

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
from homeostat.run.session import open_session
from homeostat.run.sft import train_sft

DOCS = Path(__file__).resolve().parent
RECIPE = "recipes/tiny_wordplay_cpu.yaml"
COMMAND = f"homeostat train {RECIPE}"
PANEL_CORNER = "╭"
WIDTH = 96
# Far enough for a curve, an evaluation and a checkpoint to be seen.
STEP_SHOWN = 190
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
        config = load_config(RECIPE, ["observe.console=live"])
        console = Console(
            file=io.StringIO(), record=True, width=WIDTH, force_terminal=True,
            color_system="truecolor",
        )  # fmt: skip
        watcher = threading.Thread(target=capture, args=(console, config.run_dir), daemon=True)
        watcher.start()
        with open_session(
            config,
            recipe=Path(RECIPE).read_text(),
            command=COMMAND.split(),
            console=console,
            log_level="info",
        ) as session:
            train_sft(config, session)
        watcher.join(timeout=10)
        screenshot(config.run_dir.resolve() / "report.html", DOCS / "report.png")


def capture(console: Console, run_dir: Path) -> None:
    """Waits for the run to be well on its way, then keeps the frame that is drawn next."""
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or len(list(read_metrics(metrics))) < STEP_SHOWN:
        time.sleep(0.2)
    while console.export_text(clear=False).count(PANEL_CORNER) != 1:
        console.export_text(clear=True)
        time.sleep(0.2)
    frame = console.export_text(clear=True, styles=True)
    picture = Console(record=True, width=WIDTH, file=sys.stderr, force_terminal=True)
    picture.print(Text.assemble(("$ ", "green"), COMMAND))
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
            f"--user-data-dir={profile} --window-size=1240,888 --screenshot={target}"
        )
        subprocess.run(
            [browser, *flags.split(), page.as_uri()], check=True, timeout=120, capture_output=True
        )


if __name__ == "__main__":
    main()
