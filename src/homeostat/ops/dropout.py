"""Counter-based dropout: the mask is a function of the token, not of the batch.

Invariant: the keep mask depends only on (token key, module number, channel), and a token key only
on (seed, step, row id, position). So it does not depend on packing, on how an update is split into
micro-batches, on the device, or on activations being recomputed.

`DropoutKeys` passes the keys of the current forward pass to the modules that use dropout, because
they may be deep inside a model whose signatures are not ours.

Suffixes: `_N` packed tokens, `_C` channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

_GOLDEN_64 = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_A_64 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_B_64 = -7723592293110705685  # 0x94D049BB133111EB
_MIX_A_32 = 0x7FEB352D
_MIX_B_32 = 0x846CA68B - 2**32


class DropoutKeys:
    """The token keys of the current forward pass; None outside training, without dropout."""

    def __init__(self) -> None:
        self.keys_N: Tensor | None = None

    @contextmanager
    def use(self, keys_N: Tensor | None) -> Iterator[None]:
        before, self.keys_N = self.keys_N, keys_N
        try:
            yield
        finally:
            self.keys_N = before

    def checkpoint_contexts(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return `context_fn` of torch's checkpoint, so that a recomputation sees the same keys."""
        return nullcontext(), self.use(self.keys_N)


def dropout_keys(row_ids_N: Tensor, positions_N: Tensor, *, seed: int, step: int) -> Tensor:
    """Return int64 [N]: one key per token."""
    key_N = _mix64(torch.full_like(row_ids_N, seed, dtype=torch.int64))
    for part in (step, row_ids_N, positions_N):
        # Mix after each part: a plain sum would give (row 1, position 2) and (row 2, position 1)
        # one key.
        key_N = _mix64(key_N + part)
    return key_N


def dropout(x_NC: Tensor, keys_N: Tensor, *, module: int, rate: float) -> Tensor:
    """Zero a share `rate` of the entries, and divide the others by 1 - rate."""
    keep_NC = keep_mask(keys_N, module=module, channels=x_NC.shape[-1], rate=rate)
    return torch.where(keep_NC, x_NC * (1.0 / (1.0 - rate)), 0.0)


def keep_mask(keys_N: Tensor, *, module: int, channels: int, rate: float) -> Tensor:
    """Return bool [N, C], in 32-bit arithmetic: int64 would double the memory traffic."""
    keys_N = _mix64(keys_N + module)
    low_N, high_N = keys_N.to(torch.int32), (keys_N >> 32).to(torch.int32)
    channel_C = _mix64(torch.arange(channels, device=keys_N.device)).to(torch.int32)
    bits_NC = low_N[:, None] ^ channel_C
    bits_NC ^= _shift(bits_NC, 16)
    bits_NC *= _MIX_A_32
    # The upper half of the key enters between the two rounds, so all 64 bits matter.
    bits_NC ^= high_N[:, None]
    bits_NC ^= _shift(bits_NC, 15)
    bits_NC *= _MIX_B_32
    bits_NC ^= _shift(bits_NC, 16)
    # Drop the sign bit, so that the comparison is with an unsigned number of 31 bits.
    return bits_NC.bitwise_and_(0x7FFFFFFF) >= round(rate * 2**31)


def _mix64(x: Tensor) -> Tensor:
    """Apply one step of splitmix64 (Steele, Lea, Flood 2014) in wrapping int64."""
    x = x + _GOLDEN_64
    x = (x ^ _shift(x, 30)) * _MIX_A_64
    x = (x ^ _shift(x, 27)) * _MIX_B_64
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right logically: torch's own shift copies the sign bit."""
    width = torch.iinfo(x.dtype).bits
    return (x >> bits) & ((1 << (width - bits)) - 1)
