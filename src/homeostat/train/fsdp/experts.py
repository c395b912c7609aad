"""Experts divided over ranks: tokens are sent to the ranks of their experts and back.

    x_ND -> a row for each (token, slot) pair, by expert -> all-to-all -> this rank's experts
         -> all-to-all back -> weighted sum over a token's slots

Rank r of a group of ep ranks has experts r * E / ep to (r + 1) * E / ep - 1. Its parameters have
these experts alone, and are split over the ranks of other groups that have the same ones (FSDP2):
their gradients are summed over those ranks, because this rank received the tokens of its own group.

Everything before the experts (router, replayed routes, load, losses, room for tokens) is computed
where the token is, as without expert parallelism. The product of a row with its expert does not
depend on where it is computed, and slots are added up in the same order.

Suffixes: `_N` tokens, `_K` slots, `_D` model dim, `_S` pairs that this rank sends, `_R` pairs that
it receives, `_g` ranks of the group, `_e` experts of one rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch import distributed as dist

from homeostat.models.decoder import Decoder
from homeostat.models.moe import Experts
from homeostat.ops.all_to_all import Note, RankGroup, exchange, not_noted
from homeostat.ops.expert_rows import combined


def divide_experts(decoder: Decoder, group: dist.ProcessGroup, *, note: Note = not_noted) -> None:
    """Leave this rank its share of the experts of a decoder that is on the meta device.

    `note` records every exchange of tokens.
    """
    for block in decoder.moe_blocks:
        named = RankGroup(group, f"all-to-all of tokens, block {block.number} of experts", note)
        block.experts = ParallelExperts(block.experts, named)


class ParallelExperts(Experts):
    """One rank's share of the experts of a layer. `group`: the ranks that share them."""

    def __init__(self, experts: Experts, group: RankGroup) -> None:
        nn.Module.__init__(self)
        self.numerics, self.kernel, self.product = experts.numerics, experts.kernel, experts.product
        self.group, self.size = group, group.size
        self.num_experts = len(experts.gate_up_proj)
        assert self.num_experts % self.size == 0, (self.num_experts, self.size)
        self.gate_up_proj = _share(experts.gate_up_proj, self.size)
        self.down_proj = _share(experts.down_proj, self.size)

    def forward(self, x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        ids_S = ids_NK.flatten()
        order_S = ids_S.argsort(stable=True)
        sent_ge, received_ge = self._counts(ids_S)
        # The only wait for the device: sizes of messages are known to the host.
        sent, received = torch.stack([sent_ge.sum(1), received_ge.sum(1)]).tolist()
        rows_SD = x_ND[order_S // ids_NK.shape[1]]
        rows_RD = exchange(rows_SD, sent=sent, received=received, group=self.group)
        out_RD = self._own(rows_RD, received_ge)
        out_SD = exchange(out_RD, sent=received, received=sent, group=self.group)
        return combined(out_SD[order_S.argsort()].view(*ids_NK.shape, -1), weights_NK)

    def _counts(self, ids_S: Tensor) -> tuple[Tensor, Tensor]:
        """Return [g, e] twice: pairs for each rank's experts, and those that each rank has for this
        one's."""
        sent_ge = torch.bincount(ids_S, minlength=self.num_experts).view(self.size, -1)
        each = [1] * self.size
        return sent_ge, self.group.move(sent_ge, each, each)

    def _own(self, rows_RD: Tensor, counts_ge: Tensor) -> Tensor:
        """Return the outputs of this rank's experts for the received rows, rank by rank."""
        num_rows, num_own = len(rows_RD), counts_ge.shape[1]
        own_ge = torch.arange(num_own, device=rows_RD.device).repeat(self.size)
        ids_R = own_ge.repeat_interleave(counts_ge.flatten(), output_size=num_rows)
        if not num_rows:
            # A dummy row: the parameters then have a gradient of zero, for which the ranks with the
            # same experts wait.
            rows_RD, ids_R = rows_RD.new_zeros(1, rows_RD.shape[1]) + rows_RD.sum(0), own_ge[:1]
        weights_R1 = torch.ones(len(rows_RD), 1, device=rows_RD.device)
        out_RD = self.product(
            rows_RD,
            ids_R[:, None],
            weights_R1,
            self.gate_up_proj,
            self.down_proj,
            numerics=self.numerics,
            kernel=self.kernel,
        )
        return out_RD[:num_rows]


def _share(stacked: nn.Parameter, size: int) -> nn.Parameter:
    assert stacked.is_meta, "experts are divided before they have memory"
    part = torch.empty(
        (len(stacked) // size, *stacked.shape[1:]), dtype=stacked.dtype, device="meta"
    )
    return nn.Parameter(part, requires_grad=stacked.requires_grad)
