"""Triton kernels: one pass over memory where torch takes several.

Invariant: a kernel computes what the plain torch code beside its caller computes, in fp32 inside
and rounded once; the plain code is the reference, and what runs on a CPU. Forward kernels work row
by row: a row's bits do not depend on the others. Where that is a sum over threads, the number of
rows is nothing that Triton may compile for: one kernel serves them all.

Kernels run on CUDA tensors, and on CPU tensors where TRITON_INTERPRET is set before Triton is first
imported. Triton takes its time to import, so that a kernel's module is imported where it is used.
Tensors without data go the same way, but for the launches, where they stand for a GPU's: what is
kept for the backward pass can be counted beforehand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Choice:
    has_kernels: bool = True
    meta_is_cuda: bool = False


@dataclass(slots=True)
class _Switch:
    # Of the process, not of a thread: layers are computed again in autograd's threads.
    now: _Choice


_SWITCH = _Switch(_Choice())


def fused(x: Tensor) -> bool:
    """Whether kernels are to be used on tensors like this one."""
    is_place = on_cuda(x) or (x.is_cpu and _interpreted())
    return is_place and _SWITCH.now.has_kernels and x.dtype in _DTYPES and _has_triton()


def on_cuda(x: Tensor) -> bool:
    """Whether it is on a GPU, or stands for a tensor that is."""
    return x.is_cuda or (x.is_meta and _SWITCH.now.meta_is_cuda)


def launches(x: Tensor) -> bool:
    """Whether there is anything to compute."""
    return x.numel() > 0 and not x.is_meta


@contextmanager
def plain() -> Iterator[None]:
    """No kernels inside, in this process: the reference that they are compared with."""
    with _chosen(replace(_SWITCH.now, has_kernels=False)):
        yield


@contextmanager
def meta_as(device: torch.device) -> Iterator[None]:
    """Inside, tensors without data stand for those on `device`."""
    with _chosen(replace(_SWITCH.now, meta_is_cuda=device.type == "cuda")):
        yield


@contextmanager
def _chosen(choice: _Choice) -> Iterator[None]:
    before, _SWITCH.now = _SWITCH.now, choice
    try:
        yield
    finally:
        _SWITCH.now = before


def aligned(x: Tensor) -> Tensor:
    """Contiguous, from a multiple of 16 bytes on: Triton compiles a kernel for what it can assume
    of an address, and what is to have the same bits must come from one compiled kernel."""
    x = x.contiguous()
    return x.clone() if not x.is_meta and x.data_ptr() % 16 else x


def block_of(size: int) -> int:
    """The power of two that holds `size` elements: Triton's tiles have no other sizes."""
    return 1 << max(0, size - 1).bit_length()


def warps_of(num_elements: int) -> int:
    """So many that each thread has about eight elements of a tile."""
    return min(max(num_elements // 256, 1), 8)


@cache
def num_programs(device: torch.device) -> int:
    """As many as are resident at once: each goes over many rows, and has sums to leave behind."""
    if device.type != "cuda":
        return 4
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
