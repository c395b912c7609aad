"""Kernels that start before the one before them has ended (programmatic dependent launch, Hopper).

A kernel lets its follower start; the follower does what needs nothing of its predecessor, such as
reading weights, and then waits for its end. Every kernel waits before it reads or writes anything
that another one of its step writes: then the order of a chain is that of its launches. The first
kernel of a step lets its follower start only when the last step has ended (`rows.enter`).

The sooner a follower starts the better, unless two of its programs fit where one of this kernel's
does: those that start while multiprocessors are busy crowd the free ones, and stay there.
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
    """The flags of a launch."""
    if can_start_early(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
