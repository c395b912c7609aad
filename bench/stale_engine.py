"""Claim: a policy trained on what a stale engine samples diverges, and learns with a correction.

The sorting task of `make demo` at a high, constant learning rate. The engine is sent new weights
every 8 updates only, two updates a rollout: it samples with weights up to 8 updates old. Four runs
from the same start: on-policy; stale without correction; stale with the default correction
(truncated importance sampling of tokens); stale with sequence weights. Their curves are drawn into
results/stale_engine.svg, reward as sampled, the mean over one publication's four steps.

    make bench-stale-engine
    python bench/stale_engine.py --seeds 0 1 2 --jobs 8
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import curves

ROOT = common.BENCH_DIR.parent
SFT, GRPO = "tiny_sort_sft_cpu", "tiny_sort_grpo_cpu"
INTERVAL, UPDATES, STEPS = 8, 2, 130
WINDOW = INTERVAL // UPDATES
SETTINGS = (
    "algorithm.type=dr_grpo",
    "trainer.lr=2e-3",
    "trainer.schedule.type=constant",
    f"trainer.max_steps={STEPS}",
    f"trainer.updates_per_step={UPDATES}",
    "engine.own_process=true",
    "eval.at_start=false",
    "eval.interval_steps=1000",
    "observe.report=false",
)
STALE = f"sync.interval={INTERVAL}"
SEQUENCE = "algorithm.correction.weight={type: sequence, high: 2.0}"
KINDS = {
    "on-policy": (),
    "stale, no correction": (STALE, "algorithm.correction=null"),
    "stale, token weights (default)": (STALE,),
    "stale, sequence weights": (STALE, SEQUENCE),
}
COLOURS = ("#64748b", "#dc2626", "#2563eb", "#059669")


def train(recipe: str, *overrides: str) -> None:
    code = "from homeostat.cli.main import main; main()"
    file = ROOT / "recipes" / f"{recipe}.yaml"
    line = [sys.executable, "-c", code, "train", str(file), "observe.console=plain", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(line, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment)


def run(kind: str, seed: int, place: Path) -> dict[str, Any]:
    name = f"{list(KINDS).index(kind)}-{seed}"
    weights = sorted((place / SFT / "checkpoints").glob("step_*"))[-1] / "hf"
    train(
        GRPO,
        f"name={name}",
        f"runs_dir={place}",
        f"seed={seed}",
        f"model.path={weights}",
        *SETTINGS,
        *KINDS[kind],
    )
    lines = (place / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    print(f"{kind}, seed {seed}: held-out {records[-1]['eval/pass@1']:.3f}", flush=True)
    return {
        "kind": kind,
        "seed": seed,
        "held_out_pass_at_1": records[-1]["eval/pass@1"],
        "stale_updates_max": max(record["stale/updates/max"] for record in records),
        "reward": [round(record["reward"], 4) for record in records],
        "difference": [
            round(record["sampling/sampling_logp_difference/mean"], 5) for record in records
        ],
        "ess": [round(record["sampling/ess"], 4) for record in records],
    }


def smooth(values: Sequence[float]) -> list[float]:
    chunks = [values[start : start + WINDOW] for start in range(0, len(values), WINDOW)]
    return [statistics.mean(chunk) for chunk in chunks]


def picture(runs: list[dict[str, Any]]) -> str:
    """Reward over steps: a line for the mean over seeds, a band from the lowest to the highest."""
    right = 250

    def place(step: float, value: float) -> tuple[float, float]:
        return curves.place(step / STEPS, value / 0.6, right=right)

    parts = curves.head(
        f"Sorting digits with an engine that is sent weights every {INTERVAL} updates"
    )
    for tick in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        parts.append(curves.grid_line(tick / 0.6, f"{tick:.1f}", right=right))
    parts += curves.step_labels(range(0, STEPS + 1, 26), last=STEPS, right=right)
    about = f"mean reward of {WINDOW} steps; line: mean of the seeds, band: lowest to highest"
    parts.append(curves.caption(f"step ({about})"))
    ends = []
    for kind, colour in zip(KINDS, COLOURS, strict=True):
        own = [smooth(run["reward"]) for run in runs if run["kind"] == kind]
        steps = [WINDOW * (index + 0.5) for index in range(len(own[0]))]
        columns = list(zip(*own, strict=True))
        upper, lower, middle = (
            [place(s, of(c)) for s, c in zip(steps, columns, strict=True)]
            for of in (max, min, statistics.mean)
        )
        band = "L".join(f"{x:.1f},{y:.1f}" for x, y in (*upper, *reversed(lower)))
        parts.append(f'<path d="M{band}Z" fill="{colour}" opacity="0.13"/>')
        parts.append(curves.curve(middle, colour))
        ends.append((middle[-1][1], kind, colour))
    return "\n".join([*parts, *curves.end_labels(ends, right=right), "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at one time; each takes a core")
    common.add_commit(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="homeostat-stale-") as folder:
        place = Path(folder)
        train(SFT, f"runs_dir={place}")
        wanted = [(kind, seed, place) for seed in arguments.seeds for kind in KINDS]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            runs = list(pool.map(lambda one: run(*one), wanted))
    (common.RESULTS_DIR / "stale_engine.svg").write_text(picture(runs), encoding="utf-8")
    machine = common.facts_of(arguments, ("torch", "transformers"))
    common.write_result("stale_engine", {**machine, "settings": SETTINGS, "runs": runs})


if __name__ == "__main__":
    main()
