"""The engine in the trainer's process: continuous batching over the trainer's own weights.

    submit -> Scheduler.plan -> Runner (forward over the cache) -> draw -> Sequence.append -> poll

One step computes the next token of every running request, or the prompts of those that join; a
request that ends leaves at once. Nothing is copied when weights change: the model is the trainer's
module, and between `begin_update` and `commit` nothing is computed.

Invariants: a request in flight is waiting or running, never both; it comes back exactly once, from
`poll`, `abort` or `begin_update`; a sequence that lost its cache is computed again and goes on to
the same tokens, for its noise is its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch
from torch import Tensor

from homeostat.config.rollout import NativeEngineConfig
from homeostat.errors import EngineError, PolicyNotFiniteError
from homeostat.models.decoder import Decoder
from homeostat.rollout.checks import require_servable
from homeostat.rollout.engine import Capabilities, EngineStats, Quiesce, Request
from homeostat.rollout.native.fast import decoding_way, make_bursts
from homeostat.rollout.native.room import CacheRoom
from homeostat.rollout.native.runner import Runner
from homeostat.rollout.native.sampler import draw
from homeostat.rollout.native.scheduler import Plan, Scheduler
from homeostat.rollout.native.scoring import score_rows
from homeostat.rollout.native.sequence import Sequence
from homeostat.rollout.native.serving import Serving
from homeostat.types import Completion, FloatArray, StopReason, TokenRow

if TYPE_CHECKING:
    from homeostat.rollout.native.bursts import Bursts
    from homeostat.sync.parcel import Parcel, Transport


class NativeEngine:
    """Implements `rollout.engine.Engine`.

    `max_tokens` is the most that a request may have in all; `decode` turns tokens into the text
    that stop strings are looked for in. `in_rows` is how the cache is laid out (cache.py), where
    it is said. With `bursts` several steps are decoded at a time, on a CPU by so many `threads`.
    """

    def __init__(
        self,
        model: Decoder,
        config: NativeEngineConfig,
        *,
        device: torch.device,
        max_tokens: int,
        decode: Callable[[Items[int]], str] | None,
        chunk_bytes: int,
        policy_version: int = 0,
        in_rows: bool | None = None,
        threads: int | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.device = device
        self.decode = decode
        self.chunk_bytes = chunk_bytes
        way = decoding_way(model.config, config, numerics=model.numerics, device=device)
        self.bursts = make_bursts(
            model, config, way, device=device, max_tokens=max_tokens, threads=threads
        )
        rows_pay = device.type == "cpu" and self.bursts is None
        self.in_rows = rows_pay if in_rows is None else in_rows
        self.capabilities = Capabilities(
            name="native",
            shares_weights=True,
            batch_invariant=model.numerics == "invariant",
            quiesce=frozenset(Quiesce),
            max_tokens=max_tokens,
        )
        self._serving = Serving(model)
        prompts = self.bursts.prompts if self.bursts is not None else None
        self.runner = Runner(model, in_rows=self.in_rows, way=way, prompts=prompts)
        self.scheduler = Scheduler(
            max_running=config.max_concurrency,
            prefill_tokens=config.prefill_tokens,
            in_rows=self.in_rows,
        )
        self.room = CacheRoom(
            model,
            config,
            device=device,
            max_tokens=max_tokens,
            in_rows=self.in_rows,
            spare_blocks=0 if self.bursts is None else self.bursts.spare_blocks,
        )
        self._version = policy_version
        self._flying: dict[str, Sequence] = {}
        self._finished: list[Completion] = []
        self._longest = 0
        self._num_submitted = 0
        self._num_new = 0
        self._next_expiry = math.inf
        self._is_updating = self._is_asleep = self._is_closed = False
        self._trouble: str | None = None

    @property
    def policy_version(self) -> int:
        return self._version

    def submit(self, request: Request) -> None:
        self._require_settled("submit")
        max_tokens = self.capabilities.max_tokens
        assert max_tokens is not None, self.capabilities
        require_servable(
            request,
            vocabulary=self.model.config.vocab_size,
            max_tokens=max_tokens,
            can_decode=self.decode is not None,
        )
        if request.id in self._flying:
            raise EngineError(f"a request with the id {request.id!r} is in the engine already.")
        self.wake()
        sequence = Sequence(
            request, number=self._num_submitted, now=time.monotonic(), decode=self.decode
        )
        self.room.require(sequence)
        self._num_submitted += 1
        reason = sequence.given_end()
        if reason is not None:
            self._finished.append(sequence.completion(reason))
            return
        self._flying[request.id] = sequence
        self._longest = max(self._longest, sequence.max_length)
        if sequence.expires is not None:
            self._next_expiry = min(self._next_expiry, sequence.expires)
        self.scheduler.add(sequence)

    def poll(self, *, timeout_s: float) -> list[Completion]:
        self._require_settled("poll")
        if self._flying and self._is_asleep:
            raise EngineError(
                f"the native engine is asleep with {len(self._flying)} requests in flight: "
                "call wake() before poll()."
            )
        until = time.monotonic() + timeout_s
        with self._serving(len(self._flying)):
            while self._flying and not self._finished:
                self._step(until)
                if time.monotonic() >= until:
                    break
        finished, self._finished = self._finished, []
        return finished

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        self._land()
        wanted = list(self._flying) if ids is None else [id for id in ids if id in self._flying]
        return [self._end(self._flying[id], StopReason.ABORTED) for id in dict.fromkeys(wanted)]

    def score(self, rows: Items[TokenRow], *, temperature: float) -> list[FloatArray]:
        self._require_settled("score")
        with self._serving(len(self._flying)):
            return score_rows(
                self.model,
                rows,
                temperature=temperature,
                max_tokens=self.config.prefill_tokens,
                chunk_bytes=self.chunk_bytes,
                device=self.device,
            )

    def begin_update(self, how: Quiesce) -> list[Completion]:
        self._require_settled("begin_update")
        ended: list[Completion] = []
        self._land()
        if how is Quiesce.DRAIN:
            self.wake()
            with self._serving(len(self._flying)):
                while self._flying:
                    self._step()
        elif how is Quiesce.RETRACT:
            self.scheduler.retract_all()
        elif how is Quiesce.ABORT:
            ended = self.abort()
        self._is_updating = True
        return ended

    def connect(self, transport: Transport) -> None:
        raise EngineError("the native engine shares the trainer's weights: it receives none.")

    def apply(self, parcel: Parcel) -> None:
        raise EngineError("the native engine shares the trainer's weights: it receives none.")

    @property
    def received_checksum(self) -> str | None:
        return None

    def commit(self, version: int) -> None:
        if not self._is_updating:
            raise EngineError("commit() without begin_update(): the engine was not made ready.")
        if version < self._version:
            raise EngineError(
                f"commit() of version {version} after {self._version}: versions never go back."
            )
        self.scheduler.forget_prompts()
        self._rest()
        self._version = version
        self._is_updating = False
        self._trouble = None

    def sleep(self) -> None:
        self._land()
        self._free_cache()
        self._rest()
        self._longest = max((s.max_length for s in self._flying.values()), default=0)
        self._is_asleep = True

    def wake(self) -> None:
        if self._is_closed:
            raise EngineError("the native engine is closed.")
        if self._is_asleep:
            self.room.measure()
            for sequence in self._flying.values():
                self.room.require(sequence)
            self._is_asleep = False

    def health(self) -> str | None:
        return "it is closed" if self._is_closed else self._trouble

    def stats(self) -> EngineStats:
        cache = self.runner.cache
        return EngineStats(
            prompt_tokens=self.runner.num_prefilled,
            prompt_tokens_shared=self.scheduler.num_shared,
            new_tokens=self._num_new,
            forward_passes=self.runner.num_forwards + (self.bursts.num_steps if self.bursts else 0),
            preemptions=self.scheduler.num_preempted,
            max_running=self.scheduler.most_running,
            cache_bytes=0 if cache is None else cache.num_bytes,
            warmup_s=self.bursts.warmup_s if self.bursts else 0.0,
        )

    def close(self) -> None:
        self.abort()
        self._finished.clear()
        self.sleep()
        self._is_closed = True

    def _step(self, until: float = math.inf) -> None:
        """One plan, or one burst: a step at least, and no more than there is time for."""
        self._end_expired()
        if not self._flying:
            return
        self._fit_cache()
        is_whole = False
        try:
            if self.bursts is not None and self.bursts.is_flying:
                self._take_burst(self.bursts, may_go_on=self._may_go_on())
            else:
                self._plan_and_compute(until)
            is_whole = True
        finally:
            # After half a step nobody knows what is cached: all of it is computed again.
            if not is_whole:
                self._free_cache()

    def _plan_and_compute(self, until: float) -> None:
        plan = self.scheduler.plan()
        self._copy(plan)
        if self.bursts is not None and plan.decode and not any(s.is_cut for s in plan.decode):
            self.bursts.start(plan.decode, self.runner.cache_now(), self._reserve, until=until)
            return
        sequences, hidden_BD = self._compute(plan)
        if sequences:
            self._take(sequences, hidden_BD)

    def _may_go_on(self) -> bool:
        """Nobody ended since the burst was sent, and nobody could join it."""
        assert self.bursts is not None
        has_place = len(self.scheduler.running) < self.scheduler.max_running
        all_fly = all(self._is_flying(s) for s in self.bursts.sequences)
        return all_fly and not (self.scheduler.waiting and has_place)

    def _take_burst(self, bursts: Bursts, *, may_go_on: bool) -> None:
        taken = bursts.take(self.runner.cache_now(), self._reserve, may_go_on=may_go_on)
        live = [self._is_flying(sequence) for sequence in taken.sequences]
        if not np.isfinite(taken.logps_BS[live]).all():
            self._refuse_weights()
        columns = (taken.tokens_BS.tolist(), taken.logps_BS.tolist(), taken.made_B.tolist())
        for sequence, tokens, logps, made in zip(taken.sequences, *columns, strict=True):
            if not self._is_flying(sequence):
                continue
            num_before = len(sequence.tokens)
            reason = sequence.extend(tokens[:made], logps[:made], version=self._version)
            num_new = len(sequence.tokens) - num_before
            sequence.cached += num_new
            self._num_new += num_new
            if reason is not None:
                self._finished.append(self._end(sequence, reason))

    def _land(self) -> None:
        """Takes what the device has drawn ahead of the host."""
        while self.bursts is not None and self.bursts.is_flying:
            self._take_burst(self.bursts, may_go_on=False)

    def _is_flying(self, sequence: Sequence) -> bool:
        return self._flying.get(sequence.request.id) is sequence

    def _reserve(self, sequences: list[Sequence], num_tokens: int) -> bool:
        """Room for `num_tokens` tokens more of each, memory included."""
        if not self.scheduler.reserve_ahead(sequences, num_tokens):
            return False
        self.runner.copy([], extent=self.scheduler.pool.extent)
        return True

    def _compute(self, plan: Plan) -> tuple[list[Sequence], Tensor]:
        """The sequences that get a token now, and the hidden state that predicts each one's."""
        if plan.decode:
            return plan.decode, self.runner.decode(plan.decode)
        sequences, parts = plan.forked, [self.scheduler.kept_hidden(s)[None] for s in plan.forked]
        if plan.chunks:
            sequences, hidden_BD = self.runner.prefill(plan.chunks)
            for sequence, hidden_D in zip(sequences, hidden_BD, strict=True):
                self.scheduler.keep_prompt(sequence, hidden_D)
            # Who waited for these prompts joins before a first token can end their holders.
            joined = self.scheduler.admit()
            self._copy(joined)
            parts = [hidden_BD, *(self.scheduler.kept_hidden(s)[None] for s in joined.forked)]
            sequences = sequences + joined.forked
        return sequences, torch.cat(parts)

    def _copy(self, plan: Plan) -> None:
        self.runner.copy(plan.copies, extent=self.scheduler.pool.extent)

    def _take(self, sequences: list[Sequence], hidden_BD: Tensor) -> None:
        drawn = draw(self.model, hidden_BD, sequences, chunk_bytes=self.chunk_bytes)
        if not np.isfinite(drawn.engine_logp_B).all():
            self._refuse_weights()
        self._num_new += len(sequences)
        columns = (drawn.tokens_B, drawn.engine_logp_B, drawn.sampled_logp_B)
        rows = zip(sequences, *(column.tolist() for column in columns), strict=True)
        for sequence, token, logp, sampled_logp in rows:
            reason = sequence.append(token, logp, sampled_logp, version=self._version)
            if reason is not None:
                self._finished.append(self._end(sequence, reason))

    def _end(self, sequence: Sequence, reason: StopReason) -> Completion:
        del self._flying[sequence.request.id]
        self.scheduler.remove(sequence)
        return sequence.completion(reason)

    def _end_expired(self) -> None:
        now = time.monotonic()
        if now < self._next_expiry:
            return
        late = [s for s in self._flying.values() if s.expires is not None and s.expires <= now]
        self._finished += [self._end(sequence, StopReason.DEADLINE) for sequence in late]
        left = (s.expires for s in self._flying.values() if s.expires is not None)
        self._next_expiry = min(left, default=math.inf)

    def _refuse_weights(self) -> NoReturn:
        self._trouble = (
            f"the weights of version {self._version} give log-probs that are not finite, so that "
            "nothing can be sampled from them"
        )
        raise PolicyNotFiniteError(
            f"{self._trouble}. Did an update go wrong? Go back to a checkpoint, and lower "
            "trainer.lr or trainer.max_grad_norm."
        )

    def _require_settled(self, verb: str) -> None:
        if self._is_closed:
            raise EngineError("the native engine is closed.")
        if self._is_updating:
            raise EngineError(f"{verb}() between begin_update() and commit(): weights may change.")

    def _fit_cache(self) -> None:
        """Makes the cache where there is none, and anew where a row of it is too short."""
        cache = self.runner.cache
        if cache is not None and self.room.fits(cache, self._longest):
            return
        self._free_cache()
        pool, self.runner.cache = self.room.make(self._longest)
        self.scheduler.refit(pool, block_tokens=self.runner.cache.block_tokens)

    def _rest(self) -> None:
        self.runner.rest()
        if self.bursts is not None:
            self.bursts.rest()

    def _free_cache(self) -> None:
        """What runs is retracted, and computed again when there is a cache."""
        if self.bursts is not None:
            self.bursts.drop()
        self.scheduler.retract_all()
        self.runner.cache = None
