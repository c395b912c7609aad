"""Divided experts in a world of one rank, beside the experts of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tests.support.moe import moe_settings
from torch import Tensor
from torch import distributed as dist

from homeostat.models.families import decoder_config
from homeostat.models.moe import Experts
from homeostat.ops.all_to_all import RankGroup
from homeostat.train.fsdp.experts import ParallelExperts

NUM_TOKENS = 37


@contextmanager
def alone(folder: Path, backend: str) -> Iterator[dist.ProcessGroup]:
    """A group of one rank, which talks to itself."""
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def both(
    group: dist.ProcessGroup, *, device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of the same experts, divided over the group and in one process."""
    torch.manual_seed(0)
    config = decoder_config(moe_settings("qwen3_moe"))
    assert config.moe is not None
    sizes = config.moe, config.hidden_size
    plain = Experts(*sizes, numerics="fast").to(device, dtype)
    with torch.device("meta"):
        empty = Experts(*sizes, numerics="fast").to(dtype)
    divided = ParallelExperts(empty, RankGroup(group)).to_empty(device=device)
    divided.load_state_dict(plain.state_dict())
    x_ND = torch.randn(NUM_TOKENS, config.hidden_size, device=device, dtype=dtype)
    ids_NK = torch.stack(
        [torch.randperm(config.moe.num_experts)[: config.moe.top_k] for _ in range(NUM_TOKENS)]
    ).to(device)
    weights_NK = torch.rand(NUM_TOKENS, config.moe.top_k, device=device)
    back_ND = torch.randn_like(x_ND)
    found = []
    for experts in (divided, plain):
        inputs = x_ND.clone().requires_grad_(), weights_NK.clone().requires_grad_()
        out_ND = experts(inputs[0], ids_NK, inputs[1])
        out_ND.backward(back_ND)
        grads = [tensor.grad for tensor in (*inputs, *experts.parameters())]
        found.append([out_ND.detach(), *(grad for grad in grads if grad is not None)])
    return found[0], found[1]
