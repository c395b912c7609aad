"""All GPU measurements of low precision: training, rollouts, formats. One driver, many parts.

    python bench/precision_gpu.py                         # all of them, each in its own process
    python bench/precision_gpu.py --only fp8_stack        # one of them
    python bench/precision_gpu.py --tiny --device cpu     # that the script works

A measurement is a function in a file beside this one, with a budget in seconds after which it is
ended, without harm to the others. All budgets together stay under 25 minutes. The last line printed
is the JSON; that of all measurements is also written to bench/results/.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch


@dataclass(frozen=True, slots=True)
class Measurement:
    """A function `module.name(place) -> dict`, and the seconds that it may take."""

    module: str
    function: str
    budget_s: int


@dataclass(frozen=True, slots=True)
class Place:
    """The device to measure on, and whether only to show that the measurement works."""

    device: torch.device
    is_tiny: bool


MEASUREMENTS: dict[str, Measurement] = {
    "fp8_bits": Measurement("precision_fp8", "bits", 60),
    "fp8_products": Measurement("precision_fp8", "products", 90),
    "fp8_stack": Measurement("precision_fp8", "stack", 180),
    "fp8_step_1_5b": Measurement("precision_fp8", "step", 180),
    "fp8_experts": Measurement("precision_fp8", "experts", 90),
    "int4_bits": Measurement("precision_int4", "bits", 60),
    "int4_products": Measurement("precision_int4", "products", 120),
    "int4_decode": Measurement("precision_int4", "decode", 180),
    "decode_1_5b": Measurement("precision_decode", "decode_1_5b", 120),
    "decode_8b": Measurement("precision_decode", "decode_8b", 150),
}


def measure_here(names: list[str], place: Place) -> dict[str, Any]:
    """Measure in this process, one after the other."""
    found = {}
    for name in names:
        one, started = MEASUREMENTS[name], time.perf_counter()
        result = getattr(importlib.import_module(one.module), one.function)(place)
        found[name] = {**result, "seconds": time.perf_counter() - started}
        print(name, json.dumps(found[name]), flush=True)
    return found


def measure_apart(names: list[str], arguments: list[str]) -> dict[str, Any]:
    """Measure each in its own process, so that one that fails leaves the others alone."""
    found: dict[str, Any] = {}
    for name in names:
        line = [sys.executable, __file__, "--inline", "--only", name, *arguments]
        budget_s = MEASUREMENTS[name].budget_s
        try:
            done = subprocess.run(
                line, capture_output=True, text=True, timeout=budget_s, check=False
            )
        except subprocess.TimeoutExpired:
            found[name] = {"failed": f"not done after {budget_s} s"}
            continue
        if done.returncode:
            found[name] = {"failed": done.stderr.strip().splitlines()[-1:]}
        else:
            found[name] = json.loads(done.stdout.strip().splitlines()[-1])[name]
        print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(MEASUREMENTS), choices=MEASUREMENTS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--inline", action="store_true", help="measure in this process")
    common.add_commit(parser)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    if options.inline:
        place = Place(torch.device(options.device), options.tiny)
        print(json.dumps(measure_here(options.only, place)))
        return
    arguments = ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    found = measure_apart(options.only, arguments)
    facts = common.facts_of(options, ("torch", "triton", "numpy"))
    facts |= common.device_facts(options.device)
    result = {"facts": facts, "measurements": found}
    if set(options.only) == set(MEASUREMENTS) and not options.tiny:
        common.write_result("precision_gpu", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
