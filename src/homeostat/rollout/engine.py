"""The Engine protocol: what samples completions. tests/contract holds every engine to it.

    submit(Request) ... -> poll() -> Completion ...

Tokens go in and tokens come out; an engine never sees text but to find stop strings. What a request
samples depends on the weights, its tokens and (seed, id, position) alone, never on the order of
submission (the noise is rollout/noise.py's); the last bits of its log-probs may depend on what else
was in the batch, unless the engine is `batch_invariant`.

Weights change between `begin_update` and `commit`, with the engine quiesced. An engine that shares
the trainer's weights needs no more than that; any other is given a transport by `connect` before,
and takes the new weights in by `apply`, bucket by bucket.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol

from homeostat.arrays import FloatArray, IntArray
from homeostat.columns import Columns
from homeostat.config.engine import CUTS
from homeostat.errors import EngineError
from homeostat.types import POLICY_ID, Completion, Segment, TokenRow

if TYPE_CHECKING:
    from homeostat.sync.bucket import Bucket, Transport


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings by which tokens are sampled.

    Temperature 0 takes the likeliest token; log-probs are then computed at temperature 1. `top_k`,
    `top_p` and `min_p` cut the distribution, in this order, as ops/cut.py defines it.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    @property
    def cuts(self) -> list[str]:
        """Return the settings that leave a part of the vocabulary out."""
        if self.temperature == 0:
            return []
        has = (self.top_k is not None, self.top_p < 1.0, self.min_p > 0.0)
        return [name for name, is_set in zip(CUTS, has, strict=True) if is_set]

    @property
    def is_cut(self) -> bool:
        """Return whether tokens may be drawn from a part of the vocabulary."""
        return bool(self.cuts)


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample.

    `id` is unique among the requests in the engine and, with `seed`, keys the noise, unless
    `noise_id` does, so that a server can repeat an answer under another id. Requests with
    the same `session_key` and equal tokens share the computation of their prompt. `begun` holds
    the tokens that an aborted request had sampled already: it continues from there. `deadline_s`
    counts from submission. With `keep_cache` the request's cache may outlive it, so that the next
    request of the session need not compute the tokens again that both begin with; new weights,
    sleep and other requests that need the room evict it.

    With `routed_experts` the experts of every token that the engine ran come back in the column of
    that name. If `begun` has tokens of an engine, their experts must be known: those in its
    segments and, in `prompt_columns`, those that the aborted completion brought of its prompt.
    With `routed_weights` the weights of those experts come back as well.

    With `kept_ids` the set that each token was drawn from comes back in the column of that name.
    A set of more than 1,024 ids (columns.MAX_KEPT_IDS) raises EngineError.
    """

    id: str
    tokens_T: IntArray
    sampling: Sampling
    seed: int
    session_key: str | None = None
    deadline_s: float | None = None
    begun: tuple[Segment, ...] = ()
    policy_id: str = POLICY_ID
    keep_cache: bool = False
    routed_experts: bool = False
    prompt_columns: Columns = field(default_factory=dict)
    routed_weights: bool = False
    kept_ids: bool = False
    noise_id: str | None = None

    @property
    def noise_name(self) -> str:
        """Return what keys the noise besides the seed."""
        return self.id if self.noise_id is None else self.noise_id


class Quiesce(StrEnum):
    """The treatment of in-flight requests when the weights change.

    drain: they finish first. retract: they resume later, after the new weights have recomputed
    their cache. in_place: they continue with the cache they have. abort: they end, partial.
    """

    DRAIN = "drain"
    RETRACT = "retract"
    IN_PLACE = "in_place"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities and limits of an engine, known before it starts.

    `resumes_exactly`: a request that resumes from `begun` samples what it would have sampled
    uninterrupted. `score_temperatures`: what `score` can be asked for. `cut_logp`: `engine_logp_T`
    is known where top-k or top-p cut the distribution; where not, it is NaN there. `own_process`:
    it computes in another process, so that several can be waited for at the same time.
    `num_receivers`: how many of its processes receive weights. `routed_experts`: it can return
    the experts that tokens went to; `why_no_routes` says why it cannot. `routed_weights`: it can
    return their weights as well. `kept_ids`: it can return the sets that tokens were drawn from;
    `why_no_kept_ids` says why it cannot. `cuts`: the settings of `Sampling` by which it can cut a
    distribution; `combines_cuts`: also several of them at once. `sleep_frees_cache`: the cache is
    not in memory while it sleeps.
    """

    name: str
    shares_weights: bool
    batch_invariant: bool
    quiesce: frozenset[Quiesce]
    max_tokens: int | None
    resumes_exactly: bool = True
    score_temperatures: Literal["any", "one"] = "any"
    cut_logp: bool = True
    own_process: bool = False
    num_receivers: int = 1
    stages: bool = False
    routed_experts: bool = False
    why_no_routes: str = "the model has no experts"
    routed_weights: bool = False
    kept_ids: bool = False
    why_no_kept_ids: str = "the engine does not return them"
    cuts: frozenset[str] = frozenset(CUTS)
    combines_cuts: bool = True
    sleep_frees_cache: bool = True


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine was made; the loop takes differences."""

    prompt_tokens: int = 0
    prompt_tokens_shared: int = 0
    new_tokens: int = 0
    forward_passes: int = 0
    preemptions: int = 0
    max_running: int = 0
    cache_bytes: int = 0
    # Seconds spent on making steps ready: kernels compiled, graphs captured.
    warmup_s: float = 0.0


class Engine(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def policy_id(self) -> str:
        """The policy that the engine serves; requests and weights of another one are refused."""
        ...

    @property
    def policy_version(self) -> int:
        """The version of the weights that tokens are sampled with now."""
        ...

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError where it can never be served, and says why."""
        ...

    def poll(self, *, timeout_s: float) -> list[Completion]:
        """Return what finished since the last call. Waits for at least one completion unless
        nothing is in flight, and returns [] when `timeout_s` passed first.
        """
        ...

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        """End requests, all of them by default. Returns what they had sampled, as ABORTED."""
        ...

    def score(self, rows: Sequence[TokenRow], *, temperature: float) -> list[FloatArray]:
        """Return, per row, the log-prob of each token of weight > 0, in order."""
        ...

    def connect(self, transport: Transport) -> None:
        """Make ready to receive weights by this transport, in place of one before it. An engine
        that shares the trainer's refuses."""
        ...

    def begin_update(self, how: Quiesce, *, policy_id: str = POLICY_ID) -> list[Completion]:
        """Quiesce the engine for new weights of its policy, and wake it if it sleeps. Returns the
        completions that ended because of it."""
        ...

    def apply(self, bucket: Bucket) -> None:
        """Take in some of the new weights. Raises SyncError where they are not what was sent."""
        ...

    @property
    def received_checksum(self) -> str | None:
        """Checksum of what was received since the last `begin_update`, as in the sender's manifest;
        None where weights are shared."""
        ...

    def commit(self, version: int, *, policy_id: str = POLICY_ID) -> None:
        """Sample with the new weights, which are in place, from now on."""
        ...

    def stage(self, bucket: Bucket) -> None:
        """Take in some weights of the next update while sampling continues: the commit of the next
        update puts them in place. Only an engine whose capabilities say `stages` can do this. May
        be called beside a `poll` in another thread."""
        ...

    def cancel_update(self) -> None:
        """Give up an update that was begun: nothing is sampled until another one is whole. Without
        one, nothing happens."""
        ...

    def sleep(self) -> None:
        """Free what sampling needs and training does not. Idempotent."""
        ...

    def wake(self) -> None:
        """Undo `sleep`. Idempotent; `submit` and `begin_update` do it by themselves."""
        ...

    def health(self) -> str | None:
        """Return None when the engine can serve, else what is wrong."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


def generate(engine: Engine, requests: Sequence[Request], *, timeout_s: float) -> list[Completion]:
    """Return all completions, in the order of the requests."""
    found = {one.request_id: one for one in stream(engine, requests, timeout_s=timeout_s)}
    return [found[request.id] for request in requests]


def stream(
    engine: Engine, requests: Sequence[Request], *, timeout_s: float
) -> Iterator[Completion]:
    """Submit all requests, and yield the completions as they are finished.

    Raises EngineError where none is finished for `timeout_s`.
    """
    for request in requests:
        engine.submit(request)
    waiting = {request.id: request for request in requests}
    while waiting:
        started = time.monotonic()
        finished = engine.poll(timeout_s=timeout_s)
        if not finished:
            sick = engine.health()
            if sick is None:
                engine.abort()
            why = sick or (
                f"waited {time.monotonic() - started:.0f} s; where it needs longer, "
                "raise engine.stall_s"
            )
            raise EngineError(
                f"the {engine.capabilities.name} engine finished none of {len(waiting)} requests "
                f"({next(iter(waiting))} and others): {why}."
            )
        for completion in finished:
            del waiting[completion.request_id]
            yield completion
