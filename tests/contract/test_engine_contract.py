"""What every Engine must hold. A new backend is one more entry in ENGINES."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.tiny_models import FAMILIES, random_model, save

from homeostat.config.model import ModelConfig
from homeostat.config.rollout import NativeEngineConfig
from homeostat.errors import EngineError
from homeostat.models.build import load_model
from homeostat.models.decoder import Decoder
from homeostat.ops.attention import PackedLayout
from homeostat.ops.logprobs import token_logprobs
from homeostat.rollout.engine import Engine, Quiesce, Request, Sampling, generate
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion, Segment, StopReason, TokenRow

CPU = torch.device("cpu")
CHUNK_BYTES = 1 << 16
MAX_TOKENS = 160
VOCABULARY = 97
Build = Callable[..., Engine]


def decode(tokens: Sequence[int]) -> str:
    return "".join(f"{token:02d}" for token in tokens)


def native(model: Decoder, **changes: Any) -> Engine:
    config = {name: changes.pop(name) for name in list(changes) if name in _CONFIG_KEYS}
    place = {"device": CPU, "max_tokens": MAX_TOKENS, "chunk_bytes": CHUNK_BYTES, "decode": decode}
    return NativeEngine(model, NativeEngineConfig(**config), **{**place, **changes})


def native_in_blocks(model: Decoder, **changes: Any) -> Engine:
    return native(model, in_rows=False, **changes)


_CONFIG_KEYS = NativeEngineConfig.model_fields
ENGINES: dict[str, Build] = {"native": native, "native_in_blocks": native_in_blocks}


@pytest.fixture(params=sorted(ENGINES))
def build(request: pytest.FixtureRequest) -> Build:
    return ENGINES[request.param]


@dataclass(frozen=True)
class Model:
    """The same weights twice."""

    theirs: torch.nn.Module
    ours: Decoder


def load(family: str, seed: int = 0) -> Model:
    theirs = random_model({**FAMILIES[family], "vocab_size": VOCABULARY}, seed=seed)
    with TemporaryDirectory() as folder:
        ours = load_model(
            ModelConfig(path=str(save(theirs, Path(folder)))),
            None,
            dtype=torch.float32,
            device=CPU,
            seed=0,
            gradient_checkpointing=False,
        )
    assert isinstance(ours.module, Decoder)
    return Model(theirs, ours.module)


@cache
def shared_model(family: str = "qwen3") -> Model:
    """For tests that leave the weights alone."""
    return load(family)


def prompts(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length) for length in lengths]


def requests(
    tokens: Sequence[np.ndarray], sampling: Sampling, *, samples: int = 1, seed: int = 0
) -> list[Request]:
    return [
        Request(f"{p}/{s}", tokens_T, sampling, seed=seed, session_key=f"group {p}")
        for p, tokens_T in enumerate(tokens)
        for s in range(samples)
    ]


def run(engine: Engine, wanted: Sequence[Request]) -> list[Completion]:
    return generate(engine, wanted, timeout_s=60)


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens_T.tolist() for completion in completions]


def trainer_logp(
    model: Decoder, prompt_T: np.ndarray, answer_T: np.ndarray, temperature: float
) -> np.ndarray:
    """As the trainer computes it: one packed forward over prompt and answer."""
    tokens_N = torch.from_numpy(np.concatenate([prompt_T, answer_T]))
    layout = PackedLayout.of([len(tokens_N)], CPU)
    with torch.no_grad():
        hidden_ND = model.hidden(tokens_N, torch.arange(len(tokens_N)), layout)
        logp = token_logprobs(
            hidden_ND[len(prompt_T) - 1 : -1],
            model.output_weight(),
            tokens_N[len(prompt_T) :],
            temperature=temperature,
            chunk_bytes=CHUNK_BYTES,
            numerics=model.numerics,
        )
    return logp.numpy()


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - wanted).max() <= 2e-5 * (1 + np.abs(wanted).max())


@pytest.mark.parametrize("family", ["llama", "llama_tied", "llama_bias", "qwen2", "qwen3"])
def test_greedy_is_what_transformers_generates(build: Build, family: str) -> None:
    model = shared_model(family)
    tokens = prompts((1, 5, 5, 17, 40, 33))
    engine = build(model.ours)
    found = run(engine, requests(tokens, Sampling(24, temperature=0.0), samples=2))
    for index, prompt_T in enumerate(tokens):
        with torch.no_grad():
            wanted = model.theirs.generate(
                torch.from_numpy(prompt_T)[None],
                attention_mask=torch.ones(1, len(prompt_T), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=24,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt_T) :]
        for completion in found[2 * index : 2 * index + 2]:
            assert completion.tokens_T.tolist() == wanted.tolist()
            assert completion.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_log_probs_are_the_trainers(build: Build, temperature: float) -> None:
    model = shared_model().ours
    tokens = prompts((3, 19, 8))
    sampling = Sampling(30, temperature=temperature)
    for request in requests(tokens, sampling, samples=3):
        (completion,) = run(build(model), [request])
        wanted = trainer_logp(model, request.tokens_T, completion.tokens_T, temperature or 1.0)
        assert_close(completion.engine_logp_T, wanted)
        assert all(segment.sampled_logp_T is None for segment in completion.segments)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen2", "qwen3"])
def test_invariant_log_probs_are_the_trainers_to_the_bit(build: Build, family: str) -> None:
    fast = shared_model(family).ours
    model = Decoder(fast.config, kernel="sdpa", numerics="invariant")
    model.load_state_dict(fast.state_dict())
    engine = build(model, max_concurrency=7, prefill_tokens=50)
    assert engine.capabilities.batch_invariant
    tokens = prompts((3, 70, 8, 8))
    wanted = requests(tokens, Sampling(20), samples=3)
    wanted += [replace(r, id=f"cool {r.id}", sampling=Sampling(20, 0.6)) for r in wanted]
    found = run(engine, wanted)
    rows = []
    for request, completion in zip(wanted, found, strict=True):
        temperature = request.sampling.temperature
        whole_T = np.concatenate([request.tokens_T, completion.tokens_T])
        weights_T = (np.arange(len(whole_T)) >= len(request.tokens_T)).astype(np.float32)
        rows.append(TokenRow(len(rows), whole_T, weights_T))
        trainer_T = trainer_logp(model, request.tokens_T, completion.tokens_T, temperature)
        assert completion.engine_logp_T.tolist() == trainer_T.tolist()
    for completion, logp_T in zip(
        found[:12], engine.score(rows[:12], temperature=1.0), strict=True
    ):
        assert completion.engine_logp_T.tolist() == logp_T.tolist()


def test_score_is_the_trainers(build: Build) -> None:
    model = shared_model().ours
    rng = np.random.default_rng(1)
    rows = []
    for row_id, tokens_T in enumerate(prompts((9, 2, 30, 17, 1))):
        weights_T = (rng.random(len(tokens_T)) < 0.6).astype(np.float32)
        rows.append(TokenRow(row_id, tokens_T, weights_T))
    found = build(model, prefill_tokens=20).score(rows, temperature=0.7)
    for row, logp in zip(rows, found, strict=True):
        kept_T = row.weights_T[1:] > 0
        wanted = trainer_logp(model, row.tokens_T[:1], row.tokens_T[1:], 0.7)[kept_T]
        assert logp.shape == wanted.shape
        if len(wanted):
            assert_close(logp, wanted)
    assert build(model).score([], temperature=1.0) == []


def chi_square(counts_V: np.ndarray, share_V: np.ndarray) -> tuple[float, int]:
    """The statistic over bins of at least 5 expected, and its degrees of freedom."""
    expected_V = share_V * counts_V.sum()
    rare_V = expected_V < 5
    observed = np.append(counts_V[~rare_V], counts_V[rare_V].sum())
    expected = np.append(expected_V[~rare_V], max(expected_V[rare_V].sum(), 1e-9))
    return float(((observed - expected) ** 2 / expected).sum()), len(observed) - 1


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_softmax(build: Build, temperature: float) -> None:
    model = shared_model()
    (prompt_T,) = prompts((6,))
    with torch.no_grad():
        logits_V = model.theirs(torch.from_numpy(prompt_T)[None]).logits[0, -1].double()
    share_V = (logits_V / temperature).softmax(0).numpy()
    found = run(build(model.ours), requests([prompt_T], Sampling(1, temperature), samples=3000))
    drawn = np.concatenate([completion.tokens_T for completion in found])
    statistic, freedom = chi_square(np.bincount(drawn, minlength=VOCABULARY), share_V)
    assert freedom > 10
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)
    for completion in found[:50]:
        assert completion.engine_logp_T[0] == pytest.approx(
            np.log(share_V[completion.tokens_T[0]]), abs=1e-4
        )


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.8}])
def test_cut_distributions(build: Build, cut: dict) -> None:
    model = shared_model()
    (prompt_T,) = prompts((6,))
    with torch.no_grad():
        logits_V = model.theirs(torch.from_numpy(prompt_T)[None]).logits[0, -1].double()
    share_V = logits_V.softmax(0).numpy()
    order = np.argsort(-share_V)[: cut.get("top_k", VOCABULARY)]
    before = np.cumsum(share_V[order]) - share_V[order]
    order = order[before < cut.get("top_p", 1.0) * share_V[order].sum()]
    kept_V = np.zeros(VOCABULARY)
    kept_V[order] = share_V[order] / share_V[order].sum()
    plain = Request("plain", prompt_T, Sampling(1), seed=3)
    wanted = requests([prompt_T], Sampling(1, **cut), samples=1500)
    *found, whole = run(build(model.ours), [*wanted, plain])
    drawn = np.concatenate([completion.tokens_T for completion in found])
    assert set(drawn.tolist()) <= set(order.tolist())
    statistic, freedom = chi_square(np.bincount(drawn, minlength=VOCABULARY), kept_V)
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)
    for completion in found[:50]:
        (segment,), (token,) = completion.segments, completion.tokens_T
        assert segment.engine_logp_T[0] == pytest.approx(np.log(share_V[token]), abs=1e-4)
        assert segment.sampled_logp_T is not None
        assert segment.sampled_logp_T[0] == pytest.approx(np.log(kept_V[token]), abs=1e-4)
    assert whole.segments[0].sampled_logp_T is None


def test_a_sample_does_not_depend_on_its_company(build: Build) -> None:
    model = shared_model().ours
    crowd = requests(prompts((4, 21, 9, 30)), Sampling(20), samples=4)
    together = run(build(model), crowd)
    few_at_a_time = run(build(model, max_concurrency=3, prefill_tokens=16), list(reversed(crowd)))
    alone = [run(build(model), [request])[0] for request in crowd[::5]]
    assert tokens_of(together) == tokens_of(few_at_a_time[::-1])
    assert tokens_of(together)[::5] == tokens_of(alone)
    assert len({tuple(tokens) for tokens in tokens_of(together)}) == len(crowd)


def test_another_seed_or_id_is_another_sample(build: Build) -> None:
    model = shared_model().ours
    (prompt_T,) = prompts((7,))
    base = Request("a", prompt_T, Sampling(20), seed=0)
    others = [base, replace(base, seed=1), replace(base, id="b")]
    assert len({tuple(run(build(model), [request])[0].tokens_T) for request in others}) == 3


def test_a_groups_prompt_is_computed_once(build: Build) -> None:
    model = shared_model().ours
    tokens = prompts((13, 33))
    engine = build(model)
    found = run(engine, requests(tokens, Sampling(8, temperature=0.0), samples=6))
    assert engine.stats().prompt_tokens == 13 + 33
    assert engine.stats().prompt_tokens_shared == 5 * (13 + 33)
    assert engine.stats().new_tokens == 12 * 8
    assert engine.stats().max_running == 12
    # Different prompts under one key, or equal prompts under none, share nothing.
    engine = build(model)
    one_key = [
        Request(f"{p}", t, Sampling(8, 0.0), 0, session_key="k") for p, t in enumerate(tokens)
    ]
    no_key = [Request(f"n{n}", tokens[0], Sampling(8, 0.0), 0) for n in range(2)]
    again = run(engine, one_key + no_key)
    assert engine.stats().prompt_tokens_shared == 0
    assert tokens_of(again) == tokens_of([found[0], found[6], found[0], found[0]])


def test_a_group_larger_than_the_concurrency_still_shares(build: Build) -> None:
    engine = build(shared_model().ours, max_concurrency=3)
    wanted = requests(prompts((10,)), Sampling(6), samples=8)
    found = run(engine, wanted)
    assert engine.stats().max_running == 3
    assert engine.stats().prompt_tokens_shared > 0
    assert tokens_of(found) == tokens_of(run(build(shared_model().ours), wanted))


@pytest.mark.parametrize("prefill_tokens", [1, 7, 16, 50])
def test_a_long_prompt_in_pieces_is_the_same_prompt(build: Build, prefill_tokens: int) -> None:
    model = shared_model().ours
    wanted = requests(prompts((45, 3, 16)), Sampling(10), samples=2)
    found = run(build(model, prefill_tokens=prefill_tokens), wanted)
    for request, completion in zip(wanted, found, strict=True):
        assert_close(
            completion.engine_logp_T,
            trainer_logp(model, request.tokens_T, completion.tokens_T, 1.0),
        )


def test_stop_tokens_end_a_completion_and_stay_in_it(build: Build) -> None:
    model = shared_model().ours
    (prompt_T,) = prompts((8,))
    whole = run(build(model), [Request("a", prompt_T, Sampling(30), seed=0)])[0].tokens_T.tolist()
    stop = whole[11]
    first = whole.index(stop)
    sampling = Sampling(30, stop_ids=frozenset({stop}))
    (found,) = run(build(model), [Request("a", prompt_T, sampling, seed=0)])
    assert found.tokens_T.tolist() == whole[: first + 1]
    assert found.stop_reason is StopReason.STOP


@pytest.mark.parametrize("spread", [1, 2, 3])
def test_stop_strings_are_found_across_tokens(build: Build, spread: int) -> None:
    model = shared_model().ours
    (prompt_T,) = prompts((8,))
    sampling = Sampling(90)
    whole = run(build(model), [Request("a", prompt_T, sampling, seed=0)])[0].tokens_T.tolist()
    # From the middle of one token to the middle of the last.
    stop = decode(whole[80 : 80 + spread])[0 if spread == 1 else 1 :][: 2 * spread - 1 or 1]
    ends = [n for n in range(1, 91) if stop in decode(whole[:n])]
    sampling = replace(sampling, stop_strings=("no such text", stop))
    (found,) = run(build(model), [Request("a", prompt_T, sampling, seed=0)])
    assert found.tokens_T.tolist() == whole[: ends[0]]
    assert found.stop_reason is StopReason.STOP_STRING


def test_deadlines(build: Build) -> None:
    engine = build(shared_model().ours, max_concurrency=1)
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


def test_poll_keeps_to_its_time(build: Build) -> None:
    engine = build(shared_model().ours)
    assert engine.poll(timeout_s=60) == []
    engine.submit(Request("a", prompts((8,))[0], Sampling(50), seed=0))
    polls = 0
    while not (found := engine.poll(timeout_s=0.0)):
        polls += 1
    assert polls > 5
    assert len(found[0]) == 50
    assert engine.poll(timeout_s=60) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_aborted_request_goes_on_to_the_same_tokens(build: Build, temperature: float) -> None:
    model = shared_model().ours
    wanted = requests(prompts((12, 5)), Sampling(24, temperature), samples=2)
    whole = run(build(model), wanted)
    engine = build(model)
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
    for found, uncut in zip(run(engine, resumed), whole, strict=True):
        assert found.tokens_T.tolist() == uncut.tokens_T.tolist()
        assert_close(found.engine_logp_T, uncut.engine_logp_T)
        assert len(found.segments) == 2


def test_abort_of_some_leaves_the_others(build: Build) -> None:
    model = shared_model().ours
    wanted = requests(prompts((12,)), Sampling(10), samples=4)
    engine = build(model, max_concurrency=2)
    for request in wanted:
        engine.submit(request)
    engine.poll(timeout_s=0.0)
    ended = engine.abort(["0/0", "0/3", "unknown"])
    assert {completion.request_id for completion in ended} == {"0/0", "0/3"}
    assert next(c for c in ended if c.request_id == "0/3").segments == ()
    rest = [*engine.poll(timeout_s=60), *engine.poll(timeout_s=60)]
    rest.sort(key=lambda completion: completion.request_id)
    assert [completion.request_id for completion in rest] == ["0/1", "0/2"]
    assert tokens_of(rest) == tokens_of(run(build(model), wanted)[1:3])


def test_what_was_whole_already_comes_back_as_it_was(build: Build) -> None:
    engine = build(shared_model().ours)
    (prompt_T,) = prompts((6,))
    logp_T = np.zeros(3, dtype=np.float32)
    begun = (Segment(np.array([4, 9, 2]), logp_T, policy_version=0),)
    long = Request("long", prompt_T, Sampling(3), seed=0, begun=begun)
    ended = Request("ended", prompt_T, Sampling(9, stop_ids=frozenset({2})), seed=0, begun=begun)
    found = run(engine, [long, ended])
    assert [c.stop_reason for c in found] == [StopReason.LENGTH, StopReason.STOP]
    assert all(completion.segments == begun for completion in found)
    assert engine.stats().forward_passes == 0


def change(model: Decoder) -> None:
    """Other weights, at the same addresses."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("how", list(Quiesce))
def test_versions_across_an_update(build: Build, how: Quiesce) -> None:
    model = load("qwen3").ours
    wanted = requests(prompts((12, 5)), Sampling(24), samples=2)
    engine = build(model, policy_version=3)
    for request in wanted:
        engine.submit(request)
    for _ in range(9):
        engine.poll(timeout_s=0.0)
    ended = engine.begin_update(how)
    for verb in (lambda: engine.submit(wanted[0]), lambda: engine.poll(timeout_s=1)):
        with pytest.raises(EngineError, match="begin_update"):
            verb()
    change(model)
    engine.commit(4)
    assert engine.policy_version == 4
    done = {completion.request_id: completion for completion in ended}
    while len(done) < len(wanted):
        done |= {completion.request_id: completion for completion in engine.poll(timeout_s=60)}
    found = [done[request.id] for request in wanted]
    versions = {tuple(segment.policy_version for segment in c.segments) for c in found}
    reasons = {completion.stop_reason for completion in found}
    if how is Quiesce.DRAIN:
        assert (ended, versions, reasons) == ([], {(3,)}, {StopReason.LENGTH})
    elif how is Quiesce.ABORT:
        assert (len(ended), versions, reasons) == (4, {(3,)}, {StopReason.ABORTED})
    else:
        assert (ended, versions, reasons) == ([], {(3, 4)}, {StopReason.LENGTH})
    if how is Quiesce.RETRACT:
        # As if the new weights had been given what the old ones wrote.
        begun = [replace(r, begun=c.segments[:1]) for r, c in zip(wanted, found, strict=True)]
        assert tokens_of(run(build(model), begun)) == tokens_of(found)
    assert engine.health() is None


@pytest.mark.parametrize("how", [Quiesce.IN_PLACE, Quiesce.RETRACT])
def test_no_cache_of_old_weights_is_passed_on(build: Build, how: Quiesce) -> None:
    model = load("qwen3").ours
    old, new = requests(prompts((20,)), Sampling(16, temperature=0.0), samples=2)
    engine = build(model)
    engine.submit(old)
    for _ in range(5):
        engine.poll(timeout_s=0.0)
    engine.begin_update(how)
    change(model)
    engine.commit(1)
    engine.submit(new)
    found = {}
    while len(found) < 2:
        found |= {completion.request_id: completion for completion in engine.poll(timeout_s=60)}
    assert tokens_of([found[new.id]]) == tokens_of(run(build(model), [new]))
    assert_close(
        found[new.id].engine_logp_T,
        trainer_logp(model, new.tokens_T, found[new.id].tokens_T, 1.0),
    )


def test_versions_never_go_back(build: Build) -> None:
    engine = build(shared_model().ours, policy_version=5)
    with pytest.raises(EngineError, match="begin_update"):
        engine.commit(6)
    engine.begin_update(Quiesce.DRAIN)
    with pytest.raises(EngineError, match="begin_update"):
        engine.begin_update(Quiesce.DRAIN)
    with pytest.raises(EngineError, match="version 4 after 5"):
        engine.commit(4)
    engine.commit(5)
    engine.begin_update(Quiesce.DRAIN)
    engine.commit(7)
    assert engine.policy_version == 7


@pytest.mark.parametrize("nap", ["sw", "sws", "sswws", "wsw", "ssw"])
def test_sleep_loses_nothing(build: Build, nap: str) -> None:
    model = shared_model().ours
    wanted = requests(prompts((12, 5)), Sampling(16), samples=3)
    whole = run(build(model), wanted)
    engine = build(model)
    for request in wanted[:-1]:
        engine.submit(request)
    for _ in range(5):
        engine.poll(timeout_s=0.0)
    assert engine.stats().cache_bytes > 0
    for letter in nap:
        (engine.sleep if letter == "s" else engine.wake)()
    if nap.endswith("s"):
        assert engine.stats().cache_bytes == 0
        with pytest.raises(EngineError, match="asleep"):
            engine.poll(timeout_s=1)
    engine.submit(wanted[-1])
    found = {}
    while len(found) < len(wanted):
        found |= {completion.request_id: completion for completion in engine.poll(timeout_s=60)}
    assert tokens_of([found[request.id] for request in wanted]) == tokens_of(whole)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens_T": np.zeros(0, dtype=np.int64)}, "no tokens"),
        ({"tokens_T": np.array([3, VOCABULARY])}, "vocabulary of 97"),
        ({"tokens_T": np.array([-1])}, "vocabulary of 97"),
        ({"tokens_T": np.zeros(100, dtype=np.int64), "sampling": Sampling(61)}, "max_new_tokens"),
        ({"sampling": Sampling(0)}, "max_new_tokens"),
        ({"sampling": Sampling(4, temperature=-1.0)}, "temperature"),
        ({"sampling": Sampling(4, temperature=float("nan"))}, "temperature"),
        ({"sampling": Sampling(4, top_p=0.0)}, "top_p"),
        ({"sampling": Sampling(4, top_k=0)}, "top_k"),
        ({"sampling": Sampling(4, stop_strings=("",))}, "rollout.stop"),
    ],
)
def test_what_cannot_be_served_is_refused(build: Build, changes: dict, words: str) -> None:
    engine = build(shared_model().ours)
    request = Request("a", np.array([1, 2, 3]), Sampling(4), seed=0)
    with pytest.raises(EngineError, match=words):
        engine.submit(replace(request, **changes))
    assert len(run(engine, [request])[0]) == 4


def test_an_id_is_taken_until_it_comes_back(build: Build) -> None:
    engine = build(shared_model().ours)
    request = Request("twice", np.array([1, 2, 3]), Sampling(4), seed=0)
    engine.submit(request)
    with pytest.raises(EngineError, match="'twice'"):
        engine.submit(request)
    (first,) = engine.poll(timeout_s=60)
    (second,) = run(engine, [request])
    assert first.tokens_T.tolist() == second.tokens_T.tolist()


def test_weights_that_are_not_numbers_are_refused_and_recovered_from(build: Build) -> None:
    model = load("qwen2").ours
    wanted = requests(prompts((12, 5)), Sampling(8), samples=2)
    whole = run(build(model), wanted)
    engine = build(model)
    norm = model.model.norm.weight
    kept = norm.detach().clone()
    engine.begin_update(Quiesce.DRAIN)
    with torch.no_grad():
        norm.fill_(float("nan"))
    engine.commit(1)
    with pytest.raises(EngineError, match="not finite"):
        run(engine, wanted)
    assert "version 1" in (engine.health() or "")
    engine.begin_update(Quiesce.RETRACT)
    with torch.no_grad():
        norm.copy_(kept)
    engine.commit(2)
    assert engine.health() is None
    found = {}
    while len(found) < len(wanted):
        found |= {completion.request_id: completion for completion in engine.poll(timeout_s=60)}
    assert tokens_of([found[request.id] for request in wanted]) == tokens_of(whole)


def test_a_closed_engine_serves_nothing(build: Build) -> None:
    engine = build(shared_model().ours)
    engine.submit(Request("a", np.array([1, 2, 3]), Sampling(4), seed=0))
    engine.close()
    engine.close()
    assert engine.health() is not None
    assert engine.stats().cache_bytes == 0
    with pytest.raises(EngineError, match="closed"):
        engine.submit(Request("b", np.array([1, 2, 3]), Sampling(4), seed=0))


def test_the_model_is_left_as_it_was_found(build: Build) -> None:
    model = shared_model().ours
    engine = build(model)
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
def test_no_request_is_lost_or_comes_twice(build: Build, seed: int) -> None:
    """Random submissions, aborts, polls, naps and updates; then all tokens are as if alone."""
    rng = random.Random(seed)
    model = shared_model().ours
    engine = build(
        model, max_concurrency=rng.randint(1, 6), prefill_tokens=rng.choice([5, 20, 200])
    )
    tokens = prompts((3, 17, 30, 1), seed=seed)
    asked: dict[str, Request] = {}
    found: dict[str, Completion] = {}

    def take(completions: list[Completion]) -> None:
        for completion in completions:
            assert completion.request_id in asked
            assert completion.request_id not in found
            found[completion.request_id] = completion

    def submit() -> None:
        group = rng.randrange(len(tokens))
        sampling = Sampling(rng.randint(1, 14), rng.choice([0.0, 0.7, 1.0]))
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
    for request in rng.sample(list(asked.values()), 8):
        (alone,) = run(build(model), [request])
        completion = found[request.id]
        assert completion.tokens_T.tolist() == alone.tokens_T.tolist()[: len(completion)]
        if completion.stop_reason is not StopReason.ABORTED:
            assert len(completion) == len(alone)
