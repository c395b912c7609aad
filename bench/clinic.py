"""The clinic: faults injected into tiny real runs, and healthy runs beside them.

    python bench/clinic.py [--seeds N] [--first-seed S] [--jobs N]

Runs `homeostat clinic` and keeps its answer with the facts of the machine: the share of faults that
was noticed and named right first, how late, alarms on healthy runs, and what the remedies cured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile

import common

CODE = "from homeostat.cli.main import main; main()"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    options = ["--seeds", chosen.seeds, "--first-seed", chosen.first_seed, "--jobs", chosen.jobs]
    with tempfile.TemporaryDirectory() as folder:
        words = ["clinic", *map(str, options), "--format", "json", "--out", folder]
        done = subprocess.run(
            [sys.executable, "-c", CODE, *words], stdout=subprocess.PIPE, text=True, check=True
        )
    seeds = {"seeds": chosen.seeds, "first_seed": chosen.first_seed}
    result = {**common.machine(("torch",)), **seeds, **json.loads(done.stdout)}
    common.write_result(f"clinic_seed{chosen.first_seed}", result)


if __name__ == "__main__":
    main()
