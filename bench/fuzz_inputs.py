"""Claim: no mutated recipe, data file, model folder or run directory ever gives a traceback.

Every case (see fuzz_kinds.py) goes through the command line's own `main`, in a process that
lives on from case to case, under a limit of address space and of time. Outcomes:

    accepted   exit code 0: the mutation happened to leave a sound input
    refused    exit code 2, and the message names the file, key or line; exit code 1 of `inspect`,
               which says that training would refuse these rows, is held to the same
    finding    exit code 1 of check (too little disk) or train (halted itself): said, not a fault
               of form
    violation  anything else: a traceback, another exit code, no place named, a hang, a dead process

A sample is run once more as real processes, and must end the same way. A violation holds the index
that makes it again: `--only INDEX`.

    python bench/fuzz_inputs.py --cases 2000 --seed 0
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import common
import fuzz_base
from fuzz_kinds import KINDS, Case, make_case
from fuzz_mutations import base_recipe, to_json

MAX_BYTES = 8 * 2**30
TIMEOUT_S = 60.0
MEMORY = "/dev/shm"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "COLUMNS": "100", "PYTHONUTF8": "1",
}  # fmt: skip
OUTCOMES = ("accepted", "refused", "finding", "violation")


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a command: its exit code, None for an exception that left `main`."""

    code: int | None
    output: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a case; `why` says what a violation is."""

    case: Case
    outcome: str
    code: int | None
    why: str = ""
    output: str = ""
    seconds: float = 0.0


def run_here(command: Sequence[str], folder: Path) -> Result:
    """The command in this process: file descriptors 1 and 2 go to a file, as in a real one."""
    from homeostat.cli.main import main

    argv, before = sys.argv, os.getcwd()
    code: int | None = None
    with tempfile.TemporaryFile() as file, _output_to(file.fileno()):
        sys.argv = ["homeostat", *command]
        os.chdir(folder)
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:  # the claim is that nothing gets here
            traceback.print_exc()
        finally:
            sys.argv = argv
            os.chdir(before)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        file.seek(0)
        return Result(code, file.read().decode("utf-8", errors="replace"))


@contextlib.contextmanager
def _output_to(descriptor: int) -> Iterator[None]:
    kept = os.dup(1), os.dup(2)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        for number, old in enumerate(kept, start=1):
            os.dup2(old, number)
            os.close(old)


def run_process(command: Sequence[str], folder: Path) -> Result:
    """Run the same case as a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", "from homeostat.cli.main import main; main()", *command],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
        env={**os.environ, **ENVIRONMENT}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return Result(done.returncode, done.stdout.decode("utf-8", errors="replace"))


def judge(case: Case, result: Result, seconds: float) -> Verdict:
    verb, output = case.command[0], result.output
    outcome, why = "violation", ""
    if result.code is None or "Traceback (most recent call last)" in output:
        why = "traceback"
    elif result.code == 0:
        outcome = "accepted"
    elif result.code == 1 and verb != "inspect":
        outcome = "finding"
    elif result.code not in (1, 2):
        why = f"exit code {result.code}"
    elif not _names_place(case, output):
        why = "no place named"
    else:
        outcome = "refused"
    return Verdict(case, outcome, result.code, why, output, seconds)


def _names_place(case: Case, output: str) -> bool:
    """A terminal folds lines, so white space counts for nothing."""
    said = output if "json" in case.command else _refusal(output)
    text = "".join(said.split())
    return any("".join(place.split()) in text for place in case.places if place.strip())


def _refusal(output: str) -> str:
    """The lines that refuse, with what is folded below them; not those that approve."""
    kept, refuses = [], False
    for line in output.splitlines():
        if line.startswith(("error", "no ", "Usage")):
            refuses = True
        elif line.startswith(("ok ", "look ", "recipe.yaml: not yet")):
            refuses = False
        kept.append(line if refuses else "")
    return "\n".join(kept)


def write_base(folder: Path) -> None:
    """The sound folder; weights, adapter and the used run come out of real runs."""
    folder.mkdir()
    fuzz_base.write_files(folder)
    (folder / "recipe.yaml").write_text(to_json(base_recipe()))
    shards = ["checkpoint.export=final", "checkpoint.max_shard_bytes=8192", "trainer.max_steps=1"]
    lora = ["model.path=weights", "model.init=pretrained", "lora={rank: 2}", shards[0], shards[2]]
    for name, overrides in (("run", []), ("weights", shards), ("adapter", lora)):
        done = run_here(["train", "recipe.yaml", f"name={name}", *overrides], folder)
        assert done.code == 0, done.output
        if name != "run":
            [exported] = (folder / "runs" / name).glob("checkpoints/*/hf")
            shutil.move(exported, folder / name)
            shutil.rmtree(folder / "runs" / name)
    from homeostat.models.hf import read_tensors

    fuzz_base.write_gguf(folder / "tiny.gguf", dict(read_tensors(folder / "weights")))


def run_case(root: Path, *, seed: int, index: int) -> Verdict:
    folder = root / "cases" / f"{os.getpid()}" / "case"
    case = make_case(root / "base", folder, seed=seed, index=index)
    started = time.perf_counter()
    return judge(case, run_here(case.command, folder), time.perf_counter() - started)


def _spare_repetitions() -> None:
    """Do once in a worker what every process does once; give endless templates less time."""
    import importlib.metadata

    import typer.main

    from homeostat.data import templates

    typer.main.get_command = lru_cache(typer.main.get_command)
    importlib.metadata.version = lru_cache(importlib.metadata.version)
    templates.MAX_CPU_S = 1.0


def serve(root: Path, seed: int, pipe: Connection) -> None:
    """A worker: one case after the other until there is none."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    _spare_repetitions()
    while (index := pipe.recv()) is not None:
        pipe.send(run_case(root, seed=seed, index=index))


class Worker:
    """A process that runs cases; a fresh one takes over where it hangs or dies."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        self.index: int | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(self.root, self.seed, theirs))
        self.process.start()
        theirs.close()

    def give(self, index: int | None) -> None:
        self.index, self.since = index, time.monotonic()
        self.pipe.send(index)

    def take(self) -> Verdict | None:
        """The verdict if there is one by now; a hang or a death is one too."""
        assert self.index is not None
        try:
            if self.pipe.poll():
                return self.pipe.recv()
        except EOFError:
            self.process.join()
            return self._lost(f"the process died ({self.process.exitcode})")
        if time.monotonic() - self.since > TIMEOUT_S:
            self.process.kill()
            return self._lost(f"no answer after {TIMEOUT_S:.0f} s")
        return None

    def _lost(self, why: str) -> Verdict:
        assert self.index is not None
        folder = self.root / "again"
        case = make_case(self.root / "base", folder, seed=self.seed, index=self.index)
        self._start()
        return Verdict(case, "violation", None, why, seconds=time.monotonic() - self.since)


def run_all(root: Path, indices: Sequence[int], *, seed: int, num_workers: int) -> list[Verdict]:
    waiting, verdicts = deque(indices), []
    workers = [Worker(root, seed) for _ in range(min(num_workers, len(indices)))]
    try:
        for worker in workers:
            worker.give(waiting.popleft())
        while len(verdicts) < len(indices):
            busy = [worker for worker in workers if worker.index is not None]
            wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in busy:
                verdict = worker.take()
                if verdict is not None:
                    verdicts.append(verdict)
                    if verdict.outcome == "violation":
                        print(f"case {verdict.case.index}: {verdict.why}", file=sys.stderr)
                    worker.give(waiting.popleft() if waiting else None)
                    if len(verdicts) % 100 == 0:
                        print(f"{len(verdicts)} of {len(indices)}", file=sys.stderr)
    finally:
        # A fault of the benchmark itself must not leave it waiting for workers that wait for it.
        for worker in workers:
            worker.process.kill()
            worker.process.join()
    return sorted(verdicts, key=lambda verdict: verdict.case.index)


def compare_processes(root: Path, verdicts: Sequence[Verdict], *, seed: int) -> list[Any]:
    """Run the same cases as separate processes: exit code and message must agree."""
    differing = []
    for verdict in verdicts:
        folder = root / "cases" / "again" / "case"
        case = make_case(root / "base", folder, seed=seed, index=verdict.case.index)
        result = run_process(case.command, folder)
        if (result.code, _words(result.output)) != (verdict.code, _words(verdict.output)):
            here = {"code": verdict.code, "output": verdict.output}
            differing.append({**_shown(case), "here": here, "process": asdict(result)})
    return differing


def _words(output: str) -> str:
    """Return the message without times, sizes and the log lines of libraries."""
    kept = [line for line in output.splitlines() if "Warning" not in line and "INFO" not in line]
    return re.sub(r"[\d.]+", "#", " ".join(" ".join(kept).split()))


def _shown(case: Case) -> dict[str, Any]:
    return {name: value for name, value in asdict(case).items() if name != "places"}


def summary(verdicts: list[Verdict]) -> dict[str, Any]:
    kinds = {
        kind: dict.fromkeys(OUTCOMES, 0)
        | Counter(verdict.outcome for verdict in verdicts if verdict.case.kind == kind)
        for kind in KINDS
    }
    total = {name: sum(counts[name] for counts in kinds.values()) for name in OUTCOMES}
    violations = [
        {"why": v.why, **_shown(v.case), "exit_code": v.code, "output": v.output[-3000:]}
        for v in verdicts
        if v.outcome == "violation"
    ]
    slowest = max(verdicts, key=lambda verdict: verdict.seconds)
    return {
        "outcomes": total,
        "kinds": kinds,
        "verbs": Counter(verdict.case.command[0] for verdict in verdicts),
        "slowest_case": {"index": slowest.case.index, "seconds": round(slowest.seconds, 2)},
        "violations": violations,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--processes", type=int, default=20, help="cases run as processes too")
    parser.add_argument("--only", type=int, nargs="*", help="run and show these cases")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    # In memory where there is such a folder: on a disk, half of the time goes to its fsyncs.
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzz-inputs-", dir=place) as folder:
        root = Path(folder)
        write_base(root / "base")
        for index in arguments.only or ():
            verdict = run_case(root, seed=arguments.seed, index=index)
            print(json.dumps(asdict(verdict) | {"case": _shown(verdict.case)}, indent=1))
        if arguments.only:
            return
        started = time.perf_counter()
        verdicts = run_all(
            root, range(arguments.cases), seed=arguments.seed, num_workers=arguments.workers
        )
        seconds = time.perf_counter() - started
        known = [verdict for verdict in verdicts if verdict.code is not None]
        sample = random.Random(arguments.seed).sample(known, min(arguments.processes, len(known)))
        differing = compare_processes(root, sample, seed=arguments.seed)
    found = summary(verdicts)
    result = common.machine(("torch", "transformers", "tokenizers", "pyarrow", "pydantic")) | {
        "cases": arguments.cases,
        "seed": arguments.seed,
        "seconds": round(seconds, 1),
        "claim_holds": not found["violations"] and not differing,
        "processes_compared": len(sample),
        "processes_differing": differing,
        **found,
    }
    common.write_result("fuzz_inputs", result)


if __name__ == "__main__":
    main()
