"""What is dropped depends on the token alone, and is dropped at the right rate."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from homeostat.ops.dropout import DropoutKeys, dropout, dropout_keys, keep_mask


def keys(rows, length, *, seed=0, step=1):
    row_ids = torch.arange(rows).repeat_interleave(length)
    positions = torch.arange(length).repeat(rows)
    return dropout_keys(row_ids, positions, seed=seed, step=step)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.75])
def test_the_share_dropped_is_the_rate_in_every_direction(rate):
    keep = keep_mask(keys(40, 50), module=3, channels=256, rate=rate).double()
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(keep.mean() - (1 - rate)) < 5 * deviation / keep.numel() ** 0.5
    assert (keep.mean(0) - (1 - rate)).abs().max() < 6 * deviation / keep.shape[0] ** 0.5
    assert (keep.mean(1) - (1 - rate)).abs().max() < 6 * deviation / keep.shape[1] ** 0.5


def test_neighbours_are_uncorrelated():
    keep = keep_mask(keys(40, 50), module=3, channels=256, rate=0.5).double() - 0.5
    noise = 5 * 0.25 / keep.numel() ** 0.5
    for other in (keep.roll(1, 0), keep.roll(1, 1), keep.roll((1, 1), (0, 1))):
        assert abs((keep * other).mean()) < noise


def test_modules_steps_seeds_rows_and_positions_draw_anew():
    base = keep_mask(keys(4, 8), module=0, channels=64, rate=0.5)
    others = [
        keep_mask(keys(4, 8), module=1, channels=64, rate=0.5),
        keep_mask(keys(4, 8, seed=1), module=0, channels=64, rate=0.5),
        keep_mask(keys(4, 8, step=2), module=0, channels=64, rate=0.5),
        base.roll(1, 0),
        base.roll(8, 0),
    ]
    for other in others:
        assert 0.4 < (base == other).double().mean() < 0.6


def test_a_token_keeps_its_mask_whatever_the_batch():
    together = keep_mask(keys(5, 7), module=2, channels=32, rate=0.4)
    order = torch.randperm(35, generator=torch.Generator().manual_seed(0))
    shuffled = keep_mask(keys(5, 7)[order], module=2, channels=32, rate=0.4)
    assert torch.equal(shuffled, together[order])
    assert torch.equal(keep_mask(keys(5, 7)[9:11], module=2, channels=32, rate=0.4), together[9:11])


def test_values_and_gradients_are_scaled_by_the_share_kept():
    x = torch.randn(35, 16, requires_grad=True)
    out = dropout(x, keys(5, 7), module=0, rate=0.2)
    out.sum().backward()
    keep = keep_mask(keys(5, 7), module=0, channels=16, rate=0.2)
    torch.testing.assert_close(out, torch.where(keep, x / 0.8, 0.0))
    torch.testing.assert_close(x.grad, keep / 0.8)


def test_a_recomputation_sees_the_keys_of_its_forward():
    holder = DropoutKeys()
    x = torch.randn(35, 16, requires_grad=True)

    def drop(x):
        return dropout(x, holder.keys_N, module=0, rate=0.5).pow(2)

    with holder.use(keys(5, 7)):
        out = checkpoint(drop, x, use_reentrant=False, context_fn=holder.checkpoint_contexts).sum()
    assert holder.keys_N is None
    with holder.use(keys(5, 7, step=9)):
        out.backward()
    keep = keep_mask(keys(5, 7), module=0, channels=16, rate=0.5)
    torch.testing.assert_close(x.grad, torch.where(keep, 8 * x.detach(), 0.0))
