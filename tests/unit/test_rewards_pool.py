"""Rewards in real processes that raise, hang, die, print and leave children behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.forks import real_rewards
from tests.support.patience import LIMITS_S, eventually, patiently

from homeostat.config.rewards import RewardsConfig
from homeostat.errors import MissingDependencyError, RewardError
from homeostat.rewards import log_limit, process, reaping
from homeostat.rewards.groups import ScoredGroup, UnscoredGroup
from homeostat.rewards.pool import RewardPool
from homeostat.rewards.problems import ProblemKind, RewardProblem
from homeostat.rewards.workers import RewardWorkers
from homeostat.types import Prompt

# One file of rewards: each does what the row's column `act` says, where that is its business.
REWARDS = r"""
import ctypes, json, math, os, re, signal, subprocess, sys, threading, time
from pathlib import Path

def spin():
    while True:
        pass

def grandchild():
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    Path(os.environ["PID_FILE"]).write_text(str(subprocess.Popen(argv).pid))

def daemon():
    # Forked twice, in a session of its own: the child of nobody.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            # Renamed: whoever waits for the file must not find it empty.
            unfinished = Path(os.environ["PID_FILE"] + ".unfinished")
            unfinished.write_text(str(os.getpid()))
            unfinished.rename(os.environ["PID_FILE"])
            time.sleep(600)
        os._exit(0)
    while not Path(os.environ["PID_FILE"]).exists():
        time.sleep(0.01)

def forks():
    if os.fork() == 0:
        raise RuntimeError("the child comes back up the stack")

ACTS = {
    "raise": lambda: 1 / 0,
    "sleep": lambda: time.sleep(600),
    "spin": spin,
    "backtrack": lambda: re.fullmatch("(a+)+b", "a" * 60),
    "exit": lambda: os._exit(7),
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill_group": lambda: os.killpg(0, signal.SIGKILL),
    "sys_exit": lambda: sys.exit(5),
    "memory": lambda: bytearray(10**15),
    "fork": forks,
    "grandchild_then_exit": lambda: (grandchild(), os._exit(1)),
    "grandchild_then_hang": lambda: (grandchild(), time.sleep(600)),
    "daemon": daemon,
    "daemon_then_hang": lambda: (daemon(), time.sleep(600)),
    "daemon_then_kill_group": lambda: (daemon(), os.killpg(0, signal.SIGKILL)),
    "lie": lambda: setattr(json, "dumps", lambda message: '{"values": [1.0], "metrics": 7}'),
    "interrupt": lambda: [os.kill(os.getpid(), s) for s in (signal.SIGINT, signal.SIGTERM)],
    "close_all": lambda: os.closerange(3, 100),
}
RESULTS = {
    "nan": [math.nan], "inf": [math.inf], "none": [None], "long": [1.0] * 10**6, "text": ["1"]
}

def acting(completions, act, **rest):
    act = act[0]
    if "BEGUN_FILE" in os.environ:
        Path(os.environ["BEGUN_FILE"]).touch()
    if act in ACTS:
        ACTS[act]()
    if act in RESULTS:
        return (RESULTS[act] + [1.0] * len(completions))[: max(len(completions), len(RESULTS[act]))]
    return [1.0] * len(completions)

def length(completions):
    return [len(text) for text in completions]

def prints(completions):
    for text in completions:
        print("out" * 10_000)
        print("\x00\x01raw", file=sys.stderr)
        os.write(1, b"below python\n" * 1000)
    sys.stdin.read()
    return [0.0] * len(completions)

def sees(completions, prompts, thing, trainer_state):
    kind = type(thing[0]).__name__
    return [1000 * trainer_state.global_step + 10 * len(kind) + len(t) for t in completions]

def modules(completions, log_extra):
    heavy = [name for name in ("torch", "numpy", "pydantic", "transformers") if name in sys.modules]
    log_extra("heavy", [json.dumps(heavy)] * len(completions))
    log_extra("cwd", [os.getcwd()] * len(completions))
    return [0.0] * len(completions)

def pids(completions):
    time.sleep(0.02)
    return [os.getpid()] * len(completions)
"""


@pytest.fixture
def started() -> Iterator[None]:
    """Workers are not forked: tests of how they start, and of what they leave behind."""
    with real_rewards():
        yield


@pytest.fixture(scope="module")
def rewards_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rewards") / "acts.py"
    file.write_text(REWARDS)
    return file


class Bench:
    """Builds pools over the file of rewards, and keeps the problems."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.problems: list[RewardProblem] = []

    def config(self, *names: str, **settings: Any) -> RewardsConfig:
        raw = [{"type": "function", "path": f"{self.file}:{name}"} for name in names]
        return RewardsConfig.model_validate({"functions": tuple(raw), **settings})

    def pool(self, *names: str, log_file: Path | None = None, **settings: Any) -> RewardPool:
        config = self.config(*names, **settings)
        return RewardPool(config, on_problem=self.problems.append, log_file=log_file)


@pytest.fixture
def bench(rewards_file: Path) -> Bench:
    return Bench(rewards_file)


def group(number: int, texts: list[str] | None = None, **columns: Any) -> UnscoredGroup:
    texts = ["a", "bb", "ccc"] if texts is None else texts
    prompt = Prompt(number, np.array([1, 2]), f"prompt {number}", columns)
    return UnscoredGroup(prompt, texts, [[5] * len(text) for text in texts])


def score(pool: RewardPool, *groups: UnscoredGroup) -> list[ScoredGroup]:
    return pool.score(groups, step=2, total_steps=9)


def is_alive(pid: int) -> bool:
    """A zombie that nobody waits for is dead enough."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("act", "kind", "hint"),
    [
        ("raise", "exception", "ZeroDivisionError"),
        ("sys_exit", "exception", "SystemExit"),
        ("memory", "exception", "MemoryError"),
        ("exit", "worker_died", "exit code 7"),
        ("segfault", "worker_died", "SIGSEGV"),
        ("kill", "worker_died", "SIGKILL"),
        ("kill_group", "worker_died", "killed from outside"),
        ("close_all", "worker_died", "worker"),
    ],
)
def test_a_failure_costs_its_own_call_and_no_more(
    bench: Bench, act: str, kind: str, hint: str
) -> None:
    with bench.pool("acting", "length", timeout_s=20.0) as pool:
        before, failed, after = score(pool, group(0, act=""), group(1, act=act), group(2, act=""))
        again = score(pool, group(3, act=""))[0]
    assert before.values == after.values == again.values
    assert before.values == {"acting": [1, 1, 1], "length": [1, 2, 3]}
    assert failed.values == {"acting": [None] * 3, "length": [1, 2, 3]}
    (problem,) = bench.problems
    assert (problem.reward, problem.kind, problem.prompt_id) == ("acting", kind, 1)
    assert (problem.prompt, problem.num_samples) == ("prompt 1", 3)
    assert hint in problem.message
    assert failed.failed == {"acting": frozenset({0, 1, 2}), "length": frozenset()}
    assert before.failed == {"acting": frozenset(), "length": frozenset()}


@pytest.mark.usefixtures("started")
def test_hangs_end_at_the_limit_and_show_where(bench: Bench) -> None:
    acts = ["sleep", "", "spin", "backtrack", ""]

    def check(limit_s: float) -> None:
        bench.problems.clear()
        with bench.pool("acting", "length", timeout_s=limit_s) as pool:
            scored = score(pool, *(group(n, act=act) for n, act in enumerate(acts)))
        assert [one.values["acting"][0] for one in scored] == [None, 1.0, None, None, 1.0]
        assert all(one.values["length"] == [1, 2, 3] for one in scored)
        assert [t.kind for t in bench.problems] == [ProblemKind.TIMEOUT] * 3
        assert all("rewards.timeout_s" in t.message for t in bench.problems)
        assert all('acts.py", line' in t.traceback_tail for t in bench.problems)
        assert "fullmatch" in bench.problems[2].traceback_tail
        # An answer in between ends a streak.
        assert [t.streak for t in bench.problems] == [1, 1, 2]
        assert "2 calls in a row" in str(bench.problems[2])

    patiently(check)


def test_the_limit_is_for_one_call_not_for_the_group(bench: Bench, tmp_path: Path) -> None:
    def check(limit_s: float) -> None:
        naps = f"time.sleep({0.4 * limit_s}); return [1.0]"
        bench.file = tmp_path / "slow.py"
        bench.file.write_text(
            "import time\n" + "".join(f"def f{n}(completions): {naps}\n" for n in range(4))
        )
        bench.problems.clear()
        with bench.pool("f0", "f1", "f2", "f3", timeout_s=limit_s) as pool:
            scored = score(pool, group(0, ["x"]))
        assert [one.values for one in scored] == [{f"f{n}": [1.0] for n in range(4)}]
        assert not bench.problems

    patiently(check)


@pytest.mark.parametrize(
    ("act", "kind", "values", "completion"),
    [
        ("nan", "not_finite", [None, 1, 1], "a"),
        ("inf", "not_finite", [None, 1, 1], "a"),
        ("none", "none", [None, 1, 1], "a"),
        ("text", "wrong_type", [None, 1, 1], "a"),
        ("long", "wrong_length", [None] * 3, None),
    ],
)
def test_values_that_are_none_are_counted_by_sample(
    bench: Bench, act: str, kind: str, values: list[float | None], completion: str | None
) -> None:
    with bench.pool("acting") as pool:
        (scored,) = score(pool, group(4, act=act))
    assert scored.values == {"acting": values}
    (problem,) = bench.problems
    assert (problem.kind, problem.completion) == (ProblemKind(kind), completion)
    assert problem.kind.is_error == (kind != "none")
    without = {sample for sample, value in enumerate(values) if value is None}
    assert scored.failed == {"acting": frozenset() if kind == "none" else without}


@pytest.mark.usefixtures("started")
def test_what_functions_print_goes_to_the_log(
    bench: Bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log_file = tmp_path / "rewards.log"
    with bench.pool("prints", "length", log_file=log_file) as pool:
        scored = score(pool, group(0), group(1))
    assert [one.values["prints"] for one in scored] == [[0.0] * 3] * 2
    text = log_file.read_text()
    assert text.count("out") == 60_000
    assert text.count("raw") == 6
    assert text.count("below python") == 6000
    assert capfd.readouterr() == ("", "")


def test_strange_texts_and_columns_arrive_as_they_are(bench: Bench) -> None:
    texts = ["\ud800 lone", "\0", "\U0001f600" * 3, "", "x" * 10**6]
    thing = np.datetime64("2026-01-01")
    with bench.pool("sees", "length") as pool:
        (scored,) = score(pool, group(0, texts, thing=thing))
    assert scored.values["length"] == [len(text) for text in texts]
    assert scored.values["sees"] == [2000 + 10 * len("datetime64") + len(text) for text in texts]


def test_a_problem_is_short_and_holds_no_secret(bench: Bench, tmp_path: Path) -> None:
    bench.file = tmp_path / "judge.py"
    bench.file.write_text(
        "def judge(completions):\n"
        "    raise ConnectionError('api_key=sk-abcdefghijklmnop1234 refused' + 'x' * 10**6)\n"
    )
    with bench.pool("judge") as pool:
        score(pool, group(0, ["\ud800" * 10**5]))
    (problem,) = bench.problems
    assert "refused" in problem.message
    assert "abcdefgh" not in problem.message + problem.traceback_tail
    assert len(problem.message) + len(problem.traceback_tail) < 10_000
    assert problem.completion is not None
    assert len(problem.completion) < 400


def test_order_is_kept_and_work_is_shared(bench: Bench) -> None:
    groups = [group(n, ["x" * n, "y" * (n + 1)]) for n in range(40)]
    with bench.pool("length", "pids", workers=3) as pool:
        scored = score(pool, *groups)
    assert [one.values["length"] for one in scored] == [[n, n + 1] for n in range(40)]
    assert len({one.values["pids"][0] for one in scored}) == 3


def test_failures_among_many_groups_and_workers_lose_nothing_else(bench: Bench) -> None:
    ill = {3: "exit", 7: "sleep", 8: "sleep", 11: "raise", 19: "segfault", 20: "kill"}
    groups = [group(n, act=ill.get(n, "")) for n in range(24)]

    def check(limit_s: float) -> None:
        bench.problems.clear()
        with bench.pool("acting", "length", workers=3, timeout_s=limit_s) as pool:
            scored = score(pool, *groups)
            assert score(pool, group(0, act=""))[0].values["acting"] == [1, 1, 1]
        assert {n for n, one in enumerate(scored) if one.values["acting"] == [None] * 3} == set(ill)
        assert all(one.values["length"] == [1, 2, 3] for one in scored)
        assert sorted(t.prompt_id for t in bench.problems) == sorted(ill)

    patiently(check)


def test_groups_are_scored_while_the_caller_goes_on(bench: Bench) -> None:
    """And problems are reported by whoever asks for the result, in the order of asking."""
    acts = ["", "raise", "nan", ""]
    with bench.pool("acting", "length", workers=2) as pool:
        pending = [
            pool.submit(group(number, act=act), step=2, total_steps=9)
            for number, act in enumerate(acts)
        ]
        assert eventually(lambda: all(job.done.done() for one in pending for _, job in one.jobs))
        assert bench.problems == []
        found = {number: pending[number].result() for number in (3, 2, 1, 0)}
    assert [problem.prompt_id for problem in bench.problems] == [2, 1]
    assert found[0].values == found[3].values == {"acting": [1, 1, 1], "length": [1, 2, 3]}
    assert found[1].values["acting"] == [None] * 3


def test_a_pool_that_is_closed_gives_up_what_it_was_scoring(bench: Bench) -> None:
    started = time.monotonic()
    with bench.pool("acting", timeout_s=120.0) as pool:
        for number in range(3):
            pool.submit(group(number, act="sleep"), step=2, total_steps=9)
    assert time.monotonic() - started < 60
    assert bench.problems == []


def test_submitting_never_waits_for_a_thread_that_an_error_has_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RewardError("reward workers do not stay alive")

    with bench.pool("length") as pool:
        monkeypatch.setattr(RewardWorkers, "turn", fails)
        # Far more than a socket's buffer holds.
        pending = [pool.submit(group(n), step=1, total_steps=1) for n in range(3000)]
        with pytest.raises(RewardError, match="stay alive"):
            pending[-1].result()


def test_nothing_to_score(bench: Bench) -> None:
    with bench.pool("length") as pool:
        assert score(pool) == []
        assert score(pool, group(0, []))[0].values == {"length": []}


@pytest.mark.usefixtures("started")
def test_a_worker_loads_nothing_heavy_and_stays_in_the_folder(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with bench.pool("modules") as pool:
        (scored,) = score(pool, group(0, ["x"]))
    assert scored.extras == {"modules/heavy": ["[]"], "modules/cwd": [str(tmp_path)]}


@pytest.mark.usefixtures("started")
def test_signals_are_left_to_the_parent(bench: Bench) -> None:
    with bench.pool("acting") as pool:
        assert score(pool, group(0, act="interrupt"))[0].values == {"acting": [1, 1, 1]}
    assert not bench.problems


def test_a_forked_child_cannot_answer_for_the_worker(bench: Bench) -> None:
    with bench.pool("acting", "length") as pool:
        scored = score(pool, group(0, act="fork"), *(group(n, act="") for n in range(1, 6)))
    assert all(one.values == {"acting": [1] * 3, "length": [1, 2, 3]} for one in scored)
    assert not bench.problems


# The file NUM_KILLS holds how many processes are still to be killed, by themselves, over a reward.
KILLED = """
import os, signal
from pathlib import Path

def kill_some():
    file = Path(__file__).with_name("NUM_KILLS")
    num_left = int(file.read_text())
    if num_left > 0:
        file.write_text(str(num_left - 1))
        {kill}

{load}

def f(completions):
    {call}
    return [float(len(text)) for text in completions]
"""
KILLS = {
    "worker": "os.kill(os.getpid(), signal.SIGKILL)",
    "worker and guardian": "os.killpg(0, signal.SIGKILL)",
    "worker, which is stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize("moment", ["load", "call"])
@pytest.mark.parametrize("who", KILLS)
@pytest.mark.usefixtures("started")
def test_workers_that_are_killed_change_no_reward(
    bench: Bench, tmp_path: Path, who: str, moment: str
) -> None:
    """Nor do those that are killed while they are started in place of others."""
    places = {"load": "", "call": "", moment: "kill_some()"}
    bench.file = tmp_path / "killed.py"
    bench.file.write_text(KILLED.format(kill=KILLS[who], **places))
    kills = tmp_path / "NUM_KILLS"
    if "stopped" in who and moment == "load":
        pytest.skip("a worker that never loads is given minutes")

    def check(limit_s: float) -> None:
        kills.write_text("2" if moment == "load" else "0")
        bench.problems.clear()
        with bench.pool("f", timeout_s=limit_s) as pool:
            kills.write_text("2")
            if moment == "load":
                for worker in pool._lanes[0].workers._workers:
                    os.killpg(worker._process.pid, signal.SIGKILL)
            scored = score(pool, group(0), group(1))
        assert kills.read_text() == "0"
        assert [one.values for one in scored] == [{"f": [1.0, 2.0, 3.0]}] * 2
        assert not bench.problems
        assert not any(one.failed.get("f") for one in scored)

    patiently(check, limits_s=LIMITS_S if "stopped" in who else (60.0,))


def test_idle_workers_may_all_be_lost_at_once(bench: Bench) -> None:
    with bench.pool("length", workers=4) as pool:
        for worker in pool._lanes[0].workers._workers:
            os.killpg(worker._process.pid, signal.SIGKILL)
        scored = score(pool, *(group(number) for number in range(8)))
    assert [one.values for one in scored] == [{"length": [1, 2, 3]}] * 8
    assert not bench.problems


@pytest.mark.parametrize("act", ["grandchild_then_exit", "grandchild_then_hang"])
@pytest.mark.usefixtures("started")
def test_what_a_lost_worker_started_ends_with_it(
    bench: Bench, act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(pid_file))

    started: list[int] = []

    def check(limit_s: float) -> None:
        with bench.pool("acting", timeout_s=limit_s) as pool:
            assert score(pool, group(0, act=act))[0].values == {"acting": [None] * 3}
            started.append(int(pid_file.read_text()))
            # Before the pool ends.
            assert eventually(lambda: not is_alive(started[-1]))
            assert score(pool, group(1, act=""))[0].values == {"acting": [1] * 3}

    patiently(check)
    assert not any(map(is_alive, started))


@pytest.mark.parametrize("act", ["daemon", "daemon_then_hang", "daemon_then_kill_group"])
@pytest.mark.usefixtures("started")
def test_a_child_forked_twice_does_not_outlive_the_pool(
    bench: Bench, act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(pid_file))
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    daemons: list[int] = []

    def check(limit_s: float) -> None:
        pid_file.unlink(missing_ok=True)
        with bench.pool("acting", timeout_s=limit_s) as pool:
            score(pool, group(0, act=act))
            daemons.append(int(pid_file.read_text()))
            if act == "daemon":
                assert is_alive(daemons[-1])
            assert score(pool, group(1, act=""))[0].values == {"acting": [1] * 3}

    patiently(check)
    # They have lost their memory, and may still have to be scheduled once more.
    assert eventually(lambda: not any(map(is_alive, daemons)))
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_what_was_found_is_ended_however_long_the_search_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reaping, "END_SECONDS", 0.0)
    program = [sys.executable, "-c", "import time; time.sleep(600)"]
    marked = subprocess.Popen(program, env={**os.environ, reaping.MARKER: "of this test"})
    reaping.end_marked("of this test")
    assert marked.wait(60) == -signal.SIGKILL


def test_a_malformed_answer_costs_its_call_and_no_more(bench: Bench) -> None:
    with bench.pool("acting", "length") as pool:
        (lied,) = score(pool, group(0, act="lie"))
        (after,) = score(pool, group(1, act=""))
    assert lied.values == {"acting": [None] * 3, "length": [1, 2, 3]}
    assert lied.failed["acting"] == {0, 1, 2}
    assert after.values == {"acting": [1] * 3, "length": [1, 2, 3]}
    (problem,) = bench.problems
    assert problem.kind is ProblemKind.WORKER_DIED
    assert "makes no sense: 1 values for 3 samples" in problem.message


@pytest.mark.usefixtures("started")
def test_nothing_is_left_after_the_pool(bench: Bench) -> None:
    files_before = len(os.listdir("/proc/self/fd"))

    def check(limit_s: float) -> None:
        with bench.pool("pids", "acting", workers=2, timeout_s=limit_s) as pool:
            scored = score(pool, *(group(n, act="sleep" if n == 2 else "") for n in range(6)))
        pids.update(int(one.values["pids"][0] or 0) for one in scored)
        assert len(pids) >= 2

    pids: set[int] = set()
    patiently(check)
    assert not [pid for pid in pids if is_alive(pid)]
    assert len(os.listdir("/proc/self/fd")) == files_before


@pytest.mark.usefixtures("started")
def test_a_reward_that_does_not_load_is_refused_with_its_traceback(
    bench: Bench, tmp_path: Path
) -> None:
    bench.file = tmp_path / "broken.py"
    bench.file.write_text("def helper():\n    return {}['missing key']\nhelper()\n")
    with pytest.raises(RewardError, match=r"(?s)reward f: KeyError.*in helper"), bench.pool("f"):
        pass
    bench.file.write_text("def f(:\n")
    with pytest.raises(RewardError, match=r"(?s)broken\.py.*SyntaxError"), bench.pool("f"):
        pass


def test_a_file_that_breaks_during_the_run_is_a_problem_not_an_end(
    bench: Bench, tmp_path: Path
) -> None:
    bench.file = tmp_path / "changing.py"
    bench.file.write_text("import os\ndef f(completions, act):\n    os._exit(1)\n")
    with bench.pool("f") as pool:
        bench.file.write_text("def f(:")
        scored = score(pool, group(0, act=""), group(1, act=""))
    assert [one.values["f"] for one in scored] == [[None] * 3] * 2
    assert [t.kind for t in bench.problems] == [ProblemKind.WORKER_DIED, ProblemKind.EXCEPTION]
    assert "does not load any more" in bench.problems[1].message


@pytest.mark.usefixtures("started")
def test_workers_that_cannot_start_are_an_error(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.file = tmp_path / "fatal.py"
    bench.file.write_text("import os\nos._exit(9)")
    with pytest.raises(RewardError, match="exit code 9"), bench.pool("f"):
        pass
    monkeypatch.setattr(process, "LOAD_SECONDS", 1.5)
    bench.file.write_text("import time\ntime.sleep(600)")
    with pytest.raises(RewardError, match=r"(?s)do not load.*fatal\.py"), bench.pool("f"):
        pass


@pytest.mark.usefixtures("started")
def test_a_missing_package_is_told_by_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("math_verify.py").write_text("raise ModuleNotFoundError(name='math_verify')")
    config = RewardsConfig.model_validate({"functions": ({"type": "math_verify"},)})
    with pytest.raises(MissingDependencyError, match=r"homeostat\[tasks\]"):
        RewardPool(config, on_problem=print).__enter__()


PARENT = """
import os, sys, threading
import numpy as np
from homeostat.config.rewards import RewardsConfig
from homeostat.rewards.groups import UnscoredGroup
from homeostat.rewards.pool import RewardPool
from homeostat.types import Prompt

path = {"type": "function", "path": sys.argv[1] + ":acting"}
config = RewardsConfig.model_validate({"functions": (path,), "workers": 2, "timeout_s": 500.0})
with RewardPool(config, on_problem=print) as pool:
    prompt = Prompt(0, np.array([1]), "p", {"act": sys.argv[2]})
    pool.score([UnscoredGroup(prompt, ["x"], [[1]])] * 2, step=0, total_steps=1)
    sys.stdin.read()
"""


def session_members(parent: int) -> set[int]:
    """Processes whose parents lead up to `parent`."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
    found = {parent}
    while more := {pid for pid, above in parents.items() if above in found} - found:
        found |= more
    return found - {parent}


@pytest.fixture
def parent(rewards_file: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(act: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-c", PARENT, str(rewards_file), act]
        started.append(subprocess.Popen(argv, stdin=subprocess.PIPE))
        return started[0]

    yield start
    for one in started:
        one.kill()
        one.communicate()


@pytest.mark.parametrize("act", ["", "sleep", "backtrack"])
def test_workers_end_with_a_parent_that_was_killed(
    parent: Callable[[str], subprocess.Popen[bytes]],
    act: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = tmp_path / "begun"
    monkeypatch.setenv("BEGUN_FILE", str(begun))
    process = parent(act)
    assert eventually(begun.exists)
    workers = session_members(process.pid)
    assert len(workers) == 4  # a guardian and a worker, twice
    os.kill(process.pid, signal.SIGKILL)
    assert eventually(lambda: not any(is_alive(pid) for pid in workers))


def test_a_daemon_ends_with_a_parent_that_was_killed(
    parent: Callable[[str], subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(pid_file))
    process = parent("daemon_then_hang")
    assert eventually(lambda: pid_file.exists() and bool(pid_file.read_text()))
    os.kill(process.pid, signal.SIGKILL)
    assert eventually(lambda: not is_alive(int(pid_file.read_text())))


def test_the_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    file = tmp_path / "rewards.log"
    sizes = {"limit": 4000, "head": 1000, "tail": 1000}
    # As a worker does: opened once, for appending.
    with file.open("ab", buffering=0) as writer:
        for number in range(1000):
            writer.write(b"line %d\n" % number)
            log_limit.trim(file, **sizes)
        text = file.read_text()
    assert len(text) <= 4000 + 20
    assert text.startswith("line 0\nline 1\n")
    assert text.endswith("line 998\nline 999\n")
    assert text.count("left out here") == 1
    assert log_limit.was_trimmed(file, head=1000)
    assert not log_limit.trim(file, **sizes)
    lines = text.partition("left out here")[2].splitlines()[1:]
    assert all(line.startswith("line ") for line in lines)
    assert not log_limit.trim(tmp_path / "missing")


def test_a_line_written_while_the_log_is_cut_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rewards.log"
    file.write_bytes(b"old line\n" * 1000)
    read, written = os.pread, iter(range(3))

    def read_beside_a_writer(log: int, size: int, place: int) -> bytes:
        part = read(log, size, place)
        if (number := next(written, None)) is not None:
            with file.open("ab") as writer:
                writer.write(b"new line %d\n" % number)
        return part

    monkeypatch.setattr(os, "pread", read_beside_a_writer)
    assert log_limit.trim(file, limit=4000, head=900, tail=1000)
    assert file.read_text().endswith("old line\nnew line 0\nnew line 1\nnew line 2\n")


@pytest.mark.usefixtures("started")
def test_functions_cannot_fill_the_disk(
    bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench.file = tmp_path / "loud.py"
    bench.file.write_text(
        "import os, time\ndef loud(completions):\n"
        "    os.write(1, b'first words\\n')\n"
        "    for _ in range(70): os.write(1, b'x' * 2**20)\n"
        "    os.write(1, b'last words\\n')\n"
        "    time.sleep(1.0)\n    return [1.0] * len(completions)\n"
    )
    log_file = tmp_path / "rewards.log"
    with bench.pool("loud", log_file=log_file, timeout_s=60.0) as pool:
        for number in range(2):
            score(pool, group(number))
    assert log_file.stat().st_size < log_limit.MAX_BYTES
    with log_file.open("rb") as log:
        assert log.read(11) == b"first words"
        log.seek(-11, os.SEEK_END)
        assert log.read() == b"last words\n"
    told = [record for record in caplog.records if "printed more than" in record.getMessage()]
    assert len(told) == 1
