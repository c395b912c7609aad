"""Cut distributions: which tokens are kept, and log-probs and gradients over what is kept."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from homeostat.columns import Ragged
from homeostat.errors import ReplayError
from homeostat.ops import cut as cut_module
from homeostat.ops.cut import Cut, kept_mask
from homeostat.ops.kept_sets import KeptSets
from homeostat.ops.logprobs import token_logprobs, token_logprobs_and_entropy


def kept_by_hand(z_V: np.ndarray, cut: Cut) -> set[int]:
    """The definition, token by token in float64."""
    order = sorted(range(len(z_V)), key=lambda v: (-z_V[v], v))
    order = order[: cut.top_k or len(order)]
    weights = [float(np.exp(z_V[v] - z_V[order[0]])) for v in order]
    total, before, kept = sum(weights), 0.0, set()
    for v, weight in zip(order, weights, strict=True):
        is_in = cut.top_p >= 1 or before < cut.top_p * total
        if not kept or (is_in and weight >= cut.min_p):
            kept.add(v)
        before += weight
    return kept


@given(
    st.integers(0, 2**32),
    st.floats(0.05, 20.0),
    st.sampled_from([None, 1, 3, 17, 500]),
    st.sampled_from([1.0, 0.97, 0.5, 0.01]),
    st.sampled_from([0.0, 0.05, 0.6, 1.0]),
    st.booleans(),
)
def test_the_kept_tokens_are_those_of_the_definition(seed, spread, top_k, top_p, min_p, has_ties):
    generator = torch.Generator().manual_seed(seed)
    z_BV = spread * torch.randn(4, 37, generator=generator, dtype=torch.float64)
    if has_ties:
        z_BV = z_BV.round()
    cut = Cut(top_k, top_p, min_p)
    # A third of the vocabulary, so that the first look is often too narrow.
    with patch.object(cut_module, "_WIDTH", 11):
        found = kept_mask(z_BV, [cut, Cut(), cut, cut])
    assert found[1].all()
    for row in (0, 2, 3):
        assert set(found[row].nonzero()[:, 0].tolist()) == kept_by_hand(z_BV[row].numpy(), cut)


def sets_of(size_M, vocab, targets_M, *, seed) -> Ragged:
    """Random sets of so many ids that hold their target; 0: none."""
    rng = np.random.default_rng(seed)
    lists = []
    for size, target in zip(size_M, targets_M.tolist(), strict=True):
        others = np.delete(np.arange(vocab), target)
        chosen = rng.choice(others, size - 1, replace=False) if size else others[:0]
        lists.append(np.sort([*chosen, target]) if size else chosen)
    return Ragged.of(lists, np.int32)


def kept_of(ragged: Ragged, targets_M: torch.Tensor, vocab: int) -> KeptSets:
    index_M = np.arange(len(targets_M))
    found = KeptSets.of(ragged, targets_M.numpy(), index_M, vocabulary=vocab, send=torch.from_numpy)
    assert found is not None
    return found


def problem(sizes, vocab, dim, *, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden_MD = torch.randn(len(sizes), dim, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(vocab, dim, generator=generator).to(dtype).requires_grad_()
    targets_M = torch.randint(0, vocab, (len(sizes),), generator=generator)
    return hidden_MD, weight_VD, targets_M, sets_of(sizes, vocab, targets_M, seed=seed)


def reference(hidden_MD, weight_VD, targets_M, ragged, temperature):
    """Float64 over a mask of the vocabulary: log-probs, entropies, and gradients of their sum."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden_MD, weight_VD))
    masked = torch.zeros(len(targets_M), weight.shape[0], dtype=torch.bool)
    for row in range(len(targets_M)):
        ids = torch.from_numpy(ragged[row].astype(np.int64))
        masked[row] = len(ids) > 0
        masked[row, ids] = False
    z = (hidden @ weight.t() / temperature).masked_fill(masked, -1e9)
    logp_all = z.log_softmax(1)
    logp = logp_all.gather(1, targets_M[:, None])[:, 0]
    entropy = -(logp_all.exp() * logp_all).sum(1)
    return hidden, weight, logp, entropy


@pytest.mark.parametrize("sizes", [(1, 5, 0, 40, 300, 3), (7, 1, 2), (0, 0, 9)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_over_kept_sets_equal_float64(sizes, temperature):
    hidden, weight, targets, ragged = problem(sizes, 311, 24, seed=len(sizes))
    kept = kept_of(ragged, targets, 311)
    how = {"temperature": temperature, "chunk_bytes": 2**12, "kept": kept}
    logp, entropy = token_logprobs_and_entropy(hidden, weight, targets, **how, entropy_grad=True)
    up_M = torch.linspace(-1, 2, len(sizes))
    (logp @ up_M + entropy @ up_M.flip(0)).backward()
    hidden64, weight64, want_logp, want_entropy = reference(
        hidden, weight, targets, ragged, temperature
    )
    (want_logp @ up_M.double() + want_entropy @ up_M.flip(0).double()).backward()
    pairs = ((logp, want_logp), (entropy, want_entropy), (hidden.grad, hidden64.grad),
             (weight.grad, weight64.grad))  # fmt: skip
    for found, wanted in pairs:
        torch.testing.assert_close(found.double(), wanted, atol=5e-5, rtol=2e-5)
    alone = token_logprobs(hidden.detach(), weight.detach(), targets, **how)
    assert alone.tolist() == logp.tolist()
    unkept = np.setdiff1d(np.arange(311), ragged.values)
    if 0 not in sizes:
        assert not weight.grad[torch.from_numpy(unkept)].any()


def test_a_token_has_the_same_bits_whatever_is_computed_beside_it():
    hidden, weight, targets, ragged = problem((33, 1, 700, 90, 5, 256), 1201, 96, seed=4)
    with torch.no_grad():
        whole = token_logprobs(
            hidden, weight, targets, chunk_bytes=2**14, kept=kept_of(ragged, targets, 1201)
        )
        for row in range(len(targets)):
            alone = Ragged.of([ragged[row]], np.int32)
            one = slice(row, row + 1)
            kept = kept_of(alone, targets[one], 1201)
            logp = token_logprobs(hidden[one], weight, targets[one], chunk_bytes=2**14, kept=kept)
            assert logp.tolist() == whole[one].tolist()


def test_a_set_of_another_token_is_refused():
    targets_M = torch.tensor([4, 5])
    with pytest.raises(ReplayError, match=r"token 5 is not in the set.*rollout.top_p=1"):
        kept_of(Ragged.of([[1, 4], [2, 6]], np.int32), targets_M, 9)
    with pytest.raises(ReplayError, match="id 9 lies outside the model's vocabulary of 9"):
        kept_of(Ragged.of([[1, 4], [5, 9]], np.int32), targets_M, 9)
