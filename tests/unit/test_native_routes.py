"""The native engine returns the experts of every token it ran, however the token was computed.

The reference is a forward pass of the whole row as in training: its free choice where the weights
never changed, and its log-probs under the recorded experts where they did.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.moe import MOE_FAMILIES, moe_decoder

from homeostat.columns import dense
from homeostat.config.native import NativeEngineConfig
from homeostat.errors import EngineError
from homeostat.models.decoder import Decoder
from homeostat.models.float64 import reference_logprobs
from homeostat.models.routing import Routing
from homeostat.ops.attention import PackedLayout
from homeostat.ops.logprobs import token_logprobs
from homeostat.rollout.engine import Quiesce, Request, Sampling, generate
from homeostat.rollout.native.cache import token_bytes
from homeostat.rollout.native.cpu import prompts
from homeostat.rollout.native.engine import NativeEngine
from homeostat.rollout.native.memory import free_bytes
from homeostat.rollout.routes import experts_in, weights_in
from homeostat.types import Author, Completion, Segment, StopReason

CPU = torch.device("cpu")
DECODE = ("plain", "compact", "compiled")


def engine(model: Decoder, decode: str = "plain", **settings: Any) -> NativeEngine:
    in_rows = settings.pop("in_rows", None)
    return NativeEngine(
        model,
        NativeEngineConfig(decode=decode, **settings),
        device=CPU,
        max_tokens=160,
        decode=None,
        chunk_bytes=1 << 16,
        in_rows=in_rows,
        threads=1,
    )


def requests(*, lengths: tuple[int, ...] = (19, 3, 1), new: int = 9, samples: int = 3) -> list:
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, 97, length) for length in lengths]
    return [
        Request(f"{p}/{s}", tokens_T, Sampling(new + s), 1, session_key=f"{p}", routed_experts=True)
        for p, tokens_T in enumerate(drawn)
        for s in range(samples)
    ]


def routes_of(request: Request, completion: Completion) -> np.ndarray:
    """[T, L, K] of prompt and completion."""
    columns = [completion.prompt_columns, *(s.columns for s in completion.segments)]
    return np.concatenate([dense(one["routed_experts"]) for one in columns])


def weights_of(completion: Completion) -> np.ndarray:
    """[T, L, K] of prompt and completion."""
    columns = [completion.prompt_columns, *(s.columns for s in completion.segments)]
    return np.concatenate([dense(one["routed_weights"]) for one in columns])


def trained(
    model: Decoder, request: Request, completion: Completion, routing: Routing
) -> np.ndarray:
    """The log-probs of the completion in a forward pass of the whole row, as in training."""
    tokens_N = torch.from_numpy(np.concatenate([request.tokens_T, completion.tokens_T]))
    layout = PackedLayout.of([len(tokens_N)], CPU)
    with torch.no_grad():
        hidden_ND = model.hidden(tokens_N, torch.arange(len(tokens_N)), layout, routing=routing)
        start = len(request.tokens_T)
        logp = token_logprobs(
            hidden_ND[start - 1 : -1],
            model.output_weight(),
            tokens_N[start:],
            temperature=1.0,
            chunk_bytes=1 << 16,
        )
    return logp.numpy()


def free_routes(model: Decoder, request: Request, completion: Completion) -> np.ndarray:
    routing = Routing(records=True)
    trained(model, request, completion, routing)
    return routing.recorded().numpy()


def replayed(routes_TLK: np.ndarray, weights_TLK: np.ndarray | None = None) -> Routing:
    is_last_T = torch.arange(len(routes_TLK)) == len(routes_TLK) - 1
    weights = None if weights_TLK is None else torch.from_numpy(weights_TLK)
    return Routing(torch.from_numpy(routes_TLK.astype(np.int64)), is_last_T, weights_NLK=weights)


def check_free(model: Decoder, wanted: list[Request], found: list[Completion]) -> None:
    """What came back is what the trainer's forward chooses, and nothing for the last token."""
    for request, completion in zip(wanted, found, strict=True):
        routes_TLK = routes_of(request, completion)
        np.testing.assert_array_equal(
            routes_TLK[:-1], free_routes(model, request, completion)[:-1], request.id
        )
        assert not routes_TLK[-1].any()


def change(model: Decoder) -> None:
    """Other weights at the same addresses, whose routers choose other experts."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.mul_(1 + 0.5 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def compiled_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts go through the compiled step on any processor."""
    monkeypatch.setattr(prompts, "MIN_PANEL", 1)


@pytest.mark.usefixtures("compiled_prompts")
@pytest.mark.parametrize("family", MOE_FAMILIES)
@pytest.mark.parametrize("decode", DECODE)
def test_every_token_that_was_run_comes_back_with_its_experts(family: str, decode: str) -> None:
    model, wanted = moe_decoder(family), requests()
    # Prompts in pieces, more samples than places, so that prompts are forked and computed again.
    found = generate(
        engine(model, decode, prefill_tokens=7, max_concurrency=4), wanted, timeout_s=60
    )
    check_free(model, wanted, found)
    assert found[0].prompt_columns["routed_experts"].dtype == np.uint8


@pytest.mark.usefixtures("compiled_prompts")
@pytest.mark.parametrize("family", ["qwen3_moe", "dots1"])
@pytest.mark.parametrize("decode", DECODE)
def test_the_weights_of_experts_come_back_if_they_are_asked_for(family: str, decode: str) -> None:
    """Against float64: its log-probs with the recorded experts and weights are the engine's."""
    model = moe_decoder(family)
    both = requests(lengths=(19, 3), samples=2)
    wanted = [replace(one, routed_weights=number < 3) for number, one in enumerate(both)]
    found = generate(
        engine(model, decode, prefill_tokens=7, max_concurrency=4), wanted, timeout_s=60
    )
    check_free(model, wanted, found)
    named = dict(model.named_parameters())
    for request, completion in zip(wanted[:3], found, strict=False):
        routing = Routing(records=True)
        trained(model, request, completion, routing)
        weights_TLK = weights_of(completion)
        assert weights_TLK.dtype == np.float32
        own_TLK = routing.recorded_weights().numpy()
        np.testing.assert_allclose(weights_TLK[:-1], own_TLK[:-1], rtol=1e-4, atol=1e-5)
        assert not weights_TLK[-1].any()
        tokens_T = np.concatenate([request.tokens_T, completion.tokens_T])
        routes = {"routes_TLK": routes_of(request, completion), "shares_TLK": weights_TLK}
        logp_T = reference_logprobs(model.config, named, tokens_T, **routes)
        new_T = logp_T[len(request.tokens_T) - 1 :]
        np.testing.assert_allclose(completion.engine_logp_T, new_T, rtol=1e-4, atol=2e-5)
        routes["shares_TLK"] = weights_TLK * 1.1
        other_T = reference_logprobs(model.config, named, tokens_T, **routes)
        assert np.abs(other_T - logp_T).max() > 1e-3
    assert "routed_weights" not in found[3].prompt_columns


def test_more_than_256_experts_come_in_two_bytes() -> None:
    model = moe_decoder("qwen3_moe", num_experts=300, moe_intermediate_size=8)
    wanted = requests(samples=1)
    for decode in ("plain", "compiled"):
        found = generate(engine(model, decode), wanted, timeout_s=60)
        check_free(model, wanted, found)
        routes_TLK = routes_of(wanted[0], found[0])
        assert routes_TLK.dtype == np.int16
        assert routes_TLK.max() > 255


def test_a_prompt_is_shared_with_its_experts_but_not_with_those_who_ask_for_none() -> None:
    model, wanted = moe_decoder("qwen3_moe"), requests(lengths=(19,), samples=4)
    made = engine(model)
    check_free(model, wanted, generate(made, wanted, timeout_s=60))
    assert made.stats().prompt_tokens_shared == 3 * 19
    mixed = [replace(one, routed_experts=number % 2 == 1) for number, one in enumerate(wanted)]
    made = engine(model)
    found = generate(made, mixed, timeout_s=60)
    check_free(model, mixed[1::2], found[1::2])
    assert not found[0].columns
    assert not found[0].prompt_columns
    assert made.stats().prompt_tokens == 2 * 19


def test_a_kept_cache_is_taken_over_with_its_experts_or_not_at_all() -> None:
    model = moe_decoder("dots1")
    made = engine(model)
    (first,) = requests(lengths=(19,), samples=1)
    first = replace(first, keep_cache=True)

    def next_turn(given: Request, completion: Completion) -> Request:
        tokens_T = np.concatenate([given.tokens_T, completion.tokens_T, np.array([5, 6])])
        return replace(given, id=f"{given.id}+", tokens_T=tokens_T, routed_experts=True)

    for asks, num_shared in ((True, 19 + 9 - 1), (False, 0)):
        made.sleep()
        before = made.stats().prompt_tokens_shared
        given = replace(first, routed_experts=asks)
        (completion,) = generate(made, [given], timeout_s=60)
        second = next_turn(given, completion)
        check_free(model, [second], generate(made, [second], timeout_s=60))
        assert made.stats().prompt_tokens_shared - before == num_shared


@pytest.mark.parametrize(("decode", "weighed"), [("plain", False), ("compiled", True)])
def test_new_weights_compute_a_cache_again_with_the_routes_that_were_recorded(
    decode: str, weighed: bool
) -> None:
    model, wanted = moe_decoder("qwen3_moe"), requests(lengths=(19, 3), new=24, samples=2)
    wanted = [replace(request, routed_weights=weighed) for request in wanted]
    made = engine(model, decode)
    for request in wanted:
        made.submit(request)
    made.poll(timeout_s=0.0)
    while min(len(s.tokens) - s.num_given for s in made.life.in_flight.values()) < 8:
        made.poll(timeout_s=0.0)
    made.begin_update(Quiesce.RETRACT)
    num_old = {id: len(s.tokens) for id, s in made.life.in_flight.items()}
    old = {id: s.routes.first(num_old[id] - 1).copy() for id, s in made.life.in_flight.items()}
    change(model)
    made.commit(1)
    found: list[Completion] = []
    while len(found) < len(wanted):
        found += made.poll(timeout_s=60)
    assert made.stats().prompt_tokens_shared >= 2 * (19 + 3)
    by_id = {request.id: request for request in wanted}
    num_changed = 0
    for completion in found:
        request, segment = by_id[completion.request_id], completion.segments[-1]
        assert [one.policy_version for one in completion.segments] == [0, 1]
        routes_TLK = routes_of(request, completion)
        own_TLK, num_kept = old[request.id], num_old[request.id] - 1
        np.testing.assert_array_equal(routes_TLK[:num_kept], experts_in(own_TLK))
        weights_TLK = weights_of(completion) if weighed else None
        if weights_TLK is not None:
            np.testing.assert_array_equal(weights_TLK[:num_kept], weights_in(own_TLK))
        logp_T = trained(model, request, completion, replayed(routes_TLK, weights_TLK))
        new_T = logp_T[-len(segment.tokens_T) :]
        np.testing.assert_allclose(segment.engine_logp_T, new_T, rtol=1e-4, atol=2e-5)
        free_TLK = free_routes(model, request, completion)
        num_changed += (free_TLK[:num_kept] != experts_in(own_TLK)).sum()
    # The new weights would have chosen otherwise: the test tells replayed and free apart.
    assert num_changed > 100


def test_a_cache_without_weights_serves_nobody_who_asks_for_them() -> None:
    model, made = moe_decoder("dots1"), engine(moe_decoder("dots1"))
    (first,) = requests(lengths=(19,), samples=1)
    for kept, asks, num_shared in ((True, False, 18), (False, True, 0), (True, True, 18)):
        made.sleep()
        before = made.stats().prompt_tokens_shared
        given = replace(first, keep_cache=True, routed_weights=kept)
        generate(made, [given], timeout_s=60)
        again = replace(first, id="again", routed_weights=asks)
        check_free(model, [again], generate(made, [again], timeout_s=60))
        assert made.stats().prompt_tokens_shared - before == num_shared, (kept, asks)


def test_scarce_memory_changes_no_expert() -> None:
    model, wanted = moe_decoder("qwen3_moe"), requests(lengths=(19, 30), new=30)
    share = 110 * token_bytes(model.config, torch.float32) / free_bytes(CPU)
    tight = engine(model, in_rows=False, memory_share=share)
    check_free(model, wanted, generate(tight, wanted, timeout_s=60))
    assert tight.stats().preemptions > 0


def test_tokens_sampled_over_an_update_in_place_keep_the_experts_of_their_version() -> None:
    model, (request,) = moe_decoder("mixtral"), requests(lengths=(9,), new=12, samples=1)
    made = engine(model)
    made.submit(request)
    for _ in range(5):
        made.poll(timeout_s=0.0)
    (sequence,) = made.life.in_flight.values()
    old = sequence.routes.first(len(sequence.tokens) - 1).copy()
    made.begin_update(Quiesce.IN_PLACE)
    change(model)
    made.commit(1)
    (completion,) = made.poll(timeout_s=60)
    routes_TLK = routes_of(request, completion)
    np.testing.assert_array_equal(routes_TLK[: len(old)], old)
    assert [len(s.columns["routed_experts"]) for s in completion.segments] == [
        len(s.tokens_T) for s in completion.segments
    ]
    assert len(completion.segments) == 2


@pytest.mark.parametrize("decode", ["plain", "compiled"])
def test_an_aborted_request_resumes_with_the_experts_that_it_had(decode: str) -> None:
    model, (request,) = moe_decoder("qwen3_moe"), requests(lengths=(9,), new=20, samples=1)
    made = engine(model, decode)
    (whole,) = generate(made, [request], timeout_s=60)
    made.submit(request)
    for _ in range(9):
        made.poll(timeout_s=0.0)
    (partial,) = made.abort()
    assert partial.stop_reason is StopReason.ABORTED
    assert 1 < len(partial) < 20
    again = replace(request, begun=partial.segments, prompt_columns=partial.prompt_columns)
    (resumed,) = generate(made, [again], timeout_s=60)
    assert resumed.tokens_T.tolist() == whole.tokens_T.tolist()
    np.testing.assert_array_equal(routes_of(request, resumed), routes_of(request, whole))
    # Given other experts, it computes with those.
    other = {"routed_experts": (dense(partial.prompt_columns["routed_experts"]) + 1) % 8}
    (resumed,) = generate(made, [replace(again, prompt_columns=other)], timeout_s=60)
    routes_TLK = routes_of(request, resumed)
    np.testing.assert_array_equal(routes_TLK[:9], other["routed_experts"])
    logp_T = trained(model, request, resumed, replayed(routes_TLK))
    new_T = resumed.segments[-1].engine_logp_T
    np.testing.assert_allclose(new_T, logp_T[-len(new_T) :], rtol=1e-4, atol=2e-5)


def test_tokens_of_a_tool_get_their_experts_when_they_are_run() -> None:
    model, (request,) = moe_decoder("dots1"), requests(lengths=(9,), new=6, samples=1)
    (turn,) = generate(engine(model), [request], timeout_s=60)
    said = Segment(np.array([7, 8, 9]), np.full(3, np.nan, np.float32), 0, author=Author.TOOL)
    sampling = replace(request.sampling, max_new_tokens=12)
    again = replace(
        request,
        sampling=sampling,
        begun=(*turn.segments, said),
        prompt_columns=turn.prompt_columns,
    )
    (found,) = generate(engine(model), [again], timeout_s=60)
    assert [len(s.tokens_T) for s in found.segments] == [6, 3, 6]
    check_free(model, [again], [found])


def test_what_cannot_be_known_is_refused() -> None:
    (request,) = requests(lengths=(9,), samples=1)
    dense_model = moe_decoder("qwen3_moe", mlp_only_layers=[0, 1])
    with pytest.raises(EngineError, match="the model has no experts"):
        engine(dense_model).submit(request)
    model = moe_decoder("qwen3_moe")
    (whole,) = generate(engine(model), [request], timeout_s=60)
    begun = (replace(whole.segments[0], columns={}),)
    sampling = replace(request.sampling, max_new_tokens=20)
    longer = replace(request, sampling=sampling)
    with pytest.raises(EngineError, match="that it begins with are unknown"):
        engine(model).submit(replace(longer, begun=begun))
    with pytest.raises(EngineError, match="weights of experts, and those of the tokens"):
        engine(model).submit(
            replace(
                longer,
                begun=whole.segments,
                routed_weights=True,
                prompt_columns=whole.prompt_columns,
            )
        )
    with pytest.raises(EngineError, match="experts of its 9 prompt tokens"):
        engine(model).submit(replace(longer, begun=whole.segments))
    short = {"routed_experts": whole.prompt_columns["routed_experts"][:8]}
    with pytest.raises(EngineError, match="it has 8"):
        engine(model).submit(replace(longer, begun=whole.segments, prompt_columns=short))
    other = moe_decoder("qwen3_moe", num_experts_per_tok=2)
    again = replace(longer, begun=whole.segments, prompt_columns=whole.prompt_columns)
    with pytest.raises(EngineError, match="2 layers with 3 slots each, and the model has 2 with 2"):
        engine(other).submit(again)
