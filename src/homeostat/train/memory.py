"""Handles out-of-memory errors: recognise them, record what used the memory, suggest settings."""

from __future__ import annotations

import contextlib
import json
import mmap
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from homeostat.config.optimizer import AdamConfig
from homeostat.config.parts import TrainerSetup

Site = dict[str, str | int]

_RESERVE_BYTES = 64 * 2**20


class Reserve:
    """Reserved address space, so that an error can still be reported when memory runs out.

    Its pages are never touched: it costs no physical memory.
    """

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None
        self.take()

    def take(self) -> None:
        """Reserve the block, unless there is no room even for this."""
        with contextlib.suppress(OSError):
            self._block = mmap.mmap(-1, _RESERVE_BYTES)

    def release(self) -> None:
        if self._block is not None:
            self._block.close()
            self._block = None


@contextlib.contextmanager
def recorded_allocations(device: torch.device) -> Iterator[None]:
    """Remember call sites of GPU allocations, so that a snapshot can name them.

    Every allocation then costs a walk up the Python stack: too slow to leave on.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@contextlib.contextmanager
def recorded_call_sites(device: torch.device) -> Iterator[Callable[[], list[Site]]]:
    """Yields a function that lists the largest live allocations made inside, by call site."""
    if device.type == "cuda":
        with recorded_allocations(device):
            yield lambda: largest_by_call_site(torch.cuda.memory._snapshot())
    else:
        with CpuAllocations() as allocations:
            yield allocations.largest


class CpuAllocations(TorchDispatchMode):
    """Records what the operations inside allocate on the CPU, and which of our code asked."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int, str]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps the method below in a function whose first call imports the
        # compiler: tens of megabytes, when memory has just run out.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        known = self._made.get(storage.data_ptr())
        if known is None or known[0].expired():
            site = _call_site(_frames_here())
            self._made[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes(), site)

    def largest(self) -> list[Site]:
        live = [(size, site) for weak, size, site in self._made.values() if not weak.expired()]
        return _ranked(live)


def _frames_here() -> list[dict[str, Any]]:
    """The frames that led here, innermost first, without those of this file."""
    frames = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename != __file__:
            place = {"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name}
            frames.append(place)
        frame = frame.f_back
    return frames


def write_snapshot(path: Path, *, device: torch.device, error: str, sites: list[Site]) -> None:
    """Write as JSON what used the memory when it ran out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"device": str(device), "error": error, "largest": sites}
    if device.type == "cuda":
        content["allocated_bytes"] = torch.cuda.memory_allocated(device)
        content["reserved_bytes"] = torch.cuda.memory_reserved(device)
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def largest_by_call_site(snapshot: Mapping[str, Any]) -> list[Site]:
    """Live blocks of a CUDA memory snapshot, summed by the innermost Python frames."""
    blocks = (block for segment in snapshot["segments"] for block in segment["blocks"])
    return _ranked(
        [
            (block["size"], _call_site(block.get("frames", [])))
            for block in blocks
            if block["state"] == "active_allocated"
        ]
    )


def _ranked(allocations: list[tuple[int, str]], *, most: int = 20) -> list[Site]:
    bytes_of: dict[str, int] = defaultdict(int)
    blocks_of: dict[str, int] = defaultdict(int)
    for size, site in allocations:
        bytes_of[site] += size
        blocks_of[site] += 1
    ranked = sorted(bytes_of, key=lambda site: -bytes_of[site])[:most]
    return [{"site": s, "bytes": bytes_of[s], "blocks": blocks_of[s]} for s in ranked]


def _call_site(frames: list[dict[str, Any]]) -> str:
    ours = [frame for frame in frames if "homeostat" in frame["filename"]] or frames
    names = [f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in ours[:3]]
    return " < ".join(names) or "(recorded before the history began)"


def ladder_text(config: TrainerSetup, *, longest_row: int, largest_batch: int = 0) -> str:
    ladder = memory_ladder(config, longest_row=longest_row, largest_batch=largest_batch)
    steps = "\n".join(f"  {number}. {text}" for number, text in enumerate(ladder, 1))
    return f"Settings to try, the least disruptive first:\n{steps}"


def memory_ladder(config: TrainerSetup, *, longest_row: int, largest_batch: int = 0) -> list[str]:
    """Settings that would lower the peak, least disruptive first; those in force are left out.

    `largest_batch`: tokens of the largest micro-batch, where it can still be made smaller.
    """
    trainer = config.trainer
    ladder: list[str] = []
    ranks = trainer.backend.ranks_per_micro_batch
    smaller = -(-max(config.longest_example, largest_batch // 2) // ranks)
    if trainer.packing and smaller * ranks < largest_batch:
        ladder.append(f"trainer.max_tokens_per_device={smaller}  (same result)")
    if not trainer.gradient_checkpointing and config.model.implementation == "native":
        ladder.append("trainer.gradient_checkpointing=selective  (a little slower, same result)")
    if trainer.gradient_checkpointing is not True:
        ladder.append("trainer.gradient_checkpointing=true  (about a third slower, same result)")
    if trainer.device != "cpu" and not trainer.backend.offload_optimizer:
        ladder.append("trainer.backend.offload_optimizer=true  (on a GPU; slower, same result)")
    if trainer.logits_bytes("cpu") > 16 * 2**20:
        ladder.append("trainer.logits_chunk_bytes=16MiB  (same result)")
    if trainer.precision == "fp32" and trainer.device != "cpu":
        ladder.append("trainer.precision=bf16  (half the weights and activations)")
    if isinstance(trainer.optimizer, AdamConfig) and trainer.optimizer.moments != "8bit":
        ladder.append("trainer.optimizer.moments=8bit  (a quarter of the moments' memory)")
    if config.lora is None:
        ladder.append("lora.rank=16  (trains an adapter: no gradients or moments of the base)")
    if trainer.backend.type == "fsdp" and trainer.device != "cpu":
        away = "offload_optimizer=true and offload_params=true"
        if not trainer.backend.offload_params:
            ladder.append(f"trainer.backend: {away}  (on GPUs; the slowest, same result)")
    if trainer.backend.type == "fsdp":
        ladder.append("more cluster.processes  (a smaller share of the model on each)")
        ladder.append(
            f"trainer.backend.context_parallel_size={2 * trainer.backend.context_parallel_size}  "
            "(half as many tokens of each row on a rank, same result)"
        )
    ladder.append(f"data.max_length={max(2, longest_row // 2)}  (drops or cuts the longest rows)")
    ladder.append("a smaller model, or a device with more memory")
    return ladder
