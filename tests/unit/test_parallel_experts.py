"""Experts that are divided over ranks; over several of them: tests/parity/test_scale.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.moe import moe_settings
from tests.support.parallel_experts import alone, both

from homeostat.errors import ModelError
from homeostat.models.families import decoder_config
from homeostat.models.moe import require_even_experts
from homeostat.ops.moe_shape import MoeShape


@pytest.fixture
def shape() -> MoeShape:
    found = decoder_config(moe_settings("dots1")).moe
    assert found is not None
    return found


def test_a_group_of_one_computes_the_bits_of_one_process(tmp_path: Path) -> None:
    with alone(tmp_path, "gloo") as group:
        found, expected = both(group, device=torch.device("cpu"), dtype=torch.float32)
    assert len(found) == len(expected) == 5
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_ranks_that_cannot_have_equal_shares_are_refused_with_the_sum(shape: MoeShape) -> None:
    require_even_experts(shape, ep=4)
    require_even_experts(None, ep=1)
    with pytest.raises(ModelError, match=r"12 % 5 = 2.*divisor of 12"):
        require_even_experts(shape, ep=5)
    with pytest.raises(ModelError, match="has no experts"):
        require_even_experts(None, ep=2)
