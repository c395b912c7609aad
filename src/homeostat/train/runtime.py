"""Decides once on which device and in which precision a run computes, and reports it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from homeostat.config.combinations.device import find_device_conflicts
from homeostat.config.mesh import Mesh
from homeostat.config.parts import TrainerSetup
from homeostat.config.ray_cluster import RayCluster
from homeostat.config.run import RunConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.errors import ConfigError, Problem
from homeostat.train.cores import Cores, Way, available_cores, choose_cores


@dataclass(frozen=True, slots=True)
class Runtime:
    """The resolved device, compute dtype, threads and lanes."""

    device: torch.device
    dtype: torch.dtype
    threads: int
    pin_memory: bool
    # Parts of a micro-batch computed at one time, each by so many threads (train/lanes.py).
    lanes: int = 1
    # How the cores are used, and the reason.
    cores_line: str = ""
    # How the trainer is spread over processes, of which each has such a device and threads.
    ranks_line: str = ""

    def describe(self) -> str:
        name = "CPU" if self.device.type == "cpu" else "GPUs of the cluster"
        if self.device.type == "cuda" and torch.cuda.is_available():
            name = torch.cuda.get_device_name(self.device)
        dtype = str(self.dtype).removeprefix("torch.")
        return "; ".join(filter(None, (f"{name}, {dtype}", self.cores_line, self.ranks_line)))

    @property
    def way(self) -> Way:
        return Way(self.lanes, self.threads)


def resolve_device(config: RunConfig) -> torch.device:
    """Return the device of a run, which must be able to do what the whole recipe asks for."""
    setup = config.for_trainer
    if problems := find_device_conflicts(config, device=_device_type(setup)):
        raise ConfigError(problems)
    return device_of(setup)


def _device_type(config: TrainerSetup) -> str:
    trainer, available = config.trainer, torch.cuda.is_available()
    # The controller's machine need not have the GPUs that Ray gives to the ranks.
    if trainer.device == "cuda" and not available and not isinstance(config.cluster, RayCluster):
        why = "no CUDA device can be used here."
        raise ConfigError([Problem("trainer.device", why, "See `homeostat env`, or set cpu.")])
    is_gpu = trainer.device == "cuda" or (trainer.device == "auto" and available)
    return "cuda" if is_gpu else "cpu"


def device_of(config: TrainerSetup) -> torch.device:
    """Return the device of a trainer; the first GPU, if it is one."""
    name = _device_type(config)
    are_here = not isinstance(config.cluster, RayCluster)
    if name == "cuda" and are_here and config.mesh.world_size > torch.cuda.device_count():
        why = f"each rank needs its own GPU, and there are only {torch.cuda.device_count()}."
        raise ConfigError([Problem("cluster.processes", why, "Lower it.")])
    if name == "cuda" and config.model.numerics == "invariant" and find_spec("triton") is None:
        why = "on a GPU, invariant numerics need Triton kernels, and Triton is not installed."
        way = "Install triton, or set model.numerics=fast or trainer.device=cpu."
        raise ConfigError([Problem("model.numerics", why, way)])
    return torch.device(name, 0) if name == "cuda" else torch.device("cpu")


def resolve_dtype(trainer: TrainerConfig, device: torch.device) -> torch.dtype:
    choice = trainer.precision
    if choice == "auto":
        choice = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return torch.bfloat16 if choice == "bf16" else torch.float32


def resolve_runtime(config: RunConfig, *, kept: Way | None = None) -> Runtime:
    """Decide on device, dtype and cores, and refuse what the device cannot do."""
    return runtime_on(resolve_device(config), config.for_trainer, kept=kept)


def runtime_on(device: torch.device, config: TrainerSetup, *, kept: Way | None = None) -> Runtime:
    """`kept` is what a resumed run used before: sums depend on it in their last bits."""
    cores = choose_way(config.trainer, config.mesh, device, kept=kept)
    torch.set_num_threads(cores.way.threads)
    # A model that is certain of its answer has gradients below 1e-38, and a CPU takes twenty times
    # as long over such numbers as over zeros.
    torch.set_flush_denormal(True)
    pin = config.trainer.pin_memory
    return Runtime(
        device=device,
        dtype=resolve_dtype(config.trainer, device),
        threads=cores.way.threads,
        pin_memory=device.type == "cuda" if pin is None else pin,
        lanes=cores.way.lanes,
        cores_line=str(cores),
        ranks_line=config.trainer.backend.describe(config.mesh),
    )


def choose_way(
    trainer: TrainerConfig, mesh: Mesh, device: torch.device, *, kept: Way | None = None
) -> Cores:
    """Choose the use of the cores: by the recipe, else as the run used them before, else by
    measurement.
    """
    if kept is not None and trainer.threads is None and trainer.lanes is None:
        return Cores(kept, "as before")
    may_split = device.type == "cpu" and mesh.world_size == 1
    return choose_cores(trainer, most=available_cores(mesh.world_size), may_split=may_split)
