"""SGLang as an Engine, in the process that creates it (host.py creates it in a separate one).

SGLang may be a few tokens ahead of the flights. A request that resumes after an abort, a sleep or
new weights continues with the noise that it would have had.

Invariant: weights change while nothing runs, or while SGLang is paused and all tokens of the old
ones have been taken in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from homeostat.config.ranks import LOOPBACK
from homeostat.config.sglang import SglangEngineConfig
from homeostat.rollout.engine import Capabilities, EngineStats, Quiesce
from homeostat.rollout.flight import Flight
from homeostat.rollout.served import Served
from homeostat.rollout.sglang.core import Core
from homeostat.rollout.vendor import Emitted, VendorEngine, hashed_seed
from homeostat.sync.bucket import Bucket, Receiver, Transport
from homeostat.types import POLICY_ID, Completion

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


class SglangEngine(VendorEngine[Core]):
    """Samples with SGLang. `folder` is an HF checkpoint; `max_tokens` is the most that a request
    may have in all; `decode` turns tokens into the text that stop strings are looked for in."""

    vendor = "SGLang"

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
        core = Core(
            folder,
            config,
            device=device,
            dtype=served.dtype if config.dtype == "auto" else config.dtype,
            max_tokens=max_tokens,
            vocabulary=served.vocabulary,
            host=host,
        )
        super().__init__(
            core,
            sglang_capabilities(config, device=device, max_tokens=max_tokens),
            folder=folder,
            served=served,
            decode=decode,
            policy_id=policy_id,
            policy_version=policy_version,
        )
        self._receiver: Receiver | None = None
        self._most_running = 0
        self._is_paused = False

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

    def _seed(self, flight: Flight) -> int:
        return hashed_seed(f"{flight.request.seed}/{flight.request.noise_name}")

    def _start(self, flight: Flight) -> None:
        super()._start(flight)
        running = min(len(self._by_key), self.config.max_concurrency)
        self._most_running = max(self._most_running, running)

    def _emitted(self, until: float) -> Sequence[Emitted]:
        found = self.core.step(until)
        self._num_steps += bool(found)
        return found

    def _load(self, bucket: Bucket) -> None:
        assert self._receiver is not None
        # Copies: SGLang's processes read them after the sender may have overwritten the bucket.
        self.core.load([(name, x.clone()) for name, x in self._receiver.unpack(bucket)])

    def _end_loading(self) -> None:
        self.core.finish_loading()
        self._end_pause()

    def _before_commit(self, version: int) -> None:
        self.core.finish_loading()
        super()._before_commit(version)

    def _forget_old_weights(self) -> None:
        self._end_pause()
        self.core.forget_cache()

    def _end_pause(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.core.resume()

    def _retract(self) -> None:
        self._drop_all()

    def _free_memory(self) -> None:
        self._drop_all()
        self.core.settle()
        # SGLang may still hold the last batch, and keep its cache: nothing finds it under this.
        self._change_salt()
        self.core.sleep()

    def _restore_memory(self) -> None:
        self.core.wake()
        for flight in self.life.in_flight.values():
            self._start(flight)

    def _shut_down(self) -> None:
        self._hang_up()
        self.core.close()

    def _hang_up(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
