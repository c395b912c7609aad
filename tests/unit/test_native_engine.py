"""What is the native engine's own: its memory, its sampler, its search for stop strings."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from homeostat.config.native import NativeEngineConfig
from homeostat.errors import EngineError
from homeostat.models.decoder import Decoder
from homeostat.models.families import DecoderConfig, decoder_config
from homeostat.rollout.engine import Request, Sampling, generate
from homeostat.rollout.native.cache import token_bytes
from homeostat.rollout.native.engine import NativeEngine
from homeostat.rollout.native.memory import free_bytes
from homeostat.rollout.native.sampler import draw
from homeostat.rollout.native.sequence import Sequence
from homeostat.rollout.stops import StopStrings

CPU = torch.device("cpu")


def shape(vocabulary: int = 50) -> DecoderConfig:
    return decoder_config(
        {
            "model_type": "qwen3",
            "vocab_size": vocabulary,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 512,
        }
    )


def model(vocabulary: int = 50) -> Decoder:
    torch.manual_seed(0)
    made = Decoder(shape(vocabulary), kernel="sdpa")
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made


def engine(
    made: Decoder,
    *,
    in_rows: bool | None = None,
    decode: Callable[[Items[int]], str] | None = None,
    **config: float,
) -> NativeEngine:
    return NativeEngine(
        made,
        NativeEngineConfig(**config),
        device=CPU,
        max_tokens=400,
        decode=decode,
        chunk_bytes=1 << 16,
        in_rows=in_rows,
    )


def share_for(num_tokens: float) -> float:
    """engine.memory_share that leaves room for about so many cached tokens."""
    return num_tokens * token_bytes(shape(), torch.float32) / free_bytes(CPU)


def requests(count: int, new: int, samples: int = 2) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 50, int(rng.integers(1, 40))) for _ in range(count)]
    return [
        Request(f"{p}/{s}", tokens_T, Sampling(new), seed=0, session_key=f"{p}")
        for p, tokens_T in enumerate(prompts)
        for s in range(samples)
    ]


@pytest.mark.parametrize("in_rows", [True, False])
def test_scarce_memory_changes_no_token(in_rows: bool) -> None:
    made, wanted = model(), requests(6, 60)
    plenty = generate(engine(made), wanted, timeout_s=60)
    tight = engine(made, in_rows=in_rows, memory_share=share_for(350))
    found = generate(tight, wanted, timeout_s=60)
    assert [c.tokens_T.tolist() for c in found] == [c.tokens_T.tolist() for c in plenty]
    assert tight.scheduler.pool.num_used == 0
    assert tight.stats().cache_bytes <= 450 * token_bytes(shape(), torch.float32)
    assert (tight.stats().preemptions > 0) is not in_rows


@pytest.mark.parametrize("in_rows", [True, False])
def test_what_no_memory_could_hold_is_refused(in_rows: bool) -> None:
    tight = engine(model(), in_rows=in_rows, memory_share=share_for(100))
    tokens_T = np.arange(40)
    tight.submit(Request("fits", tokens_T, Sampling(10), seed=0))
    for setting in ("engine.memory_share", "rollout.max_new_tokens", "data.max_length"):
        with pytest.raises(EngineError, match=setting):
            tight.submit(Request("too long", tokens_T, Sampling(300), seed=0))
    assert len(tight.poll(timeout_s=60)) == 1


def test_the_cache_is_no_larger_than_the_requests_need() -> None:
    small = engine(model())
    assert small.stats().cache_bytes == 0
    generate(small, requests(1, 4, samples=3), timeout_s=60)
    assert small.stats().cache_bytes <= 4 * 48 * token_bytes(shape(), torch.float32)


def test_a_longer_request_joins_shorter_ones_in_flight() -> None:
    made = model()
    wanted = [*requests(2, 30), Request("long", np.arange(50), Sampling(200), seed=0)]
    alone = [generate(engine(made), [request], timeout_s=60)[0] for request in wanted]
    crowd = engine(made)
    for request in wanted[:-1]:
        crowd.submit(request)
    ended = crowd.poll(timeout_s=0.0)
    assert not ended
    crowd.submit(wanted[-1])
    found = {}
    while len(found) < len(wanted):
        found |= {completion.request_id: completion for completion in crowd.poll(timeout_s=60)}
    for request, completion in zip(wanted, alone, strict=True):
        assert found[request.id].tokens_T.tolist() == completion.tokens_T.tolist()


def test_blocks_are_free_after_every_kind_of_end() -> None:
    served = engine(model(), in_rows=False, max_concurrency=4)
    for request in requests(4, 12):
        served.submit(request)
    served.submit(Request("late", np.arange(5), Sampling(9), seed=0, deadline_s=1e-9))
    for _ in range(6):
        served.poll(timeout_s=0.0)
    served.abort(["0/0", "3/1"])
    assert served.scheduler.pool.num_used > 0
    while served.poll(timeout_s=60):
        pass
    assert served.scheduler.pool.num_used == 0


def test_a_step_that_fails_half_way_loses_nothing() -> None:
    made = model()
    plain = requests(3, 12)
    whole = generate(engine(made), plain, timeout_s=60)
    calls = 0

    def decode(tokens: Items[int]) -> str:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise UnicodeError("no such token")
        return "x"

    served = engine(made, decode=decode)
    for request in plain:
        sampling = replace(request.sampling, stop_strings=("never",))
        served.submit(replace(request, sampling=sampling))
    with pytest.raises(UnicodeError):
        served.poll(timeout_s=60)
    found = {}
    while len(found) < len(plain):
        found |= {completion.request_id: completion for completion in served.poll(timeout_s=60)}
    assert [found[r.id].tokens_T.tolist() for r in plain] == [c.tokens_T.tolist() for c in whole]


def drawn_from(logits_BV: torch.Tensor, settings: list[Sampling]) -> tuple:
    """Draws with an identity for a head, so that hidden states are the logits."""
    vocabulary = logits_BV.shape[1]
    identity = Decoder(shape(vocabulary), kernel="sdpa")
    identity.model.embed_tokens.weight = torch.nn.Parameter(torch.eye(vocabulary))
    sequences = [
        Sequence(Request(f"{n}", np.array([0]), s, seed=n), number=n, now=0.0, decode=None)
        for n, s in enumerate(settings)
    ]
    with torch.no_grad():
        drawn = draw(identity, logits_BV, sequences, chunk_bytes=1 << 16)
    return drawn.tokens_B, drawn.engine_logp_B, drawn.sampled_logp_B


def test_tokens_without_probability_are_never_drawn() -> None:
    logits_BV = torch.full((300, 7), -200.0)
    logits_BV[:, 3] = 100.0
    logits_BV[:, 5] = 99.0
    tokens_B, logp_B, _ = drawn_from(logits_BV, [Sampling(1)] * 300)
    assert set(tokens_B.tolist()) == {3, 5}
    assert np.isfinite(logp_B).all()


@given(st.integers(0, 2**32), st.floats(0.05, 30.0))
def test_rows_with_different_settings_do_not_meet(seed: int, spread: float) -> None:
    """Each row as drawn alone, and its log-probs as float64 arithmetic has them."""
    generator = torch.Generator().manual_seed(seed)
    logits_BV = spread * torch.randn(6, 23, generator=generator)
    choices = [
        Sampling(1),
        Sampling(1, temperature=0.0),
        Sampling(1, temperature=0.3),
        Sampling(1, top_k=3),
        Sampling(1, top_p=0.5),
        Sampling(1, temperature=2.0, top_k=30, top_p=0.9),
    ]
    tokens_B, logp_B, sampled_B = drawn_from(logits_BV, choices)
    for row, sampling in enumerate(choices):
        z_V = logits_BV[row].double() / (sampling.temperature or 1.0)
        share_V = z_V.softmax(0).numpy()
        token = tokens_B[row]
        assert logp_B[row] == pytest.approx(z_V.log_softmax(0)[token].item(), rel=1e-5, abs=1e-5)
        order = np.argsort(-share_V, kind="stable")[: sampling.top_k]
        before = np.cumsum(share_V[order]) - share_V[order]
        # A borderline token may fall on either side in fp32.
        kept = order[before < sampling.top_p * share_V[order].sum() + 1e-6]
        assert token in kept
        if sampling.temperature == 0:
            assert token == order[0]
        if sampling.top_k is None and sampling.top_p == 1:
            assert sampled_B[row] == logp_B[row]
        else:
            assert sampled_B[row] >= logp_B[row] - 1e-6
    # Row 0 has the noise of request 0 in both.
    assert drawn_from(logits_BV[:1], choices[:1])[0][0] == tokens_B[0]


@given(
    st.lists(st.sampled_from(["a", "ab", "b ", "", "abc", "c"]), min_size=1, max_size=120),
    st.sampled_from([("abca",), ("b a", "cc"), ("aaaaaaaaaa",), ("c",)]),
)
def test_stop_strings_are_found_at_the_first_token_that_completes_one(
    words: list[str], strings: tuple[str, ...]
) -> None:
    search = StopStrings(strings, lambda tokens: "".join(words[t] for t in tokens))
    tokens = [0, 0, 0]
    for number in range(len(words)):
        tokens.append(number)
        text = "".join(words[: number + 1])
        expected = any(string in text for string in strings)
        assert search.found(array("q", tokens), since=3) is expected
        if expected:
            break


def decode_with_byte_fallback(tokens: Items[int]) -> str:
    """Decode as Llama 2's tokenizer does: bytes in a row are text together, or none of them is."""
    text, run = "", b""
    for token in [*tokens, 0]:
        if 0 < token < 256:
            run += bytes([token])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(run)
        text, run = text + ("" if token == 0 else chr(token - 256)), b""
    return text


@pytest.mark.parametrize("stop", ["\U0001f600 end", "\U0001f680\U0001f600", "b\U0001f600"])
@pytest.mark.parametrize("lead", range(40, 60))
def test_a_stop_string_is_found_where_bytes_in_a_row_are_decoded_together(
    stop: str, lead: int
) -> None:
    text = "a" * lead + "b" + "\U0001f600\U0001f680" * 4 + "\U0001f600 end and more"
    wanted = text[: text.index(stop) + len(stop)]
    search = StopStrings((stop,), decode_with_byte_fallback)
    tokens = array("q")
    for char in text:
        for token in [256 + ord(char)] if char.isascii() else char.encode():
            tokens.append(token)
            if search.found(tokens, since=0):
                assert decode_with_byte_fallback(tokens) == wanted
                return
    pytest.fail("the stop string was not found")
