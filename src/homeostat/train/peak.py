"""The most memory that this process has had."""

from __future__ import annotations

import resource

import torch

from homeostat.train.trainer import MemoryReport


def peak_memory(device: torch.device) -> MemoryReport:
    if device.type == "cuda":
        return MemoryReport(
            max_alloc=torch.cuda.max_memory_allocated(device),
            max_reserved=torch.cuda.max_memory_reserved(device),
        )
    # ru_maxrss is in KiB on Linux: the highest resident size of this process.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return MemoryReport(max_alloc=peak, max_reserved=peak)
