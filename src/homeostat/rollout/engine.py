"""The Engine protocol: an engine samples completions. tests/contract tests every engine against it.

    submit(Request) ... -> poll() -> Completion ...

An engine takes tokens and returns tokens; it decodes text only to find stop strings. The tokens
that a request samples depend only on the weights, its own tokens and (seed, id, position), never on
the order of submission (rollout/noise.py makes the noise). The last bits of its log-probs may
depend on the other requests in the batch, unless the engine is `batch_invariant`.

Weights change between `begin_update` and `commit`, with the engine quiesced. An engine that shares
the trainer's weights needs only these two calls. Any other engine first gets a transport by
`connect`, and receives the new weights by `apply`, bucket by bucket.
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

    `id` is unique among the requests in the engine. With `seed` it keys the noise, unless
    `noise_id` is given: with that a server can repeat an answer under another id. Requests with the
    same `session_key` and equal tokens share the computation of their prompt. `begun` holds the
    tokens that an aborted request had sampled already; the request continues from there.
    `deadline_s` counts from submission. With `keep_cache` the request's cache may be kept after it
    ends, so that the next request of the session does not recompute their common beginning. New
    weights, sleep and other requests that need the memory evict it.

    With `routed_experts` the completion has a column of that name, with the experts of every token
    that the engine computed. If `begun` has tokens that an engine sampled, the experts must be
    given: those of its tokens in its segments, and those of the prompt, from the aborted
    completion, in `prompt_columns`. With `routed_weights` the weights of those experts are returned
    as well.

    With `kept_ids` the completion has a column of that name, with the set of ids that each token
    was drawn from. A set of more than 1,024 ids (columns.MAX_KEPT_IDS) raises EngineError.
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
        """Return the name that, together with the seed, is the key of the sampling noise."""
        return self.id if self.noise_id is None else self.noise_id


class Quiesce(StrEnum):
    """The treatment of in-flight requests when the weights change.

    drain: they finish first. retract: they resume later, after their cache was recomputed with the
    new weights. in_place: they continue with their present cache. abort: they end unfinished.
    """

    DRAIN = "drain"
    RETRACT = "retract"
    IN_PLACE = "in_place"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities and limits of an engine, known before it starts.

    `resumes_exactly`: a request that resumes from `begun` samples what it would have sampled
    uninterrupted. `score_temperatures`: the temperatures that `score` supports. `cut_logp`:
    `engine_logp_T` is known if top-k or top-p cut the distribution; otherwise it is NaN there.
    `own_process`: it computes in another process, so that several engines can compute at the same
    time. `num_receivers`: how many of its processes receive weights. `routed_experts`: it can
    return the experts that tokens went to; `why_no_routes` says why it cannot. `routed_weights`: it
    can return their weights as well. `kept_ids`: it can return the sets that tokens were drawn
    from; `why_no_kept_ids` says why it cannot. `cuts`: the settings of `Sampling` by which it can
    cut a distribution; `combines_cuts`: also several of them at once. `sleep_frees_cache`: the
    cache is not in memory while it sleeps.
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
    """Counts since the engine was created. The training loop takes differences."""

    prompt_tokens: int = 0
    prompt_tokens_shared: int = 0
    new_tokens: int = 0
    forward_passes: int = 0
    preemptions: int = 0
    max_running: int = 0
    cache_bytes: int = 0
    # Seconds spent on preparing steps: compiling kernels and capturing graphs.
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
        """Queue a request. Raises EngineError, with the reason, if it can never be served."""
        ...

    def poll(self, *, timeout_s: float) -> list[Completion]:
        """Return the completions that finished since the last call. Waits for at least one
        completion unless nothing is in flight, and returns [] when `timeout_s` passed first.
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
        """Receive some of the new weights. Raises SyncError if they differ from what was sent."""
        ...

    @property
    def received_checksum(self) -> str | None:
        """Checksum of the weights received since the last `begin_update`, computed as in the
        sender's manifest; None if weights are shared.
        """
        ...

    def commit(self, version: int, *, policy_id: str = POLICY_ID) -> None:
        """Sample with the new weights from now on. All of them must have been received."""
        ...

    def stage(self, bucket: Bucket) -> None:
        """Take in some weights of the next update while sampling continues: the commit of the next
        update puts them in place. Only an engine whose capabilities say `stages` can do this. May
        be called while another thread calls `poll`.
        """
        ...

    def cancel_update(self) -> None:
        """Cancel an update that was begun: nothing is sampled until another update is complete.
        Without one, nothing happens.
        """
        ...

    def sleep(self) -> None:
        """Free the memory that only sampling needs. Idempotent."""
        ...

    def wake(self) -> None:
        """Undo `sleep`. Idempotent; `submit` and `begin_update` do this automatically."""
        ...

    def health(self) -> str | None:
        """Return None if the engine can serve, else a description of the problem."""
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

    Raises EngineError if none is finished for `timeout_s`.
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
