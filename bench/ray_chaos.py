"""Claim: an RL run on Ray survives the loss or the hang of any process, in any phase of a step.

    python bench/ray_chaos.py --runs 8
    python bench/ray_chaos.py --only engine:publish:KILL --only driver:train:KILL

One Ray of two nodes on loopback addresses serves all runs: two trainer ranks on the first, the
engine on the second. One run is left alone. Each of the others is disturbed once: when its second
step comes to a phase, one process is sent SIGKILL or SIGSTOP.

    driver    `homeostat train` itself; where it was killed, it is started again
    rank      a trainer rank        engine    the engine's process
    reward    a reward worker       actor     the Ray actor that started a trainer rank

A run that ends with an error is started again with the same command. At the end the run must have
the right number of steps, a journal and weights that are bitwise those of the undisturbed run (so
no data are lost or doubled), no process, and no CPU that Ray still holds for it.
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
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
from rl_kills import MEASURED, Run, recipe
from victims import MARK, orphans, pairs, worker_pids

VICTIMS = ("driver", "rank", "engine", "reward", "actor")
PHASES = ("start", "generate", "reward", "train", "publish", "checkpoint")
SIGNALS = ("KILL", "STOP")
STEPS = 4
# The step at which a run is disturbed: one checkpoint lies behind it, one comes with it.
STEP = 2
# Limits of waits for a process that hangs.
LIMIT_S = 30.0
DEADLINE_S = 420.0
MAX_STARTS = 4
# A stopped driver is continued after a while: nobody else can find out that it hangs.
PAUSE_S = 5.0
ORPHAN_S = 20.0


@dataclass(frozen=True, slots=True)
class Blow:
    """One process of a run is lost: which, in which phase, by which signal."""

    victim: str
    phase: str
    signal: str

    def __str__(self) -> str:
        return f"{self.victim}:{self.phase}:{self.signal}"


@dataclass(slots=True)
class Outcome:
    """The end of a disturbed run. `recovery_s`: from the blow until the step was complete."""

    blow: str
    was_hit: bool
    starts: int
    recovery_s: float | None
    right_steps: bool
    same_weights: bool
    same_journal: bool
    same_metrics: bool
    processes_left: int
    cpus_held: float

    @property
    def is_good(self) -> bool:
        same = self.right_steps and self.same_weights and self.same_journal and self.same_metrics
        return self.was_hit and same and not self.processes_left and not self.cpus_held


def ray_recipe(name: str, folder: Path, *, address: str, mark: str) -> dict[str, Any]:
    """Take the recipe of the kills on one host, over Ray."""
    made = recipe(name, folder, "own_process")
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

    def __init__(self, name: str, folder: Path, *, address: str, blow: Blow | None) -> None:
        self.folder = folder / name
        self.file = folder / f"{name}.json"
        self.mark = uuid.uuid4().hex
        self.address = address
        self.blow = blow
        self.note = folder / f"{name}.hit"
        made = ray_recipe(name, folder, address=address, mark=self.mark)
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


# In the driver


def disturb(blow: Blow, note: Path, run: Callable[[], None]) -> None:
    """Run the driver. The blow falls when its phase comes at its step, once in the whole run."""
    from homeostat.observe.timeline import Timeline
    from homeostat.rollout.scorer import Scorer
    from homeostat.run.wiring import rl_setup

    now = {"step": 0}
    phase, begin, open_engine = Timeline.phase, Scorer.begin, rl_setup.open_engine

    @contextmanager
    def timed(self: Timeline, name: str, *, step: int) -> Iterator[None]:
        now["step"] = step
        word = "generate" if name.startswith("generate") else name
        if step == STEP and word == blow.phase:
            strike(blow, note)
        with phase(self, name, step=step):
            yield

    def scored(self: Scorer, *args: Any, **kwargs: Any) -> Any:
        if now["step"] == STEP and blow.phase == "reward":
            strike(blow, note)
        return begin(self, *args, **kwargs)

    def opened(*args: Any, **kwargs: Any) -> Any:
        if blow.phase == "start":
            threading.Thread(target=strike, args=(blow, note), daemon=True).start()
        return open_engine(*args, **kwargs)

    Timeline.phase, Scorer.begin, rl_setup.open_engine = timed, scored, opened
    run()


def strike(blow: Blow, note: Path) -> None:
    """Send the signal as soon as the victim is there, unless it was sent before."""
    end = time.monotonic() + LIMIT_S
    while not note.exists() and time.monotonic() < end:
        pid = find(blow.victim)
        if pid is not None:
            note.write_text(str(time.time()))
            os.kill(pid, signal.Signals[f"SIG{blow.signal}"])
            return
        time.sleep(0.05)


def find(victim: str) -> int | None:
    """Return a process of this run."""
    main, mark = os.getpid(), os.environ[MARK]
    if victim == "driver":
        return main
    if victim == "reward":
        found = [pair.worker or pair.guardian for pair in pairs(main, "reward")]
    elif victim == "rank":
        found = [worker for _, worker in worker_pids(mark, "trainer")]
    elif victim == "engine":
        found = [worker for _, worker in worker_pids(mark, "engine")]
    else:
        found = [_parent(guardian) for guardian, _ in worker_pids(mark, "trainer")]
    return found[-1] if found else None


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def run_driver(arguments: argparse.Namespace) -> None:
    from homeostat.cli.main import main as homeostat

    sys.argv = ["homeostat", "train", arguments.run]
    if arguments.only:
        disturb(Blow(*arguments.only[0].split(":")), Path(arguments.note), homeostat)
    else:
        homeostat()


# In the benchmark


def start_nodes() -> Any:
    """Start two Ray nodes of this machine: two ranks fill the first, the engine the second."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_worker_niceness", "0")
    common = {"object_store_memory": 80 * 2**20}
    head = {"num_cpus": 2, "node_ip_address": "127.0.0.2", "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**common, **head})
    cluster.add_node(**common, num_cpus=1, node_ip_address="127.0.0.3")
    return cluster


def cases(arguments: argparse.Namespace) -> list[Blow]:
    if arguments.only:
        return [Blow(*one.split(":")) for one in arguments.only]
    every = [Blow(*one) for one in itertools.product(VICTIMS, PHASES, SIGNALS)]
    random.Random(arguments.seed).shuffle(every)
    return [every[number % len(every)] for number in range(arguments.runs)]


def disturbed(number: int, blow: Blow, alone: ChaosRun, cpus: Callable[[], float]) -> Outcome:
    run = ChaosRun(f"hit_{number:03d}", alone.file.parent, address=alone.address, blow=blow)
    run.complete()
    return judged(run, alone, cpus)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=len(VICTIMS) * len(PHASES) * len(SIGNALS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="victim:phase:KILL or :STOP")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--note", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_driver(arguments)
        return
    started = time.monotonic()
    import ray

    nodes = start_nodes()
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")

    def cpus_held() -> float:
        return ray.cluster_resources().get("CPU", 0) - ray.available_resources().get("CPU", 0)

    outcomes: list[Outcome] = []
    failures: list[str] = []
    try:
        with tempfile.TemporaryDirectory(prefix="homeostat-chaos-") as place:
            alone = ChaosRun("alone", Path(place), address=nodes.address, blow=None)
            alone.complete()
            print(f"alone: {time.monotonic() - started:.0f} s", flush=True)
            for number, blow in enumerate(cases(arguments)):
                try:
                    outcomes.append(disturbed(number, blow, alone, cpus_held))
                    print(outcomes[-1], flush=True)
                except RuntimeError as error:
                    failures.append(f"{blow}: {error}")
                    print(failures[-1], flush=True)
    finally:
        ray.shutdown()
        nodes.shutdown()
    report(outcomes, failures, seconds=time.monotonic() - started)


def report(outcomes: list[Outcome], failures: list[str], *, seconds: float) -> None:
    recovery = sorted(one.recovery_s for one in outcomes if one.recovery_s is not None)
    facts = {
        "runs": len(outcomes) + len(failures),
        "good": sum(one.is_good for one in outcomes),
        "not_complete": len(failures),
        "started_again": sum(one.starts > 1 for one in outcomes),
        "by_victim": dict(collections.Counter(one.blow.split(":")[0] for one in outcomes)),
        "median_recovery_s": recovery[len(recovery) // 2] if recovery else None,
        "max_recovery_s": recovery[-1] if recovery else None,
        "processes_left": sum(one.processes_left for one in outcomes),
        "steps": STEPS,
        "not_compared": list(MEASURED),
        "outcomes": [asdict(one) for one in outcomes],
        "seconds": round(seconds),
    }
    common.write_result(
        "ray_chaos", {**common.machine(("torch", "transformers", "ray", "numpy")), **facts}
    )
    bad = [str(one) for one in outcomes if not one.is_good] + failures
    if bad:
        sys.exit("\n".join(["these runs did not end as the undisturbed one:", *bad]))


if __name__ == "__main__":
    main()
