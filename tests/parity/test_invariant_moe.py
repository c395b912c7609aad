"""Invariant numerics with experts: engine and trainer are exactly 0 apart, routes included.

The bits to meet are those of a training forward of the document alone (test_invariant.py).
"""

import numpy as np
import pytest
import torch
from tests.support.moe import MOE_FAMILIES, moe_decoder

from homeostat.config.native import NativeEngineConfig
from homeostat.models.routing import Routing
from homeostat.ops.attention import PackedLayout
from homeostat.ops.experts import experts_of
from homeostat.ops.logprobs import token_logprobs
from homeostat.ops.moe_shape import MoeShape
from homeostat.ops.routing import expert_weights, scores_of
from homeostat.rollout.engine import Request, Sampling, generate
from homeostat.rollout.native.engine import NativeEngine

CPU = torch.device("cpu")
# Widths that are no multiples of a vector's, so that loops have tails and rows begin anywhere.
ODD = {"hidden_size": 36, "intermediate_size": 22, "moe_intermediate_size": 10, "head_dim": 12}


@pytest.fixture(scope="module", params=MOE_FAMILIES)
def model(request):
    return moe_decoder(request.param, numerics="invariant", **ODD)


def train_hidden(model, documents, routing=None):
    layout = PackedLayout.of([len(document) for document in documents], CPU)
    positions_N = torch.cat([torch.arange(len(document)) for document in documents])
    return model.hidden(torch.cat(documents), positions_N, layout, routing=routing)


@torch.no_grad()
def test_packing_changes_no_bit_and_no_expert(model):
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 70, 1, 33, 2)
    documents = [torch.randint(0, 97, (length,), generator=generator) for length in lengths]
    routing = Routing(records=True)
    together = train_hidden(model, documents, routing).split(lengths)
    routes = routing.recorded().split(lengths)
    for document, hidden, routes_TLK in zip(documents, together, routes, strict=True):
        alone = Routing(records=True)
        assert torch.equal(hidden, train_hidden(model, [document], alone))
        assert torch.equal(routes_TLK, alone.recorded())


def test_engine_and_trainer_are_exactly_0_apart(model):
    engine = NativeEngine(
        model,
        NativeEngineConfig(max_concurrency=5, prefill_tokens=11),
        device=CPU,
        max_tokens=100,
        decode=None,
        chunk_bytes=1 << 16,
    )
    rng = np.random.default_rng(0)
    wanted = [
        Request(f"{p}/{s}", tokens_T, Sampling(7 + 5 * p), 1, f"{p}", routed_experts=True)
        for p, tokens_T in enumerate(rng.integers(0, 97, size) for size in (3, 29))
        for s in range(2)
    ]
    for request, found in zip(wanted, generate(engine, wanted, timeout_s=120), strict=True):
        tokens_T = torch.from_numpy(np.concatenate([request.tokens_T, found.tokens_T]))
        routing, start = Routing(records=True), len(request.tokens_T)
        with torch.no_grad():
            hidden_TD = train_hidden(model, [tokens_T], routing)
            logp_T = token_logprobs(
                hidden_TD[start - 1 : -1],
                model.output_weight(),
                tokens_T[start:],
                temperature=1.0,
                chunk_bytes=1 << 16,
                numerics="invariant",
            )
        np.testing.assert_array_equal(found.engine_logp_T, logp_T.numpy())
        routes_TLK = routing.recorded().numpy()
        np.testing.assert_array_equal(
            found.prompt_columns["routed_experts"], routes_TLK[:start], request.id
        )
        np.testing.assert_array_equal(
            found.columns["routed_experts"][:-1], routes_TLK[start:-1], request.id
        )


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_experts", [5, 37, 128])
def test_scores_and_weights_of_a_token_do_not_depend_on_its_place(scoring, num_experts):
    shape = MoeShape(num_experts, 5, 8, layers=(0,), scoring=scoring, scaling=1.3)
    logits_NE = 4 * torch.randn(67, num_experts, generator=torch.Generator().manual_seed(2))
    ids_NK = logits_NE.argsort(dim=1)[:, :5]
    scores_NE = scores_of(logits_NE, shape, numerics="invariant")
    weights_NK = expert_weights(scores_NE, ids_NK, shape)
    for first in (0, 1, 7, 40, 66):
        for last in (first + 1, first + 2, 67):
            part = scores_of(logits_NE[first:last].clone(), shape, numerics="invariant")
            assert torch.equal(part, scores_NE[first:last])
            weights = expert_weights(part, ids_NK[first:last], shape)
            assert torch.equal(weights, weights_NK[first:last])
    exact_NE = (
        logits_NE.double().sigmoid() if scoring == "sigmoid" else logits_NE.double().softmax(1)
    )
    torch.testing.assert_close(scores_NE.double(), exact_NE, rtol=2e-6, atol=1e-12)


def test_the_invariant_sigmoid_has_a_gradient_everywhere():
    shape = MoeShape(4, 2, 8, layers=(0,), scoring="sigmoid")
    logits_NE = torch.tensor([[-200.0, -3.0, 0.5, 120.0]], requires_grad=True)
    (grad_NE,) = torch.autograd.grad(
        scores_of(logits_NE, shape, numerics="invariant").sum(), logits_NE
    )
    exact_NE = logits_NE.detach().double().sigmoid()
    torch.testing.assert_close(grad_NE.double(), exact_NE * (1 - exact_NE), rtol=1e-5, atol=1e-12)


@torch.no_grad()
def test_an_expert_gives_a_row_the_same_bits_whatever_rows_come_before_it():
    generator = torch.Generator().manual_seed(3)
    x_ND = torch.randn(90, 37, generator=generator)
    ids_NK = torch.rand(90, 6, generator=generator).argsort(dim=1)[:, :2]
    weights_NK = torch.rand(90, 2, generator=generator)
    gate_up_EJD = torch.randn(6, 26, 37, generator=generator)
    down_EDI = torch.randn(6, 37, 13, generator=generator)
    experts = (gate_up_EJD, down_EDI)
    whole_ND = experts_of(x_ND, ids_NK, weights_NK, *experts, numerics="invariant")
    for rows in ([17], [3, 80, 44], list(range(60, 90))):
        at = (x_ND[rows], ids_NK[rows], weights_NK[rows])
        assert torch.equal(experts_of(*at, *experts, numerics="invariant"), whole_ND[rows])
