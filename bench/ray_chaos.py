"""Claim: an RL run on Ray survives the loss or the hang of any process, in any phase of a step.

    python bench/ray_chaos.py --runs 100 --lanes 2
    python bench/ray_chaos.py --only engine:publish:KILL --only driver:train:KILL

Every lane has a Ray of two nodes on loopback addresses, which serves its runs one after another:
two trainer ranks on the first node, the engine on the second. Its first run is left alone. Each of
the others is disturbed once: when its second step comes to a phase, one process is sent SIGKILL or
SIGSTOP. Lanes work side by side, and their runs have different seeds.

    driver    `homeostat train` itself; where it was killed, it is started again
    rank      a trainer rank        engine    the engine's process
    reward    a reward worker       actor     the Ray actor that started a trainer rank

A run that ends with an error is started again with the same command. At the end the run must have
the right number of steps, a journal and weights that are bitwise those of the undisturbed run (so
no data are lost or doubled), no process, and no CPU that Ray still holds for it.

With --outcomes FILE every outcome is added to the file as it comes, and those that are in it
already are not run again.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
from chaos_blows import PHASES, SIGNALS, STEP, VICTIMS, Blow, disturb
from rl_kills import MEASURED, Run, recipe
from victims import MARK, orphans

STEPS = 3
# Limits of waits for a process that hangs.
LIMIT_S = 30.0
DEADLINE_S = 900.0
MAX_STARTS = 4
# A stopped driver is continued after a while: nobody else can find out that it hangs.
PAUSE_S = 5.0
ORPHAN_S = 20.0


@dataclass(slots=True)
class Outcome:
    """The end of a disturbed run. `recovery_s`: from the blow until the step was complete.

    `error` is there if the run was not complete in time.
    """

    blow: str
    seed: int
    was_hit: bool
    starts: int
    recovery_s: float | None
    right_steps: bool
    same_weights: bool
    same_journal: bool
    same_metrics: bool
    processes_left: int
    cpus_held: float
    error: str = ""

    @property
    def is_good(self) -> bool:
        same = self.right_steps and self.same_weights and self.same_journal and self.same_metrics
        is_clean = not self.processes_left and not self.cpus_held and not self.error
        return self.was_hit and same and is_clean


def ray_recipe(name: str, folder: Path, *, address: str, mark: str, seed: int) -> dict[str, Any]:
    """Take the recipe of the kills on one host, over Ray."""
    made = recipe(name, folder, "own_process") | {"seed": seed}
    made["cluster"] = {
        "type": "ray",
        "address": address,
        "processes": 2,
        "timeout_s": LIMIT_S,
        "start_timeout_s": 240.0,
        "env": {MARK: mark},
    }
    made["trainer"] |= {"backend": {"type": "fsdp"}, "max_steps": STEPS}
    made["engine"] |= {"stall_s": LIMIT_S, "start_timeout_s": 240.0}
    made["sync"] = {"transport": {"type": "collective"}, "timeout_s": LIMIT_S}
    made["rewards"]["timeout_s"] = 10.0
    made["checkpoint"]["interval_steps"] = 1
    made["data"].pop("validation")
    made.pop("eval")
    return made


class ChaosRun(Run):
    """A run folder, and the driver that works on it, which is started until the run is complete."""

    def __init__(
        self, name: str, folder: Path, *, address: str, seed: int, blow: Blow | None
    ) -> None:
        self.folder = folder / name
        self.file = folder / f"{name}.json"
        self.mark = uuid.uuid4().hex
        self.address = address
        self.seed = seed
        self.blow = blow
        self.note = folder / f"{name}.hit"
        made = ray_recipe(name, folder, address=address, mark=self.mark, seed=seed)
        self.file.write_text(json.dumps(made), encoding="utf-8")
        self.starts = 0
        self.kills = []

    def start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        command = [sys.executable, __file__, "--run", str(self.file), "--note", str(self.note)]
        if self.blow is not None:
            command += ["--only", str(self.blow)]
        with open(self.folder.with_suffix(".log"), "ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, MARK: self.mark},
            )

    def complete(self) -> None:
        """Start the driver until it says that the run is complete."""
        end = time.monotonic() + DEADLINE_S
        while self.starts < MAX_STARTS:
            self.process = self.start()
            while self.process.poll() is None:
                self._let_go_on()
                if time.monotonic() > end:
                    self.process.kill()
                    self.process.wait()
                    raise RuntimeError(f"{self.folder}: not complete in {DEADLINE_S:.0f} s")
                time.sleep(0.1)
            if self.process.returncode == 0:
                return
        tail = self.folder.with_suffix(".log").read_text()[-3000:]
        raise RuntimeError(f"{self.folder}: not complete after {self.starts} starts\n{tail}")

    def _let_go_on(self) -> None:
        blow = self.blow
        if blow is not None and (blow.victim, blow.signal) == ("driver", "STOP"):
            if self.note.exists() and time.time() - self.hit_at() > PAUSE_S:
                self.process.send_signal(signal.SIGCONT)

    def hit_at(self) -> float:
        return float(self.note.read_text() or "inf")

    def recovery_s(self) -> float | None:
        """Return the seconds from the blow until the step that it came in was in the metrics."""
        if not self.note.exists():
            return None
        saved = [one for one in self.events("checkpoint_saved") if one["step"] >= STEP]
        after = [one["time"] for one in saved if one["time"] > self.hit_at()]
        return round(after[0] - self.hit_at(), 1) if after else None


def judged(run: ChaosRun, alone: ChaosRun, cpus: Callable[[], float]) -> Outcome:
    """Compare a disturbed run with the undisturbed one, once nothing of it should be left."""
    left = len(orphans(run.mark, patience_s=ORPHAN_S))
    end = time.monotonic() + ORPHAN_S
    while (held := cpus()) and time.monotonic() < end:
        time.sleep(0.5)
    metrics, expected = run.metrics(), alone.metrics()
    return Outcome(
        blow=str(run.blow),
        seed=run.seed,
        was_hit=run.note.exists(),
        starts=run.starts,
        recovery_s=run.recovery_s(),
        right_steps=[one["step"] for one in metrics] == list(range(1, STEPS + 1)),
        same_weights=run.tensors() == alone.tensors(),
        same_journal=run.journal() == alone.journal(),
        same_metrics=metrics == expected,
        processes_left=left,
        cpus_held=held,
    )


def run_driver(arguments: argparse.Namespace) -> None:
    from homeostat.cli.main import main as homeostat

    sys.argv = ["homeostat", "train", arguments.run]
    if arguments.only:
        disturb(Blow.of(arguments.only[0]), Path(arguments.note), homeostat)
    else:
        homeostat()


def start_nodes(lane: int) -> Any:
    """Start two Ray nodes of this machine: two ranks fill the first, the engine the second."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_worker_niceness", "0")
    common = {"object_store_memory": 80 * 2**20}
    first, second = (f"127.0.{10 + lane}.{number}" for number in (2, 3))
    head = {"num_cpus": 2, "node_ip_address": first, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**common, **head})
    cluster.add_node(**common, num_cpus=1, node_ip_address=second)
    return cluster


def blows(arguments: argparse.Namespace) -> list[Blow]:
    """Return the blows of all lanes: every combination once, in any order, and again."""
    if arguments.only:
        return [Blow.of(one) for one in arguments.only]
    every = [Blow(*one) for one in itertools.product(VICTIMS, PHASES, SIGNALS)]
    random.Random(arguments.seed).shuffle(every)
    return [every[number % len(every)] for number in range(arguments.runs)]


def work(arguments: argparse.Namespace) -> None:
    """Run one lane: its share of the blows, on its own Ray."""
    import ray

    lane, seed = arguments.lane, 3 + arguments.lane
    done = collections.Counter(one.blow for one in outcomes_in(arguments.outcomes, seed=seed))
    nodes = start_nodes(lane)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")

    def cpus_held() -> float:
        return ray.cluster_resources().get("CPU", 0) - ray.available_resources().get("CPU", 0)

    try:
        with tempfile.TemporaryDirectory(prefix="homeostat-chaos-") as place:
            alone = ChaosRun("alone", Path(place), address=nodes.address, seed=seed, blow=None)
            alone.complete()
            for number, blow in enumerate(blows(arguments)[lane :: arguments.lanes]):
                if done[str(blow)]:
                    done[str(blow)] -= 1
                    continue
                outcome = disturbed(number, blow, alone, cpus_held)
                with open(arguments.outcomes, "a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
                print(outcome, flush=True)
    finally:
        ray.shutdown()
        nodes.shutdown()


def disturbed(number: int, blow: Blow, alone: ChaosRun, cpus: Callable[[], float]) -> Outcome:
    run = ChaosRun(
        f"hit_{number:03d}", alone.file.parent, address=alone.address, seed=alone.seed, blow=blow
    )
    try:
        run.complete()
    except RuntimeError as error:
        left = len(orphans(run.mark, patience_s=ORPHAN_S))
        hit, none = run.note.exists(), (False, False, False, False)
        return Outcome(
            str(blow), run.seed, hit, run.starts, None, *none, left, cpus(), error=str(error)
        )
    return judged(run, alone, cpus)


def outcomes_in(file: Path, *, seed: int | None = None) -> list[Outcome]:
    """Return the outcomes that the file holds, of one seed or of all."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = [Outcome(**json.loads(line)) for line in lines]
    return [one for one in found if seed is None or one.seed == seed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=len(VICTIMS) * len(PHASES) * len(SIGNALS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lanes", type=int, default=1, help="runs at one time")
    parser.add_argument("--only", action="append", help="victim:phase:KILL or :STOP")
    parser.add_argument("--outcomes", type=Path, help="a file that keeps the outcomes")
    parser.add_argument("--lane", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--note", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_driver(arguments)
    elif arguments.lane is not None:
        work(arguments)
    else:
        with tempfile.TemporaryDirectory(prefix="homeostat-outcomes-") as place:
            arguments.outcomes = arguments.outcomes or Path(place) / "outcomes.jsonl"
            started = time.monotonic()
            run_lanes(arguments)
            report(outcomes_in(arguments.outcomes), seconds=time.monotonic() - started)


def run_lanes(arguments: argparse.Namespace) -> None:
    """Start a process for each lane, and wait for all."""
    given = ["--outcomes", str(arguments.outcomes)]
    words = [word for word in sys.argv[1:] if word not in given]
    lanes = [
        subprocess.Popen([sys.executable, __file__, *words, *given, "--lane", str(lane)])
        for lane in range(arguments.lanes)
    ]
    codes = [lane.wait() for lane in lanes]
    if any(codes):
        sys.exit("a lane ended with an error: see above")


def report(outcomes: list[Outcome], *, seconds: float) -> None:
    """Write the result. Exits with a list of the runs that did not end as they should."""
    table: dict[str, list[float | None]] = {}
    for one in sorted(outcomes, key=lambda outcome: outcome.blow):
        table.setdefault(one.blow, []).append(one.recovery_s)
    recovery = sorted(one.recovery_s for one in outcomes if one.recovery_s is not None)
    facts = {
        "runs": len(outcomes),
        "good": sum(one.is_good for one in outcomes),
        "combinations": len(table),
        "not_complete": sum(bool(one.error) for one in outcomes),
        "started_again": sum(one.starts > 1 for one in outcomes),
        "by_victim": dict(collections.Counter(one.blow.split(":")[0] for one in outcomes)),
        "median_recovery_s": recovery[len(recovery) // 2] if recovery else None,
        "max_recovery_s": recovery[-1] if recovery else None,
        "processes_left": sum(one.processes_left for one in outcomes),
        "steps": STEPS,
        "limit_s": LIMIT_S,
        "not_compared": list(MEASURED),
        "recovery_s": table,
        "outcomes": [asdict(one) for one in outcomes],
        "seconds": round(seconds),
    }
    common.write_result(
        "ray_chaos", {**common.machine(("torch", "transformers", "ray", "numpy")), **facts}
    )
    bad = [str(one) for one in outcomes if not one.is_good]
    if bad:
        sys.exit("\n".join(["these runs did not end as the undisturbed one:", *bad]))


if __name__ == "__main__":
    main()
