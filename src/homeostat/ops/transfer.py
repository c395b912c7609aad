"""Small tensors on their way to a device, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy from pageable memory would wait until the device has done all that was asked of it."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
