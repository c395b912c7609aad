"""What every Engine must hold of tokens and log-probs. A new backend is one more of ENGINES."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from tests.contract.engines import (
    VOCABULARY,
    Backend,
    assert_close,
    decode,
    prompts,
    requests,
    run,
    shared_model,
    tokens_of,
    trainer_logp,
)

from homeostat.columns import KEPT_IDS, Ragged
from homeostat.errors import EngineError
from homeostat.models.decoder import Decoder
from homeostat.rollout.engine import Engine, Request, Sampling
from homeostat.types import Completion, StopReason, TokenRow

GREEDY_LENGTHS = (1, 5, 5, 17, 40, 33)


@cache
def generated_by_transformers(family: str) -> list[list[int]]:
    """Greedy completions of 24 tokens, which all engines are compared with."""
    model = shared_model(family).theirs
    found = []
    for prompt_T in prompts(GREEDY_LENGTHS):
        with torch.no_grad():
            tokens_NT = model.generate(
                torch.from_numpy(prompt_T)[None],
                attention_mask=torch.ones(1, len(prompt_T), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=24,
                eos_token_id=None,
                pad_token_id=0,
            )
        found.append(tokens_NT[0, len(prompt_T) :].tolist())
    return found


@pytest.mark.parametrize("family", ["llama", "llama_tied", "llama_bias", "qwen2", "qwen3"])
def test_greedy_is_what_transformers_generates(build: Backend, family: str) -> None:
    tokens = prompts(GREEDY_LENGTHS)
    if build.name == "sglang" and family == "llama_bias":
        with pytest.raises(EngineError, match="mlp_bias"):
            build(shared_model(family))
        return
    engine = build(shared_model(family))
    found = run(engine, requests(tokens, Sampling(24, temperature=0.0), samples=2))
    for index, wanted in enumerate(generated_by_transformers(family)):
        for completion in found[2 * index : 2 * index + 2]:
            assert completion.tokens_T.tolist() == wanted
            assert completion.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_log_probs_are_the_trainers(build: Backend, temperature: float) -> None:
    model = shared_model()
    tokens = prompts((3, 19, 8))
    sampling = Sampling(30, temperature=temperature)
    engine = build(model)
    for request in requests(tokens, sampling, samples=3):
        (completion,) = run(engine, [request])
        wanted = trainer_logp(model, request.tokens_T, completion.tokens_T, temperature or 1.0)
        assert_close(completion.engine_logp_T, wanted)
        assert all(segment.sampled_logp_T is None for segment in completion.segments)


@pytest.mark.parametrize(
    "family",
    [
        "llama_tied",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("llama", "qwen2", "qwen3")),
    ],
)
def test_invariant_log_probs_are_the_trainers_to_the_bit(build: Backend, family: str) -> None:
    build.require_invariant()
    fast = shared_model(family)
    ours = Decoder(fast.ours.config, kernel="sdpa", numerics="invariant")
    ours.load_state_dict(fast.ours.state_dict())
    model = replace(fast, ours=ours)
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


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_score_is_the_trainers(build: Backend, temperature: float) -> None:
    model = shared_model()
    rng = np.random.default_rng(1)
    rows = []
    for row_id, tokens_T in enumerate(prompts((9, 2, 30, 17, 1))):
        weights_T = (rng.random(len(tokens_T)) < 0.6).astype(np.float32)
        rows.append(TokenRow(row_id, tokens_T, weights_T))
    engine = build(model, prefill_tokens=20)
    if temperature != 1.0 and engine.capabilities.score_temperatures == "one":
        with pytest.raises(EngineError, match="temperature 1"):
            engine.score(rows, temperature=temperature)
        return
    found = engine.score(rows, temperature=temperature)
    for row, logp in zip(rows, found, strict=True):
        kept_T = row.weights_T[1:] > 0
        wanted = trainer_logp(model, row.tokens_T[:1], row.tokens_T[1:], temperature)[kept_T]
        assert logp.shape == wanted.shape
        if len(wanted):
            assert_close(logp, wanted)
    assert engine.score([], temperature=temperature) == []


def chi_square(counts_V: np.ndarray, share_V: np.ndarray) -> tuple[float, int]:
    """The statistic over bins of at least 5 expected, and its degrees of freedom."""
    expected_V = share_V * counts_V.sum()
    rare_V = expected_V < 5
    observed = np.append(counts_V[~rare_V], counts_V[rare_V].sum())
    expected = np.append(expected_V[~rare_V], max(expected_V[rare_V].sum(), 1e-9))
    return float(((observed - expected) ** 2 / expected).sum()), len(observed) - 1


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_softmax(build: Backend, temperature: float) -> None:
    model = shared_model()
    (prompt_T,) = prompts((6,))
    with torch.no_grad():
        logits_V = model.theirs(torch.from_numpy(prompt_T)[None]).logits[0, -1].double()
    share_V = (logits_V / temperature).softmax(0).numpy()
    found = run(build(model), requests([prompt_T], Sampling(1, temperature), samples=3000))
    drawn = np.concatenate([completion.tokens_T for completion in found])
    statistic, freedom = chi_square(np.bincount(drawn, minlength=VOCABULARY), share_V)
    assert freedom > 10
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)
    for completion in found[:50]:
        assert completion.engine_logp_T[0] == pytest.approx(
            np.log(share_V[completion.tokens_T[0]]), abs=1e-4
        )


@pytest.mark.parametrize(
    ("cut", "heat"),
    [
        ({"top_k": 5}, 1.0),
        ({"top_p": 0.6}, 1.0),
        ({"top_k": 9, "top_p": 0.8}, 1.0),
        ({"min_p": 0.3}, 1.0),
        ({"top_p": 0.9}, 0.7),
    ],
)
def test_cut_distributions(build: Backend, cut: dict, heat: float) -> None:
    model = shared_model()
    (prompt_T,) = prompts((6,))
    with torch.no_grad():
        logits_V = model.theirs(torch.from_numpy(prompt_T)[None]).logits[0, -1].double()
    share_V = (logits_V / heat).softmax(0).numpy()
    order = np.argsort(-share_V)[: cut.get("top_k", VOCABULARY)]
    before = np.cumsum(share_V[order]) - share_V[order]
    order = order[before < cut.get("top_p", 1.0) * share_V[order].sum()]
    order = order[share_V[order] >= cut.get("min_p", 0.0) * share_V.max()]
    kept_V = np.zeros(VOCABULARY)
    kept_V[order] = share_V[order] / share_V[order].sum()
    plain = Request("plain", prompt_T, Sampling(1), seed=3)
    wanted = requests([prompt_T], Sampling(1, heat, **cut), samples=1500)
    engine = build(model)
    able = engine.capabilities
    if not (cut.keys() <= able.cuts and (len(cut) == 1 or able.combines_cuts)):
        with pytest.raises(EngineError, match=r"cuts? its distribution"):
            engine.submit(wanted[0])
        return
    returns_sets = able.kept_ids
    wanted = [replace(request, kept_ids=returns_sets) for request in wanted]
    *found, whole = run(engine, [*wanted, plain])
    drawn = np.concatenate([completion.tokens_T for completion in found])
    assert set(drawn.tolist()) <= set(order.tolist())
    statistic, freedom = chi_square(np.bincount(drawn, minlength=VOCABULARY), kept_V)
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)
    for completion in found[:50]:
        (segment,), (token,) = completion.segments, completion.tokens_T
        # Unknown is said, never guessed.
        wanted_logp = np.log(share_V[token]) if engine.capabilities.cut_logp else np.nan
        assert segment.engine_logp_T[0] == pytest.approx(wanted_logp, abs=1e-4, nan_ok=True)
        assert segment.sampled_logp_T is not None
        assert segment.sampled_logp_T[0] == pytest.approx(np.log(kept_V[token]), abs=1e-4)
        if returns_sets:
            kept = segment.columns[KEPT_IDS]
            assert isinstance(kept, Ragged)
            assert kept[0].tolist() == sorted(order.tolist())
    if not returns_sets:
        with pytest.raises(EngineError, match=engine.capabilities.why_no_kept_ids[:20]):
            engine.submit(replace(wanted[0], kept_ids=True))
    assert whole.segments[0].sampled_logp_T is None


def test_a_sample_does_not_depend_on_its_company(build: Backend) -> None:
    model = shared_model()
    crowd = requests(prompts((4, 21, 9, 30)), Sampling(20), samples=4)
    together = run(build(model), crowd)
    few_at_a_time = run(build(model, max_concurrency=3, prefill_tokens=16), list(reversed(crowd)))
    engine = build(model)
    alone = [run(engine, [request])[0] for request in crowd[::5]]
    assert tokens_of(together) == tokens_of(few_at_a_time[::-1])
    assert tokens_of(together)[::5] == tokens_of(alone)
    assert len({tuple(tokens) for tokens in tokens_of(together)}) == len(crowd)


def test_another_seed_or_id_is_another_sample(build: Backend) -> None:
    model = shared_model()
    (prompt_T,) = prompts((7,))
    base = Request("a", prompt_T, Sampling(20), seed=0)
    others = [base, replace(base, seed=1), replace(base, id="b")]
    engine = build(model)
    assert len({tuple(run(engine, [request])[0].tokens_T) for request in others}) == 3


def test_a_groups_prompt_is_computed_once(build: Backend) -> None:
    build.require_ours("it shares whole blocks of a prompt, whatever its key")
    model = shared_model()
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


def test_a_group_larger_than_the_concurrency_still_shares(build: Backend) -> None:
    engine = build(shared_model(), max_concurrency=3)
    wanted = requests(prompts((140,)), Sampling(6), samples=8)
    found = run(engine, wanted)
    assert engine.stats().max_running == 3
    assert engine.stats().prompt_tokens_shared > 0
    assert tokens_of(found) == tokens_of(run(build(shared_model()), wanted))


def turns(engine: Engine, *, keep: bool) -> tuple[list[Completion], int]:
    """Three turns of two sessions; between them a user writes. Also the tokens computed for it."""
    before = engine.stats().prompt_tokens
    found: list[Completion] = []
    said = prompts((21, 34), seed=7)
    for turn in range(3):
        asked = [
            Request(f"{s}/{turn}", t, Sampling(9), 0, session_key=f"s{s}", keep_cache=keep)
            for s, t in enumerate(said)
        ]
        answers = run(engine, asked)
        user = prompts((3, 5), seed=turn)
        said = [
            np.concatenate([tokens_T, answer.tokens_T, more_T])
            for tokens_T, answer, more_T in zip(said, answers, user, strict=True)
        ]
        found += answers
    return found, engine.stats().prompt_tokens - before


def test_a_next_turn_finds_what_the_last_one_computed(build: Backend) -> None:
    model = shared_model()
    kept, num_kept = turns(build(model), keep=True)
    plain, num_plain = turns(build(model), keep=False)
    assert tokens_of(kept) == tokens_of(plain)
    for one, other in zip(kept, plain, strict=True):
        assert_close(one.engine_logp_T, other.engine_logp_T)
    if build.is_ours:
        # Of each turn but the first: the last sampled token, which nothing was computed from, and
        # what the user wrote.
        assert num_kept == (21 + 34) + 2 * (1 + 3) + 2 * (1 + 5)
        assert num_plain == (21 + 34) * 3 + (9 + 3) * 3 + (9 + 5) * 3


def test_a_prefix_that_was_found_changes_no_bit(build: Backend) -> None:
    build.require_invariant()
    fast = shared_model()
    ours = Decoder(fast.ours.config, kernel="sdpa", numerics="invariant")
    ours.load_state_dict(fast.ours.state_dict())
    model = replace(fast, ours=ours)
    kept, num_kept = turns(build(model), keep=True)
    plain, num_plain = turns(build(model), keep=False)
    assert num_kept < num_plain
    assert tokens_of(kept) == tokens_of(plain)
    for one, other in zip(kept, plain, strict=True):
        assert one.engine_logp_T.tolist() == other.engine_logp_T.tolist()


@pytest.mark.parametrize("prefill_tokens", [7, 1, 16, 50])
def test_a_long_prompt_in_pieces_is_the_same_prompt(build: Backend, prefill_tokens: int) -> None:
    build.require_ours("prompts are computed whole on a CPU")
    model = shared_model()
    wanted = requests(prompts((45, 3, 16)), Sampling(10), samples=2)
    found = run(build(model, prefill_tokens=prefill_tokens), wanted)
    for request, completion in zip(wanted, found, strict=True):
        assert_close(
            completion.engine_logp_T,
            trainer_logp(model, request.tokens_T, completion.tokens_T, 1.0),
        )


def test_stop_tokens_end_a_completion_and_stay_in_it(build: Backend) -> None:
    model = shared_model()
    (prompt_T,) = prompts((8,))
    engine = build(model)
    whole = run(engine, [Request("a", prompt_T, Sampling(30), seed=0)])[0].tokens_T.tolist()
    stop = whole[11]
    first = whole.index(stop)
    sampling = Sampling(30, stop_ids=frozenset({stop}))
    (found,) = run(engine, [Request("a", prompt_T, sampling, seed=0)])
    assert found.tokens_T.tolist() == whole[: first + 1]
    assert found.stop_reason is StopReason.STOP


@pytest.mark.parametrize("spread", [1, 2, 3])
def test_stop_strings_are_found_across_tokens(build: Backend, spread: int) -> None:
    model = shared_model()
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
