"""The dashboard over a run of 1,000,000 points: time to the first curves, and of a frame.

    python bench/dashboard.py [--steps 100000]

Writes a run folder, serves it, opens it in a real Chromium, and measures there: from the click on
the run to the first curves on the screen, and how long frames take while the cursor moves over the
charts and ranges are zoomed to.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import machine, write_result

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.browser import Page, opened_browser
from tests.support.dashboard_server import served
from tests.support.run_folders import write_run

NAMES = (
    "reward", "train/loss", "entropy", "grad_norm", "learning_rate", "kl", "time/step",
    "completions/mean_length", "throughput/tokens_per_s", "clip_ratio/high_mean",
)  # fmt: skip
FRAMES = """new Promise((done) => {
  const over = document.querySelector('.u-over'), box = over.getBoundingClientRect();
  const spent = []; let last = performance.now(), count = 0;
  const frame = (now) => {
    spent.push(now - last); last = now; count += 1;
    over.dispatchEvent(new MouseEvent('mousemove', {bubbles: true,
      clientX: box.left + box.width * ((count * 7) % 100) / 100, clientY: box.top + 40}));
    if (count < 240) requestAnimationFrame(frame); else done(spent.slice(5));
  };
  requestAnimationFrame(frame);
})"""
# A curve that is new has pixels that are not transparent.
DRAWN = "document.querySelectorAll('.plot canvas').length > 0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    metrics = {
        name: np.round(rng.normal(size=options.steps).cumsum(), 4).tolist() for name in NAMES
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_run(folder / "runs" / "long", metrics)
        write_run(folder / "runs" / "short", {"reward": [0.1, 0.2]})
        with served([folder / "runs"]) as address, opened_browser(folder / "browser") as page:
            result = measured(page, address)
    points = options.steps * len(NAMES)
    print(f"{points:,} points: {result}")
    write_result("dashboard", {"points": points, **result, **machine(("starlette", "uvicorn"))})


def measured(page: Page, address: str) -> dict[str, float]:
    page.size(1280, 900)
    begun = time.monotonic()
    page.open(address)
    page.wait("document.querySelectorAll('tr[data-run]').length === 2")
    list_s = time.monotonic() - begun
    begun = time.monotonic()
    page.run("[...document.querySelectorAll('a')].find((a) => a.textContent === 'long').click()")
    page.wait(DRAWN)
    curves_s = time.monotonic() - begun
    page.run("location.hash = '#/'")
    page.wait("document.querySelectorAll('tr[data-run]').length === 2")
    begun = time.monotonic()
    page.run("[...document.querySelectorAll('a')].find((a) => a.textContent === 'long').click()")
    page.wait(DRAWN)
    again_s = time.monotonic() - begun
    time.sleep(1.0)
    frames = np.array(page.run(FRAMES))
    return {
        "list_s": round(list_s, 3),
        "first_curves_s": round(curves_s, 3),
        "curves_again_s": round(again_s, 3),
        "frame_ms_p50": round(float(np.percentile(frames, 50)), 1),
        "frame_ms_p95": round(float(np.percentile(frames, 95)), 1),
    }


if __name__ == "__main__":
    main()
