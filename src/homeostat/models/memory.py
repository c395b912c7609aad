"""Refuse weights that cannot fit, before anything is allocated.

Only the certain case is refused: weights larger than the total memory. Whether training fits is
another question.
"""

from __future__ import annotations

import resource

import torch

from homeostat.errors import ModelError
from homeostat.observe.devices import host_memory


def require_memory(
    num_params: int, *, dtype: torch.dtype, device: torch.device, what: str, on_host: int = 0
) -> None:
    """Raise ModelError where the weights alone need more; `what` begins the sentence: "x makes".

    `on_host` of the parameters are kept in host memory.
    """
    if on_host:
        require_memory(on_host, dtype=dtype, device=torch.device("cpu"), what=what)
        num_params -= on_host
    need, have = num_params * dtype.itemsize, memory_bytes(device)
    if need > have:
        raise ModelError(
            f"{what} {num_params:.3g} parameters, whose "
            f"{need / 1e9:.3g} GB of {str(dtype).removeprefix('torch.')} weights are more than "
            f"all the memory of the device ({have / 1e9:.3g} GB). Lower it."
        )


def require_bytes(need: int, *, device: torch.device, what: str) -> None:
    """Raise ModelError where weights of so many bytes need more; `what` begins the sentence."""
    have = memory_bytes(device)
    if need > have:
        raise ModelError(
            f"{what} {need / 1e9:.3g} GB of weights, which are more than all the memory of the "
            f"device ({have / 1e9:.3g} GB). Lower it."
        )


def memory_bytes(device: torch.device) -> int:
    """Return the total memory that a process could have there, whoever uses it now."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    _, total = host_memory()
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    return total if allowed == resource.RLIM_INFINITY else min(total, allowed)
