"""Kernels that start before the one before them has ended (programmatic dependent launch, Hopper).

A kernel allows the next one to start. That one first does work that needs no result of its
predecessor, such as reading weights, and then waits for the predecessor to end. Every kernel waits
before it reads or writes anything that another kernel of its step writes, so kernels take effect in
the order of their launches. The first kernel of a step allows the next one to start only when the
previous step has ended (`rows.enter`).

It pays to start the next kernel as soon as possible, with one exception: if two of its programs fit
into the space of one of this kernel's, programs that start while some multiprocessors are busy
crowd onto the free ones and stay there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()


@cache
def can_start_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def early(device: torch.device) -> dict[str, Any]:
    """Return the options of a launch that make a kernel start early, if the device can do so."""
    if can_start_early(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
