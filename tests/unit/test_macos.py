"""What only Linux has is not needed elsewhere: modules that deal with the system are imported, and
some are used, in a process that looks like macOS. It is no Mac: what the system itself does there
is not shown."""

from __future__ import annotations

import os
import pkgutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch

# Names of Linux that Python does not have on macOS.
_LACKING = {
    os: ("sched_getaffinity", "sched_setaffinity", "posix_fallocate", "memfd_create", "pipe2",
         "fdatasync", "eventfd", "pidfd_open", "copy_file_range", "O_DIRECT", "O_TMPFILE"),
    signal: ("SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT", "sigtimedwait", "sigwaitinfo"),
    socket: ("TCP_KEEPIDLE", "SO_PEERCRED", "AF_NETLINK"),
}  # fmt: skip
# Packages and modules that deal with processes, memory, files and signals.
_PACKAGES = ("config", "observe", "rewards", "sync", "workers")
_MODULES = (
    "cli.verbs", "clinic.processes", "data.templates", "models.memory", "rollout.native.memory",
    "run.session.signals", "train.cores", "train.inspection.device_report", "user_code",
)  # fmt: skip


def as_on_macos() -> None:
    sys.platform = "darwin"
    for module, names in _LACKING.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "homeostat"]:
        del sys.modules[name]


def import_all() -> None:
    for package in _PACKAGES:
        start = f"homeostat.{package}"
        for found in pkgutil.walk_packages(import_module(start).__path__, f"{start}."):
            import_module(found.name)
    for name in _MODULES:
        import_module(f"homeostat.{name}")


def use_what_differs(folder: Path) -> None:
    devices = import_module("homeostat.observe.devices")
    # Linux counts in KiB, macOS in bytes: here the fake counts too little by that factor.
    assert devices.host_peak() < devices.host_rss() / 100
    assert import_module("homeostat.train.cores").available_cores() >= 1
    shared = import_module("homeostat.sync.shared_memory")
    assert str(shared.ROOT) != "/dev/shm"
    shared.ROOT = folder
    transport = shared.SharedMemoryTransport("macos", 2**10)
    weights = {f"w{n}": torch.full((300,), float(n)) for n in range(5)}
    packer = transport.packer()
    receiver = transport.receiver(0, 1)
    for bucket in packer.pack(weights.items()):
        for name, tensor in receiver.unpack(bucket):
            assert torch.equal(tensor, weights[name])
    packer.close()
    assert list(folder.iterdir()) == []
    processes = import_module("homeostat.clinic.processes")
    processes._PROC = folder / "proc"
    errors = import_module("homeostat.errors")
    with pytest.raises(errors.HomeostatError, match="this system has none"):
        processes.descendants("x")
    network = import_module("homeostat.workers.network")
    assert network.interface_of("127.0.0.1") is None


def in_a_fork(work: Callable[[], None]) -> str:
    """Return what the work raised in a process of its own; empty if it ended well."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = ""
        try:
            work()
        except BaseException:
            told = traceback.format_exc()
        os.write(writing, told.encode()[-60_000:])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(child, 0)
    return told


def test_what_linux_alone_has_is_not_needed(tmp_path: Path) -> None:
    def work() -> None:
        as_on_macos()
        import_all()
        use_what_differs(tmp_path)

    assert in_a_fork(work) == ""
