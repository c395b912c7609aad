"""A prompt computed once gives what it gives when every row computes it: values and gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support import tiny_rl
from tests.support.rounding import assert_right_to_rounding

from homeostat.models.build import load_model
from homeostat.ops.attention import PackedLayout
from homeostat.ops.sharing import SharedPrompts
from homeostat.train.forward import prompt_lengths
from homeostat.types import TokenRow, TrainBatch

CPU = torch.device("cpu")


def batch_of(rng: np.random.Generator, *, groups: int, samples: int) -> TrainBatch:
    rows = []
    for _ in range(groups):
        prompt = rng.integers(0, 13, int(rng.integers(1, 12)))
        for _ in range(samples):
            completion = rng.integers(0, 13, int(rng.integers(1, 9)))
            weights = np.r_[np.zeros(len(prompt)), np.ones(len(completion))].astype(np.float32)
            rows.append(TokenRow(len(rows), np.concatenate([prompt, completion]), weights))
    order = rng.permutation(len(rows))
    return TrainBatch.of([rows[int(index)] for index in order])


def found_in(batch: TrainBatch) -> SharedPrompts | None:
    lengths = prompt_lengths(batch)
    return SharedPrompts.find(batch.tokens_N, batch.lengths_B, lengths, device=CPU)


@pytest.mark.parametrize("changes", [{}, {"kernel": "eager"}, {"numerics": "invariant"}])
def test_values_and_gradients_are_those_of_the_whole_batch(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    config = tiny_rl.config(tmp_path, f"model.numerics={changes.get('numerics', 'fast')}")
    batch = batch_of(np.random.default_rng(), groups=3, samples=5)
    sharing = found_in(batch)
    assert sharing is not None
    assert len(sharing.unique_U) < batch.num_tokens
    target = torch.randn(batch.num_tokens, 32)
    made = {}
    for name, given_sharing in (("whole", None), ("shared", sharing)):
        loaded = load_model(config.model, None, dtype=torch.float32, device=CPU, seed=1,
                            gradient_checkpointing=name == "shared")  # fmt: skip
        loaded.module.kernel = changes.get("kernel", "sdpa")
        tokens, positions = (torch.from_numpy(a) for a in (batch.tokens_N, batch.positions_N))
        layout = PackedLayout.of(batch.lengths_B.tolist(), CPU)
        hidden = loaded.module.hidden(tokens, positions, layout, sharing=given_sharing)
        (hidden * target).sum().backward()
        grads = {n: p.grad for n, p in loaded.module.named_parameters() if p.grad is not None}
        made[name] = hidden.detach(), grads
    plain = tiny_rl.config(tmp_path, "model.numerics=fast").model
    wide = load_model(plain, None, dtype=torch.float64, device=CPU, seed=1,
                      gradient_checkpointing=False)  # fmt: skip
    with torch.no_grad():
        exact = wide.module.hidden(tokens, positions, layout)
    if changes.get("numerics") == "invariant":
        assert torch.equal(made["shared"][0], made["whole"][0])
    assert_right_to_rounding(made["shared"][0], made["whole"][0], exact=exact)
    assert made["shared"][1].keys() == made["whole"][1].keys()
    for name, grad in made["whole"][1].items():
        near = 1e-5 * float(grad.abs().max())
        torch.testing.assert_close(made["shared"][1][name], grad, rtol=1e-4, atol=near)


@given(seed=st.integers(0, 2**32), groups=st.integers(1, 4), samples=st.integers(1, 4))
def test_every_token_is_one_of_the_distinct_ones(seed: int, groups: int, samples: int) -> None:
    batch = batch_of(np.random.default_rng(seed), groups=groups, samples=samples)
    sharing = found_in(batch)
    if sharing is None:
        return
    unique, place = sharing.unique_U.numpy(), sharing.place_N.numpy()
    for column in (batch.tokens_N, batch.positions_N):
        assert (column[unique][place] == column).all()
    # Trained tokens are never shared, and a prompt never with half of another.
    trained = np.flatnonzero(batch.weights_N)
    assert (unique[place[trained]] == trained).all()


def test_rows_that_share_nothing_are_left_alone() -> None:
    rng = np.random.default_rng(0)
    rows = [
        TokenRow(index, np.r_[index, rng.integers(0, 13, 8)], np.r_[0, np.ones(8)].astype("f4"))
        for index in range(4)
    ]
    assert found_in(TrainBatch.of(rows)) is None


def test_the_prompt_ends_where_training_begins() -> None:
    rows = [
        TokenRow(0, np.arange(4), np.array([0, 0, 1, 0], dtype=np.float32)),
        TokenRow(1, np.arange(3), np.zeros(3, dtype=np.float32)),
        TokenRow(2, np.arange(2), np.array([0, 1], dtype=np.float32)),
    ]
    assert prompt_lengths(TrainBatch.of(rows)).tolist() == [2, 3, 1]
