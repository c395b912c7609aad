"""Describe the machine: versions, hardware, GPUs, and whether they can work together.

Nothing here imports torch: facts about torch are passed in (`TorchFacts`), so that judging them is
a pure function and `env` works even if torch is broken or missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from homeostat import __version__
from homeostat.observe import format as fmt
from homeostat.observe.devices import GpuFacts, GpuSampler, host_memory
from homeostat.observe.processor import this_processor

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "pydantic", "pyyaml",
    "jinja2", "typer", "rich", "triton", "peft", "gguf", "reasoning-gym", "math-verify",
    "tensorboard", "wandb", "trackio", "nvidia-ml-py", "trl", "datasets", "accelerate",
)  # fmt: skip

# Extra -> module that it installs, and its purpose. A test compares this with pyproject.toml.
EXTRAS: dict[str, tuple[str, str]] = {
    "train": ("torch", "training, sampling, checks of models and rows"),
    "gguf": ("gguf", "GGUF checkpoints"),
    "tasks": ("reasoning_gym", "reasoning-gym prompts, math-verify rewards"),
    "tensorboard": ("tensorboard", "the TensorBoard sink"),
    "wandb": ("wandb", "the W&B sink"),
    "trackio": ("trackio", "the trackio sink"),
    "gpu": ("pynvml", "GPU memory and utilisation"),
    "ray": ("ray", "cluster.type: ray"),
    "dashboard": ("starlette", "homeostat dashboard"),
    "eval": ("lm_eval", "homeostat eval"),
    "vllm": ("vllm", "the vLLM engine"),
}


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """Facts about torch. `error` holds the reason if it cannot be imported."""

    version: str | None = None
    error: str | None = None
    built_for_cuda: str | None = None
    cuda_available: bool = False
    arch_list: tuple[str, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """Versions that must be compatible: driver, torch's CUDA version, GPU architectures."""

    torch: TorchFacts
    gpus: tuple[GpuFacts, ...] = ()
    driver_version: str | None = None
    driver_cuda: tuple[int, int] | None = None
    has_nvidia_device: bool = False
    visible_devices: str | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything that `homeostat env` shows."""

    versions: dict[str, str]
    machine: dict[str, str]
    cuda: CudaFacts
    verdicts: list[str]
    missing_extras: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def gather_environment(torch_facts: TorchFacts, *, folder: Path | None = None) -> Environment:
    """Inspect this machine. `folder` is where disk space is measured."""
    sampler = GpuSampler()
    cuda = CudaFacts(
        torch=torch_facts,
        gpus=tuple(sampler.gpus()),
        driver_version=sampler.driver_version() or _driver_from_proc(),
        driver_cuda=sampler.driver_cuda(),
        has_nvidia_device=Path("/dev/nvidia0").exists(),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    sampler.close()
    return Environment(
        versions=_versions() | ({"torch": torch_facts.version} if torch_facts.version else {}),
        machine=_machine(folder or Path.cwd()),
        cuda=cuda,
        verdicts=judge_cuda(cuda),
        missing_extras=missing_extras(),
    )


def summarise_environment(folder: Path) -> dict[str, str]:
    """Return a few lines for the start event of a run; the reports show them."""
    versions, machine = _versions(), _machine(folder)
    sampler = GpuSampler()
    names = ("homeostat", "python", "torch", "transformers")
    lines = {name: versions[name] for name in names if name in versions}
    lines |= {name: machine[name] for name in ("os", "cpu", "memory", "disk")}
    lines |= {f"GPU {index}": gpu.describe() for index, gpu in enumerate(sampler.gpus())}
    driver = sampler.driver_version()
    sampler.close()
    return lines | ({"driver": driver} if driver else {})


def judge_cuda(facts: CudaFacts) -> list[str]:
    """Return sentences about what cannot work, with the remedy; none if everything fits."""
    torch = facts.torch
    if torch.version is None and (torch.error or "").startswith("No module named"):
        return [
            "torch is not installed: doctor, explain, rules, import and the keys of a recipe work "
            "without it. To train: pip install 'homeostat[train]'."
        ]
    if torch.version is None:
        return [f"torch cannot be used: {torch.error or 'it is not installed'}."]
    has_gpu = bool(facts.gpus) or facts.has_nvidia_device or bool(torch.capabilities)
    if not has_gpu:
        return []
    if facts.visible_devices is not None and facts.visible_devices.strip() in ("", "-1"):
        return ["CUDA_VISIBLE_DEVICES hides all GPUs: unset it to train on one."]
    if torch.built_for_cuda is None:
        return [
            f"This machine has an NVIDIA GPU, but torch {torch.version} is built without CUDA: "
            "training would run on the CPU. Install a CUDA build of torch (pytorch.org)."
        ]
    driver = _judge_driver(facts)
    if driver:
        return [driver]
    if not torch.cuda_available:
        return [
            "A GPU and a CUDA build of torch are here, but torch cannot reach the GPU. Check that "
            "the driver is loaded (nvidia-smi) and that this user or container may use it."
        ]
    return _judge_kernels(facts)


def _judge_driver(facts: CudaFacts) -> str | None:
    """Check the driver: it runs CUDA of its own major version and below."""
    wanted = _version(facts.torch.built_for_cuda or "")
    if facts.driver_cuda is None or wanted is None or facts.driver_cuda[0] >= wanted[0]:
        return None
    have = ".".join(map(str, facts.driver_cuda))
    return (
        f"The driver {facts.driver_version or ''} runs CUDA up to {have}, torch "
        f"{facts.torch.version} is built for CUDA {facts.torch.built_for_cuda}: it is too old. "
        f"Update the driver, or install a torch built for CUDA {facts.driver_cuda[0]}."
    )


def _judge_kernels(facts: CudaFacts) -> list[str]:
    verdicts: list[str] = []
    capabilities = facts.torch.capabilities or tuple(
        gpu.capability for gpu in facts.gpus if gpu.capability is not None
    )
    for index, capability in enumerate(capabilities):
        if facts.torch.arch_list and not has_kernels(capability, facts.torch.arch_list):
            name = facts.gpus[index].name if index < len(facts.gpus) else f"GPU {index}"
            verdicts.append(
                f"{name} has compute capability {capability[0]}.{capability[1]}; torch "
                f"{facts.torch.version} has kernels for {', '.join(facts.torch.arch_list)} only: "
                "it would fail with 'no kernel image is available'. Install a torch built for it."
            )
    return verdicts


def has_kernels(capability: tuple[int, int], arch_list: tuple[str, ...]) -> bool:
    """Return whether a GPU can run kernels built for an architecture.

    sm_XY runs on X.Y and later minors of X; compute_XY is compiled for anything newer. A suffixed
    architecture (sm_90a) runs on exactly its own capability.
    """
    for arch in arch_list:
        kind, _, number = arch.partition("_")
        digits = number.rstrip("abcdefghijklmnopqrstuvwxyz")
        if not digits.isdigit():
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if digits != number and built == capability:
            return True
        if digits == number and kind == "compute" and built <= capability:
            return True
        same_major = built[0] == capability[0] and built[1] <= capability[1]
        if digits == number and kind == "sm" and same_major:
            return True
    return False


def missing_extras() -> dict[str, str]:
    """Return the extras that are not installed: purpose and install command of each."""
    return {
        extra: f"{purpose}: pip install 'homeostat[{extra}]'"
        for extra, (module, purpose) in EXTRAS.items()
        if importlib.util.find_spec(module) is None
    }


def _versions() -> dict[str, str]:
    versions = {"homeostat": __version__, "python": platform.python_version()}
    found = {package: _installed(package) for package in PACKAGES}
    return versions | {package: version for package, version in found.items() if version}


@cache
def _installed(package: str) -> str | None:
    """Return the installed version. Cached: it takes milliseconds to parse a package's metadata."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine(folder: Path) -> dict[str, str]:
    disk = shutil.disk_usage(folder)
    return {
        "os": f"{_os_name()}, {platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{sys.executable} ({platform.python_implementation()})",
        "cpu": f"{this_processor().describe()}, {num_usable_cpus()} usable cores",
        "memory": _memory(),
        "disk": f"{fmt.byte_size(disk.free)} free of {fmt.byte_size(disk.total)} at {folder}",
    }


def num_usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def _memory() -> str:
    total, allowed = host_memory()
    text = fmt.byte_size(total)
    if allowed < total:
        text += f", {fmt.byte_size(allowed)} allowed by the container"
    return text


def _driver_from_proc() -> str | None:
    """Return the version of the loaded driver, for machines without NVML."""
    path = Path("/sys/module/nvidia/version")
    return path.read_text().strip() if path.is_file() else None


def _version(text: str) -> tuple[int, int] | None:
    parts = text.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1])
