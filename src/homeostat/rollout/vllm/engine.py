"""vLLM as an Engine, in the process that creates it (host.py creates it in a separate one).

    submit -> Core.add -> step: tokens and log-probs -> Flight.append -> poll

The flights here are authoritative; vLLM holds the requests that are being computed. A request that
resumes after an abort, or after weights that were not finite, is given to vLLM as a longer prompt.

Invariants: a request in flight is in vLLM, or held back until the next weights; it comes back
exactly once. No key or value of old weights reaches a request that began after them: what is
cached is salted with the number of the update, and dropped where nothing runs.

Noise: vLLM draws from a generator per request, seeded by (seed, id, tokens begun). What a request
samples does not depend on the rest of its batch, but one that resumes from `begun` is another draw
(`resumes_exactly` is False). Where top-k or top-p cut the distribution, vLLM gives log-probs of
what was left: `engine_logp_T` is not known then, and NaN.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from homeostat.arrays import FloatArray
from homeostat.config.vllm import VllmEngineConfig
from homeostat.errors import EngineError
from homeostat.rollout.engine import Capabilities, EngineStats, Quiesce, Request
from homeostat.rollout.flight import Flight
from homeostat.rollout.lifecycle import BROKEN
from homeostat.rollout.served import Served, require_served
from homeostat.rollout.stepping import SteppingEngine
from homeostat.rollout.vllm.core import MIN_TEMPERATURE, Core, Emitted
from homeostat.sync.bucket import Bucket, Transport
from homeostat.types import POLICY_ID, TokenRow

_NO_ROUTES = (
    "vLLM 0.32 returns them from its model runner V2 alone, which needs Triton and which this "
    "engine does not use. Set engine.type=native, or model.moe.router_replay=off"
)
_NO_KEPT_IDS = (
    "vLLM 0.32 returns no sets: its log-probs are of what its filters left, and of a fixed number "
    "of tokens. Set engine.type=native, or rollout.top_p=1, rollout.min_p=0 and no rollout.top_k"
)


def vllm_capabilities(config: VllmEngineConfig, *, max_tokens: int) -> Capabilities:
    """Return what the engine can do; known without vLLM."""
    return Capabilities(
        name="vllm",
        shares_weights=False,
        batch_invariant=False,
        quiesce=frozenset(Quiesce),
        max_tokens=max_tokens,
        resumes_exactly=False,
        score_temperatures=config.score_temperatures,
        cut_logp=False,
        num_receivers=config.tensor_parallel_size,
        why_no_routes=_NO_ROUTES,
        why_no_kept_ids=_NO_KEPT_IDS,
    )


class VllmEngine(SteppingEngine[Flight]):
    """Samples with vLLM. `folder` is an HF checkpoint; `max_tokens` is the most that a request may
    have in all; `decode` turns tokens into the text that stop strings are looked for in.
    `quantization`: the `quantization_config` of the weights that it will be sent."""

    def __init__(
        self,
        folder: Path,
        config: VllmEngineConfig,
        *,
        served: Served,
        max_tokens: int,
        decode: Callable[[Sequence[int]], str] | None,
        policy_id: str = POLICY_ID,
        policy_version: int = 0,
        quantization: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        dtype = served.dtype if config.dtype == "auto" else config.dtype
        how = {"dtype": dtype, "max_tokens": max_tokens, "quantization": quantization}
        self.core = Core(folder, config, **how)
        require_served(self.core, served, folder, vendor="vLLM")
        super().__init__(
            vllm_capabilities(config, max_tokens=max_tokens),
            vocabulary=self.core.vocabulary,
            decode=decode,
            policy_id=policy_id,
            policy_version=policy_version,
        )
        # The name of a flight, or of a row to be scored, in vLLM: a new one each time.
        self._keys: dict[str, str] = {}
        self._by_key: dict[str, Flight] = {}
        self._scored: dict[str, Emitted] = {}
        self._num_keys = self._num_updates = 0
        self._num_prompt = self._num_shared = self._num_new = self._num_steps = 0
        self._is_broken = False

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        self.life.require_settled("score")
        if temperature != 1.0:
            raise EngineError(
                f"the vllm engine scores at temperature 1 only, and was asked for {temperature}."
            )
        self.wake()
        keys = [self._give_row(row) for row in rows]
        while not all(key is None or key in self._scored for key in keys):
            self._end_expired()
            self._step(math.inf)
        return [self._weighted(row, key) for row, key in zip(rows, keys, strict=True)]

    def connect(self, transport: Transport) -> None:
        self.core.call("homeostat_connect", transport)
        self.life.is_connected = True

    def apply(self, bucket: Bucket) -> None:
        self.life.require_receiving()
        is_whole = False
        try:
            self.core.call("homeostat_apply", bucket)
            is_whole = True
        finally:
            if not is_whole:
                self._break_off()
        self.life.received += bucket.entries

    def health(self) -> str | None:
        if self.life.health() is None:
            try:
                self.core.check_health()
            except (RuntimeError, TimeoutError, OSError) as error:
                self.life.problem = f"vLLM's workers do not answer: {error}"
        return self.life.health()

    def stats(self) -> EngineStats:
        has_cache = not (self.life.is_closed or self.life.is_asleep)
        return EngineStats(
            prompt_tokens=self._num_prompt,
            prompt_tokens_shared=self._num_shared,
            new_tokens=self._num_new,
            forward_passes=self._num_steps,
            preemptions=self.core.num_preempted,
            max_running=self.core.most_running,
            cache_bytes=sum(self.core.call("homeostat_cache_bytes")) if has_cache else 0,
        )

    def _flight(self, request: Request, *, number: int, now: float) -> Flight:
        return Flight(request, number=number, now=now, decode=self.decode)

    def _require_servable(self, request: Request) -> None:
        super()._require_servable(request)
        if 0 < request.sampling.temperature < MIN_TEMPERATURE:
            raise EngineError(
                f"request {request.id!r} cannot be served: vLLM has no temperature between 0 and "
                f"{MIN_TEMPERATURE}, and rollout.temperature is {request.sampling.temperature}."
            )

    def _start(self, flight: Flight) -> None:
        """Submit a flight to vLLM; tokens that it has already sampled become part of the prompt."""
        if self.life.problem is not None:
            return
        key = self._new_key()
        request = flight.request
        self.core.add(
            key,
            flight.tokens.tolist(),
            request.sampling,
            max_tokens=flight.max_length - len(flight.tokens),
            seed=_stream(request.seed, request.id, flight.num_new),
            salt=self._salt,
        )
        self._keys[request.id] = key
        self._by_key[key] = flight

    def _drop(self, flight: Flight) -> None:
        """Withdraw a flight from vLLM."""
        key = self._keys.pop(flight.request.id, None)
        if key is not None:
            del self._by_key[key]
            self.core.abort([key])

    def _retract(self) -> None:
        self.core.forget_cache(retract=True)

    def _before_commit(self, version: int) -> None:
        missing = sorted(set().union(*self.core.call("homeostat_finish")))
        if missing:
            self._break_off()
            raise EngineError(
                f"version {version} came without {len(missing)} of the model's parameters "
                f"({missing[0]} and others): the engine would sample with old ones."
            )
        # A commit without weights leaves half of an earlier update where it was.
        self._is_broken = self._is_broken and not self.life.received

    def _after_commit(self) -> None:
        """Give vLLM what was held back; and again what sampled nothing yet, whose old salt would
        let it find keys and values of the old weights."""
        if self._is_broken:
            self.life.problem = BROKEN
        self._num_updates += 1
        self.core.forget_cache(retract=False)
        for flight in list(self.life.in_flight.values()):
            if len(flight.tokens) == flight.num_given:
                self._drop(flight)
            if flight.request.id not in self._keys:
                self._start(flight)

    def _free_memory(self) -> None:
        self.core.sleep()

    def _restore_memory(self) -> None:
        self.core.wake()

    def _shut_down(self) -> None:
        self.core.call("homeostat_close")
        self.core.close()

    def _step(self, until: float) -> None:
        if self.life.problem is not None:
            raise EngineError(f"{self.life.problem}.")
        self._num_steps += 1
        for emitted in self.core.step():
            flight = self._by_key.get(emitted.key)
            if flight is not None:
                self._take(flight, emitted)
            elif emitted.prompt_logps is not None:
                self._scored[emitted.key] = emitted

    def _take(self, flight: Flight, emitted: Emitted) -> None:
        if len(flight.tokens) == flight.num_given:
            self._num_shared += emitted.num_cached
            self._num_prompt += flight.num_given - emitted.num_cached
        for token, logp in zip(emitted.tokens, emitted.logps, strict=True):
            if not math.isfinite(logp):
                self._refuse_weights()
            self._num_new += 1
            whole_logp = math.nan if flight.is_cut else logp
            reason = flight.append(token, whole_logp, logp, version=self.life.version)
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
        """Drop all flights until other weights arrive: vLLM has sampled a meaningless token."""
        for flight in self.life.in_flight.values():
            self._drop(flight)
        super()._refuse_weights()

    def _cancel_update(self) -> None:
        self._break_off()

    def _break_off(self) -> None:
        """End an update that cannot be finished: nothing is sampled until another one is whole."""
        self.core.call("homeostat_finish")
        for flight in self.life.in_flight.values():
            self._drop(flight)
        self._is_broken = True
        self.life.break_off()

    @property
    def _salt(self) -> str:
        return f"update {self._num_updates}"

    def _new_key(self) -> str:
        self._num_keys += 1
        return str(self._num_keys)


def _stream(seed: int, request_id: str, num_begun: int) -> int:
    """The seed of vLLM's generator: 63 bits of a hash that is the same everywhere."""
    digest = hashlib.blake2b(f"{seed}/{request_id}/{num_begun}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
