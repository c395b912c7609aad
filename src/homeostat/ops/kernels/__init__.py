"""Triton kernels that need one pass over memory where torch needs several.

Invariant: a kernel computes the same as the plain torch code beside its caller, in fp32 inside and
rounded once. The plain code is the reference, and it runs on a CPU. Forward kernels work row by
row: the bits of a row do not depend on the other rows. If a kernel sums over threads, Triton must
not specialise it for the number of rows, so one compiled kernel serves them all.

Kernels run on CUDA tensors, and on CPU tensors if TRITON_INTERPRET is set before Triton is first
imported. Importing Triton is slow, so a kernel's module is imported where it is used. Meta tensors
that stand for GPU tensors take the same path, except for the launches, so that the memory kept for
the backward pass can be counted in advance.
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
    # Process-wide, not per thread, because autograd recomputes layers in its own threads.
    now: _Choice


_SWITCH = _Switch(_Choice())


def fused(x: Tensor) -> bool:
    """Return whether to use kernels on tensors like this one."""
    is_place = on_cuda(x) or (x.is_cpu and _interpreted())
    return is_place and _SWITCH.now.has_kernels and x.dtype in _DTYPES and _has_triton()


def on_cuda(x: Tensor) -> bool:
    """Return whether a tensor is on a GPU, or is a meta tensor that stands for one."""
    return x.is_cuda or (x.is_meta and _SWITCH.now.meta_is_cuda)


def launches(x: Tensor) -> bool:
    """Return whether there is anything to compute."""
    return x.numel() > 0 and not x.is_meta


@contextmanager
def plain() -> Iterator[None]:
    """Disable kernels inside the block, in this process, to get the reference result."""
    with _chosen(replace(_SWITCH.now, has_kernels=False)):
        yield


@contextmanager
def meta_as(device: torch.device) -> Iterator[None]:
    """Let meta tensors stand for tensors on `device` inside the block."""
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
    """Return a contiguous tensor whose address is a multiple of 16 bytes.

    Triton compiles a kernel for what it can assume about an address, and results must come from one
    compiled kernel to have the same bits.
    """
    x = x.contiguous()
    return x.clone() if not x.is_meta and x.data_ptr() % 16 else x


def block_of(size: int) -> int:
    """Return the smallest power of two that holds `size` elements, as Triton's tiles require."""
    return 1 << max(0, size - 1).bit_length()


def warps_of(num_elements: int) -> int:
    """Return the number of warps that gives each thread about eight elements of a tile."""
    return min(max(num_elements // 256, 1), 8)


@cache
def num_programs(device: torch.device) -> int:
    """Return the number of programs that are resident at once; each handles many rows."""
    if device.type != "cuda":
        return 4
    return 8 * torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
