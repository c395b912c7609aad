"""Report on the device of one process: its peak memory so far, and its speed now."""

from __future__ import annotations

import time
from statistics import median_low

import torch

from homeostat.observe.devices import host_peak
from homeostat.train.trainer import DeviceReport


def peak_memory(device: torch.device) -> DeviceReport:
    if device.type == "cuda":
        return DeviceReport(
            max_alloc=torch.cuda.max_memory_allocated(device),
            max_reserved=torch.cuda.max_memory_reserved(device),
        )
    peak = host_peak()
    return DeviceReport(max_alloc=peak, max_reserved=peak)


def probe_seconds(device: torch.device) -> float:
    """Time a few products of matrices, without any collective: the current speed of this rank.

    Between collectives ranks wait for each other, so that a step takes all of them equally long.
    """
    on_gpu = device.type == "cuda"
    size = 2048 if on_gpu else 320
    matrix = torch.ones(size, size, device=device)
    _finish(device)
    begun = time.perf_counter()
    for _ in range(4):
        torch.mm(matrix, matrix)
    _finish(device)
    return time.perf_counter() - begun


def speed_metrics(seconds: tuple[float, ...]) -> dict[str, float]:
    """Compare the slowest rank with the median one; empty for a single process."""
    if len(seconds) < 2:
        return {}
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    # The lower one of two: with two ranks, the other one.
    return {
        "throughput/slowest_rank": slowest,
        "throughput/slowest_rank_share": median_low(seconds) / seconds[slowest],
    }


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
