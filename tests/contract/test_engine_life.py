"""What every Engine must hold over its life: deadlines, aborts, updates, sleep, refusals, close."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.contract.engines import (
    MAX_TOKENS,
    VOCABULARY,
    Backend,
    assert_close,
    change,
    finish,
    load,
    prompts,
    publish,
    requests,
    run,
    shared_model,
    stage,
    tokens_of,
    trainer_logp,
)

from homeostat.errors import EngineError
from homeostat.rollout.engine import Quiesce, Request, Sampling
from homeostat.sync.bucket import Bucket
from homeostat.types import Completion, Segment, StopReason, TokenRow


def test_deadlines(build: Backend) -> None:
    engine = build(shared_model(), max_concurrency=1)
    tokens = prompts((8, 9))
    late = Request("late", tokens[0], Sampling(100), seed=0, deadline_s=0.03)
    waiting = Request("waiting", tokens[1], Sampling(100), seed=0, deadline_s=1e-6)
    patient = Request("patient", tokens[1], Sampling(4), seed=0, deadline_s=600.0)
    found = run(engine, [late, waiting, patient])
    assert [completion.stop_reason for completion in found[1:]] == [
        StopReason.DEADLINE,
        StopReason.LENGTH,
    ]
    assert found[1].segments == ()
    if found[0].stop_reason is StopReason.DEADLINE:
        assert len(found[0]) < 100
    else:
        assert len(found[0]) == 100


def test_poll_keeps_to_its_time(build: Backend) -> None:
    engine = build(shared_model())
    assert engine.poll(timeout_s=60) == []
    engine.submit(Request("a", prompts((8,))[0], Sampling(50), seed=0))
    polls = 0
    while not (found := engine.poll(timeout_s=0.0)):
        polls += 1
    assert polls > 5
    assert len(found[0]) == 50
    assert engine.poll(timeout_s=60) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_aborted_request_goes_on_to_the_same_tokens(build: Backend, temperature: float) -> None:
    model = shared_model()
    wanted = requests(prompts((12, 5)), Sampling(24, temperature), samples=2)
    engine = build(model)
    whole = run(engine, wanted)
    for request in wanted:
        engine.submit(request)
    for _ in range(9):
        assert engine.poll(timeout_s=0.0) == []
    partial = {completion.request_id: completion for completion in engine.abort()}
    assert set(partial) == {request.id for request in wanted}
    assert engine.abort() == []
    assert engine.poll(timeout_s=60) == []
    for completion in partial.values():
        assert completion.stop_reason is StopReason.ABORTED
        assert 0 < len(completion) < 24
    resumed = [replace(request, begun=partial[request.id].segments) for request in wanted]
    is_exact = engine.capabilities.resumes_exactly or temperature == 0
    for request, found, uncut in zip(resumed, run(engine, resumed), whole, strict=True):
        num_kept = len(uncut) if is_exact else len(partial[request.id])
        assert found.tokens_T.tolist()[:num_kept] == uncut.tokens_T.tolist()[:num_kept]
        assert found.segments[0] is request.begun[0]
        assert (len(found), len(found.segments)) == (24, 2)
        assert_close(
            found.engine_logp_T,
            trainer_logp(model, request.tokens_T, found.tokens_T, temperature or 1.0),
        )


def test_abort_of_some_leaves_the_others(build: Backend) -> None:
    model = shared_model()
    wanted = requests(prompts((12,)), Sampling(10), samples=4)
    engine = build(model, max_concurrency=2)
    for request in wanted:
        engine.submit(request)
    engine.poll(timeout_s=0.0)
    ended = engine.abort(["0/0", "0/3", "unknown"])
    assert {completion.request_id for completion in ended} == {"0/0", "0/3"}
    assert next(c for c in ended if c.request_id == "0/3").segments == ()
    rest = finish(engine, wanted[1:3])
    assert tokens_of(rest) == tokens_of(run(build(model), wanted)[1:3])


def test_what_was_whole_already_comes_back_as_it_was(build: Backend) -> None:
    engine = build(shared_model())
    passes = engine.stats().forward_passes
    (prompt_T,) = prompts((6,))
    logp_T = np.zeros(3, dtype=np.float32)
    begun = (Segment(np.array([4, 9, 2]), logp_T, policy_version=0),)
    long = Request("long", prompt_T, Sampling(3), seed=0, begun=begun)
    ended = Request("ended", prompt_T, Sampling(9, stop_ids=frozenset({2})), seed=0, begun=begun)
    found = run(engine, [long, ended])
    assert [c.stop_reason for c in found] == [StopReason.LENGTH, StopReason.STOP]
    assert all(completion.segments == begun for completion in found)
    assert engine.stats().forward_passes == passes


@pytest.mark.parametrize("how", list(Quiesce))
def test_versions_across_an_update(build: Backend, how: Quiesce) -> None:
    model = load("qwen3")
    wanted = requests(prompts((12, 5)), Sampling(24), samples=2)
    engine = build(model, policy_version=3)
    assert how in engine.capabilities.quiesce
    old = engine.policy_version
    for request in wanted:
        engine.submit(request)
    for _ in range(9):
        engine.poll(timeout_s=0.0)
    ended = engine.begin_update(how)
    for verb in (lambda: engine.submit(wanted[0]), lambda: engine.poll(timeout_s=1)):
        with pytest.raises(EngineError, match="begin_update"):
            verb()
    change(model)
    publish(engine, model)
    engine.commit(old + 1)
    assert engine.policy_version == old + 1
    done = {completion.request_id: completion for completion in ended}
    while len(done) < len(wanted):
        done |= {completion.request_id: completion for completion in engine.poll(timeout_s=60)}
    found = [done[request.id] for request in wanted]
    versions = {tuple(segment.policy_version for segment in c.segments) for c in found}
    reasons = {completion.stop_reason for completion in found}
    if how is Quiesce.DRAIN:
        assert (ended, versions, reasons) == ([], {(old,)}, {StopReason.LENGTH})
    elif how is Quiesce.ABORT:
        assert (len(ended), versions, reasons) == (4, {(old,)}, {StopReason.ABORTED})
    else:
        assert (ended, versions, reasons) == ([], {(old, old + 1)}, {StopReason.LENGTH})
    if how is Quiesce.RETRACT:
        # As if the new weights had been given what the old ones wrote.
        for request, completion in zip(wanted, found, strict=True):
            written_T = np.concatenate([request.tokens_T, completion.segments[0].tokens_T])
            new = completion.segments[1]
            assert_close(new.engine_logp_T, trainer_logp(model, written_T, new.tokens_T, 1.0))
        if engine.capabilities.resumes_exactly:
            begun = [replace(r, begun=c.segments[:1]) for r, c in zip(wanted, found, strict=True)]
            assert tokens_of(run(build(model), begun)) == tokens_of(found)
    assert engine.health() is None


@pytest.mark.parametrize("how", [Quiesce.IN_PLACE, Quiesce.RETRACT])
def test_no_cache_of_old_weights_is_passed_on(build: Backend, how: Quiesce) -> None:
    """Neither to a request that waits for its turn, nor to one that comes after."""
    model = load("qwen3")
    # More than a block of any engine.
    wanted = requests(prompts((140,)), Sampling(16, temperature=0.0), samples=6)
    *before, new = wanted
    engine = build(model, max_concurrency=3)
    for request in before:
        engine.submit(request)
    since = engine.stats().new_tokens
    while engine.stats().new_tokens == since:
        engine.poll(timeout_s=0.0)
    engine.begin_update(how)
    change(model)
    publish(engine, model)
    engine.commit(engine.policy_version + 1)
    engine.submit(new)
    _, _, _, *later = finish(engine, wanted)
    assert tokens_of(later) == tokens_of(run(build(model), wanted[3:]))
    for completion in later:
        assert {segment.policy_version for segment in completion.segments} == {
            engine.policy_version
        }
        assert_close(
            completion.engine_logp_T,
            trainer_logp(model, new.tokens_T, completion.tokens_T, 1.0),
        )


@pytest.mark.parametrize("how", ["update", "sleep"])
def test_a_kept_cache_ends_with_its_weights_and_with_sleep(build: Backend, how: str) -> None:
    model = load("qwen3")
    engine = build(model)
    (prompt_T,) = prompts((40,))
    first = Request("a", prompt_T, Sampling(9, 0.0), 0, session_key="s", keep_cache=True)
    (answer,) = run(engine, [first])
    next_turn = replace(first, id="b", tokens_T=np.concatenate([prompt_T, answer.tokens_T]))
    computed = engine.stats().prompt_tokens
    if how == "update":
        engine.begin_update(Quiesce.DRAIN)
        change(model)
        publish(engine, model)
        engine.commit(engine.policy_version + 1)
    else:
        engine.sleep()
        assert (engine.stats().cache_bytes == 0) == engine.capabilities.sleep_frees_cache
    (found,) = run(engine, [next_turn])
    assert engine.stats().prompt_tokens - computed == 49
    wanted = trainer_logp(model, next_turn.tokens_T, found.tokens_T, 1.0)
    assert_close(found.engine_logp_T, wanted)


def test_versions_never_go_back(build: Backend) -> None:
    engine = build(shared_model(), policy_version=5)
    old = engine.policy_version
    with pytest.raises(EngineError, match="begin_update"):
        engine.commit(old + 1)
    engine.begin_update(Quiesce.DRAIN)
    with pytest.raises(EngineError, match="begin_update"):
        engine.begin_update(Quiesce.DRAIN)
    with pytest.raises(EngineError, match=f"version {old - 1} after {old}"):
        engine.commit(old - 1)
    engine.commit(old)
    engine.begin_update(Quiesce.DRAIN)
    engine.commit(old + 2)
    assert engine.policy_version == old + 2


def test_after_a_cancelled_update_another_one_is_served(build: Backend) -> None:
    model = load("qwen3")
    engine = build(model)
    engine.cancel_update()
    assert engine.health() is None, "without an update nothing happens"
    engine.begin_update(Quiesce.DRAIN)
    engine.cancel_update()
    if not engine.capabilities.shares_weights:
        assert "broke off" in (engine.health() or "")
    engine.begin_update(Quiesce.DRAIN)
    change(model)
    publish(engine, model)
    engine.commit(engine.policy_version + 1)
    assert engine.health() is None
    (prompt_T,) = prompts((9,))
    (found,) = run(engine, [Request("a", prompt_T, Sampling(6), seed=0)])
    wanted = trainer_logp(model, prompt_T, found.tokens_T, 1.0)
    assert_close(found.engine_logp_T, wanted)


def test_staged_weights_wait_for_the_commit(build: Backend) -> None:
    """What is in flight continues with the weights it has; the next request has the new ones."""
    model = load("qwen3")
    engine = build(model)
    if not engine.capabilities.stages:
        with pytest.raises(EngineError, match="commit"):
            engine.stage(Bucket((), 0))
        return
    (prompt_T,) = prompts((9,))
    request = Request("a", prompt_T, Sampling(24), seed=0)
    (wanted,) = run(engine, [request])
    engine.submit(replace(request, id="a"))
    engine.poll(timeout_s=0)
    change(model)
    stage(engine, model)
    (found,) = finish(engine, [request])
    assert tokens_of([found]) == tokens_of([wanted])
    assert np.array_equal(found.engine_logp_T, wanted.engine_logp_T)
    engine.begin_update(Quiesce.DRAIN)
    engine.commit(engine.policy_version + 1)
    assert engine.received_checksum is not None
    (later,) = run(engine, [replace(request, id="b")])
    assert_close(later.engine_logp_T, trainer_logp(model, prompt_T, later.tokens_T, 1.0))
    assert {segment.policy_version for segment in later.segments} == {engine.policy_version}


def test_weights_and_requests_of_another_policy_are_refused(build: Backend) -> None:
    engine = build(shared_model())
    old = engine.policy_version
    assert engine.policy_id == "policy"
    request = Request("a", np.array([1, 2, 3]), Sampling(4), seed=0)
    with pytest.raises(EngineError, match=r"the policy 'draft', and the \w+ engine"):
        engine.submit(replace(request, policy_id="draft"))
    with pytest.raises(EngineError, match="weights of the policy 'draft'"):
        engine.begin_update(Quiesce.DRAIN, policy_id="draft")
    # Nothing was begun by it.
    assert len(run(engine, [request])[0]) == 4
    engine.begin_update(Quiesce.DRAIN, policy_id="policy")
    with pytest.raises(EngineError, match="weights of the policy 'draft'"):
        engine.commit(old + 1, policy_id="draft")
    assert engine.policy_version == old
    engine.commit(old + 1, policy_id="policy")
    assert engine.policy_version == old + 1


def test_illegal_calls_have_the_same_errors_in_all_engines(build: Backend) -> None:
    engine = build(shared_model())
    request = Request("a", np.array([1, 2, 3]), Sampling(4), seed=0)
    row = TokenRow(0, np.array([1, 2, 3]), np.ones(3, dtype=np.float32))
    verbs: dict[str, Callable[[], object]] = {
        "submit": lambda: engine.submit(request),
        "poll": lambda: engine.poll(timeout_s=1),
        "score": lambda: engine.score([row], temperature=1.0),
        "begin_update": lambda: engine.begin_update(Quiesce.DRAIN),
    }
    with pytest.raises(EngineError, match=r"^commit\(\) without begin_update\(\): the engine was"):
        engine.commit(engine.policy_version)
    engine.begin_update(Quiesce.DRAIN)
    for verb, call in verbs.items():
        with pytest.raises(EngineError, match=rf"^{verb}\(\) between begin_update\(\) and commit"):
            call()
    engine.commit(engine.policy_version)
    engine.close()
    for call in (*verbs.values(), engine.wake):
        with pytest.raises(EngineError, match=r"^the (native|vllm|sglang) engine is closed\.$"):
            call()


def test_an_update_wakes_the_engine(build: Backend) -> None:
    engine = build(shared_model())
    wanted = requests(prompts((6,)), Sampling(8))
    whole = tokens_of(run(engine, wanted))
    engine.submit(wanted[0])
    engine.sleep()
    engine.begin_update(Quiesce.RETRACT)
    publish(engine, shared_model())
    engine.commit(engine.policy_version + 1)
    assert tokens_of(finish(engine, wanted)) == whole


@pytest.mark.parametrize("nap", ["sswws", "sw", "sws", "wsw", "ssw"])
def test_sleep_loses_nothing(build: Backend, nap: str) -> None:
    model = shared_model()
    wanted = requests(prompts((12, 5)), Sampling(16), samples=3)
    engine = build(model)
    whole = run(engine, wanted)
    for request in wanted[:-1]:
        engine.submit(request)
    for _ in range(5):
        engine.poll(timeout_s=0.0)
    assert engine.stats().cache_bytes > 0
    for letter in nap:
        (engine.sleep if letter == "s" else engine.wake)()
    if nap.endswith("s"):
        assert (engine.stats().cache_bytes == 0) == engine.capabilities.sleep_frees_cache
        with pytest.raises(EngineError, match="asleep"):
            engine.poll(timeout_s=1)
    engine.submit(wanted[-1])
    assert tokens_of(finish(engine, wanted)) == tokens_of(whole)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens_T": np.zeros(0, dtype=np.int64)}, "no tokens"),
        ({"tokens_T": np.array([3, VOCABULARY])}, "vocabulary of 97"),
        ({"tokens_T": np.array([-1])}, "vocabulary of 97"),
        (
            {"tokens_T": np.zeros(100, dtype=np.int64), "sampling": Sampling(MAX_TOKENS - 99)},
            "max_new_tokens",
        ),
        ({"sampling": Sampling(0)}, "max_new_tokens"),
        ({"sampling": Sampling(4, temperature=-1.0)}, "temperature"),
        ({"sampling": Sampling(4, temperature=float("nan"))}, "temperature"),
        ({"sampling": Sampling(4, top_p=0.0)}, "top_p"),
        ({"sampling": Sampling(4, top_k=0)}, "top_k"),
        ({"sampling": Sampling(4, stop_strings=("",))}, "rollout.stop"),
        ({"keep_cache": True}, "session_key"),
    ],
)
def test_what_cannot_be_served_is_refused(build: Backend, changes: dict, words: str) -> None:
    engine = build(shared_model())
    request = Request("a", np.array([1, 2, 3]), Sampling(4), seed=0)
    with pytest.raises(EngineError, match=words):
        engine.submit(replace(request, **changes))
    assert len(run(engine, [request])[0]) == 4


def test_an_id_is_taken_until_it_comes_back(build: Backend) -> None:
    engine = build(shared_model())
    request = Request("twice", np.array([1, 2, 3]), Sampling(4), seed=0)
    engine.submit(request)
    with pytest.raises(EngineError, match="'twice'"):
        engine.submit(request)
    (first,) = engine.poll(timeout_s=60)
    (second,) = run(engine, [request])
    assert first.tokens_T.tolist() == second.tokens_T.tolist()


def test_weights_that_are_not_numbers_are_refused_and_recovered_from(build: Backend) -> None:
    model = load("qwen2")
    wanted = requests(prompts((12, 5)), Sampling(8), samples=2)
    engine = build(model)
    whole = run(engine, wanted)
    norm = model.ours.model.norm.weight
    kept = norm.detach().clone()
    bad = engine.policy_version + 1
    engine.begin_update(Quiesce.DRAIN)
    with torch.no_grad():
        norm.fill_(float("nan"))
    publish(engine, model)
    engine.commit(bad)
    for _ in range(2):
        with pytest.raises(EngineError, match="not finite"):
            run(engine, wanted) if not engine.health() else engine.poll(timeout_s=60)
    assert f"version {bad}" in (engine.health() or "")
    engine.begin_update(Quiesce.RETRACT)
    with torch.no_grad():
        norm.copy_(kept)
    publish(engine, model)
    engine.commit(bad + 1)
    assert engine.health() is None
    assert tokens_of(finish(engine, wanted)) == tokens_of(whole)


def test_a_closed_engine_serves_nothing(build: Backend) -> None:
    engine = build(shared_model())
    engine.submit(Request("a", np.array([1, 2, 3]), Sampling(4), seed=0))
    engine.close()
    engine.close()
    assert engine.health() is not None
    assert engine.stats().cache_bytes == 0
    with pytest.raises(EngineError, match="closed"):
        engine.submit(Request("b", np.array([1, 2, 3]), Sampling(4), seed=0))


def test_the_model_is_left_as_it_was_found(build: Backend) -> None:
    build.require_ours("it has a model of its own")
    engine = build(shared_model())
    model = shared_model().ours
    request = Request("a", np.array([1, 2, 3]), Sampling(4), seed=0)
    row = TokenRow(0, np.array([1, 2, 3]), np.ones(3, dtype=np.float32))
    for training in (True, False):
        model.train(training)
        run(engine, [request])
        engine.score([row], temperature=1.0)
        assert all(module.training is training for module in model.modules())
    # A tensor made under inference_mode could never be trained through.
    assert not any(parameter.is_inference() for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("seed", range(6))
def test_no_request_is_lost_or_comes_twice(build: Backend, seed: int) -> None:
    """Random submissions, aborts, polls, naps and updates; then all tokens are as if alone."""
    rng = random.Random(seed)
    model = shared_model()
    engine = build(
        model, max_concurrency=rng.randint(1, 6), prefill_tokens=rng.choice([5, 20, 200])
    )
    tokens = prompts((3, 17, 30, 1), seed=seed)
    # In SGLang a greedy request changes which of the others' tokens a draw of noise belongs to.
    temperatures = [0.7, 1.0] if build.name == "sglang" else [0.0, 0.7, 1.0]
    asked: dict[str, Request] = {}
    found: dict[str, Completion] = {}

    def take(completions: list[Completion]) -> None:
        for completion in completions:
            assert completion.request_id in asked
            assert completion.request_id not in found
            found[completion.request_id] = completion

    def submit() -> None:
        group = rng.randrange(len(tokens))
        sampling = Sampling(rng.randint(1, 14), rng.choice(temperatures))
        key = rng.choice([None, f"group {group}"])
        request = Request(f"{len(asked)}", tokens[group], sampling, seed, session_key=key)
        asked[request.id] = request
        engine.submit(request)

    def update() -> None:
        take(engine.begin_update(rng.choice(list(Quiesce))))
        engine.commit(engine.policy_version + 1)

    def nap() -> None:
        engine.sleep()
        engine.wake()

    def abort() -> None:
        take(engine.abort(rng.sample(sorted(asked), min(len(asked), 2))))

    acts = [submit] * 6 + [lambda: take(engine.poll(timeout_s=0.0))] * 12 + [abort, nap, update]
    for _ in range(120):
        rng.choice(acts)()
    while len(found) < len(asked):
        take(engine.poll(timeout_s=60))
    assert engine.abort() == []
    assert engine.poll(timeout_s=0) == []
    alone_engine = build(model)
    for request in rng.sample(list(asked.values()), 8):
        (alone,) = run(alone_engine, [request])
        completion = found[request.id]
        assert completion.tokens_T.tolist() == alone.tokens_T.tolist()[: len(completion)]
        if completion.stop_reason is not StopReason.ABORTED:
            assert len(completion) == len(alone)
