"""Every implementation of every protocol passes that protocol's one suite: the table of it.

Runs tests/contract here and, for vLLM, in the environment that `make setup-vllm` built. A test that
an implementation skips names a capability that it says it does not have.

    make bench-contract-table
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import common

ROOT = common.BENCH_DIR.parent
SUITES = {
    "Engine": (
        ("test_engine_contract", "test_engine_life"),
        ("native", "native_in_blocks", "native_in_its_own_process", "vllm"),
    ),
    "Trainer": (("test_trainer_contract",), ("local", "1 ranks", "2 ranks", "4 ranks")),
    "WeightTransport": (
        ("test_transport_contract",),
        ("in_process", "shared_memory", "disk", "collective", "cuda_ipc"),
    ),
    "WorkerGroup": (
        ("test_worker_group_contract",),
        ("in_process", "spawn_1", "spawn_3", "torchrun_2"),
    ),
}


def outcomes(python: str, *selection: str) -> list[tuple[str, str, str]]:
    """(file, parameters, outcome) of every test that was selected."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection]
        subprocess.run(
            [*command, f"--junitxml={report}"],
            cwd=ROOT,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return [_outcome(case) for case in cases]


def _outcome(case: ElementTree.Element) -> tuple[str, str, str]:
    parameters = case.get("name", "").partition("[")[2]
    file = case.get("classname", "").split(".")[-1]
    kinds = {child.tag for child in case}
    outcome = "failed" if kinds & {"failure", "error"} else "passed"
    return file, parameters.removesuffix("]"), "skipped" if "skipped" in kinds else outcome


def table(found: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    rows = []
    for protocol, (files, names) in SUITES.items():
        for name in names:
            counts = Counter(
                outcome
                for file, parameters, outcome in found
                if file in files and (parameters == name or parameters.startswith(f"{name}-"))
            )
            fields = {kind: counts[kind] for kind in ("passed", "failed", "skipped")}
            rows.append({"protocol": protocol, "implementation": name, **fields})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm/bin/python"))
    arguments = parser.parse_args()
    started = time.perf_counter()
    found = outcomes(sys.executable, "-m", "not vllm", "tests/contract")
    if Path(arguments.vllm_python).exists():
        files = [f"tests/contract/{file}.py" for file in SUITES["Engine"][0]]
        found += outcomes(arguments.vllm_python, "-m", "vllm", *files)
    rows = table(found)
    print(f"\n| {'protocol':15} | {'implementation':25} | passed | failed | skipped |")
    print("|---|---|---|---|---|")
    for row in rows:
        counts = " | ".join(f"{row[kind]:6}" for kind in ("passed", "failed", "skipped"))
        print(f"| {row['protocol']:15} | {row['implementation']:25} | {counts} |")
    seconds = time.perf_counter() - started
    result = {**common.machine(("torch", "transformers")), "seconds": seconds, "table": rows}
    common.write_result("contract_table", result)
    if any(row["failed"] or not (row["passed"] or row["skipped"]) for row in rows):
        sys.exit("some implementation failed, or was not tested")


if __name__ == "__main__":
    main()
