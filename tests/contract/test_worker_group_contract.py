"""The contract of every WorkerGroup, whatever launches it. A new launcher is an entry in SHAPES."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tests.support.forks import real_workers
from tests.support.patience import eventually, patiently
from tests.support.seats import seated

from homeostat.config.cluster import AnyCluster, InProcessCluster, TorchrunCluster
from homeostat.config.ranks import LOOPBACK, Launcher, WorkerKind
from homeostat.config.ray_cluster import RayCluster
from homeostat.errors import ConfigError, EngineError, WorkerError, WorkerOutOfMemoryError
from homeostat.run.ray.cluster import RayLauncher
from homeostat.run.ray.vendor import connected
from homeostat.types import Completion, Segment, StopReason
from homeostat.workers.group import WorkerGroup, gather
from homeostat.workers.in_process import InProcessGroup
from homeostat.workers.opening import LAUNCHERS, launcher_opened, open_group
from homeostat.workers.processes import ProcessGroup
from homeostat.workers.spec import GroupSpec

OBJECTS = "tests.support.worker_objects"
MAKE = f"{OBJECTS}:make"
MAKE_CLOSING = f"{OBJECTS}:make_closing"
MAKE_NONE = f"{OBJECTS}:make_none"
# Under load everything may be late; what is asserted of time is only that nothing waits for ever.
SOON_S = 20.0

# name -> launcher, size
SHAPES = {
    "spawn_1": ("spawn", 1),
    "spawn_3": ("spawn", 3),
    "torchrun_2": ("torchrun", 2),
    "outside_2": ("outside", 2),
    "ray_2": ("ray", 2),
}
# launcher -> a cluster that has it, and for workers of which kind
CLUSTERS: dict[str, tuple[AnyCluster, WorkerKind]] = {
    "in_process": (InProcessCluster(), "trainer"),
    "spawn": (InProcessCluster(), "engine"),
    "torchrun": (TorchrunCluster(type="torchrun"), "trainer"),
    "outside": (TorchrunCluster(type="torchrun"), "trainer"),
    "ray": (RayCluster(type="ray", cpus_per_worker=0.1), "trainer"),
}
Start = Callable[..., ProcessGroup]


def open_with(launcher: str, **changes: Any) -> WorkerGroup:
    cluster, kind = CLUSTERS[launcher]
    assert cluster.launcher(kind) == ("torchrun" if launcher == "outside" else launcher)
    return open_group(cluster, GroupSpec(kind=kind, name="trainer", **changes))


def open_here(factory: str, **kwargs: Any) -> WorkerGroup:
    """A group in this process."""
    return open_with("in_process", factory=factory, kwargs=kwargs, log_file=Path("unused"))


def test_every_launcher_is_held_to_the_contract() -> None:
    assert set(CLUSTERS) == set(get_args(Launcher))
    assert set(CLUSTERS) == {"in_process", *(by for by, _ in SHAPES.values())}
    # These are entries only while they are open.
    assert set(LAUNCHERS) - {"ray"} == set(CLUSTERS) - {"ray", "outside"}


def processes_of(log_file: Path) -> set[int]:
    """Launchers, guardians and workers: their log is named in the environment they began with."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.fsencode(log_file) in (entry / "environ").read_bytes():
                found.add(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@cache
def opened_ray() -> ExitStack:
    """A Ray of this machine that workers are placed by, until the tests of this file end."""
    stack = ExitStack()
    cluster, _ = CLUSTERS["ray"]
    assert isinstance(cluster, RayCluster)
    ray = stack.enter_context(connected(cluster))
    stack.enter_context(launcher_opened("ray", RayLauncher(ray).open_group))
    return stack


@pytest.fixture(scope="module", autouse=True)
def ray_ends_with_these_tests() -> Iterator[None]:
    yield
    if opened_ray.cache_info().currsize:
        opened_ray().close()


@contextlib.contextmanager
def starter(log_file: Path) -> Iterator[Start]:
    """Starts groups. At the end they are closed, and nothing may be left over of them."""
    groups: list[ProcessGroup] = []
    seats = ExitStack()

    def start(shape: str, factory: str = MAKE, kwargs: Any = (), **changes: Any) -> ProcessGroup:
        launcher, size = SHAPES.get(shape, ("spawn", 2))
        if changes.get("launcher", launcher) == "ray":
            pytest.importorskip("ray")
            opened_ray()
        settings = {"launcher": launcher, "size": size, "log_file": log_file}
        settings |= {"start_timeout_s": 60.0, "close_timeout_s": SOON_S, **changes}
        with ExitStack() as opened:
            if settings["launcher"] == "outside":
                # An entry for this group alone: it would be used in place of our own torchrun.
                at = seats.enter_context(seated(settings["size"], nodes=1))
                opened.enter_context(launcher_opened("outside", at.open_group))
            group = open_with(factory=factory, kwargs=dict(kwargs), **settings)
        assert isinstance(group, ProcessGroup)
        groups.append(group)
        return group

    try:
        yield start
    finally:
        for group in groups:
            group.abandon()
        seats.close()
        assert eventually(lambda: not processes_of(log_file))


@pytest.fixture(scope="module", autouse=True)
def workers_are_started_as_outside_of_tests() -> Iterator[None]:
    with real_workers():
        yield


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "workers.log"


@pytest.fixture
def start(log_file: Path) -> Iterator[Start]:
    with starter(log_file) as begin:
        yield begin


# torchrun takes seconds to start. What any launcher must hold is tried with it in `group`; most
# tests that start a group of their own do so with it at night.
AT_NIGHT = dict.fromkeys(("torchrun", "torchrun_2"), pytest.mark.slow)


# torchrun's and Ray's tests are with those of ranks, because both take seconds to start. Processes
# that were started from outside are tried there in full, and in tests/unit/test_seats.py in part.
SLOW_TO_START = ("torchrun", "torchrun_2", "ray", "ray_2", "outside", "outside_2")
WITH_RANKS = dict.fromkeys(SLOW_TO_START, pytest.mark.ranks)


def at_night(name: str) -> Any:
    return pytest.param(name, marks=AT_NIGHT.get(name, ()))


def by_ranks(name: str) -> Any:
    return pytest.param(name, marks=WITH_RANKS.get(name, ()))


@pytest.fixture(
    params=[pytest.param(name, marks=(WITH_RANKS | AT_NIGHT).get(name, ())) for name in SHAPES]
)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def group_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("group") / "workers.log"


@pytest.fixture(scope="module", params=["in_process", *map(by_ranks, SHAPES)])
def group(request: pytest.FixtureRequest, group_log: Path) -> Iterator[WorkerGroup]:
    """One for all tests that leave it usable."""
    if request.param == "in_process":
        yield open_here(MAKE, width=3)
        return
    with starter(group_log) as begin:
        yield begin(request.param, kwargs={"width": 3})


@pytest.fixture
def processes(group: WorkerGroup) -> WorkerGroup:
    if isinstance(group, InProcessGroup):
        pytest.skip("of processes alone")
    return group


def pids(group: WorkerGroup) -> list[int]:
    return [about["pid"] for about in gather(group.call_all("about"), timeout_s=SOON_S)]


# Calls


def test_a_factory_is_told_its_place_and_its_arguments(group: WorkerGroup) -> None:
    abouts = gather(group.call_all("about"), timeout_s=SOON_S)
    assert [about["rank"] for about in abouts] == list(range(group.size))
    assert [about["local_rank"] for about in abouts] == list(range(group.size))
    for about in abouts:
        assert (about["size"], about["group_name"]) == (group.size, "trainer")
        # Ray knows its nodes by an address that others reach.
        assert about["host"] == LOOPBACK or "ray" in LAUNCHERS
        assert about["kwargs"] == {"width": 3}


def test_calls_reach_the_ranks_they_are_meant_for(group: WorkerGroup) -> None:
    last = group.size - 1
    assert group.call(last, "about").result(timeout_s=SOON_S)["rank"] == last
    everywhere = gather(group.call_all("echo", 1, b=2), timeout_s=SOON_S)
    assert everywhere == [((1,), {"b": 2})] * group.size
    own = [(rank, "x" * rank) for rank in range(group.size)]
    each = group.call_each("echo", own)
    assert [one.rank for one in each] == list(range(group.size))
    assert gather(each, timeout_s=SOON_S) == [(args, {}) for args in own]
    # An answer may be asked for twice.
    assert each[0].result(timeout_s=0) == ((0, ""), {})


def test_calls_of_one_worker_are_answered_in_order(group: WorkerGroup) -> None:
    before = group.call(0, "remember", "begin").result(timeout_s=SOON_S)
    slow = group.call(0, "sleep", 0.1)
    pending = [group.call(0, "remember", n) for n in range(50)]
    assert gather(pending, timeout_s=SOON_S)[-1] == [*before, *range(50)]
    assert slow.result(timeout_s=0) == 0.1


def test_each_rank_needs_its_arguments(group: WorkerGroup) -> None:
    with pytest.raises(ValueError, match=r"argument|unpack|zip"):
        group.call_each("echo", [(1,)] * (group.size + 1))


def test_arrays_tensors_and_dataclasses_travel(group: WorkerGroup) -> None:
    rng = np.random.default_rng()
    tokens_T = rng.integers(0, 1000, 7)
    segment = Segment(tokens_T, rng.random(7, dtype=np.float32), policy_version=3)
    completion = Completion("r", (segment,), StopReason.LENGTH)
    # The worker imports torch for a tensor, which takes seconds: once is enough.
    tensors = [torch.randn(3, 5).to(torch.bfloat16)] if group.size == 1 else []
    asked = group.call(0, "echo", completion, *tensors, flag=np.True_)
    (found, *arrived), kwargs = asked.result(timeout_s=60)
    back = found.segments[0]
    assert back.tokens_T.dtype == np.int64
    assert np.array_equal(back.tokens_T, tokens_T)
    assert np.array_equal(back.engine_logp_T, segment.engine_logp_T)
    assert found.stop_reason is StopReason.LENGTH
    for tensor, other in zip(tensors, arrived, strict=True):
        assert other.dtype == torch.bfloat16
        assert torch.equal(other, tensor)
    assert kwargs["flag"]


def test_signals_to_a_whole_job_are_left_to_the_controller(processes: WorkerGroup) -> None:
    """Ctrl-C, and what a scheduler sends to every process: launcher, guardians and workers."""
    abouts = gather(processes.call_all("about"), timeout_s=SOON_S)
    calls = processes.call_all("sleep", 0.3)
    for about in abouts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(about["pid"], number)
            os.kill(about["guardian"], number)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            for launcher in processes._started.launchers:
                # Those of Ray are actors, which have no process id of this host.
                if isinstance(launcher, subprocess.Popen):
                    os.kill(launcher.pid, number)
        assert os.getsid(about["pid"]) != os.getsid(0)
    assert gather(calls, timeout_s=SOON_S) == [0.3] * processes.size
    assert pids(processes) == [about["pid"] for about in abouts]


def test_output_goes_to_the_log_with_its_rank(
    processes: WorkerGroup, group_log: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = range(processes.size)
    words = [f"{time.monotonic()} of {rank}" for rank in ranks]
    gather(processes.call_each("say", [(word,) for word in words]), timeout_s=SOON_S)
    lines = {f"[trainer {rank}] {words[rank]}" for rank in ranks}
    assert eventually(lambda: lines <= set(group_log.read_text().splitlines()))
    assert capfd.readouterr() == ("", "")


# Errors


def test_our_errors_arrive_as_they_were_raised(group: WorkerGroup) -> None:
    with pytest.raises(EngineError) as caught:
        group.call(0, "raise_engine_error", "no room for\n7 rows").result(timeout_s=SOON_S)
    assert type(caught.value) is EngineError
    assert str(caught.value) == "no room for\n7 rows"
    assert "worker_objects.py" in caught.value.__notes__[0]
    with pytest.raises(ConfigError) as many:
        group.call(0, "raise_config_error").result(timeout_s=SOON_S)
    assert str(many.value) == "x.yaml: a.b: is wrong Set it.\nx.yaml: c: too"
    assert [problem.place for problem in many.value.problems] == ["a.b", "c"]


def test_a_subclass_from_elsewhere_arrives_as_the_nearest_of_ours(group: WorkerGroup) -> None:
    with pytest.raises(EngineError, match="from afar") as caught:
        group.call(0, "raise_local_engine_error").result(timeout_s=SOON_S)
    assert type(caught.value) is EngineError


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("raise_value_error", "ValueError: seven is not even"),
        ("no_such_method", "AttributeError: .*no_such_method"),
    ],
)
def test_foreign_errors_arrive_with_their_traceback(
    group: WorkerGroup, method: str, reason: str
) -> None:
    rank = group.size - 1
    with pytest.raises(WorkerError, match=reason) as caught:
        group.call(rank, method).result(timeout_s=SOON_S)
    assert type(caught.value) is WorkerError
    assert str(caught.value).startswith(f"trainer rank {rank}: {method!r} raised ")
    assert 'hosting.py", line' in str(caught.value)
    assert group.call(rank, "echo", 1).result(timeout_s=SOON_S) == ((1,), {})
    assert group.health() is None


def test_a_failed_call_is_not_hidden_by_a_slow_one(start: Start) -> None:
    group = start("two")
    calls = [group.call(0, "sleep", 600.0), group.call(1, "raise_value_error")]
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1: .* seven is not even"):
        gather(calls, timeout_s=2 * SOON_S)
    assert time.monotonic() - begun < SOON_S
    assert not calls[0].future.done()


# Deadlines


def test_a_wait_in_vain_names_whom_it_waited_for(start: Start, tmp_path: Path) -> None:
    group = start("spawn_3")
    group.call(2, "say", "I am busy").result(timeout_s=SOON_S)
    calls = group.call_all("wait_for_file_but", 0, str(tmp_path / "go on"))
    calls[0].result(timeout_s=SOON_S)
    with pytest.raises(WorkerError) as caught:
        gather(calls, timeout_s=0.3)
    message = "trainer: no answer from rank 1, 2 to 'wait_for_file_but' within 0.3 s."
    assert message in str(caught.value)
    assert group.health() == message
    with pytest.raises(WorkerError, match=r"rank 2 to 'echo' within 0\.1 s(.|\n)*I am busy"):
        group.call(2, "echo", "mine").result(timeout_s=0.1)
    (tmp_path / "go on").touch()
    # The late answers are those of the calls that they belong to.
    after = group.call(2, "echo", "after")
    assert after.result(timeout_s=SOON_S) == (("after",), {})
    assert gather(calls, timeout_s=SOON_S) == [None] * 3
    assert group.health() is None


def test_a_hang_is_reported_with_the_call_and_stack_of_each_rank(
    start: Start, log_file: Path
) -> None:
    group = start("spawn_3")
    gather(group.call_all("echo"), timeout_s=SOON_S)
    calls = group.call_all("sleep_but", 0, 600.0)
    calls[0].result(timeout_s=SOON_S)
    # On a busy machine the others may not have begun.
    assert eventually(lambda: group.report_hang().count("in sleep_but") == 2)
    stopped = group.call(0, "about").result(timeout_s=SOON_S)["pid"]
    os.kill(stopped, signal.SIGSTOP)
    lines = group.report_hang().splitlines()
    assert lines[0] == "rank 0 lags: its process is stopped by a signal."
    assert "rank 1: waiting" in lines[2]
    # The start, the echo, and this.
    assert "call 3 'sleep_but', begun" in lines[2]
    assert "no last collective yet" in lines[2]
    assert "in sleep_but" in lines[2]
    hangs = log_file.parent / "hangs"
    report = hangs / f"trainer_{len(list(hangs.iterdir()))}.txt"
    assert lines[-1] == f"The stacks of all threads are in {report}."
    stacks = report.read_text().split("== trainer rank ")
    assert stacks[1] == "0\nno stack\n\n"
    assert "sleep_but" in stacks[2]
    assert "sleep_but" in stacks[3]
    group.abandon()
    assert eventually(lambda: not is_alive(stopped))


def test_asking_a_busy_worker_does_not_wait(start: Start) -> None:
    group = start("spawn_1")
    large = np.zeros(4_000_000)
    group.call(0, "sleep", 600.0)
    # Far more than the socket takes.
    calls = [group.call(0, "echo", large) for _ in range(3)]
    assert not any(call.future.done() for call in calls)


def test_large_payloads_go_both_ways_at_once(start: Start) -> None:
    group = start("spawn_1")
    sent = [np.arange(size, dtype=np.int64) for size in (4_000_000, 400_000)]
    calls = [group.call(0, "echo", array) for array in sent]
    for array, call in zip(sent, calls, strict=True):
        assert np.array_equal(call.result(timeout_s=60)[0][0], array)


def test_what_cannot_be_packed_is_an_error_of_that_call(start: Start) -> None:
    group = start("spawn_1")
    with pytest.raises(WorkerError, match="cannot pickle"):
        group.call(0, "not_to_be_packed").result(timeout_s=SOON_S)
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        group.call(0, "echo", lambda: None)
    assert group.call(0, "echo", 1).result(timeout_s=SOON_S) == ((1,), {})


# Death


def test_a_killed_rank_ends_the_group_with_a_report(
    shape: str, start: Start, log_file: Path
) -> None:
    log_file.parent.mkdir()
    log_file.write_text("[trainer 0] of an earlier group\n")
    group = start(shape)
    victim = group.size - 1
    group.call(victim, "say", "my last words").result(timeout_s=SOON_S)
    pid = pids(group)[victim]
    program = group.call(victim, "start_a_program").result(timeout_s=SOON_S)
    shared = Path("/dev/shm") / group.call(0, "share_memory").result(timeout_s=SOON_S)
    assert shared.exists()
    calls = group.call_all("sleep", 600.0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError) as caught:
        gather(calls, timeout_s=SOON_S)
    assert f"trainer rank {victim} was ended by SIGKILL" in str(caught.value)
    assert str(log_file) in str(caught.value)
    assert f"{log_file}:\nmy last words" in str(caught.value)
    assert group.health() == str(caught.value)
    with pytest.raises(WorkerError, match="SIGKILL"):
        group.call(0, "echo", 1)
    # No word to the group is needed: torchrun and the other ranks end as well.
    assert eventually(lambda: not processes_of(log_file))
    assert eventually(lambda: not is_alive(program))
    assert eventually(lambda: not shared.exists())


# Both of its workers import torch.
@pytest.mark.ranks
@pytest.mark.parametrize("launcher", ["spawn", at_night("torchrun"), "outside", "ray"])
def test_a_collective_works_and_its_broken_half_is_not_the_report(
    launcher: str, start: Start, log_file: Path
) -> None:
    group = start("two", launcher=launcher, size=2)
    assert gather(group.call_each("gloo_sum", [(1.5,), (2.0,)]), timeout_s=60) == [3.5, 3.5]
    pid = pids(group)[1]
    calls = group.call_all("gloo_sum_but", 1)
    calls[1].result(timeout_s=SOON_S)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="trainer rank 1 was ended by SIGKILL"):
        gather(calls, timeout_s=SOON_S)
    assert eventually(lambda: not processes_of(log_file))


def test_a_death_is_the_report_although_its_guardian_is_slow(start: Start) -> None:
    """It waits for the last lines of a program that the rank started. Another rank, which cannot do
    without the dead one, fails at once."""
    group = start("two")
    about = group.call(1, "about").result(timeout_s=SOON_S)
    program = group.call(1, "start_a_program").result(timeout_s=SOON_S)
    waiting = group.call(1, "sleep", 600.0)
    os.kill(about["guardian"], signal.SIGSTOP)
    os.kill(about["pid"], signal.SIGKILL)
    failing = group.call(0, "raise_value_error")
    time.sleep(0.2)
    os.kill(about["guardian"], signal.SIGCONT)
    with pytest.raises(WorkerError, match="trainer rank 1 was ended by SIGKILL"):
        gather([failing, waiting], timeout_s=SOON_S)
    assert eventually(lambda: not is_alive(program))


@pytest.mark.parametrize(
    ("method", "number", "how"),
    [
        ("exit", 7, "ended with exit code 7"),
        ("leave", 0, "ended with exit code 0"),
        ("crash", signal.SIGSEGV, "was ended by SIGSEGV(.|\n)*worker_objects.py.* in crash"),
    ],
)
def test_a_rank_that_ends_by_itself_says_how(
    start: Start, method: str, number: int, how: str
) -> None:
    group = start("two")
    calls = [group.call(0, "sleep", 600.0), group.call(1, method, number)]
    with pytest.raises(WorkerError, match=f"trainer rank 1 {how}"):
        gather(calls, timeout_s=SOON_S)


def test_a_rank_that_aborts_for_want_of_memory_is_known_by_its_last_words(start: Start) -> None:
    """An allocation that fails where C++ cannot raise ends the process, with no Python error."""
    group = start("two")
    calls = [group.call(0, "sleep", 600.0), group.call(1, "abort_for_want_of_memory")]
    with pytest.raises(WorkerOutOfMemoryError, match=r"SIGABRT(.|\n)*bad_alloc"):
        gather(calls, timeout_s=SOON_S)


def test_a_rank_whose_guardian_is_killed_ends_too(start: Start, log_file: Path) -> None:
    group = start("two")
    guardian = group.call(1, "about").result(timeout_s=SOON_S)["guardian"]
    call = group.call(1, "sleep", 600.0)
    os.kill(guardian, signal.SIGKILL)
    with pytest.raises(WorkerError, match="trainer rank 1 was killed from outside"):
        call.result(timeout_s=SOON_S)
    assert eventually(lambda: not processes_of(log_file))


@pytest.mark.ranks
def test_a_launcher_that_is_killed_takes_its_workers_along(start: Start, log_file: Path) -> None:
    group = start("torchrun_2")
    about = group.call(0, "about").result(timeout_s=SOON_S)
    torchrun = int(
        Path(f"/proc/{about['guardian']}/stat").read_text().rpartition(")")[2].split()[1]
    )
    call = group.call(0, "sleep", 600.0)
    os.kill(torchrun, signal.SIGKILL)
    with pytest.raises(WorkerError, match="trainer: the launcher of its workers was ended by SIGK"):
        call.result(timeout_s=SOON_S)
    assert eventually(lambda: not processes_of(log_file))


CONTROLLER = """
import sys
from pathlib import Path
from homeostat.config.cluster import InProcessCluster, TorchrunCluster
from homeostat.workers.group import gather
from homeostat.workers.opening import open_group
from homeostat.workers.spec import GroupSpec

launcher, log_file, factory = sys.argv[1:]
clusters = {"spawn": (InProcessCluster(), "engine"),
            "torchrun": (TorchrunCluster(type="torchrun"), "trainer")}
cluster, kind = clusters[launcher]
group = open_group(cluster, GroupSpec(factory=factory, kind=kind, name="trainer",
                                      log_file=Path(log_file), size=2, start_timeout_s=60))
abouts = gather(group.call_all("about"), timeout_s=20)
heavy = {"torch", "numpy"} & set(sys.modules)
group.call(0, "sleep", 600.0)
print([about["torch"] for about in abouts], sorted(heavy), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("launcher", ["spawn", by_ranks("torchrun")])
def test_workers_end_with_a_controller_that_was_killed(launcher: str, log_file: Path) -> None:
    argv = [sys.executable, "-c", CONTROLLER, launcher, str(log_file), MAKE]
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as controller:
        try:
            assert controller.stdout is not None
            # Neither side imports torch for it.
            assert controller.stdout.readline() == b"[False, False] []\n"
            workers = processes_of(log_file)
            assert len(workers) == 4 + (launcher == "torchrun")
        finally:
            controller.kill()
    assert eventually(lambda: not processes_of(log_file))


# Start


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("raises", WorkerError, "rank 1: '\\(start\\)' raised KeyError: 'no such thing'"),
        ("raises ours", EngineError, "^the factory says no"),
        ("exits", WorkerError, "rank 1 ended with exit code 7(.|\n)*about to fail"),
        ("kills itself", WorkerError, "rank 1 was ended by SIGKILL(.|\n)*about to fail"),
    ],
)
def test_a_factory_that_fails_is_told_at_once(
    start: Start, log_file: Path, kind: str, error: type[Exception], message: str
) -> None:
    begun = time.monotonic()
    with pytest.raises(error, match=message):
        start("two", MAKE_NONE, {"kind": kind})
    assert time.monotonic() - begun < SOON_S
    assert not processes_of(log_file)


@pytest.mark.slow
def test_under_torchrun_too(start: Start, log_file: Path) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 ended with exit code 7(.|\n)*about to fail"):
        start("torchrun_2", MAKE_NONE, {"kind": "exits"})
    assert not processes_of(log_file)


def test_a_start_that_hangs_has_a_deadline(start: Start, log_file: Path) -> None:
    def check(limit_s: float) -> None:
        with pytest.raises(WorkerError) as caught:
            start("two", MAKE_NONE, {"kind": "hangs"}, start_timeout_s=limit_s)
        assert re.search(
            r"trainer: no answer from rank 0, 1 to '\(start\)' within \d", str(caught.value)
        )
        assert "\nabout to fail\n" in str(caught.value)
        # Where it hangs, rank by rank.
        assert re.search(r"rank 1: .*call 1 '\(start\)', begun", str(caught.value))

    patiently(check)
    assert not processes_of(log_file)


@pytest.mark.parametrize("is_process", [False, True])
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("no.such.module:make", "ModuleNotFoundError: No module named 'no'"),
        (f"{OBJECTS}:no_such_factory", "AttributeError: .*no_such_factory"),
        (OBJECTS, "is not of the form 'package.module:function'"),
    ],
)
def test_a_factory_that_does_not_exist_is_named(
    start: Start, is_process: bool, factory: str, message: str
) -> None:
    def begin() -> WorkerGroup:
        if is_process:
            return start("spawn_1", factory)
        return open_here(factory)

    with pytest.raises(WorkerError, match=message):
        begin()


def broken_python(tmp_path: Path, code: str) -> dict[str, str]:
    """An interpreter that does `code` before anything of ours."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


@pytest.mark.parametrize("launcher", ["spawn", *map(by_ranks, ("torchrun", "outside", "ray"))])
def test_a_process_that_ends_before_it_speaks_is_told_with_its_output(
    start: Start, tmp_path: Path, log_file: Path, launcher: str
) -> None:
    env = broken_python(tmp_path, "import os, sys\nprint('all is lost', flush=True)\nos._exit(9)")
    with pytest.raises(WorkerError, match=r"trainer: .* ended with exit code 9(.|\n)*all is lost"):
        start("two", launcher=launcher, env=env)
    assert not processes_of(log_file)


def test_one_rank_that_never_speaks_is_named(start: Start, tmp_path: Path, log_file: Path) -> None:
    code = "import os, time\nif os.environ.get('RANK') == '1': time.sleep(600)"
    env = broken_python(tmp_path, code)

    def check(limit_s: float) -> None:
        message = rf"trainer: rank 1 did not start within {limit_s:g} s"
        with pytest.raises(WorkerError, match=message):
            start("two", env=env, start_timeout_s=limit_s)

    patiently(check)
    assert not processes_of(log_file)


def test_a_process_that_never_speaks_has_a_deadline_and_its_socket_is_private(
    start: Start, tmp_path: Path, log_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[int] = []

    def look() -> None:
        assert eventually(lambda: any(path.is_socket() for path in tmp_path.glob("*/socket")))
        seen.extend(folder.stat().st_mode & 0o777 for folder in tmp_path.glob("homeostat-*"))

    env = broken_python(tmp_path, "import time\nprint('zzz', flush=True)\ntime.sleep(600)")

    def check(limit_s: float) -> None:
        message = rf"rank 0, 1 did not start within {limit_s:g} s(.|\n)*zzz"
        with pytest.raises(WorkerError, match=message):
            start("two", env=env, start_timeout_s=limit_s)

    looking = threading.Thread(target=look)
    looking.start()
    patiently(check)
    looking.join()
    assert seen == [0o700]
    assert not list(tmp_path.glob("homeostat-*"))
    assert not processes_of(log_file)


def test_the_environment_is_inherited_and_added_to(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INHERITED", "from above")
    names = ("INHERITED", "ADDED", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_ADDR")
    added = {"ADDED": "by us", "OMP_NUM_THREADS": "3"}
    alone = start("spawn_1", env=added).call(0, "environment", *names)
    assert alone.result(timeout_s=SOON_S) == ["from above", "by us", "3", None, None, None]
    two = gather(start("two", env=added).call_all("environment", *names), timeout_s=SOON_S)
    assert two == [["from above", "by us", "3", rank, "2", LOOPBACK] for rank in ("0", "1")]


def test_a_rank_may_have_arguments_of_its_own(start: Start) -> None:
    group = start("two", kwargs={"a": 0, "b": 0}, per_rank=[{"b": 1}, {"b": 2}])
    kwargs = [about["kwargs"] for about in gather(group.call_all("about"), timeout_s=SOON_S)]
    assert kwargs == [{"a": 0, "b": 1}, {"a": 0, "b": 2}]


# Close


def marks(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.glob("closed_*")}


def test_close_asks_first_and_twice_is_once(
    shape: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A socket's path may not be long.
    own = Path(tempfile.mkdtemp(prefix="w-"))
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    monkeypatch.setenv("TMPDIR", str(own))
    group = start(shape, MAKE_CLOSING, {"folder": tmp_path})
    # Neither the socket nor what torchrun would log to is of use from now on.
    assert not list(own.iterdir())
    running = group.call_all("sleep", 0.3)
    group.close()
    group.close()
    own.rmdir()
    assert gather(running, timeout_s=0) == [0.3] * group.size
    assert marks(tmp_path) == {f"closed_{rank}": "x" for rank in range(group.size)}
    for call in (group.call_all, lambda method: group.call(0, method)):
        with pytest.raises(WorkerError, match="trainer: the group is closed, 'about' cannot"):
            call("about")


def test_in_process_close_is_the_same(tmp_path: Path) -> None:
    group = open_here(MAKE_CLOSING, folder=tmp_path)
    group.close()
    group.close()
    assert marks(tmp_path) == {"closed_0": "x"}
    with pytest.raises(WorkerError, match="trainer: the group is closed, 'about' cannot"):
        group.call(0, "about")


@pytest.mark.parametrize("is_process", [False, True])
def test_a_close_that_fails_is_warned_of(
    start: Start, caplog: pytest.LogCaptureFixture, is_process: bool
) -> None:
    kwargs = {"fails": True}
    if is_process:
        start("spawn_1", MAKE_CLOSING, kwargs).close()
    else:
        open_here(MAKE_CLOSING, **kwargs).close()
    assert "trainer: closing went wrong" in caplog.text
    assert "cannot be closed" in caplog.text


def test_close_ends_what_does_not_listen(start: Start, log_file: Path, tmp_path: Path) -> None:
    def check(limit_s: float) -> None:
        folder = tmp_path / f"{limit_s}"
        folder.mkdir()
        group = start("two", MAKE_CLOSING, {"folder": folder}, close_timeout_s=limit_s)
        stuck = group.call(1, "sleep", 600.0)
        group.close()
        assert marks(folder) == {"closed_0": "x"}
        with pytest.raises(WorkerError, match="SIGKILL"):
            stuck.result(timeout_s=0)

    patiently(check)
    assert not processes_of(log_file)
