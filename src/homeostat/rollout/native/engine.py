"""The engine in the trainer's process: continuous batching over the trainer's own weights.

    submit -> Scheduler.plan -> Runner (forward over the cache) -> draw -> Sequence.append -> poll

One step computes the next token of every running request, or the prompts of requests that join. A
request that ends leaves at once. Nothing is copied when weights change: the model is the trainer's
module, and between `begin_update` and `commit` nothing is computed.

Invariants: a request in flight is waiting or running, never both; a sequence that lost its cache is
computed again and resumes with the same tokens, because its noise is keyed by the request alone.
The order in which verbs are legal is in stepping.py, which all engines of this kind share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from homeostat.arrays import FloatArray
from homeostat.config.fp8 import Fp8Config
from homeostat.config.native import NativeEngineConfig
from homeostat.models.build import Model, vocab_size
from homeostat.models.decoder import Decoder
from homeostat.ops.linear import Numerics
from homeostat.precision.int4_packed import is_int4
from homeostat.rollout.engine import Capabilities, EngineStats, Quiesce, Request
from homeostat.rollout.native.fast import decode_path, make_bursts, require_length
from homeostat.rollout.native.fp8_model import Fp8Model
from homeostat.rollout.native.int4_model import Int4Model, int4_model
from homeostat.rollout.native.room import CacheRoom
from homeostat.rollout.native.runner import Runner
from homeostat.rollout.native.sampler import draw
from homeostat.rollout.native.scheduler import Plan, Scheduler
from homeostat.rollout.native.scoring import score_rows
from homeostat.rollout.native.sequence import Sequence
from homeostat.rollout.native.serving import Serving
from homeostat.rollout.routes import require_shape
from homeostat.rollout.stepping import SteppingEngine
from homeostat.types import POLICY_ID, TokenRow

if TYPE_CHECKING:
    from homeostat.rollout.native.bursts import Bursts


def native_capabilities(
    *, shares_weights: bool, numerics: Numerics, max_tokens: int, has_experts: bool
) -> Capabilities:
    """Return what the engine can do. It can be called before the engine exists."""
    return Capabilities(
        name="native",
        shares_weights=shares_weights,
        batch_invariant=numerics == "invariant",
        quiesce=frozenset(Quiesce),
        max_tokens=max_tokens,
        routed_experts=has_experts,
        routed_weights=has_experts,
        kept_ids=True,
    )


class NativeEngine(SteppingEngine[Sequence]):
    """Samples with the trainer's own module: the native decoder, or a model of transformers.

    `max_tokens` limits the tokens of a request in all. `decode` turns tokens into text, in which
    stop strings are searched. `in_rows` sets the layout of the cache (cache.py), if it is given.
    With `bursts` several steps are decoded at a time, on a CPU by so many `threads`.
    `fp8`: which linear maps are served in FP8, from which version on.
    """

    def __init__(
        self,
        model: Model,
        config: NativeEngineConfig,
        *,
        device: torch.device,
        max_tokens: int,
        decode: Callable[[Items[int]], str] | None,
        chunk_bytes: int,
        policy_id: str = POLICY_ID,
        policy_version: int = 0,
        in_rows: bool | None = None,
        threads: int | None = None,
        fp8: Fp8Config | None = None,
    ) -> None:
        super().__init__(
            native_capabilities(
                shares_weights=True,
                numerics=model.numerics,
                max_tokens=max_tokens,
                has_experts=model.moe is not None,
            ),
            vocabulary=vocab_size(model),
            decode=decode,
            policy_id=policy_id,
            policy_version=policy_version,
        )
        self.config = config
        self.device = device
        self.chunk_bytes = chunk_bytes
        self.bursts: Bursts | None = None
        self._fp8: Fp8Model | None = None
        self._int4: Int4Model | None = None
        path = "plain"
        if isinstance(model, Decoder):
            require_length(model.config, max_tokens)
            model = self._served(model, fp8, version=policy_version)
            path = self._choose_path(model, threads, is_fp8=fp8 is not None)
        else:
            model.prepare_sampling()
        self.model = model
        rows_pay = device.type == "cpu" and self.bursts is None
        self.in_rows = rows_pay if in_rows is None else in_rows
        self._serving = Serving(model)
        prompts = None if self.bursts is None else self.bursts.prompts
        self.runner = Runner(model, in_rows=self.in_rows, path=path, prompts=prompts)
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
        self._longest = self._num_new = 0

    def _choose_path(self, model: Decoder, threads: int | None, *, is_fp8: bool) -> str:
        """Return the decode path, and make its burst decoder if it has one."""
        how = {"device": self.device, "is_fp8": is_fp8}
        kinds = {"numerics": model.numerics, "is_int4": is_int4(model)}
        path = decode_path(model.config, self.config, **kinds, **how)
        sizes = {"threads": threads, "max_tokens": self.max_tokens}
        self.bursts = make_bursts(model, self.config, path, **sizes, **how)
        return path

    def _served(self, model: Decoder, fp8: Fp8Config | None, *, version: int) -> Decoder:
        """Return the model in the engine's precision, over the same parameters."""
        if fp8 is not None:
            self._fp8 = Fp8Model(model, fp8, device=self.device, version=version)
            model = self._fp8.model
        self._int4 = int4_model(model, self.config, device=self.device)
        return model if self._int4 is None else self._int4.model

    def score(self, rows: Items[TokenRow], *, temperature: float) -> list[FloatArray]:
        self.life.require_settled("score")
        with self._computing():
            return score_rows(
                self.model,
                rows,
                temperature=temperature,
                max_tokens=self.config.prefill_tokens,
                chunk_bytes=self.chunk_bytes,
                device=self.device,
            )

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

    def _flight(self, request: Request, *, number: int, now: float) -> Sequence:
        return Sequence(request, number=number, now=now, decode=self.decode)

    def _require_servable(self, request: Request) -> None:
        super()._require_servable(request)
        moe = self.model.moe
        if request.routed_experts and moe is not None:
            require_shape(request, num_layers=len(moe.layers), num_slots=moe.top_k)

    def _require_room(self, flight: Sequence) -> None:
        self.room.require(flight)

    def _start(self, flight: Sequence) -> None:
        longest = flight.max_length
        if flight.request.keep_cache and self.room.holds(self.max_tokens):
            # The next turn is longer: in a wider row it finds the tokens of this one.
            longest = self.max_tokens
        self._longest = max(self._longest, longest)
        self.scheduler.add(flight)

    def _drop(self, flight: Sequence) -> None:
        self.scheduler.remove(flight)

    def _computing(self) -> AbstractContextManager[None]:
        return self._serving(len(self.life.in_flight))

    def _retract(self) -> None:
        self.scheduler.retract_all()

    def _before_commit(self, version: int) -> None:
        self.scheduler.forget_prompts()
        self._rest()
        if self._fp8 is not None:
            self._fp8.weights_changed(version)
        if self._int4 is not None:
            self._int4.weights_changed()

    def _free_memory(self) -> None:
        self._free_cache()
        self._rest()
        in_flight = self.life.in_flight.values()
        self._longest = max((sequence.max_length for sequence in in_flight), default=0)

    def _restore_memory(self) -> None:
        self.room.measure()
        for sequence in self.life.in_flight.values():
            self.room.require(sequence)

    def _shut_down(self) -> None:
        self.abort()
        self._free_memory()

    def _step(self, until: float = math.inf) -> None:
        """Compute one plan or one burst."""
        self._fit_cache()
        is_whole = False
        try:
            if self.bursts is not None and self.bursts.is_flying:
                self._take_burst(self.bursts, may_go_on=self._may_go_on())
            else:
                self._plan_and_compute(until)
            is_whole = True
        finally:
            # After an interrupted step it is unknown what is cached, so all is computed again.
            if not is_whole:
                self._free_cache()

    def _plan_and_compute(self, until: float) -> None:
        plan = self.scheduler.plan()
        self._copy(plan)
        if self.bursts is not None and plan.decode:
            self.bursts.start(plan.decode, self.runner.cache_now(), self._reserve, until=until)
            return
        sequences, hidden_BD = self._compute(plan)
        if sequences:
            self._take(sequences, hidden_BD)

    def _may_go_on(self) -> bool:
        """Return whether no sequence ended since the burst was started, and none could join."""
        assert self.bursts is not None
        has_place = len(self.scheduler.running) < self.scheduler.max_running
        all_fly = all(self._is_flying(s) for s in self.bursts.sequences)
        return all_fly and not (self.scheduler.waiting and has_place)

    def _take_burst(self, bursts: Bursts, *, may_go_on: bool) -> None:
        taken = bursts.take(self.runner.cache_now(), self._reserve, may_go_on=may_go_on)
        live = [self._is_flying(sequence) for sequence in taken.sequences]
        if not np.isfinite(taken.logps_BS[live]).all():
            self._refuse_weights()
        sampled_BS = taken.logps_BS if taken.cut is None else taken.cut.sampled_logps_BS
        columns = [values.tolist() for values in (taken.tokens_BS, taken.logps_BS, sampled_BS)]
        rows = zip(taken.sequences, *columns, taken.made_B.tolist(), strict=True)
        for row, (sequence, tokens, logps, sampled, made) in enumerate(rows):
            if not self._is_flying(sequence):
                continue
            num_before = len(sequence.tokens)
            drawn = (tokens[:made], logps[:made], sampled[:made])
            reason = sequence.extend(*drawn, version=self.life.version)
            num_new = len(sequence.tokens) - num_before
            if sequence.kept is not None:
                assert taken.cut is not None, "the burst recorded no sets"
                taken.cut.give(sequence.kept, row, num_new)
            if sequence.routes is not None:
                assert taken.routes_BSLK is not None, "the burst recorded no experts"
                sequence.routes.put(sequence.cached, taken.routes_BSLK[row, :num_new])
            sequence.cached += num_new
            self._num_new += num_new
            if reason is not None:
                self._finish(sequence, reason)

    def _land(self) -> None:
        """Take the tokens that the device has sampled ahead of the host."""
        while self.bursts is not None and self.bursts.is_flying:
            self._take_burst(self.bursts, may_go_on=False)

    def _is_flying(self, sequence: Sequence) -> bool:
        return self.life.in_flight.get(sequence.request.id) is sequence

    def _reserve(self, sequences: list[Sequence], num_tokens: int) -> bool:
        """Make room and memory for `num_tokens` more tokens of each sequence, or return False."""
        if not self.scheduler.reserve_ahead(sequences, num_tokens):
            return False
        self.runner.copy([], extent=self.scheduler.pool.extent)
        return True

    def _compute(self, plan: Plan) -> tuple[list[Sequence], Tensor]:
        """Return the sequences that get a token now, and the hidden states that predict them."""
        if plan.decode:
            return plan.decode, self.runner.decode(plan.decode)
        sequences, parts = plan.forked, [self.scheduler.kept_hidden(s)[None] for s in plan.forked]
        if plan.chunks:
            sequences, hidden_BD = self.runner.prefill(plan.chunks)
            for sequence, hidden_D in zip(sequences, hidden_BD, strict=True):
                self.scheduler.keep_prompt(sequence, hidden_D)
            # Sequences waiting for these prompts join before a first token can end the holders.
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
        for row, (sequence, token, logp, sampled_logp) in enumerate(rows):
            if sequence.kept is not None:
                assert drawn.kept_B is not None, "nothing was cut"
                ids = drawn.kept_B[row]
                sequence.kept.require_bounded(len(ids))
                sequence.kept.put(ids, np.array([len(ids)], dtype=np.int32))
            reason = sequence.append(token, logp, sampled_logp, version=self.life.version)
            if reason is not None:
                self._finish(sequence, reason)

    def _fit_cache(self) -> None:
        """Make the cache if there is none, or a new one if its rows are too short."""
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
        """Free the cache. Running sequences are retracted, and computed again in the next one."""
        if self.bursts is not None:
            self.bursts.drop()
        self.scheduler.retract_all()
        self.runner.cache = None
