"""Stands in for SGLang's compiled kernels, which exist for GPUs alone, so that it starts on a CPU.

With it on the path SGLang computes every layer with torch. Any name can be imported; calling one
raises an error that names it, so that nothing is ever computed by a kernel that is not there. The
one kernel that is computed here is the hash by which a request's noise is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.4.10"
_MASK = 0xFFFFFFFF

_OPERATORS = torch.library.Library("sgl_kernel", "FRAGMENT")


def _define(schema: str, implementation: Callable[..., Any]) -> None:
    """Register an operator that SGLang calls as it starts, whatever it computes with."""
    _OPERATORS.define(schema)
    name = schema.partition("(")[0]
    _OPERATORS.impl(name, implementation, "CompositeExplicitAutograd")


def _mixed(hashed: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bits, public domain): mix one block into the hash, in 64-bit integers."""
    block = (block * 0xCC9E2D51) & _MASK
    block = (((block << 15) | (block >> 17)) & _MASK) * 0x1B873593 & _MASK
    hashed = hashed ^ block
    hashed = ((hashed << 13) | (hashed >> 19)) & _MASK
    return (hashed * 5 + 0xE6546B64) & _MASK


def _murmur(seed_B: torch.Tensor, at_B: torch.Tensor, token_V: torch.Tensor) -> torch.Tensor:
    """Return the hash of (seed, position, token) for every request and token."""
    seed_B = seed_B.view(torch.int64)[:, None]
    blocks = (seed_B & _MASK, (seed_B >> 32) & _MASK, at_B.long()[:, None], token_V.long()[None])
    hashed = torch.zeros(1, 1, dtype=torch.int64)
    for block in blocks:
        hashed = _mixed(hashed, block)
    hashed = hashed ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & _MASK
    return hashed ^ (hashed >> 16)


_define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor", _murmur)
_define("init_cpu_threads_env(str ids) -> str", lambda ids: "threads are left as they are")
_define("initialize(int size, int rank) -> ()", lambda size, rank: None)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a kernel for GPUs")

    return absent
