"""SGLang as an Engine, in the process that creates it (host.py creates it in a separate one).

    submit -> Core.add -> step: tokens and log-probs -> Flight -> poll

The flights here are authoritative; SGLang holds the requests that are being computed, and may be a
few tokens ahead. A request that resumes after an abort, a sleep or new weights is given to SGLang
as a longer prompt, and continues with the noise that it would have had.

Invariants: a request in flight is in SGLang, or held back until the next weights or until the
engine wakes; it comes back exactly once. No key or value of old weights reaches a request that
began after them: what is cached has another salt after every update and nap, and is dropped where
nothing runs. Weights change while nothing runs, or while SGLang is paused and all tokens of the old
ones have been taken in.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from homeostat.arrays import FloatArray
from homeostat.config.ranks import LOOPBACK
from homeostat.config.sglang import SglangEngineConfig
from homeostat.errors import EngineError
from homeostat.rollout.engine import Capabilities, EngineStats, Quiesce, Request
from homeostat.rollout.flight import Flight
from homeostat.rollout.lifecycle import BROKEN
from homeostat.rollout.served import Served, require_served
from homeostat.rollout.sglang.core import MIN_TEMPERATURE, Core, Emitted
from homeostat.rollout.stepping import SteppingEngine
from homeostat.sync.bucket import Bucket, Receiver, Transport
from homeostat.types import POLICY_ID, Completion, TokenRow

_NO_ROUTES = (
    "SGLang returns the experts of a request at its end alone. Set engine.type=native, or "
    "model.moe.router_replay=off"
)


def sglang_capabilities(
    config: SglangEngineConfig, *, device: str, max_tokens: int
) -> Capabilities:
    """Return what the engine can do; known without SGLang."""
    return Capabilities(
        name="sglang",
        shares_weights=False,
        batch_invariant=False,
        quiesce=frozenset(Quiesce),
        max_tokens=max_tokens,
        score_temperatures=config.score_temperatures,
        cuts=config.cuts,
        combines_cuts=config.combines_cuts,
        kept_ids=config.returns_kept_ids,
        sleep_frees_cache=device == "cuda",
        why_no_routes=_NO_ROUTES,
    )


class SglangEngine(SteppingEngine[Flight]):
    """Samples with SGLang. `folder` is an HF checkpoint; `max_tokens` is the most that a request
    may have in all; `decode` turns tokens into the text that stop strings are looked for in."""

    def __init__(
        self,
        folder: Path,
        config: SglangEngineConfig,
        *,
        served: Served,
        device: str,
        max_tokens: int,
        decode: Callable[[Sequence[int]], str] | None,
        policy_id: str = POLICY_ID,
        policy_version: int = 0,
        host: str = LOOPBACK,
    ) -> None:
        self.config = config
        self.core = Core(
            folder,
            config,
            device=device,
            dtype=served.dtype if config.dtype == "auto" else config.dtype,
            max_tokens=max_tokens,
            vocabulary=served.vocabulary,
            host=host,
        )
        require_served(self.core, served, folder, vendor="SGLang")
        super().__init__(
            sglang_capabilities(config, device=device, max_tokens=max_tokens),
            vocabulary=self.core.vocabulary,
            decode=decode,
            policy_id=policy_id,
            policy_version=policy_version,
        )
        self._receiver: Receiver | None = None
        # The name of a flight, or of a row to be scored, in SGLang: a new one each time.
        self._keys: dict[str, str] = {}
        self._by_key: dict[str, Flight] = {}
        self._scored: dict[str, Emitted] = {}
        self._num_keys = self._num_salts = 0
        self._num_prompt = self._num_shared = self._num_new = self._num_steps = 0
        self._num_retracted = self._most_running = 0
        self._is_broken = self._is_paused = False

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        self.life.require_settled("score")
        if temperature != 1.0:
            raise EngineError(
                f"the sglang engine scores at temperature 1 only, and was asked for {temperature}."
            )
        self.wake()
        keys = [self._give_row(row) for row in rows]
        while not all(key is None or key in self._scored for key in keys):
            self._end_expired()
            self._step(math.inf)
        return [self._weighted(row, key) for row, key in zip(rows, keys, strict=True)]

    def connect(self, transport: Transport) -> None:
        self._hang_up()
        self._receiver = transport.receiver(0, 1)
        self.life.is_connected = True

    def begin_update(self, how: Quiesce, *, policy_id: str = POLICY_ID) -> list[Completion]:
        ended = super().begin_update(how, policy_id=policy_id)
        if how is Quiesce.IN_PLACE and self._keys:
            self._is_paused = True
            self.core.pause()
            self._take_all(self.core.collect())
        else:
            self.core.settle()
        return ended

    def apply(self, bucket: Bucket) -> None:
        self.life.require_receiving()
        assert self._receiver is not None
        is_whole = False
        try:
            # Copies: SGLang's processes read them after the sender may have overwritten the bucket.
            self.core.load([(name, x.clone()) for name, x in self._receiver.unpack(bucket)])
            is_whole = True
        finally:
            if not is_whole:
                self._break_off()
        self.life.received += bucket.entries

    def health(self) -> str | None:
        if self.life.health() is None and not self.core.is_alive():
            self.life.problem = "a process of SGLang is gone; its log says why"
        return self.life.health()

    def stats(self) -> EngineStats:
        is_freed = self.life.is_asleep and self.capabilities.sleep_frees_cache
        return EngineStats(
            prompt_tokens=self._num_prompt,
            prompt_tokens_shared=self._num_shared,
            new_tokens=self._num_new,
            forward_passes=self._num_steps,
            preemptions=self._num_retracted,
            max_running=self._most_running,
            cache_bytes=0 if self.life.is_closed or is_freed else self.core.cache_bytes,
        )

    def _flight(self, request: Request, *, number: int, now: float) -> Flight:
        return Flight(request, number=number, now=now, decode=self.decode)

    def _require_servable(self, request: Request) -> None:
        super()._require_servable(request)
        if 0 < request.sampling.temperature < MIN_TEMPERATURE:
            raise EngineError(
                f"request {request.id!r} cannot be served: SGLang has no temperature between 0 and "
                f"{MIN_TEMPERATURE}, and rollout.temperature is {request.sampling.temperature}."
            )

    def _start(self, flight: Flight) -> None:
        """Submit a flight to SGLang; tokens sampled already become part of the prompt."""
        if self.life.problem is not None:
            return
        key = self._new_key()
        request = flight.request
        self.core.add(
            key,
            flight.tokens.tolist(),
            request.sampling,
            max_tokens=flight.max_length - len(flight.tokens),
            seed=_stream(request.seed, request.noise_name),
            salt=self._salt,
        )
        self._keys[request.id] = key
        self._by_key[key] = flight
        running = min(len(self._by_key), self.config.max_concurrency)
        self._most_running = max(self._most_running, running)

    def _drop(self, flight: Flight) -> None:
        """Withdraw a flight from SGLang."""
        key = self._keys.pop(flight.request.id, None)
        if key is not None:
            del self._by_key[key]
            self.core.abort([key])

    def _retract(self) -> None:
        for flight in self.life.in_flight.values():
            self._drop(flight)

    def _before_commit(self, version: int) -> None:
        self.core.finish_loading()
        # A commit without weights leaves half of an earlier update where it was.
        self._is_broken = self._is_broken and not self.life.received

    def _after_commit(self) -> None:
        """Give SGLang what was held back; and again what sampled nothing yet, whose old salt would
        let it find keys and values of the old weights."""
        if self._is_broken:
            self.life.problem = BROKEN
        self._num_salts += 1
        if self._is_paused:
            self._is_paused = False
            self.core.resume()
        self.core.forget_cache()
        for flight in list(self.life.in_flight.values()):
            if len(flight.tokens) == flight.num_given:
                self._drop(flight)
            if flight.request.id not in self._keys:
                self._start(flight)

    def _free_memory(self) -> None:
        self._retract()
        self.core.settle()
        # SGLang may still hold the last batch, and keep its cache: nothing finds it under this.
        self._num_salts += 1
        self.core.sleep()

    def _restore_memory(self) -> None:
        self.core.wake()
        for flight in self.life.in_flight.values():
            self._start(flight)

    def _shut_down(self) -> None:
        self._hang_up()
        self.core.close()

    def _step(self, until: float) -> None:
        if self.life.problem is not None:
            raise EngineError(f"{self.life.problem}.")
        found = self.core.step(until)
        self._num_steps += bool(found)
        self._take_all(found)

    def _take_all(self, found: Sequence[Emitted]) -> None:
        for emitted in found:
            flight = self._by_key.get(emitted.key)
            if flight is not None:
                self._take(flight, emitted)
            elif emitted.prompt_logps is not None:
                self._scored[emitted.key] = emitted

    def _take(self, flight: Flight, emitted: Emitted) -> None:
        if emitted.error is not None:
            raise EngineError(f"SGLang ended the request {flight.request.id!r}: {emitted.error}")
        if len(flight.tokens) == flight.num_given:
            self._num_shared += emitted.num_cached
            self._num_prompt += flight.num_given - emitted.num_cached
            self._num_retracted += emitted.num_retracted
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
            reason = flight.append(token, logp, sampled_logps[at], version=self.life.version)
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
        """SGLang has taken a token that means nothing: all flights wait for other weights."""
        self._retract()
        super()._refuse_weights()

    def _cancel_update(self) -> None:
        self._break_off()

    def _break_off(self) -> None:
        """End an update that cannot be finished: nothing is sampled until another one is whole."""
        self.core.finish_loading()
        if self._is_paused:
            self._is_paused = False
            self.core.resume()
        self._retract()
        self._is_broken = True
        self.life.break_off()

    def _hang_up(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    @property
    def _salt(self) -> str:
        return f"salt {self._num_salts}"

    def _new_key(self) -> str:
        self._num_keys += 1
        return str(self._num_keys)


def _stream(seed: int, name: str) -> int:
    """The seed of a request's noise: 63 bits of a hash that is the same everywhere."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
