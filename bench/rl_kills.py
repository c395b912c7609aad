"""Claim: an RL run any of whose processes is killed with -9, at any moment, ends at the same bits.

    python bench/rl_kills.py --kills 60

There are four kinds of run: the engine in the trainer's process, in a separate process, in the
trainer's process with a helper, and in a separate process that samples ahead of the trainer. One
run of each kind is left alone. The others are disturbed: at random moments a random victim is
killed (the main process, its process group, the engine, a helper, a reward worker; worker, guardian
or both), and in half of the cases its successor once more while it starts. A run whose main process
was killed is begun again with the same command until it is complete. Then the tensors of the last
checkpoint and all groups of the journal are compared byte by byte, the metrics that do not measure
time value by value, and no process may be left.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
from victims import MARK, Pair, kill, orphans, pairs

from homeostat.rollout.journal_part import frames

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 600.0
# How long a successor is waited for; an idle reward worker has one only when it is needed.
SUCCESSOR_S = 20.0
ORPHAN_S = 10.0
STEPS = 16
MOMENTS_PER_RUN = 8
# Not a function of seed and recipe alone.
MEASURED = (
    "time", "throughput", "memory", "engine", "gpu", "sync", "rollout/replayed_rounds",
    "rollout/buffer_groups", "rollout/groups_in_flight",
)  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "in_process": {},
    "own_process": {"own_process": True, "max_restarts": 50},
    "helper": {"processes": 2},
    "ahead": {"own_process": True, "max_restarts": 50},
}
VICTIMS = {
    "in_process": ("main", "group", "reward"),
    "own_process": ("main", "group", "reward", "engine", "engine", "engine"),
    "helper": ("main", "group", "reward", "reward", "helper", "helper"),
    "ahead": ("main", "group", "reward", "engine", "engine", "engine"),
}


def recipe(name: str, runs_dir: Path, kind: str) -> dict[str, Any]:
    """Use two updates a step, dynamic sampling, an adaptive KL and normalised rewards: everything
    that has state."""
    assets = ROOT / "recipes" / "assets"
    return {
        "name": name,
        "runs_dir": str(runs_dir),
        "seed": 3,
        "algorithm": {
            "type": "dapo",
            "kl": {"coefficient": 0.01, "target": 0.05, "horizon": 256},
            "overlong": {"type": "shape", "buffer_tokens": 2},
            "dynamic_sampling": {"max_rounds": 3},
        },
        "model": {"path": str(assets / "tiny-sort"), "init": "random", "numerics": "invariant"},
        "engine": ENGINES[kind],
        "data": {
            "train": [
                {"type": "prompts", "path": str(assets / "tiny_sort_prompts.jsonl"), "chat": False}
            ],
            "validation": [
                {"type": "prompts", "path": str(assets / "tiny_sort_eval.jsonl"), "chat": False}
            ],
            "max_length": 16,
        },
        "rollout": {
            "prompts_per_step": 8,
            "samples_per_prompt": 8,
            "max_new_tokens": 8,
            "keep_journal": True,
            **({"max_staleness": 2} if kind == "ahead" else {}),
        },
        "rewards": {
            "functions": [
                {"type": "regex_format", "pattern": "[0-9]+"},
                {"type": "exact_match", "column": "answer"},
            ],
            "normalise": "scale",
            "workers": 2,
        },
        "reference": {"type": "initial", "refresh_steps": 5},
        "trainer": {
            "max_steps": STEPS,
            "updates_per_step": 3,
            "max_tokens_per_device": 512,
            "lr": 1e-3,
            "threads": 1,
            "device": "cpu",
        },
        "eval": {"interval_steps": 6, "max_rows": 16},
        "checkpoint": {"interval_steps": 4, "export": "off"},
        "observe": {"console": "plain", "report": False},
    }


@dataclass(slots=True)
class Kill:
    """One kill: whom, when, and whether it hit a successor that was just starting."""

    victim: str
    part: str
    step: int
    at_restart: bool


class Run:
    """One run directory, and the processes that work on it."""

    def __init__(self, name: str, folder: Path, kind: str) -> None:
        self.kind = kind
        self.folder = folder / name
        self.file = folder / f"{name}.json"
        self.file.write_text(json.dumps(recipe(name, folder, kind)), encoding="utf-8")
        self.mark = uuid.uuid4().hex
        self.kills: list[Kill] = []
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        code = "from homeostat.cli.main import main; main()"
        with open(self.folder.with_suffix(".log"), "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", code, "train", str(self.file)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, MARK: self.mark},
            )

    @property
    def step(self) -> int:
        file = self.folder / "metrics.jsonl"
        lines = file.read_bytes().splitlines() if file.exists() else []
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except ValueError:
                continue  # half a line: the process is writing it, or was killed
        return 0

    def events(self, kind: str) -> list[dict[str, Any]]:
        file = self.folder / "events.jsonl"
        found = [json.loads(line) for line in file.read_text().splitlines()]
        return [event for event in found if event["kind"] == kind]

    def finish(self) -> None:
        try:
            code = self.process.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise RuntimeError(f"{self.folder}: not complete in {DEADLINE_S:.0f} s") from None
        if code != 0:
            tail = self.folder.with_suffix(".log").read_text()[-3000:]
            raise RuntimeError(f"{self.folder}: exit code {code} after {self.kills}\n{tail}")

    def reach(self, step: int) -> bool:
        """Wait for a step. False when the run has ended before it."""
        end = time.monotonic() + DEADLINE_S
        while self.step < step:
            if self.process.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(0.01)
        return self.process.poll() is None

    def kill_main(self, victim: str, *, at_restart: bool) -> None:
        step = self.step
        if victim == "group":
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            kill(self.process.pid)
        self.process.wait()
        self.kills.append(Kill(victim, victim, step, at_restart))
        self.process = self.start()

    def kill_worker(self, victim: str, rng: random.Random, *, known: set[int]) -> set[int]:
        """Kill one that is not `known`. Returns those that were there, or none where there was
        nobody to kill."""
        end = time.monotonic() + (SUCCESSOR_S if known else 0.0)
        while not (
            found := [p for p in pairs(self.process.pid, victim) if p.guardian not in known]
        ):
            if self.process.poll() is not None or time.monotonic() >= end:
                return set()
            time.sleep(0.002)
        if known:
            # It has just been started: let it come some way.
            time.sleep(rng.uniform(0.0, 3.0))
        step, pair = self.step, rng.choice(found)
        part = pair.kill(rng)
        self.kills.append(Kill(victim, part, step, bool(known)))
        return known | {one.guardian for one in found}

    def _new_pairs(self, victim: str, known: set[int]) -> list[Pair]:
        return [pair for pair in pairs(self.process.pid, victim) if pair.guardian not in known]

    def tensors(self) -> dict[str, bytes]:
        last = sorted((self.folder / "checkpoints").glob("step_*"))[-1]
        return {f"{last.name}/{p.name}": p.read_bytes() for p in last.glob("*.safetensors")}

    def journal(self) -> dict[str, bytes]:
        """Every group as it was written last; a round that a kill cut off is written again."""
        return {
            frame.head["key"]: json.dumps(frame.head, sort_keys=True).encode() + frame.body()
            for file in sorted((self.folder / "journal").glob("*.log"))
            for frame in frames(file)
            if frame.head["kind"] == "group"
        }

    def metrics(self) -> list[dict[str, float]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [
            {n: value for n, value in json.loads(line).items() if not n.startswith(MEASURED)}
            for line in lines
        ]


def disturb(run: Run, rng: random.Random, spent: threading.Event) -> Run:
    """Kill at random moments, in the order of the steps at which they come."""
    for step in sorted(rng.randrange(STEPS) for _ in range(MOMENTS_PER_RUN)):
        if spent.is_set() or not run.reach(step):
            break
        time.sleep(rng.uniform(0.0, 1.0) * (3.0 if step == 0 else 1.0))
        victim, again = rng.choice(VICTIMS[run.kind]), rng.random() < 0.5
        if run.process.poll() is not None:
            break
        if victim in ("main", "group"):
            run.kill_main(victim, at_restart=False)
            if again:
                time.sleep(rng.uniform(0.0, 5.0))
                if run.process.poll() is None:
                    run.kill_main(victim, at_restart=True)
        elif (seen := run.kill_worker(victim, rng, known=set())) and again and victim != "helper":
            run.kill_worker(victim, rng, known=seen)
    run.finish()
    return run


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of a disturbed run with the undisturbed one of its kind."""

    same_weights: bool
    same_journal: bool
    same_metrics: bool
    orphans: int

    @classmethod
    def of(cls, run: Run, alone: Run) -> Verdict:
        return cls(
            run.tensors() == alone.tensors(),
            run.journal() == alone.journal(),
            run.metrics() == alone.metrics(),
            len(orphans(run.mark, patience_s=ORPHAN_S)),
        )

    @property
    def is_good(self) -> bool:
        return self.same_weights and self.same_journal and self.same_metrics and not self.orphans


def disturb_until(folder: Path, *, num_kills: int, seed: int, parallel: int) -> list[Run]:
    """Runs of all kinds in turn, until there were so many kills."""
    kinds, runs, lock = list(ENGINES), [], threading.Lock()
    spent = threading.Event()

    def work() -> None:
        while not spent.is_set():
            with lock:
                number = len(runs)
                kind = kinds[number % len(kinds)]
                runs.append(run := Run(f"killed_{number:02d}", folder, kind))
            disturb(run, random.Random(seed * 1000 + number), spent)
            print(f"{run.folder.name} ({kind}): {len(run.kills)} kills", flush=True)
            with lock:
                if sum(len(one.kills) for one in runs) >= num_kills:
                    spent.set()

    with ThreadPoolExecutor(parallel) as pool:
        for future in [pool.submit(work) for _ in range(parallel)]:
            future.result()
    return runs


def summary(runs: list[Run], verdicts: list[Verdict]) -> dict[str, Any]:
    kills = [one for run in runs for one in run.kills]
    by_victim = collections.Counter(f"{one.victim}: {one.part}" for one in kills)
    return {
        "runs": dict(collections.Counter(run.kind for run in runs)),
        "kills": len(kills),
        "kills_of_a_process_that_was_being_restarted": sum(one.at_restart for one in kills),
        "kills_by_victim": dict(sorted(by_victim.items())),
        "resumed_from_a_checkpoint": sum(len(run.events("run_resumed")) for run in runs),
        "engine_restarts": sum(len(run.events("engine_restarted")) for run in runs),
        "helpers_lost": sum(len(run.events("helper_lost")) for run in runs),
        "weights_bitwise_equal": sum(one.same_weights for one in verdicts),
        "journals_bitwise_equal": sum(one.same_journal for one in verdicts),
        "metrics_equal": sum(one.same_metrics for one in verdicts),
        "orphans": sum(one.orphans for one in verdicts),
        "steps": STEPS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2)
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="homeostat-kills-") as place:
        folder = Path(place)
        alone = {kind: Run(f"alone_{kind}", folder, kind) for kind in ENGINES}
        for run in alone.values():
            run.finish()
        runs = disturb_until(
            folder, num_kills=arguments.kills, seed=arguments.seed, parallel=arguments.parallel
        )
        verdicts = [Verdict.of(run, alone[run.kind]) for run in runs]
        facts = summary(runs, verdicts)
        bad = [
            f"{run.folder.name} ({run.kind}): {verdict} after {[asdict(one) for one in run.kills]}"
            for run, verdict in zip(runs, verdicts, strict=True)
            if not verdict.is_good
        ]
    seconds = round(time.monotonic() - started)
    machine = common.machine(("torch", "transformers", "numpy"))
    common.write_result("rl_kills", {**machine, **facts, "seconds": seconds})
    if bad:
        sys.exit("\n".join(["disturbed runs differ from the undisturbed one:", *bad]))


if __name__ == "__main__":
    main()
