"""The native engine draws from cut distributions: the same in all paths, and returns the sets.

The compiled step is compared with ops/cut.py through the plain path, and with a trainer that
computes log-probs over the sets that came back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.test_native_cpu import engine_of, requests, wide_decoder

from homeostat.columns import KEPT_IDS, Ragged
from homeostat.errors import EngineError
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.rollout.engine import Request, Sampling, generate
from homeostat.rollout.native.engine import NativeEngine
from homeostat.types import Completion, StopReason, TokenRow

CUTS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "all, warm": {"top_k": 90, "top_p": 0.9, "min_p": 0.01, "temperature": 1.7},
    "all, cold": {"top_k": 300, "top_p": 0.97, "min_p": 0.002, "temperature": 0.4},
    "more than is gathered at first": {"top_k": 600},
}


def cut_requests(decoder: Decoder, cut: dict[str, Any]) -> list[Request]:
    """Every third one is not cut, and of the others not all ask for their sets."""
    made = requests(decoder, max_new_tokens=12, **cut)
    whole = Sampling(12, temperature=cut.get("temperature", 1.0))
    return [
        replace(one, sampling=whole) if number % 3 == 2 else replace(one, kept_ids=number != 1)
        for number, one in enumerate(made)
    ]


def kept_of(completion: Completion) -> Ragged:
    column = completion.columns[KEPT_IDS]
    assert isinstance(column, Ragged)
    return column


def logp_over_sets(engine: NativeEngine, request: Request, found: Completion) -> np.ndarray:
    whole_T = np.concatenate([request.tokens_T, found.tokens_T])
    is_new_T = (np.arange(len(whole_T)) >= len(request.tokens_T)).astype(np.float32)
    before = Ragged.of([[]] * len(request.tokens_T), np.int32)
    own = kept_of(found)
    offsets_T = np.concatenate([before.offsets_T[:-1], own.offsets_T])
    row = TokenRow(0, whole_T, is_new_T, {KEPT_IDS: Ragged(own.values, offsets_T)})
    (logp_T,) = engine.score([row], temperature=request.sampling.temperature)
    return logp_T


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_the_compiled_step_keeps_and_draws_what_the_definition_says(cut: dict[str, Any]) -> None:
    decoder = wide_decoder()
    wanted = cut_requests(decoder, cut)
    plain, compiled = engine_of(decoder, "plain"), engine_of(decoder, "compiled", threads=2)
    reference = generate(plain, wanted, timeout_s=60)
    for request, one, other in zip(
        wanted, generate(compiled, wanted, timeout_s=60), reference, strict=True
    ):
        assert one.tokens_T.tolist() == other.tokens_T.tolist()
        np.testing.assert_allclose(one.engine_logp_T, other.engine_logp_T, atol=2e-5)
        np.testing.assert_allclose(one.sampled_logp_T, other.sampled_logp_T, atol=2e-5)
        assert (KEPT_IDS in one.columns) == (request.kept_ids and request.sampling.is_cut)
        if KEPT_IDS in one.columns:
            own, others = kept_of(one), kept_of(other)
            assert own.offsets_T.tolist() == others.offsets_T.tolist()
            assert own.values.tolist() == others.values.tolist()
            assert (one.sampled_logp_T >= one.engine_logp_T).all()
            logp_T = logp_over_sets(compiled, request, one)
            np.testing.assert_allclose(one.sampled_logp_T, logp_T, atol=3e-5)


def identity(logits_V: torch.Tensor) -> Decoder:
    """A model whose next logits are these, whatever it reads."""
    size = 16
    shape = {
        "model_type": "llama", "vocab_size": len(logits_V), "hidden_size": size,
        "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": size, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip
    made = Decoder(decoder_config(shape), kernel="sdpa").requires_grad_(False)
    for parameter in made.parameters():
        parameter.zero_()
    made.model.embed_tokens.weight[:, 0] = 1.0
    made.model.norm.weight.fill_(1.0)
    # The norm of a row with a single 1 of 16 is 4 there.
    made.lm_head.weight[:, 0] = logits_V / 4
    return made


@pytest.mark.parametrize("order", ["random", "falling", "rising", "two values", "all equal"])
def test_ties_and_any_order_of_logits(order: str) -> None:
    """What is gathered shrinks again and again where logits rise; of equal ones the first count."""
    size = 5003
    logits_V = {
        "random": 4 * torch.randn(size, generator=torch.Generator().manual_seed(0)),
        "falling": -torch.arange(size) / 300.0,
        "rising": torch.arange(size) / 300.0,
        "two values": (torch.arange(size) % 7 == 3).float(),
        "all equal": torch.zeros(size),
    }[order]
    decoder = identity(logits_V)
    made = [Sampling(3, top_k=37), Sampling(3, top_k=700, top_p=0.7), Sampling(3, min_p=0.999),
            Sampling(3, top_p=0.02), Sampling(3, top_k=60, min_p=0.9, top_p=0.8)]  # fmt: skip
    wanted = [
        Request(f"{number}", np.array([1]), sampling, seed=3, kept_ids=number != 2)
        for number, sampling in enumerate(made)
    ]
    plain = generate(engine_of(decoder, "plain", max_tokens=8), wanted, timeout_s=60)
    compiled = generate(engine_of(decoder, "compiled", max_tokens=8), wanted, timeout_s=60)
    for one, other in zip(compiled, plain, strict=True):
        assert one.tokens_T.tolist() == other.tokens_T.tolist()
        if KEPT_IDS in one.columns:
            assert kept_of(one).values.tolist() == kept_of(other).values.tolist()
    if order == "all equal":
        assert kept_of(compiled[0])[2].tolist() == list(range(37))


@pytest.mark.parametrize("path", ["plain", "compiled"])
def test_a_set_that_is_too_large_ends_with_the_setting_to_change(path: str) -> None:
    decoder = identity(torch.zeros(3000))
    request = Request("r", np.array([1]), Sampling(4, top_p=0.9), seed=3, kept_ids=True)
    with pytest.raises(EngineError, match=r"drawn from 2,700 ids.*rollout\.top_k to 1024"):
        generate(engine_of(decoder, path, max_tokens=8), [request], timeout_s=60)
    # Where nobody asks for the sets, any size will do.
    free = replace(request, kept_ids=False)
    (found,) = generate(engine_of(decoder, path, max_tokens=8), [free], timeout_s=60)
    assert found.sampled_logp_T == pytest.approx(-np.log(2700), abs=1e-5)


def test_a_whole_vocabulary_is_kept_without_a_set() -> None:
    decoder = identity(torch.zeros(40))
    request = Request("r", np.array([1]), Sampling(4, top_p=0.99), seed=3, kept_ids=True)
    (found,) = generate(engine_of(decoder, "compiled", max_tokens=8), [request], timeout_s=60)
    assert found.stop_reason is StopReason.LENGTH
    assert kept_of(found).sizes_T.tolist() == [0, 0, 0, 0]
    assert found.sampled_logp_T.tolist() == found.engine_logp_T.tolist()


def test_what_was_begun_keeps_its_sets() -> None:
    """A request that resumes returns the sets of all its tokens, and refuses to guess some."""
    decoder = wide_decoder()
    sampling = Sampling(10, top_k=5)
    request = Request("r", np.array([1, 2, 3]), sampling, seed=3, kept_ids=True)
    engine = engine_of(decoder, "compiled")
    (whole,) = generate(engine, [request], timeout_s=60)
    (first,) = generate(engine, [replace(request, sampling=replace(sampling, max_new_tokens=4))],
                        timeout_s=60)  # fmt: skip
    (resumed,) = generate(engine, [replace(request, begun=first.segments)], timeout_s=60)
    assert resumed.tokens_T.tolist() == whole.tokens_T.tolist()
    assert kept_of(resumed).values.tolist() == kept_of(whole).values.tolist()
    bare = tuple(replace(segment, columns={}) for segment in first.segments)
    with pytest.raises(EngineError, match="kept ids, and those of the tokens that it begins with"):
        engine.submit(replace(request, begun=bare))
