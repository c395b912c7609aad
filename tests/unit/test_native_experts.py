"""Experts in the fast decode paths of a CPU: the plain path's choice, whatever batch or threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.moe import MOE_FAMILIES, moe_decoder
from tests.unit.test_native_compact import Recorded
from tests.unit.test_native_cpu import engine_of

from homeostat.models.decoder import Decoder
from homeostat.models.moe import Router
from homeostat.models.routing import Routing
from homeostat.rollout.engine import Request, Sampling, generate
from homeostat.rollout.native import compact
from homeostat.types import Completion


def requests(count: int) -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        Request(
            f"{n}", rng.integers(97, size=1 + n % 9), Sampling(6 + n % 5), 1, routed_experts=True
        )
        for n in range(count)
    ]


def sampled(
    model: Decoder, decode: str, count: int, threads: int = 1, **settings: Any
) -> list[Completion]:
    engine = engine_of(model, decode, threads=threads, **settings)
    return generate(engine, requests(count), timeout_s=60)


@torch.no_grad()
@pytest.mark.parametrize("family", MOE_FAMILIES)
@pytest.mark.parametrize("most_copied", [0, 1 << 18])
def test_compact_experts_are_the_decoders(
    family: str, most_copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact, "_MOST_COPIED", most_copied)
    model = moe_decoder(family)
    tokens_B, positions_B = torch.randint(97, (11,)), torch.randint(50, (11,))
    found, wanted = Routing(records=True), Routing(records=True)
    hidden_BD = compact.CompactDecoder(model).hidden_in(
        tokens_B, positions_B, Recorded(), routing=found
    )
    exact_BD = model.hidden_in(tokens_B, positions_B, Recorded(), routing=wanted)
    torch.testing.assert_close(hidden_BD, exact_BD, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.recorded(), wanted.recorded())


@pytest.mark.parametrize("count", [2, 40])
def test_threads_and_batches_change_no_bit_of_a_compiled_step(count: int) -> None:
    """Few rows are computed by all threads together, many are divided among them.

    Prompts go in token by token: their products are torch's, whose bits depend on the number of
    rows on some machines.
    """
    model = moe_decoder("dots1")
    slowly = {"prefill_tokens": 1}
    alone = {c.request_id: c for c in sampled(model, "compiled", count, **slowly)}
    for completion in sampled(model, "compiled", count, threads=3, **slowly):
        other = alone[completion.request_id]
        assert completion.tokens_T.tolist() == other.tokens_T.tolist()
        np.testing.assert_array_equal(completion.engine_logp_T, other.engine_logp_T)
        np.testing.assert_array_equal(
            completion.columns["routed_experts"], other.columns["routed_experts"]
        )
    (first,) = sampled(model, "compiled", 1, **slowly)
    np.testing.assert_array_equal(first.engine_logp_T, alone["0"].engine_logp_T)


def test_threads_that_lag_behind_count_the_same_tasks() -> None:
    """With far more threads than cores some are always several layers behind the others."""
    model = moe_decoder("dots1")
    alone = {c.request_id: c.tokens_T.tolist() for c in sampled(model, "compiled", 3)}
    for _ in range(20):
        found = sampled(model, "compiled", 3, threads=8)
        assert {c.request_id: c.tokens_T.tolist() for c in found} == alone


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_of_equal_scores_the_lower_number_wins(family: str) -> None:
    model = moe_decoder(family)
    for module in model.modules():
        if isinstance(module, Router):
            module.weight.zero_()
            if module.e_score_correction_bias is not None:
                # The best groups are the last and the second; the best of them is expert 5.
                bias = torch.tensor([0, 0, 0, 2, 2, 3, 0, 0, 0, 3, 3, 2])
                module.e_score_correction_bias.copy_(bias)
    best = {"qwen3_moe": [0, 1, 2], "mixtral": [0, 1], "dots1": [5, 9, 10]}[family]
    for decode in ("plain", "compact", "compiled"):
        (completion,) = sampled(model, decode, 1)
        assert (completion.columns["routed_experts"][:-1] == best).all(), decode
