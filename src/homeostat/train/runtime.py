"""Where and in which precision a run takes place, decided once and said aloud."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from homeostat.config.combinations import find_device_conflicts
from homeostat.config.run import RunConfig
from homeostat.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Runtime:
    """The resolved device, compute dtype and thread count."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    pin_memory: bool
    # How the trainer is spread over processes, of which each has such a device and threads.
    ranks_line: str = ""

    def describe(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}"
        ranks = f"; {self.ranks_line}" if self.ranks_line else ""
        return f"{name}, {str(self.dtype).removeprefix('torch.')}{threads}{ranks}"


def resolve_device(config: RunConfig) -> torch.device:
    choice = config.trainer.device
    available = torch.cuda.is_available()
    if choice == "cuda" and not available:
        why = "no CUDA device can be used here."
        raise ConfigError([Problem("trainer.device", why, "See `homeostat env`, or set cpu.")])
    name = "cuda" if choice == "cuda" or (choice == "auto" and available) else "cpu"
    if problems := find_device_conflicts(config, device=name):
        raise ConfigError(problems)
    if name == "cuda" and config.num_ranks > torch.cuda.device_count():
        why = f"each rank has a GPU of its own, and there are {torch.cuda.device_count()}."
        raise ConfigError([Problem("cluster.processes", why, "Lower it.")])
    if name == "cuda" and config.model.numerics == "invariant" and find_spec("triton") is None:
        why = (
            "on a GPU invariant arithmetic is done by Triton kernels, and Triton is not installed."
        )
        way = "Install triton, or set model.numerics=fast or trainer.device=cpu."
        raise ConfigError([Problem("model.numerics", why, way)])
    return torch.device(name, 0) if name == "cuda" else torch.device("cpu")


def resolve_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    choice = config.trainer.precision
    if choice == "auto":
        choice = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return torch.bfloat16 if choice == "bf16" else torch.float32


def resolve_runtime(config: RunConfig, *, threads: int | None = None) -> Runtime:
    """`threads` is what a resumed run used before: sums depend on it, so it is kept."""
    device = resolve_device(config)
    chosen = config.trainer.threads or threads or measure_threads(config.num_ranks)
    torch.set_num_threads(chosen)
    # A model that is certain of its answer has gradients below 1e-38, and a CPU takes twenty times
    # as long over such numbers as over zeros.
    torch.set_flush_denormal(True)
    pin = config.trainer.pin_memory
    return Runtime(
        device=device,
        dtype=resolve_dtype(config, device),
        threads=chosen,
        pin_memory=device.type == "cuda" if pin is None else pin,
        ranks_line=config.ranks_line,
    )


def measure_threads(num_ranks: int = 1) -> int:
    """One thread or a rank's share of the cores, whichever multiplies small matrices faster.

    On some machines a second OpenMP thread makes matmuls many times slower. OMP_NUM_THREADS,
    where set, is what torch starts with and is taken as the upper choice.
    """
    most = min(torch.get_num_threads(), len(os.sched_getaffinity(0)) // num_ranks)
    if most <= 1:
        return 1
    return min((1, most), key=_matmul_seconds)


def _matmul_seconds(threads: int) -> float:
    torch.set_num_threads(threads)
    left, right = torch.ones(128, 512), torch.ones(512, 512)
    for _ in range(3):
        left @ right
    laps = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(8):
            left @ right
        laps.append(time.perf_counter() - start)
    return sorted(laps)[len(laps) // 2]
