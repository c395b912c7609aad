"""Hidden states of a rank's own tokens, where several ranks share a micro-batch.

    part of the batch (split.py) -> the model's layers, with attention over all ranks
                                 -> states of own tokens -> log-probs, values, reduced states
                                 -> those of all tokens, on every rank

What is made of a token is one number or a few, so that all ranks of a data group get all of them:
each computes the loss of whole rows as a local trainer does, and its gradient for its own tokens
alone. Gradients of weights are summed over ranks by FSDP as they always are, and nothing is counted
twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from homeostat.arrays import IntArray
from homeostat.models.decoder import Decoder
from homeostat.models.hidden_states import HiddenStates
from homeostat.models.routing import Routing
from homeostat.ops.attention import AttentionContext, PackedLayout
from homeostat.ops.branches import Branches
from homeostat.ops.sharing import SharedPrompts
from homeostat.train.hidden import Send
from homeostat.train.reducers import Reducer, TokenPlaces
from homeostat.train.sequence.blocks import block_kernel
from homeostat.train.sequence.heads import HeadExchange, repeats
from homeostat.train.sequence.links import Link, SequenceLinks
from homeostat.train.sequence.ring import RingAttention, RingLayout
from homeostat.train.sequence.split import SequencePart, part_of_distinct, part_of_rows

Sharing = SharedPrompts | Branches


@dataclass(frozen=True, slots=True)
class PartHidden:
    """Hidden states of the tokens that this rank computes. Read like `train.hidden.Hidden`."""

    state_XD: Tensor
    send: Send
    part: SequencePart
    link: Link

    def mine(self, index_M: IntArray) -> IntArray:
        """Return the given tokens whose states are on this rank."""
        return self.part.mine(index_M)

    def at(self, index_M: IntArray) -> Tensor:
        """Return the states of tokens that are here."""
        return self.state_XD[self.send(self.part.place_N[index_M])]

    def whole(self, values_M: Tensor, of_M: IntArray, among_M: IntArray) -> Tensor:
        """Return values of all tokens `among_M`, which ascend; those of `of_M` are known here."""
        at_M = self.send(np.searchsorted(among_M, of_M))
        return _Whole.apply(values_M, at_M, len(among_M), self.link)

    def total(self, value: Tensor) -> Tensor:
        """Return a sum over all tokens from one over those that are here."""
        return self.link.sum(value)

    def reduced(self, reduce: Reducer, state_XD: Tensor, places: TokenPlaces) -> Tensor:
        """Return what a reducer makes of the states of a layer.

        Reducers are linear in the states, so that those of other ranks may count as zero.
        """
        zero_1D = state_XD.new_zeros(1, state_XD.shape[1])
        return self.link.sum(reduce(torch.cat([state_XD, zero_1D]), places))

    def state_places(self, num_tokens: int) -> Tensor:
        """Return, for each token, the place of its state; that of the zero if it is elsewhere."""
        place_N = self.part.place_N
        return self.send(np.where(place_N < 0, len(self.state_XD), place_N))


class _Whole(torch.autograd.Function):
    """Every rank's values in one tensor. Each rank's loss is the whole one, so the gradient of its
    own values is all that it needs."""

    @staticmethod
    def forward(ctx: Any, values_M: Tensor, at_M: Tensor, size: int, link: Link) -> Tensor:
        ctx.save_for_backward(at_M)
        return link.sum(values_M.new_zeros(size).index_copy_(0, at_M, values_M))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (at_M,) = ctx.saved_tensors
        return grads[0].index_select(0, at_M), None, None, None


@dataclass(frozen=True, slots=True)
class WholePass:
    """The inputs of a pass over a micro-batch, of all its tokens, before ranks share them out."""

    tokens_N: Tensor
    positions_N: Tensor
    dropout_keys_N: Tensor | None
    lengths_B: IntArray
    sharing: Sharing | None
    routing: Routing | None
    states: HiddenStates | None


def part_hidden(
    model: Decoder, links: SequenceLinks, whole: WholePass, *, send: Send
) -> PartHidden:
    """Compute the hidden states of this rank's tokens. All ranks of the data group take part."""
    part = _part(model, links, whole)
    index_X = send(part.index_X)
    keys_N = whole.dropout_keys_N
    state_XD = model.hidden_part(
        whole.tokens_N[index_X],
        whole.positions_N[index_X],
        _attention(model, links, whole, part),
        dropout_keys_N=None if keys_N is None else keys_N[index_X],
        states=whole.states,
        routing=None if whole.routing is None else _routing(whole, whole.routing, part, send),
    )
    return PartHidden(state_XD, send, part, links.all)


def _part(model: Decoder, links: SequenceLinks, whole: WholePass) -> SequencePart:
    sp = (links.sp.size, links.sp.place)
    if whole.sharing is not None:
        assert links.cp.size == 1, "refused by config: a ring has whole rows"
        tables = (whole.sharing.unique_U, whole.sharing.place_N)
        return part_of_distinct(*(table.cpu().numpy() for table in tables), sp=sp)
    cp = (links.cp.size, links.cp.place)
    return part_of_rows(whole.lengths_B, cp=cp, sp=sp, by_length=model.kernel == "sdpa")


def _routing(whole: WholePass, routing: Routing, part: SequencePart, send: Send) -> Routing:
    """Return the routing of the part: what only fills up is routed freely, and never counted."""
    index_X, is_own_X = send(part.index_X), send(part.is_own_X)
    inner = routing.at(index_X)
    if inner.free_N is not None:
        inner.free_N = inner.free_N | ~is_own_X
    watch = routing.load
    if whole.sharing is not None:
        unique_U, place_N = whole.sharing.unique_U, whole.sharing.place_N
        copies_U = routing.copies(place_N, count=len(unique_U))
        # From places in the batch to places among the distinct tokens.
        index_X = place_N[index_X]
        inner.copies_N = None if copies_U is None else copies_U[index_X]
        watch = None if watch is None else watch.at(unique_U, place_N)
    inner.load = None if watch is None else watch.part(index_X, is_own_X)
    return inner


def _attention(
    model: Decoder, links: SequenceLinks, whole: WholePass, part: SequencePart
) -> AttentionContext:
    device = whole.tokens_N.device
    if links.cp.size > 1:
        kernel = block_kernel(model.kernel, device_type=device.type)
        inner = RingAttention(RingLayout.of(part.chunks, device), links.cp, kernel)
    else:
        inner = _whole_rows(model, links, whole)
    if links.sp.size == 1:
        return inner
    return HeadExchange(inner, links.sp, part.num_joined)


def _whole_rows(model: Decoder, links: SequenceLinks, whole: WholePass) -> AttentionContext:
    """Return the attention of whole rows, in this rank's heads."""
    size, num_kv_heads = links.sp.size, model.config.num_kv_heads
    heads = num_kv_heads * repeats(num_kv_heads, size) // size

    def packed(layout: PackedLayout) -> AttentionContext:
        return model.packed_attention(layout, num_kv_heads=heads)

    device, lengths = whole.tokens_N.device, [int(length) for length in whole.lengths_B]
    if whole.sharing is not None:
        layout = PackedLayout.of(lengths, device)
        return whole.sharing.attention(layout, kernel=model.kernel, packed=packed)
    # In the order of `part_of_rows`.
    return packed(PackedLayout.of(sorted(lengths) if model.kernel == "sdpa" else lengths, device))
