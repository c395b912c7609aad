"""vLLM as an Engine, inside whatever process it is made in (host.py makes it in its own).

    submit -> Core.add -> step: tokens and log-probs -> Flight.append -> poll

The flights here are the truth; vLLM holds what is being computed. A request that goes on after an
abort, or after weights that were not numbers, is given to vLLM as a longer prompt.

Invariants: a request in flight is in vLLM, or held back until the next weights; it comes back
exactly once. No key or value of old weights reaches a request that began after them: what is
cached is salted with the number of the update, and dropped where nothing runs.

Noise: vLLM draws from a generator per request, seeded by (seed, id, tokens begun). What a request
samples does not depend on its company, but one that goes on from `begun` is another draw
(`resumes_exactly` is False). Where top-k or top-p cut the distribution, vLLM gives log-probs of
what was left: `engine_logp_T` is not known then, and NaN.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from homeostat.config.vllm import VllmEngineConfig
from homeostat.errors import EngineError
from homeostat.rollout.checks import require_servable
from homeostat.rollout.engine import Capabilities, EngineStats, Quiesce, Request
from homeostat.rollout.flight import Flight
from homeostat.rollout.vllm.core import MIN_TEMPERATURE, Core, Emitted
from homeostat.rollout.vllm.served import Served, require_served
from homeostat.sync.parcel import Parcel, TensorEntry, Transport, entries_checksum
from homeostat.types import Completion, FloatArray, StopReason, TokenRow


def capabilities(max_tokens: int) -> Capabilities:
    """Known without vLLM."""
    return Capabilities(
        name="vllm",
        shares_weights=False,
        batch_invariant=False,
        quiesce=frozenset(Quiesce),
        max_tokens=max_tokens,
        resumes_exactly=False,
        score_temperatures="one",
        cut_logp=False,
    )


class VllmEngine:
    """Implements `rollout.engine.Engine`. `folder` is an HF checkpoint; `max_tokens` is the most
    that a request may have in all; `decode` turns tokens into the text that stop strings are
    looked for in."""

    def __init__(
        self,
        folder: Path,
        config: VllmEngineConfig,
        *,
        served: Served,
        max_tokens: int,
        decode: Callable[[Sequence[int]], str] | None,
        policy_version: int = 0,
    ) -> None:
        self.config = config
        self.decode = decode
        self.capabilities = capabilities(max_tokens)
        dtype = served.dtype if config.dtype == "auto" else config.dtype
        self.core = Core(folder, config, dtype=dtype, max_tokens=max_tokens)
        require_served(self.core, served, folder)
        self._version = policy_version
        self._flying: dict[str, Flight] = {}
        # What vLLM knows a flight, or a row to be scored, by: a new name each time it is given one.
        self._keys: dict[str, str] = {}
        self._by_key: dict[str, Flight] = {}
        self._scored: dict[str, Emitted] = {}
        self._finished: list[Completion] = []
        self._received: list[TensorEntry] = []
        self._num_submitted = self._num_keys = self._num_updates = 0
        self._num_prompt = self._num_shared = self._num_new = self._num_steps = 0
        self._is_updating = self._is_asleep = self._is_closed = False
        self._is_connected = self._is_broken = False
        self._trouble: str | None = None

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def received_checksum(self) -> str | None:
        return entries_checksum(self._received) if self._received else None

    def submit(self, request: Request) -> None:
        self._require_settled("submit")
        max_tokens = self.capabilities.max_tokens
        assert max_tokens is not None, self.capabilities
        require_servable(
            request,
            vocabulary=self.core.vocabulary,
            max_tokens=max_tokens,
            can_decode=self.decode is not None,
        )
        if 0 < request.sampling.temperature < MIN_TEMPERATURE:
            raise EngineError(
                f"request {request.id!r} cannot be served: vLLM has no temperature between 0 and "
                f"{MIN_TEMPERATURE}, and rollout.temperature is {request.sampling.temperature}."
            )
        if request.id in self._flying:
            raise EngineError(f"a request with the id {request.id!r} is in the engine already.")
        self.wake()
        flight = Flight(
            request, number=self._num_submitted, now=time.monotonic(), decode=self.decode
        )
        self._num_submitted += 1
        reason = flight.given_end()
        if reason is not None:
            self._finished.append(flight.completion(reason))
            return
        self._flying[request.id] = flight
        self._give(flight)

    def poll(self, *, timeout_s: float) -> list[Completion]:
        self._require_settled("poll")
        if self._flying and self._is_asleep:
            raise EngineError(
                f"the vllm engine is asleep with {len(self._flying)} requests in flight: "
                "call wake() before poll()."
            )
        until = time.monotonic() + timeout_s
        while self._flying and not self._finished:
            self._step()
            if time.monotonic() >= until:
                break
        finished, self._finished = self._finished, []
        return finished

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        wanted = list(self._flying) if ids is None else [id for id in ids if id in self._flying]
        return [self._end(self._flying[id], StopReason.ABORTED) for id in dict.fromkeys(wanted)]

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        self._require_settled("score")
        if temperature != 1.0:
            raise EngineError(
                f"the vllm engine scores at temperature 1 only, and was asked for {temperature}."
            )
        self.wake()
        keys = [self._give_row(row) for row in rows]
        while not all(key is None or key in self._scored for key in keys):
            self._step()
        return [self._weighted(row, key) for row, key in zip(rows, keys, strict=True)]

    def connect(self, transport: Transport) -> None:
        self.core.call("homeostat_connect", transport)
        self._is_connected = True

    def begin_update(self, how: Quiesce) -> list[Completion]:
        self._require_settled("begin_update")
        self.wake()
        ended: list[Completion] = []
        if how is Quiesce.DRAIN:
            while self._flying:
                self._step()
        elif how is Quiesce.RETRACT:
            self.core.forget_cache(retract=True)
        elif how is Quiesce.ABORT:
            ended = self.abort()
        self._received.clear()
        self._is_updating = True
        return ended

    def apply(self, parcel: Parcel) -> None:
        if not (self._is_updating and self._is_connected):
            missing = "connect()" if self._is_updating else "begin_update()"
            raise EngineError(f"apply() without {missing}: the engine was not made ready.")
        is_whole = False
        try:
            self.core.call("homeostat_apply", parcel)
            is_whole = True
        finally:
            if not is_whole:
                self._break_off()
        self._received += parcel.entries

    def commit(self, version: int) -> None:
        if not self._is_updating:
            raise EngineError("commit() without begin_update(): the engine was not made ready.")
        if version < self._version:
            raise EngineError(
                f"commit() of version {version} after {self._version}: versions never go back."
            )
        missing = sorted(set().union(*self.core.call("homeostat_finish")))
        if missing:
            self._break_off()
            raise EngineError(
                f"version {version} came without {len(missing)} of the model's parameters "
                f"({missing[0]} and others): the engine would sample with old ones."
            )
        self._is_updating = False
        self._version = version
        if self._received or not self._is_broken:
            self._is_broken, self._trouble = False, None
        self._num_updates += 1
        self.core.forget_cache(retract=False)
        self._give_again()

    def sleep(self) -> None:
        if not (self._is_asleep or self._is_closed):
            self.core.sleep()
            self._is_asleep = True

    def wake(self) -> None:
        if self._is_closed:
            raise EngineError("the vllm engine is closed.")
        if self._is_asleep:
            self.core.wake()
            self._is_asleep = False

    def health(self) -> str | None:
        if self._is_closed:
            return "it is closed"
        if self._trouble is None:
            try:
                self.core.check_health()
            except (RuntimeError, TimeoutError, OSError) as error:
                self._trouble = f"vLLM's workers do not answer: {error}"
        return self._trouble

    def stats(self) -> EngineStats:
        has_cache = not (self._is_closed or self._is_asleep)
        return EngineStats(
            prompt_tokens=self._num_prompt,
            prompt_tokens_shared=self._num_shared,
            new_tokens=self._num_new,
            forward_passes=self._num_steps,
            preemptions=self.core.num_preempted,
            max_running=self.core.most_running,
            cache_bytes=sum(self.core.call("homeostat_cache_bytes")) if has_cache else 0,
        )

    def close(self) -> None:
        if not self._is_closed:
            self._finished.clear()
            self._flying.clear()
            self.core.call("homeostat_close")
            self.core.close()
            self._is_closed = True

    def _step(self) -> None:
        self._end_expired()
        if self._trouble is not None:
            raise EngineError(f"{self._trouble}.")
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
            reason = flight.append(token, whole_logp, logp, version=self._version)
            if reason is not None:
                self._finished.append(self._end(flight, reason))
                return

    def _give(self, flight: Flight) -> None:
        """To vLLM; what it has sampled already goes as part of the prompt."""
        if self._trouble is not None:
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

    def _give_again(self) -> None:
        """What was held back; and what sampled nothing yet, whose old salt would let it find keys
        and values of the old weights."""
        for flight in list(self._flying.values()):
            if len(flight.tokens) == flight.num_given:
                self._take_back(flight)
            if flight.request.id not in self._keys:
                self._give(flight)

    def _take_back(self, flight: Flight) -> None:
        key = self._keys.pop(flight.request.id, None)
        if key is not None:
            del self._by_key[key]
            self.core.abort([key])

    def _give_row(self, row: TokenRow) -> str | None:
        max_tokens = self.capabilities.max_tokens
        assert max_tokens is not None, self.capabilities
        if len(row) > max_tokens:
            raise EngineError(
                f"row {row.row_id} has {len(row)} tokens, more than the engine's {max_tokens}."
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

    def _end(self, flight: Flight, reason: StopReason) -> Completion:
        del self._flying[flight.request.id]
        self._take_back(flight)
        return flight.completion(reason)

    def _end_expired(self) -> None:
        now = time.monotonic()
        late = [f for f in self._flying.values() if f.expires is not None and f.expires <= now]
        self._finished += [self._end(flight, StopReason.DEADLINE) for flight in late]

    def _refuse_weights(self) -> NoReturn:
        """vLLM has taken a token that means nothing: all flights wait for other weights."""
        for flight in self._flying.values():
            self._take_back(flight)
        self._trouble = (
            f"the weights of version {self._version} give log-probs that are not finite, so that "
            "nothing can be sampled from them"
        )
        raise EngineError(
            f"{self._trouble}. Did an update go wrong? Go back to a checkpoint, and lower "
            "trainer.lr or trainer.max_grad_norm."
        )

    def _break_off(self) -> None:
        """An update that cannot be finished: nothing is sampled until another one is whole."""
        self.core.call("homeostat_finish")
        for flight in self._flying.values():
            self._take_back(flight)
        self._received.clear()
        self._is_updating = False
        self._is_broken = True
        self._trouble = "an update broke off: its weights are part old and part new"

    def _require_settled(self, verb: str) -> None:
        if self._is_closed:
            raise EngineError("the vllm engine is closed.")
        if self._is_updating:
            raise EngineError(f"{verb}() between begin_update() and commit(): weights may change.")

    @property
    def _salt(self) -> str:
        return f"update {self._num_updates}"

    def _new_key(self) -> str:
        self._num_keys += 1
        return str(self._num_keys)


def _stream(seed: int, request_id: str, num_begun: int) -> int:
    """What seeds vLLM's generator: 63 bits of a hash that is the same everywhere."""
    digest = hashlib.blake2b(f"{seed}/{request_id}/{num_begun}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
