"""Round fp32 to bf16 stochastically, without a generator that would have to be saved.

A number between two neighbours a < b of bf16 becomes b with probability (x - a) / (b - a), so the
expected result is x itself: updates that are smaller than half a unit in the last place still add
up. The 16 random bits are a pure function of (key, element index): the result does not depend on
how a tensor is cut into pieces, on the device or on an interruption.

    bits = hash32(index ^ key)          lowbias32 of Ellis, with the key's upper half between rounds
    round(x) = (bits of x + 16 random bits) with the lower 16 bits cleared

The sign is a separate bit, so both signs are rounded alike. Infinities and NaN stay as they are.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_MASK_64 = 2**64 - 1
_MIX_A = 0x7FEB352D
_MIX_B = 0x846CA68B - 2**32
_UPPER_HALF = -(2**16)
# Elements that are rounded in one go: random bits take several times the memory of the result.
_CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class Noise:
    """The random bits of one tensor at one update; `start` is the index of the first element."""

    key: int
    start: int = 0

    @property
    def words(self) -> tuple[int, int]:
        """Return the lower and the upper half of the key, as signed 32-bit integers."""
        return _signed(self.key), _signed(self.key >> 32)

    def shifted(self, count: int) -> Noise:
        """Return the noise of the elements from the `count`-th on."""
        return Noise(self.key, self.start + count)

    def other(self) -> Noise:
        """Return independent noise for the same elements."""
        return Noise(_mixed(self.key + 1), self.start)


@cache
def tensor_key(seed: int, name: str) -> int:
    """Return the 64-bit key of a tensor, whatever the order of tensors."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def noise_at(step: int, *, key: int) -> Noise:
    """Return the noise of a tensor at an update."""
    return Noise(_mixed(key + step * 0x9E3779B97F4A7C15))


def random_bits(noise: Noise, count: int, *, device: torch.device) -> Tensor:
    """Return `count` int32 numbers, each of 32 random bits."""
    low, high = noise.words
    bits = torch.arange(noise.start, noise.start + count, dtype=torch.int64, device=device)
    bits = bits.to(torch.int32) ^ low
    bits ^= _shifted(bits, 16)
    bits *= _MIX_A
    bits ^= high
    bits ^= _shifted(bits, 15)
    bits *= _MIX_B
    return bits.bitwise_xor_(_shifted(bits, 16))


def round_to_bf16(value: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 by the lower 16 of the given random bits."""
    raised = ((value.view(torch.int32) + (bits & 0xFFFF)) & _UPPER_HALF).view(torch.float32)
    return torch.where(value.isfinite(), raised, value).to(torch.bfloat16)


def round_into(target: Tensor, value: Tensor, noise: Noise, *, upper: bool = False) -> None:
    """Store fp32 values in a bf16 tensor, rounded by the lower or the upper 16 random bits."""
    flat, found = target.view(-1), value.reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        part = found[start : start + _CHUNK]
        bits = random_bits(noise.shifted(start), len(part), device=part.device)
        flat[start : start + _CHUNK] = round_to_bf16(part, _shifted(bits, 16) if upper else bits)


def _shifted(bits: Tensor, places: int) -> Tensor:
    """Shift to the right, filling with zeros: int32 would repeat the sign."""
    return (bits >> places) & (2 ** (32 - places) - 1)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word


def _mixed(key: int) -> int:
    """Return the splitmix64 hash of a 64-bit key."""
    key = (key + 0x9E3779B97F4A7C15) & _MASK_64
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return key ^ (key >> 31)
