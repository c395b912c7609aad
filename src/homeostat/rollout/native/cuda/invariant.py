"""A decoding step over the device's state by the decoder's own forward.

    tokens and positions -> Decoder.hidden_in -> logits -> draw -> log-prob of what was drawn

It is used with invariant numerics and, in fast numerics, for blocks that forward.py has no kernels
for.

Invariant: every operation is the one that training and scoring use, in the same numerics. With
invariant numerics the log-prob of a token therefore has the same bits. The only difference is where
keys are stored: `CachedAttention` writes the new token's key and value into the cache and finds the
others through the state's tables, in the same tiles and the same order. Nothing depends on the
host, so that a step can be captured as a graph.

Suffixes: `_B` rows, `_H` heads, `_d` head dim, `_K` blocks of a sequence, `_V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from homeostat.models.decoder import Decoder
from homeostat.models.routing import Routing
from homeostat.ops.attention import NO_LIMITS, Limits
from homeostat.ops.kernels import aligned
from homeostat.ops.kernels.attention import over_keys, tile_options
from homeostat.ops.kernels.kept import kept_sums
from homeostat.ops.kernels.logits import Chunks
from homeostat.ops.linear import tiled_product
from homeostat.ops.tiled_attention import KEY_TILE, QUERY_TILE
from homeostat.rollout.native.cuda.candidates import sums_of_tiles
from homeostat.rollout.native.cuda.cutting import draw_kept
from homeostat.rollout.native.cuda.int4_weights import SwitchWatch
from homeostat.rollout.native.cuda.sampling import draw_from_logits
from homeostat.rollout.native.cuda.state import DecodeState, Rows
from homeostat.rollout.native.fp8_weights import Fp8Watch


class InvariantForward:
    """The counterpart of forward.py's `DecodeForward`."""

    def __init__(self, model: Decoder, state: DecodeState, *, block_tokens: int) -> None:
        self.model = model
        self.state = state
        self.block_tokens = block_tokens
        self._watch = SwitchWatch(model)
        self._fp8 = Fp8Watch(model)

    @property
    def vocabulary(self) -> int:
        return self.model.config.vocab_size

    def refresh(self) -> bool:
        """Update FP8 copies of weights, which a captured step would not do.

        Return whether steps must be captured again: layers switched to rounded weights or back.
        """
        is_fp8 = self._fp8.refresh()
        return self._watch.take_switch() or is_fp8

    def weights_changed(self) -> None:
        """Do nothing: the products of the model know which of their copies are stale."""

    def step(self, num_rows: int, *, is_cut: bool) -> None:
        """Sample one more token for the first `num_rows` rows of the state.

        `is_cut`: top-k, top-p or min-p may apply to some of them.
        """
        state = self.state.rows(num_rows)
        attention = CachedAttention(state, self.state.stores_LA, self.block_tokens)
        routing = Routing(records=True)
        hidden_BD = self.model.hidden_in(
            state.tokens_B, state.positions_B, attention, routing=routing
        )
        if state.routes_SBLK is not None:
            _note_routes(routing, state)
        weight_VD = self.model.output_weight()
        logits_BV = tiled_product(hidden_BD, weight_VD, out_dtype=torch.float32)
        if not is_cut:
            draw_from_logits(logits_BV, state)
            _note(_logp(logits_BV, state), state)
            return
        draw_kept(logits_BV, *sums_of_tiles(logits_BV, state.scale_B), state)
        logp_B = _logp(logits_BV, state)
        _note(logp_B, state)
        _note_kept(logp_B, hidden_BD, weight_VD, state)


def _logp(logits_BV: Tensor, state: Rows) -> Tensor:
    """Return log-probs of the sampled tokens, fp32 [B], by the sums of ops/fused_logprobs.py."""
    num_rows, vocabulary = logits_BV.shape
    chunks = Chunks.of(vocabulary, state.scale_B)
    chunks.add(logits_BV, state.tokens_B.long(), slice(0, num_rows), first=0)
    return chunks.target_M - chunks.totals().lse()


def _note(logp_B: Tensor, state: Rows) -> None:
    """Record the log-probs under the step just made; drawing left them exact only to rounding."""
    step_B = (state.positions_B - state.starts_B - state.moves_B).long()
    state.logps_SB.scatter_(0, step_B[None], logp_B[None])


def _note_kept(whole_logp_B: Tensor, hidden_BD: Tensor, weight_VD: Tensor, state: Rows) -> None:
    """Record log-probs over the kept words, by the trainer's kernel; over all without a cut."""
    cut = state.cut
    assert cut is not None, "the state has been prepared for cut rows"
    step_B = (state.positions_B - state.starts_B - state.moves_B).long()
    row_B = torch.arange(len(step_B), device=step_B.device)
    size_B = cut.sizes_SB[step_B, row_B].long()
    starts_B = step_B * cut.kept_SBK.stride(0) + row_B * cut.kept_SBK.stride(1)
    ends_B = starts_B + size_B.clamp(max=cut.kept_SBK.shape[2])
    targets_B, scale_B = state.tokens_B.long(), state.scale_B
    sums = kept_sums(
        hidden_BD, weight_VD, targets_B, cut.kept_SBK, starts_B, ends_B, scale_B, with_logits=False
    )
    _, target_B, lse_B, _ = sums
    logp_B = torch.where(size_B > 0, target_B - lse_B, whole_logp_B)
    cut.sampled_logps_SB.scatter_(0, step_B[None], logp_B[None])


def _note_routes(routing: Routing, state: Rows) -> None:
    """Record the chosen experts under the step that is being made."""
    assert state.routes_SBLK is not None, "a model with experts has routes"
    assert state.shares_SBLK is not None, "routes have weights"
    step_B = (state.positions_B - state.starts_B).long()
    row_B = torch.arange(len(step_B), device=step_B.device)
    state.routes_SBLK[step_B, row_B] = routing.recorded().to(state.routes_SBLK.dtype)
    state.shares_SBLK[step_B, row_B] = routing.recorded_weights()


@dataclass(frozen=True, slots=True)
class CachedAttention:
    """Attention of one query per row over its cached blocks and its own key."""

    state: Rows
    stores_LA: Tensor
    block_tokens: int

    def attend(
        self,
        layer: int,
        q_BHd: Tensor,
        k_BHd: Tensor,
        v_BHd: Tensor,
        *,
        scale: float,
        limits: Limits = NO_LIMITS,
    ) -> Tensor:
        num_kv_heads = k_BHd.shape[1]
        out_BHd = q_BHd.new_empty(q_BHd.shape)
        tables_BK = self.state.tables_BK
        tiles = {"queries": QUERY_TILE, "keys": KEY_TILE, "limits": limits}
        options = tile_options(q_BHd, num_kv_heads=num_kv_heads, **tiles)
        _attend[(len(q_BHd), num_kv_heads)](
            aligned(q_BHd), aligned(k_BHd), aligned(v_BHd), self.stores_LA[layer], tables_BK,
            self.state.positions_B, out_BHd, tables_BK.stride(0), scale,
            NUM_KV_HEADS=num_kv_heads, BLOCK_TOKENS=self.block_tokens, **options,
        )  # fmt: skip
        return out_BHd


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, stores_ptr, tables_ptr, positions_ptr, out_ptr, table_stride, scale,
    NUM_KV_HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    PRECISION: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    now = tl.load(positions_ptr + sequence)
    table_ptr = tables_ptr + sequence * table_stride
    # The compiler cannot see the alignment of raw addresses; the allocator guarantees it.
    element = q_ptr.dtype.element_ty
    keys_ptr = tl.multiple_of(tl.load(stores_ptr).to(tl.pointer_type(element)), 16)
    values_ptr = tl.multiple_of(tl.load(stores_ptr + 1).to(tl.pointer_type(element)), 16)

    at_d = tl.arange(0, DIM)
    is_dim = at_d < WIDTH
    block = tl.load(table_ptr + now // BLOCK_TOKENS).to(tl.int64)
    slot = (block * NUM_KV_HEADS + head) * BLOCK_TOKENS + now % BLOCK_TOKENS
    at_new = (sequence * NUM_KV_HEADS + head) * WIDTH + at_d
    k, v = tl.load(k_ptr + at_new, mask=is_dim), tl.load(v_ptr + at_new, mask=is_dim)
    tl.store(keys_ptr + slot * WIDTH + at_d, k, mask=is_dim)
    tl.store(values_ptr + slot * WIDTH + at_d, v, mask=is_dim)
    # Below, threads of the program read what other threads wrote.
    tl.debug_barrier()

    row = tl.arange(0, ROWS)
    member = row % MEMBERS
    position = now // QUERIES * QUERIES + row // MEMBERS
    inside = ((position == now) & (member < GROUP))[:, None] & is_dim[None, :]
    at_q = (sequence * NUM_HEADS + head * GROUP + member)[:, None] * WIDTH + at_d[None, :]
    q = tl.load(q_ptr + at_q, mask=inside, other=0.0)
    out = over_keys(
        q, keys_ptr, values_ptr, table_ptr, position, now + 1, now + 1, head * BLOCK_TOKENS, scale,
        BLOCK_TOKENS=BLOCK_TOKENS, BLOCK_STRIDE=NUM_KV_HEADS * BLOCK_TOKENS,
        WINDOW=WINDOW, SOFT_CAP=SOFT_CAP,
        ROWS=ROWS, KEYS=KEYS, WIDTH=WIDTH, DIM=DIM, PRECISION=PRECISION,
    )  # fmt: skip
    tl.store(out_ptr + at_q, out.to(element), mask=inside)
