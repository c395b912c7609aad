"""Claim: the doctor starts in under 0.4 s, and reads 1,000,000 steps x 12 values in 15 s and 1 GB.

With `--text-bytes 2000000000` also: a console log of 2 GB (large_log.py, deleted afterwards) in
under 3 minutes and 500 MB.

Each figure is that of a separate process, the whole command as a user types it. Byte code is
written beforehand, as an installation does it. Start: the median of `--repeats` runs of `homeostat
doctor` on a log of 30 lines, reading, judging and showing included. A machine that does other work
too shows in `wall`; `cpu` is what the process itself used.

    python bench/doctor_speed.py
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
from large_log import write_log as write_large

CODE = "from homeostat.cli.main import main; main()"
MAX_START_S, MAX_READ_S, MAX_READ_BYTES = 0.4, 15.0, 10**9
MAX_TEXT_S, MAX_TEXT_BYTES = 180.0, 500 * 10**6
NAMES = (
    "loss", "reward", "reward_std", "kl", "entropy", "grad_norm", "learning_rate",
    "completions/mean_length", "completions/clipped_ratio", "clip_ratio/region_mean",
    "frac_reward_zero_std", "step_time",
)  # fmt: skip
# Of these nothing may be loaded by a doctor who only reads.
HEAVY = ("torch", "transformers", "pydantic", "pyarrow", "pandas")


def write_log(path: Path) -> None:
    rng = random.Random(0)
    rows = [
        {name: round(rng.uniform(0.1, 0.3), 4) for name in NAMES} | {"epoch": step / 100}
        for step in range(30)
    ]
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def write_metrics(path: Path, *, num_steps: int) -> None:
    """One JSON object a line, numbers as a trainer writes them; some blocks are used again."""
    rng = random.Random(0)
    blocks = [
        ", ".join(f'"{name}": {rng.uniform(0.1, 0.3)!r}' for name in NAMES) for _ in range(997)
    ]
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, num_steps + 1):
            file.write(f'{{"step": {step}, {blocks[step % len(blocks)]}}}\n')


def run(path: Path, *, cache: Path) -> dict[str, Any]:
    """One command: wall clock, CPU seconds and peak memory of its process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, "doctor", str(path), "--format", "json"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = process.communicate()
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode in (0, 1), process.returncode
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        # The largest child so far: the file is read last and is by far the largest.
        "peak_bytes": after.ru_maxrss * 1024,
        "framework": json.loads(output)["framework"],
    }


def loaded(path: Path) -> list[str]:
    """Return which of the heavy packages the command has loaded at its end."""
    code = (
        "import sys\nfrom homeostat.cli.main import main\n"
        f"sys.argv = ['homeostat', 'doctor', {str(path)!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stderr.strip().splitlines()[-1].replace("'", '"'))


def main() -> None:
    parser = argparse.ArgumentParser(description="How soon the doctor answers.")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--text-bytes", type=int, default=0, help="size of a console log; 0: none")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_log(root / "train.log")
        write_metrics(root / "metrics.jsonl", num_steps=chosen.steps)
        run(root / "train.log", cache=root / "cache")
        starts = [run(root / "train.log", cache=root / "cache") for _ in range(chosen.repeats)]
        text = None
        if chosen.text_bytes:
            # Read first: the peak is that of the largest child so far.
            write_large(root / "console.log", num_bytes=chosen.text_bytes, seed=0)
            text = run(root / "console.log", cache=root / "cache")
            (root / "console.log").unlink()
        large = run(root / "metrics.jsonl", cache=root / "cache")
        file_bytes = (root / "metrics.jsonl").stat().st_size
        heavy = loaded(root / "train.log")
    start_s = statistics.median(one["wall_s"] for one in starts)
    result = {
        "claim": "starts in under 0.4 s; 1,000,000 steps x 12 values in under 15 s and 1 GB",
        "holds": start_s < MAX_START_S
        and large["wall_s"] < MAX_READ_S
        and large["peak_bytes"] < MAX_READ_BYTES
        and not heavy
        and (text is None or (text["wall_s"] < MAX_TEXT_S and text["peak_bytes"] < MAX_TEXT_BYTES)),
        **common.machine(["numpy", "typer"]),
        "start": {
            "median_wall_s": round(start_s, 3),
            "wall_s": [round(one["wall_s"], 3) for one in starts],
            "median_cpu_s": round(statistics.median(one["cpu_s"] for one in starts), 3),
            "heavy_packages_loaded": heavy,
        },
        "read": {
            "steps": chosen.steps,
            "values_per_step": len(NAMES),
            "file_bytes": file_bytes,
            "wall_s": round(large["wall_s"], 2),
            "cpu_s": round(large["cpu_s"], 2),
            "peak_bytes": large["peak_bytes"],
        },
    }
    if text is not None:
        result["text"] = {
            "file_bytes": chosen.text_bytes,
            "wall_s": round(text["wall_s"], 1),
            "cpu_s": round(text["cpu_s"], 1),
            "peak_bytes": text["peak_bytes"],
        }
    common.write_result("doctor_speed", result)


if __name__ == "__main__":
    main()
