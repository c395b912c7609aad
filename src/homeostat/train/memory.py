"""Running out of memory: recognising it, writing down who held what, and what to try next."""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from homeostat.config.run import RunConfig

_CPU_ALLOCATOR_FAILED = "can't allocate memory"
_RESERVE_BYTES = 64 * 2**20


class Reserve:
    """Address space set aside, so that there is room to say what happened when memory is out.

    Its pages are never touched: it costs no physical memory.
    """

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None
        self.take()

    def take(self) -> None:
        """Where there is no room left even for this, what happened is told as well as can be."""
        with contextlib.suppress(OSError):
            self._block = mmap.mmap(-1, _RESERVE_BYTES)

    def release(self) -> None:
        if self._block is not None:
            self._block.close()
            self._block = None


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR_FAILED in str(error)


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


def write_snapshot(path: Path, *, device: torch.device, error: str) -> dict[str, Any]:
    """The largest live allocations by call site (on the CPU: live tensors by shape), as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if device.type == "cuda":
        sites = largest_by_call_site(torch.cuda.memory._snapshot())
        content = {
            "device": torch.cuda.get_device_name(device),
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "reserved_bytes": torch.cuda.memory_reserved(device),
        }
    else:
        sites = _largest_tensors_if_possible()
        content = {"device": "cpu"}
    content |= {"error": error, "largest": sites}
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return content


def largest_by_call_site(snapshot: dict[str, Any], *, most: int = 20) -> list[dict[str, Any]]:
    """Live blocks of a CUDA memory snapshot, summed by the innermost Python frames."""
    bytes_of: dict[str, int] = defaultdict(int)
    blocks_of: dict[str, int] = defaultdict(int)
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                site = _call_site(block.get("frames", []))
                bytes_of[site] += block["size"]
                blocks_of[site] += 1
    ranked = sorted(bytes_of, key=lambda site: -bytes_of[site])[:most]
    return [{"site": s, "bytes": bytes_of[s], "blocks": blocks_of[s]} for s in ranked]


def _call_site(frames: list[dict[str, Any]]) -> str:
    ours = [frame for frame in frames if "homeostat" in frame["filename"]] or frames
    names = [f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in ours[:3]]
    return " < ".join(names) or "(recorded before the history began)"


def _largest_tensors_if_possible() -> list[dict[str, Any]]:
    try:
        return largest_tensors()
    except MemoryError:
        return [{"site": "(no memory was left to list tensors)", "bytes": 0, "blocks": 0}]


def largest_tensors(*, most: int = 20) -> list[dict[str, Any]]:
    """Live CPU tensors, largest first, each storage counted once."""
    seen: dict[int, dict[str, Any]] = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.device.type == "cpu":
            storage = item.untyped_storage()
            entry = {
                "site": f"{type(item).__name__}{list(item.shape)} {item.dtype}",
                "bytes": storage.nbytes(),
                "blocks": 1,
            }
            seen.setdefault(storage.data_ptr(), entry)
    return sorted(seen.values(), key=lambda entry: -entry["bytes"])[:most]


def memory_ladder(config: RunConfig, *, longest_row: int) -> list[str]:
    """Settings that would lower the peak, least disruptive first; those in force are left out."""
    trainer = config.trainer
    ladder: list[str] = []
    if not trainer.gradient_checkpointing:
        ladder.append("trainer.gradient_checkpointing=true  (about a third slower, same result)")
    if trainer.logits_chunk_bytes > 16 * 2**20:
        ladder.append("trainer.logits_chunk_bytes=16MiB  (same result)")
    if trainer.precision == "fp32" and trainer.device != "cpu":
        ladder.append("trainer.precision=bf16  (half the weights and activations)")
    if config.lora is None:
        ladder.append("lora.rank=16  (trains an adapter: no gradients or moments of the base)")
    ladder.append(f"data.max_length={max(2, longest_row // 2)}  (drops or cuts the longest rows)")
    ladder.append("a smaller model, or a device with more memory")
    return ladder
