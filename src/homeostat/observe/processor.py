"""Identify the processor: its architecture, its name and its instruction set extensions.

x86-64 names itself in /proc/cpuinfo ("model name", "flags"); aarch64 gives the numbers of an
implementer and a part ("CPU implementer", "CPU part", "Features").
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# Flags of AMX and AVX512-BF16 on x86-64, and of FEAT_BF16 on aarch64.
BF16_FEATURES = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
_MAKERS = {0x41: "Arm", 0x46: "Fujitsu", 0x48: "HiSilicon", 0x4E: "NVIDIA", 0x51: "Qualcomm",
           0x61: "Apple", 0x6D: "Microsoft", 0xC0: "Ampere"}  # fmt: skip
_PARTS = {
    (0x41, 0xD03): "Cortex-A53", (0x41, 0xD08): "Cortex-A72", (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1", (0x41, 0xD40): "Neoverse-V1", (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2", (0x41, 0xD84): "Neoverse-V3", (0x41, 0xD8E): "Neoverse-N3",
    (0x46, 0x001): "A64FX", (0xC0, 0xAC3): "Ampere-1", (0xC0, 0xAC4): "Ampere-1a",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor. `features` are its instruction set extensions as the kernel names them.

    It is empty if the kernel does not list them.
    """

    architecture: str
    name: str
    features: frozenset[str]

    @property
    def has_bf16(self) -> bool:
        """Return whether the processor has bf16 multiply instructions."""
        return bool(self.features & BF16_FEATURES)

    def describe(self) -> str:
        return f"{self.architecture}, {self.name}"


def this_processor(cpuinfo: Path = _CPUINFO, *, architecture: str | None = None) -> Processor:
    """Return the processor that /proc/cpuinfo describes; elsewhere what Python knows of it."""
    architecture = architecture or platform.machine()
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return Processor(architecture, platform.processor() or architecture, frozenset())
    fields = [line.partition(":") for line in text.splitlines()]
    first: dict[str, str] = {}
    for key, _, value in fields:
        first.setdefault(key.strip().lower(), value.strip())
    name = first.get("model name") or _arm_name(first) or architecture
    features = first.get("flags") or first.get("features") or ""
    return Processor(architecture, name, frozenset(features.split()))


def _arm_name(fields: dict[str, str]) -> str:
    """Return "Arm Neoverse-N1"; the numbers if their names are not known here."""
    try:
        maker, part = (int(fields[key], 0) for key in ("cpu implementer", "cpu part"))
    except (KeyError, ValueError):
        return ""
    return f"{_MAKERS.get(maker, f'maker {maker:#x}')} {_PARTS.get((maker, part), f'{part:#x}')}"
