"""Kernels of cut distributions against ops/cut.py and float64, and an engine that uses them.

On a GPU, or in Triton's interpreter (tests/unit/test_ops_kernels.py).
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.test_decode import DEVICE, MULTIPLIED, drawn, engine, go_wide, model
from tests.kernels.test_invariant_kernels import decoder, sampled

from homeostat.columns import KEPT_IDS, Ragged
from homeostat.config.kept_ids import MAX_KEPT_IDS
from homeostat.models.decoder import Decoder
from homeostat.models.side_by_side import lay_side_by_side
from homeostat.ops import kernels
from homeostat.ops.cut import Cut, kept_mask
from homeostat.ops.kept_sets import KeptSets
from homeostat.ops.logprobs import token_logprobs_and_entropy
from homeostat.rollout.engine import Request, Sampling, generate
from homeostat.rollout.native.cuda.candidates import sums_of_tiles
from homeostat.rollout.native.cuda.cutting import draw_kept
from homeostat.rollout.native.cuda.sampling import multiplied_sums
from homeostat.rollout.native.cuda.state import CutRows, DecodeState, Rows
from homeostat.types import Completion, TokenRow

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device or Triton's interpreter (tests/unit/test_ops_kernels.py)",
)
# The last one is not cut; top-p and min-p act on what top-k leaves.
CUTS = (
    Cut(top_k=7), Cut(top_p=0.9), Cut(min_p=0.2), Cut(top_k=40, top_p=0.8, min_p=0.01),
    Cut(top_k=1), Cut(top_p=0.999), Cut(),
)  # fmt: skip
TEMPERATURES = (1.0, 0.5, 2.0, 1.0, 1.0, 1.0, 1.0)


def test_log_probs_over_kept_sets_and_their_gradients() -> None:
    sizes, vocab, width = (1, 33, 0, 70, 2), 90, 140
    hidden_MD, weight_VD = drawn(5, width) / 4, drawn(vocab, width, seed=1)
    targets_M = torch.tensor([3, 89, 7, 40, 41])
    rng, lists = np.random.default_rng(0), []
    for size, target in zip(sizes, targets_M.tolist(), strict=True):
        others = rng.permutation(np.delete(np.arange(vocab), target))[: max(size - 1, 0)]
        lists.append(np.sort([*others, target]) if size else [])
    kept = KeptSets.of(
        Ragged.of(lists, np.int32), targets_M.numpy(), np.arange(5), vocabulary=vocab,
        send=lambda array: torch.from_numpy(array).to(DEVICE),
    )  # fmt: skip

    def results() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden_MD, weight_VD)]
        logp_M, entropy_M = token_logprobs_and_entropy(
            *leaves, targets_M.to(DEVICE), temperature=0.7, chunk_bytes=1 << 14,
            entropy_grad=True, kept=kept,
        )  # fmt: skip
        up_M = torch.linspace(-1, 2, 5, device=DEVICE)
        (logp_M @ up_M + entropy_M @ up_M.flip(0)).backward()
        return [logp_M.detach(), entropy_M.detach(), *(leaf.grad for leaf in leaves)]

    found = results()
    # The plain code is compared with float64 in tests/unit/test_ops_cut.py.
    with kernels.plain():
        wanted = results()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def cut_state(num_rows: int, vocabulary: int, noise_B: Tensor) -> tuple[DecodeState, Rows]:
    state = DecodeState(max_rows=num_rows, max_tokens=9, block_tokens=16, layers=1, device=DEVICE)
    state.make_cut(vocabulary)
    state.scale_B.copy_(torch.tensor([1 / t for t in TEMPERATURES]))
    state.moves_B.fill_(1)
    state.noise_SB[0] = noise_B
    cut = state.cut
    assert isinstance(cut, CutRows)
    cut.is_cut_B.copy_(torch.tensor([not one.is_off for one in CUTS]))
    cut.top_k_B.copy_(torch.tensor([min(one.top_k or vocabulary, vocabulary) for one in CUTS]))
    cut.top_p_B.copy_(torch.tensor([one.top_p for one in CUTS]))
    cut.min_p_B.copy_(torch.tensor([one.min_p for one in CUTS]))
    return state, state.rows(num_rows)


@pytest.mark.parametrize("kind", ["logits", "hidden"])
def test_words_are_kept_and_drawn_as_the_definition_says(kind: str) -> None:
    """Of logits in memory, of some rows many equal ones, or of hidden rows. The set of one row is
    too large to be noted, and more than a program holds at a time."""
    vocabulary, width = 2500 if kind != "hidden" else 700, 72
    logits_BV = 2 * drawn(len(CUTS), vocabulary)
    if kind == "hidden":
        hidden_BD = drawn(len(CUTS), width).to(MULTIPLIED)
        weight_VD = (0.3 * drawn(vocabulary, width, seed=1)).to(MULTIPLIED)
        logits_BV = torch.empty_like(logits_BV)
    else:
        logits_BV[1::2] = logits_BV[1::2].round()
    noise_B = torch.rand(len(CUTS), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    state, rows = cut_state(len(CUTS), vocabulary, noise_B)
    if kind == "hidden":
        sums = multiplied_sums(hidden_BD, weight_VD, rows.scale_B, logits_BV=logits_BV)
        torch.testing.assert_close(
            logits_BV, hidden_BD.float() @ weight_VD.float().t(), rtol=1e-4, atol=1e-4
        )
    else:
        sums = sums_of_tiles(logits_BV, rows.scale_B)
    draw_kept(logits_BV, *sums, rows)
    assert state.cut is not None
    z_BV = (logits_BV * state.scale_B[:, None]).cpu()
    mask_BV = kept_mask(z_BV, CUTS)
    for row, (cut, noise) in enumerate(zip(CUTS, noise_B.tolist(), strict=True)):
        wanted = mask_BV[row].nonzero()[:, 0]
        z_V = z_BV[row].double()
        cdf_V = z_V[wanted].softmax(0).cumsum(0)
        token = int(wanted[torch.searchsorted(cdf_V, noise * cdf_V[-1], right=True)])
        assert int(state.drawn_SB[0, row]) == int(state.tokens_B[row]) == token
        near = pytest.approx
        assert float(state.logps_SB[0, row]) == near(float(z_V.log_softmax(0)[token]), abs=2e-5)
        over = float(z_V[token] - z_V[wanted].logsumexp(0))
        assert float(state.cut.sampled_logps_SB[0, row]) == near(over, abs=2e-5)
        size = int(state.cut.sizes_SB[0, row])
        assert size == (0 if cut.is_off else len(wanted))
        if size:
            ids = state.cut.kept_SBK[0, row, :size].tolist()
            assert ids == wanted[: min(vocabulary, MAX_KEPT_IDS)].tolist()
    assert state.positions_B.tolist() == [1] * len(CUTS)


def cut_requests(vocabulary: int, new: int) -> list[Request]:
    """Rows that are cut differently beside one that is not."""
    settings = (Sampling(new, top_k=5), Sampling(new, top_p=0.8, temperature=0.7), Sampling(new),
                Sampling(new, min_p=0.1))  # fmt: skip
    tokens_T = np.random.default_rng(0).integers(0, vocabulary, 3)
    return [
        Request(f"{number}", tokens_T, sampling, seed=0, kept_ids=True)
        for number, sampling in enumerate(settings)
    ]


def same_sets(one: Completion, other: Completion) -> None:
    assert (KEPT_IDS in one.columns) == (KEPT_IDS in other.columns)
    if KEPT_IDS in one.columns:
        own, others = one.columns[KEPT_IDS], other.columns[KEPT_IDS]
        assert isinstance(own, Ragged)
        assert isinstance(others, Ragged)
        assert own.values.tolist() == others.values.tolist()
        assert own.offsets_T.tolist() == others.offsets_T.tolist()


@pytest.mark.slow
def test_bursts_keep_what_the_plain_engine_keeps() -> None:
    made = model("qwen2")
    lay_side_by_side(made)
    asked = cut_requests(60, 3)
    fused = engine(made, "fused")
    go_wide(fused)
    wanted = generate(engine(made, "plain"), asked, timeout_s=100)
    for one, other in zip(generate(fused, asked, timeout_s=300), wanted, strict=True):
        assert one.tokens_T.tolist() == other.tokens_T.tolist()
        np.testing.assert_allclose(one.engine_logp_T, other.engine_logp_T, atol=1e-5)
        np.testing.assert_allclose(one.sampled_logp_T, other.sampled_logp_T, atol=1e-5)
        same_sets(one, other)


def scored_over_sets(made: Decoder, asked: list[Request], found: list[Completion]) -> list[list]:
    """What the trainer's function gives each completion, over the sets that came with it."""
    scorer, _ = sampled(made, "plain", [replace(asked[0], kept_ids=False)], max_concurrency=1)
    scores = []
    for request, one in zip(asked, found, strict=True):
        num_prompt = len(request.tokens_T)
        whole_T = np.concatenate([request.tokens_T, one.tokens_T])
        is_new_T = (np.arange(len(whole_T)) >= num_prompt).astype(np.float32)
        columns = {}
        if KEPT_IDS in one.columns:
            own = one.columns[KEPT_IDS]
            assert isinstance(own, Ragged)
            offsets_T = np.concatenate([np.zeros(num_prompt, dtype=np.int64), own.offsets_T])
            columns[KEPT_IDS] = Ragged(own.values, offsets_T)
        row = TokenRow(0, whole_T, is_new_T, columns)
        (logp_T,) = scorer.score([row], temperature=request.sampling.temperature)
        scores.append(logp_T.tolist())
    return scores


@pytest.mark.slow
def test_invariant_log_probs_over_kept_sets_have_the_trainers_bits() -> None:
    made = decoder()
    asked = cut_requests(made.config.vocab_size, 2)
    _, found = sampled(made, "fused", asked, max_concurrency=4)
    _, wanted = sampled(made, "plain", asked, max_concurrency=3)
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens_T.tolist() == other.tokens_T.tolist()
        assert one.sampled_logp_T.tolist() == other.sampled_logp_T.tolist()
        same_sets(one, other)
    assert [one.sampled_logp_T.tolist() for one in found] == scored_over_sets(made, asked, found)
