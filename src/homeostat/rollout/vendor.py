"""The base of engines whose requests another library computes: vLLM and SGLang.

    submit -> VendorCore.add -> _step: Emitted(tokens, log-probs) -> Flight -> poll

The flights here are authoritative; the library holds the requests that are being computed. One that
resumes is given to it as a longer prompt.

Invariants: a request in flight is in the library, or held back until the next weights or until the
engine wakes; it comes back exactly once. No key or value of old weights reaches a request that
began after them: what is cached has another salt after every update, and is dropped where nothing
runs.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, Protocol, TypeVar

import numpy as np

from homeostat.arrays import FloatArray
from homeostat.errors import EngineError
from homeostat.rollout.engine import Capabilities, Request, Sampling
from homeostat.rollout.flight import Flight
from homeostat.rollout.lifecycle import BROKEN
from homeostat.rollout.served import Served, ServingCore, require_served
from homeostat.rollout.stepping import SteppingEngine
from homeostat.sync.bucket import Bucket
from homeostat.types import TokenRow


@dataclass(frozen=True, slots=True)
class Emitted:
    """Tokens of one request. `num_cached` tokens of its prompt were found in the cache.

    `kept` and `sampled_logps` are there where the distribution is cut and the library returns them;
    `error` says why the library ended the request.
    """

    key: str
    tokens: list[int]
    logps: list[float]
    num_cached: int = 0
    num_retracted: int = 0
    prompt_logps: list[float] | None = None
    kept: list[list[int]] | None = None
    sampled_logps: list[float] | None = None
    error: str | None = None


class VendorCore(ServingCore, Protocol):
    """The calls by which a library is given requests. Those with one `salt` may share what is
    cached of their tokens."""

    def add(
        self,
        key: str,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        seed: int,
        salt: str,
    ) -> None: ...

    def add_scored(self, key: str, tokens: Sequence[int], *, salt: str) -> None:
        """Add a request for the log-probs of its own tokens, at temperature 1."""
        ...

    def abort(self, keys: Sequence[str]) -> None: ...


CoreT = TypeVar("CoreT", bound=VendorCore)


class VendorEngine(SteppingEngine[Flight], Generic[CoreT]):
    """Samples with a library that serves the model in `folder`.

    `vendor` is the library's name in errors; `core` makes the calls to it.
    """

    vendor: str

    def __init__(
        self,
        core: CoreT,
        capabilities: Capabilities,
        *,
        folder: Path,
        served: Served,
        decode: Callable[[Sequence[int]], str] | None,
        policy_id: str,
        policy_version: int,
    ) -> None:
        require_served(core, served, folder, vendor=self.vendor)
        super().__init__(
            capabilities,
            vocabulary=core.vocabulary,
            decode=decode,
            policy_id=policy_id,
            policy_version=policy_version,
        )
        self.core = core
        # The name of a flight, or of a row to be scored, in the library: a new one each time.
        self._keys: dict[str, str] = {}
        self._by_key: dict[str, Flight] = {}
        self._scored: dict[str, Emitted] = {}
        self._num_keys = self._num_salts = 0
        self._num_prompt = self._num_shared = self._num_new = self._num_steps = 0
        self._num_retracted = 0
        self._is_broken = False

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        self.life.require_settled("score")
        if temperature != 1.0:
            raise EngineError(
                f"the {self.life.name} engine scores at temperature 1 only, and was asked for "
                f"{temperature}."
            )
        self.wake()
        keys = [self._give_row(row) for row in rows]
        while not all(key is None or key in self._scored for key in keys):
            self._end_expired()
            self._step(math.inf)
        return [self._weighted(row, key) for row, key in zip(rows, keys, strict=True)]

    def apply(self, bucket: Bucket) -> None:
        self.life.require_receiving()
        is_whole = False
        try:
            self._load(bucket)
            is_whole = True
        finally:
            if not is_whole:
                self._break_off()
        self.life.received += bucket.entries

    # Methods that each library's engine implements.

    @abstractmethod
    def _seed(self, flight: Flight) -> int:
        """Return the seed of the noise from which the flight samples its next tokens."""

    @abstractmethod
    def _emitted(self, until: float) -> Iterable[Emitted]:
        """Let the library compute, and return what came of it."""

    @abstractmethod
    def _load(self, bucket: Bucket) -> None:
        """Put the weights of a bucket in place."""

    @abstractmethod
    def _end_loading(self) -> None:
        """End an update of the weights that cannot be finished."""

    @abstractmethod
    def _forget_old_weights(self) -> None:
        """Sample from the weights that were committed, and drop what the old ones cached."""

    # Methods that they share.

    def _flight(self, request: Request, *, number: int, now: float) -> Flight:
        return Flight(request, number=number, now=now, decode=self.decode)

    def _start(self, flight: Flight) -> None:
        """Submit a flight; tokens that it has already sampled become part of the prompt."""
        if self.life.problem is not None:
            return
        key = self._new_key()
        self.core.add(
            key,
            flight.tokens.tolist(),
            flight.request.sampling,
            max_tokens=flight.max_length - len(flight.tokens),
            seed=self._seed(flight),
            salt=self._salt,
        )
        self._keys[flight.request.id] = key
        self._by_key[key] = flight

    def _drop(self, flight: Flight) -> None:
        """Withdraw a flight from the library."""
        key = self._keys.pop(flight.request.id, None)
        if key is not None:
            del self._by_key[key]
            self.core.abort([key])

    def _drop_all(self) -> None:
        for flight in self.life.in_flight.values():
            self._drop(flight)

    def _before_commit(self, version: int) -> None:
        # A commit without weights leaves half of an earlier update where it was.
        self._is_broken = self._is_broken and not self.life.received

    def _after_commit(self) -> None:
        """Submit what was held back; and again what sampled nothing yet, whose old salt would let
        it find keys and values of the old weights."""
        if self._is_broken:
            self.life.problem = BROKEN
        self._change_salt()
        self._forget_old_weights()
        for flight in list(self.life.in_flight.values()):
            if len(flight.tokens) == flight.num_given:
                self._drop(flight)
            if flight.request.id not in self._keys:
                self._start(flight)

    def _step(self, until: float) -> None:
        if self.life.problem is not None:
            raise EngineError(f"{self.life.problem}.")
        self._take_all(self._emitted(until))

    def _take_all(self, found: Iterable[Emitted]) -> None:
        for emitted in found:
            flight = self._by_key.get(emitted.key)
            if flight is not None:
                self._take(flight, emitted)
            elif emitted.prompt_logps is not None:
                self._scored[emitted.key] = emitted

    def _take(self, flight: Flight, emitted: Emitted) -> None:
        if emitted.error is not None:
            raise EngineError(
                f"{self.vendor} ended the request {flight.request.id!r}: {emitted.error}"
            )
        if len(flight.tokens) == flight.num_given:
            self._num_shared += emitted.num_cached
            self._num_prompt += flight.num_given - emitted.num_cached
            self._num_retracted += emitted.num_retracted
        is_whole = self.capabilities.cut_logp or not flight.is_cut
        sampled_logps = emitted.sampled_logps or emitted.logps
        for at, (token, logp) in enumerate(zip(emitted.tokens, emitted.logps, strict=True)):
            if not math.isfinite(logp):
                self._refuse_weights()
            self._num_new += 1
            if flight.kept is not None:
                assert emitted.kept is not None, emitted.key
                ids = np.array(sorted(emitted.kept[at]), dtype=np.int32)
                flight.kept.require_bounded(len(ids))
                flight.kept.put(ids, np.array([len(ids)], dtype=np.int32))
            whole_logp = logp if is_whole else math.nan
            reason = flight.append(token, whole_logp, sampled_logps[at], version=self.life.version)
            if reason is not None:
                self._finish(flight, reason)
                return

    def _give_row(self, row: TokenRow) -> str | None:
        if len(row) > self.max_tokens:
            raise EngineError(
                f"row {row.row_id} has {len(row)} tokens, more than the engine's {self.max_tokens}."
            )
        if not (row.weights_T[1:] > 0).any():
            return None
        key = self._new_key()
        self.core.add_scored(key, row.tokens_T.tolist(), salt=self._salt)
        return key

    def _weighted(self, row: TokenRow, key: str | None) -> FloatArray:
        if key is None:
            return np.zeros(0, dtype=np.float32)
        prompt_logps = self._scored.pop(key).prompt_logps
        assert prompt_logps is not None, key
        return np.array(prompt_logps, dtype=np.float32)[row.weights_T[1:] > 0]

    def _refuse_weights(self) -> NoReturn:
        """The library has sampled a meaningless token: all flights wait for other weights."""
        self._drop_all()
        super()._refuse_weights()

    def _cancel_update(self) -> None:
        self._break_off()

    def _break_off(self) -> None:
        """End an update that cannot be finished: nothing is sampled until another one is whole."""
        self._end_loading()
        self._drop_all()
        self._is_broken = True
        self.life.break_off()

    @property
    def _salt(self) -> str:
        return f"salt {self._num_salts}"

    def _change_salt(self) -> None:
        self._num_salts += 1

    def _new_key(self) -> str:
        self._num_keys += 1
        return str(self._num_keys)


def hashed_seed(name: str) -> int:
    """Return 63 bits of a hash of the name that is the same everywhere."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
