"""The device's memory: how much is free for a cache, and how arrays are copied into it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from homeostat.observe.devices import host_memory


def free_bytes(device: torch.device) -> int:
    """Return the bytes still to be had on the device; what torch keeps unused counts as free."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    _, allowed = host_memory()
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return allowed
    lines = meminfo.read_text(encoding="ascii").splitlines()
    (available,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return min(int(available) * 1024, allowed)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
