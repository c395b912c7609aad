"""Measure memory and load of the GPUs (NVML) and of this process, in bytes, shares and Celsius.

Device i is device i of CUDA_VISIBLE_DEVICES, as torch counts them. Without the package or a driver
there are no values; this is logged once at debug level.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homeostat.observe import format as fmt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Facts about one device from NVML, without torch."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None

    def describe(self) -> str:
        text = f"{self.name}, {fmt.byte_size(self.memory_bytes)}"
        if self.capability is not None:
            text += f", compute capability {self.capability[0]}.{self.capability[1]}"
        return text


class GpuSampler:
    """Query NVML for the values of each visible device. Close it when the run ends."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml
        except ImportError:
            log.debug("no GPU metrics: nvidia-ml-py is missing (pip install 'homeostat[gpu]')")
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            log.debug("no GPU metrics: NVML does not start (%s)", error)
            return
        self._nvml = pynvml
        self._handles = self._find_handles(os.environ.get("CUDA_VISIBLE_DEVICES"))

    def sample(self) -> dict[str, float]:
        """Return `gpu/<i>/...` metrics; a value that a device does not support is left out."""
        metrics: dict[str, float] = {}
        for index, handle in enumerate(self._handles):
            for name, read in self._readings().items():
                value = self._ask(lambda read=read, handle=handle: read(handle))
                if value is not None:
                    metrics[f"gpu/{index}/{name}"] = float(value)
        return metrics

    def gpus(self) -> list[GpuFacts]:
        return [self._facts(handle) for handle in self._handles]

    def driver_version(self) -> str | None:
        return self._ask(lambda: _text(self._nvml.nvmlSystemGetDriverVersion()))

    def driver_cuda(self) -> tuple[int, int] | None:
        """Return the newest CUDA version that the driver supports."""
        version = self._ask(lambda: self._nvml.nvmlSystemGetCudaDriverVersion_v2())
        return None if version is None else (version // 1000, version % 1000 // 10)

    def close(self) -> None:
        if self._nvml is not None:
            self._ask(self._nvml.nvmlShutdown)
            self._nvml, self._handles = None, []

    def _readings(self) -> dict[str, Callable[[Any], float]]:
        nvml = self._nvml
        return {
            "memory_used": lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "utilization": lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "temperature": lambda handle: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
        }

    def _facts(self, handle: Any) -> GpuFacts:
        nvml = self._nvml
        memory = self._ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
        capability = self._ask(lambda: tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)))
        name = self._ask(lambda: _text(nvml.nvmlDeviceGetName(handle)))
        return GpuFacts(name=name or "unknown GPU", memory_bytes=memory or 0, capability=capability)

    def _find_handles(self, visible: str | None) -> list[Any]:
        nvml = self._nvml
        if visible is None:
            count = self._ask(nvml.nvmlDeviceGetCount) or 0
            asked = [str(index) for index in range(count)]
        else:
            asked = [part.strip() for part in visible.split(",") if part.strip()]
        handles: list[Any] = []
        for part in asked:
            # As in CUDA, the first name that is not a device hides all that follow it.
            handle = self._ask(lambda part=part: _handle(nvml, part))
            if handle is None:
                break
            handles.append(handle)
        return handles

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Return the answer of NVML, or None if the device or driver gives none."""
        if self._nvml is None:
            return None
        try:
            return question()
        except self._nvml.NVMLError as error:
            log.debug("NVML: %s", error)
            return None


def _handle(nvml: Any, name: str) -> Any:
    if name.lstrip("-").isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name)) if int(name) >= 0 else None
    return nvml.nvmlDeviceGetHandleByUUID(name)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value


def host_rss() -> float:
    """Return the host memory that this process holds now; its peak if /proc is missing."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return float(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return float(host_peak())


def host_peak() -> int:
    """Return the most host memory that this process has held so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts KiB, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def host_memory() -> tuple[int, int]:
    """Return the memory of the machine in bytes, and how much of it the container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    value = limit.read_text().strip() if limit.is_file() else ""
    return total, min(total, int(value)) if value.isdigit() else total
