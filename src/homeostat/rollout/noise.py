"""Sampling noise of a request: a pure function of (seed, request id, position).

    key = 8 bytes of blake2b("seed/id");   u = splitmix64(key, position) in [0, 1)

One uniform number per token. The token is drawn by inverse CDF, so the tokens of a request do not
depend on the other requests in the batch, nor on interruptions.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def noise_key(seed: int, request_id: str) -> int:
    """Return the key of the request's random stream, as an unsigned 64-bit number."""
    digest = hashlib.blake2b(f"{seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(keys_B: NDArray[np.uint64], positions_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each (key, position of the token in its completion)."""
    with np.errstate(over="ignore"):
        x = keys_B + (positions_B + np.uint64(1)) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * _MIX_1
        x = (x ^ (x >> np.uint64(27))) * _MIX_2
    x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
