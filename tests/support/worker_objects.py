"""The objects that the tests of worker groups host. Only those that need torch import it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from homeostat.errors import ConfigError, EngineError, Problem
from homeostat.workers.context import WorkerContext


class LocalEngineError(EngineError):
    """A subclass that the controller need not know."""


class Worker:
    """Does what a test asks of it."""

    def __init__(self, context: WorkerContext, **kwargs: Any) -> None:
        self.context = context
        self.kwargs = kwargs
        self.seen: list[Any] = []

    def about(self) -> dict[str, Any]:
        return {
            **asdict(replace(self.context, record=None)),
            "kwargs": self.kwargs,
            "pid": os.getpid(),
            "guardian": os.getppid(),
            "torch": "torch" in sys.modules,
        }

    def echo(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def remember(self, value: Any) -> list[Any]:
        self.seen.append(value)
        return list(self.seen)

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def sleep_but(self, rank: int, seconds: float) -> None:
        if self.context.rank != rank:
            time.sleep(seconds)

    def wait_for_file_but(self, rank: int, file: str) -> None:
        while self.context.rank != rank and not os.path.exists(file):
            time.sleep(0.01)

    def say(self, text: str) -> None:
        sys.stdout.write(text + "\n")

    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def exit(self, code: int) -> None:
        os._exit(code)

    def leave(self, code: int) -> None:
        sys.exit(code)

    def crash(self, signal_number: int) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), signal_number)

    def abort_for_want_of_memory(self) -> None:
        """C++'s own allocation, which throws through C: nobody can catch it."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        allocate = ctypes.CDLL("libstdc++.so.6")._Znwm
        allocate.argtypes = [ctypes.c_size_t]
        allocate(2**60)

    def start_a_program(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def share_memory(self) -> str:
        """Never unlinked here: that is left to Python's resource tracker."""
        self.shared = SharedMemory(create=True, size=64)
        return self.shared.name

    def raise_value_error(self) -> None:
        raise ValueError("seven is not even")

    def raise_engine_error(self, text: str) -> None:
        raise EngineError(text)

    def raise_local_engine_error(self) -> None:
        raise LocalEngineError("from afar")

    def raise_config_error(self) -> None:
        raise ConfigError(
            [Problem("a.b", "is wrong", "Set it."), Problem("c", "too")], file="x.yaml"
        )

    def not_to_be_packed(self) -> Any:
        return threading.Lock()

    def gloo_sum(self, value: float) -> float:
        """All ranks together; torch.distributed finds its rendezvous in the environment."""
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        total = torch.tensor([value])
        dist.all_reduce(total)
        return float(total.item())

    def gloo_sum_but(self, rank: int) -> float | None:
        return None if self.context.rank == rank else self.gloo_sum(0.0)


class ClosingWorker(Worker):
    """Writes down that it was closed, after `delay` seconds, or fails to."""

    def close(self) -> None:
        time.sleep(self.kwargs.get("delay", 0.0))
        if self.kwargs.get("fails"):
            raise ValueError("cannot be closed")
        folder = Path(self.kwargs["folder"])
        with open(folder / f"closed_{self.context.rank}", "a") as file:
            file.write("x")


def make(context: WorkerContext, **kwargs: Any) -> Worker:
    return Worker(context, **kwargs)


def make_closing(context: WorkerContext, **kwargs: Any) -> ClosingWorker:
    return ClosingWorker(context, **kwargs)


def make_none(context: WorkerContext, *, kind: str) -> None:
    """Factories that fail. Those of more than one rank fail on the last."""
    sys.stderr.write("about to fail\n")
    if context.rank != context.size - 1:
        time.sleep(600)
    if kind == "raises":
        raise KeyError("no such thing")
    if kind == "raises ours":
        raise EngineError("the factory says no")
    if kind == "exits":
        os._exit(7)
    if kind == "kills itself":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
