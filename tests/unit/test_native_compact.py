"""A decoding step over compact copies is the decoder's, and follows every write to a weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.parity.tiny_models import FAMILIES, ROPES, SIZES

from homeostat.config.native import NativeEngineConfig
from homeostat.models.decoder import Decoder
from homeostat.models.families import decoder_config
from homeostat.ops.attention import NO_LIMITS, Limits
from homeostat.rollout.engine import Quiesce, Request, Sampling, generate
from homeostat.rollout.native.compact import CompactDecoder, compact_of
from homeostat.rollout.native.engine import NativeEngine

CPU = torch.device("cpu")
CASES = [(family, None) for family in FAMILIES] + [("llama", rope) for rope in ROPES]


class Recorded:
    """An attention of the test's own: every token sees every other."""

    def attend(
        self,
        layer: int,
        q_NHd: torch.Tensor,
        k_NHd: torch.Tensor,
        v_NHd: torch.Tensor,
        *,
        scale: float,
        limits: Limits = NO_LIMITS,
    ) -> torch.Tensor:
        assert limits == NO_LIMITS
        repeats = q_NHd.shape[1] // k_NHd.shape[1]
        k_NHd, v_NHd = (x.repeat_interleave(repeats, dim=1) for x in (k_NHd, v_NHd))
        weights = torch.einsum("nhd,mhd->hnm", q_NHd, k_NHd).mul(scale * (layer + 1)).softmax(-1)
        return torch.einsum("hnm,mhd->nhd", weights, v_NHd)


def random_decoder(family: str, rope: str | None = None, *, numerics: str = "fast") -> Decoder:
    settings = {**SIZES, "rms_norm_eps": 1e-6, **FAMILIES[family]}
    if rope is not None:
        settings["rope_parameters"] = ROPES[rope]
    decoder = Decoder(decoder_config(settings), kernel="sdpa", numerics=numerics)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.2)
    return decoder.requires_grad_(False)


def step_inputs(decoder: Decoder) -> tuple[torch.Tensor, torch.Tensor, Recorded]:
    tokens_B = torch.randint(decoder.config.vocab_size, (7,))
    return tokens_B, torch.randint(100, (7,)), Recorded()


@pytest.mark.parametrize(("family", "rope"), CASES)
def test_the_compact_step_is_the_decoders(family: str, rope: str | None) -> None:
    decoder = random_decoder(family, rope)
    compact = compact_of(decoder)
    assert compact is not None
    inputs = step_inputs(decoder)
    expected = decoder.hidden_in(*inputs)
    torch.testing.assert_close(compact.hidden_in(*inputs), expected, rtol=2e-5, atol=2e-5)


def test_a_copy_is_of_one_model_and_of_its_weights_of_then() -> None:
    decoder = random_decoder("qwen2")
    compact = CompactDecoder(decoder)
    assert compact.is_of(decoder)
    assert not compact.is_of(random_decoder("qwen2"))
    decoder.model.layers[1].mlp.up_proj.weight.mul_(2)
    assert not compact.is_of(decoder)


def test_an_engine_samples_with_what_an_optimizer_wrote_before_the_commit() -> None:
    decoder = random_decoder("qwen2")
    engines = [engine_of(decoder, in_rows=in_rows) for in_rows in (True, False)]
    before = [logp_of(engine) for engine in engines]
    for engine in engines:
        engine.begin_update(Quiesce.DRAIN)
    weights = [weight.requires_grad_(True) for weight in decoder.parameters()]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    torch.optim.AdamW(weights, lr=0.1, fused=True).step()
    for engine in engines:
        engine.commit(1)
    rows, paged = (logp_of(engine) for engine in engines)
    np.testing.assert_allclose(rows, paged, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(*before, rtol=1e-4, atol=1e-5)
    assert np.abs(rows - before[0]).max() > 0.1


def engine_of(decoder: Decoder, *, in_rows: bool) -> NativeEngine:
    return NativeEngine(
        decoder,
        NativeEngineConfig(),
        device=CPU,
        max_tokens=64,
        decode=None,
        chunk_bytes=1 << 16,
        in_rows=in_rows,
    )


def logp_of(engine: NativeEngine) -> np.ndarray:
    request = Request("one", np.arange(5), Sampling(max_new_tokens=12), seed=0)
    (completion,) = generate(engine, [request], timeout_s=60)
    return np.concatenate([segment.engine_logp_T for segment in completion.segments])


def test_what_copies_cannot_stand_for_is_left_to_the_decoder() -> None:
    assert compact_of(random_decoder("llama", numerics="invariant")) is None
    assert compact_of(random_decoder("llama").double()) is None
    hooked = random_decoder("llama")
    hooked.model.embed_tokens.register_forward_hook(lambda *_: None)
    assert compact_of(hooked) is None
