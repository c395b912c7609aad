"""Claim: energy-based fine-tuning moves the features of samples toward those of the truth.

The sorting model of `make demo` after its first stage, in two runs of 200 steps: structured, where
prompts have reference answers (recipes/tiny_sort_ebft_cpu.yaml), and strided, where raw text is
continued at every fourth position. The three metrics of both are drawn into results/ebft.svg, as
means over 5 steps. tests/parity/test_ebft.py compares both forms with float64.

    python bench/ebft.py
    python bench/ebft.py --steps 40
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import curves

ROOT = common.BENCH_DIR.parent
SFT, EBFT = "tiny_sort_sft_cpu", "tiny_sort_ebft_cpu"
METRICS = {
    "alignment": ("ebft/alignment", "#2563eb"),
    "diversity": ("ebft/diversity", "#059669"),
    "cfm loss": ("ebft/cfm_loss", "#dc2626"),
}
WINDOW = 5
RIGHT, MOST = 120, 2.0
# Worked examples in a text, and texts.
NUM_PAIRS, NUM_TEXTS = 5, 512
STRIDED = (
    "ebft={mode: strided, stride: 4, context_length: 6, generate_length: 4}",
    "rewards=null",
    "data.max_length=64",
    "rollout={prompts_per_step: 4, samples_per_prompt: 4}",
)


def train(recipe: str, *overrides: str) -> float:
    """Run a recipe through the command line; return the seconds that it took."""
    code = "from homeostat.cli.main import main; main()"
    file = ROOT / "recipes" / f"{recipe}.yaml"
    line = [sys.executable, "-c", code, "train", str(file), "observe.console=plain", *overrides]
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(line, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def write_texts(file: Path) -> Path:
    """Texts of worked examples, one after another, to be continued anywhere."""
    lines = (ROOT / "recipes/assets/tiny_sort_sft.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    texts = []
    for number in range(NUM_TEXTS):
        own = [pairs[(number * NUM_PAIRS + k) % len(pairs)] for k in range(NUM_PAIRS)]
        texts.append(json.dumps({"text": "".join(p["prompt"] + p["completion"] for p in own)}))
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return file


def read_run(folder: Path) -> dict[str, Any]:
    """Return the metrics over steps, and their means over the first and last steps."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = [name for name, _ in METRICS.values()]
    series = {name: [round(record[name], 5) for record in records] for name in names}
    right = [record["rewards/exact_match/mean"] for record in records
             if "rewards/exact_match/mean" in record]  # fmt: skip
    ends = {
        name: {"first": _mean(values[: 2 * WINDOW]), "last": _mean(values[-2 * WINDOW :])}
        for name, values in series.items()
    }
    if right:
        ends["exact_match"] = {"first": _mean(right[:10]), "last": _mean(right[-10:])}
    return {"steps": len(records), "ends": ends, "series": series}


def _mean(values: list[float]) -> float:
    return round(statistics.mean(values), 4)


def picture(runs: dict[str, dict[str, Any]]) -> str:
    """Draw the three metrics of both runs; the strided one is dashed."""
    parts = curves.head("Energy-based fine-tuning: structured (solid) and strided (dashed)")
    for tick in range(5):
        value = MOST * tick / 4
        parts.append(curves.grid_line(tick / 4, f"{value:g}", right=RIGHT))
    labels = []
    for kind, run in runs.items():
        for label, (name, colour) in METRICS.items():
            points = _points(run["series"][name])
            line = curves.curve(points, colour)
            if kind == "strided":
                line = line.replace("/>", ' stroke-dasharray="5 4"/>')
            else:
                labels.append((points[-1][1], label, colour))
            parts.append(line)
    parts += curves.end_labels(labels, right=RIGHT)
    steps = max(run["steps"] for run in runs.values())
    parts.append(curves.caption(f"Steps 1 to {steps}; means over {WINDOW} steps. Alignment and "
                                "diversity are at most 2."))  # fmt: skip
    return "\n".join([*parts, "</svg>", ""])


def _points(values: list[float]) -> list[tuple[float, float]]:
    means = [
        statistics.mean(values[start : start + WINDOW]) for start in range(0, len(values), WINDOW)
    ]
    last = max(1, len(means) - 1)
    return [
        curves.place(number / last, min(1.0, max(0.0, mean / MOST)), right=RIGHT)
        for number, mean in enumerate(means)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="homeostat-ebft-") as folder:
        place = Path(folder)
        where = (f"runs_dir={place}", "observe.report=false")
        train(SFT, *where)
        weights = sorted((place / SFT / "checkpoints").glob("step_*"))[-1] / "hf"
        start = (*where, f"model.path={weights}", f"trainer.max_steps={arguments.steps}")
        texts = f"data.train=[{{type: text, path: {write_texts(place / 'texts.jsonl')}}}]"
        for kind, more in (("structured", ()), ("strided", (*STRIDED, texts))):
            seconds = train(EBFT, *start, f"name={kind}", *more)
            runs[kind] = {"seconds": round(seconds, 1), **read_run(place / kind)}
            print(kind, json.dumps(runs[kind]["ends"]), f"{seconds:.0f} s", flush=True)
    machine = common.machine(("torch", "transformers", "numpy"))
    file = common.write_result("ebft", {**machine, "runs": runs})
    file.with_suffix(".svg").write_text(picture(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
