"""Copy tensors to and from a device without waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy through pinned memory: a copy from pageable memory would wait for the device."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class SideStream:
    """Copies that run beside the computation. On a CPU they are done at once.

    Events are CUDA events, or None on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, copy: Callable[[], None], *, after: Any = None) -> Any:
        """Launch copies that follow all that was launched so far, and another stream's event.

        Returns the event that follows them.
        """
        if self._stream is None:
            copy()
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            copy()
            return self._stream.record_event()

    def uses(self, tensor: Tensor) -> None:
        """Keep the tensor's memory until this stream is done with it, once it is freed."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def wait(self, event: Any) -> None:
        """Let the computation wait for an event of this stream; the host does not wait."""
        if self._stream is not None and event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)

    def finish(self, event: Any) -> None:
        """Let the host wait for an event."""
        if event is not None:
            event.synchronize()
