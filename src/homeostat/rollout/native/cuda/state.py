"""The state of decoding sequences on the device: the inputs of a step, and its outputs.

Addresses never change, so that graphs can be captured over them. Rows beyond the sequences are
padding: their positions stay the same, and they write to the cache's spare block.

Suffixes: `_B` rows, `_K` blocks of a sequence, `_S` steps of a burst, `_L` layers, `_A` addresses
of a layer. In routes, `_L` stands for layers with experts and `_K` for slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from homeostat.config.kept_ids import MAX_KEPT_IDS
from homeostat.models.routing import smallest_dtype
from homeostat.ops.moe_shape import MoeShape
from homeostat.rollout.kept import packed
from homeostat.rollout.native.bursts import TakenCut
from homeostat.rollout.native.cache import KVCache
from homeostat.rollout.native.cuda.packing import pack_sets
from homeostat.rollout.native.sequence import Sequence
from homeostat.rollout.noise import uniforms
from homeostat.rollout.routes import joined

# Steps that the device makes without the host. A sequence that has ended is still computed for up
# to twice as many.
BURST_STEPS = 8
# The average number of kept ids that are copied to the host with the tokens; more need a second
# copy.
FEW_IDS = 128
# Padding rows write to this block; no sequence owns it.
SPARE_BLOCK = 0


class DecodeState:
    def __init__(
        self,
        *,
        max_rows: int,
        max_tokens: int,
        block_tokens: int,
        layers: int,
        device: torch.device,
        moe: MoeShape | None = None,
        fp8_cache: bool = False,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.device = device
        self.max_rows = max_rows
        self.num_blocks = -(-(max_tokens + 2 * BURST_STEPS) // block_tokens) + 1
        self.tokens_B = zeros(max_rows, dtype=torch.int32)
        self.positions_B = zeros(max_rows, dtype=torch.int32)
        self.starts_B = zeros(max_rows, dtype=torch.int32)
        self.moves_B = zeros(max_rows, dtype=torch.int32)
        self.greedy_B = zeros(max_rows, dtype=torch.int32)
        self.scale_B = zeros(max_rows, dtype=torch.float32)
        self.tables_BK = zeros(max_rows, self.num_blocks, dtype=torch.int32)
        self.noise_SB = zeros(BURST_STEPS, max_rows, dtype=torch.float64)
        self.drawn_SB = zeros(BURST_STEPS, max_rows, dtype=torch.int32)
        self.logps_SB = zeros(BURST_STEPS, max_rows, dtype=torch.float32)
        # Addresses of keys and values, and in FP8 those of their scales.
        self.fp8_cache = fp8_cache
        self.stores_LA = zeros(layers, 4 if fp8_cache else 2, dtype=torch.int64)
        # The experts of each step's tokens, and the weights of their outputs.
        self.routes_SBLK = self.shares_SBLK = None
        if moe is not None:
            size = BURST_STEPS, max_rows, len(moe.layers), moe.top_k
            self.routes_SBLK = zeros(*size, dtype=smallest_dtype(moe.num_experts))
            self.shares_SBLK = zeros(*size, dtype=torch.float32)
        self._stores: list[tuple[int, ...]] = []
        self.cut: CutRows | None = None

    def make_cut(self, vocabulary: int) -> None:
        """Allocate memory for rows with a cut, when the first of them comes."""
        if self.cut is not None:
            return
        rows, width, device = self.max_rows, min(vocabulary, MAX_KEPT_IDS), self.device
        self.cut = CutRows(
            is_cut_B=torch.zeros(rows, dtype=torch.int32, device=device),
            top_k_B=torch.zeros(rows, dtype=torch.int32, device=device),
            top_p_B=torch.zeros(rows, dtype=torch.float64, device=device),
            min_p_B=torch.zeros(rows, dtype=torch.float32, device=device),
            sampled_logps_SB=torch.zeros_like(self.logps_SB),
            sizes_SB=torch.zeros_like(self.drawn_SB),
            kept_SBK=torch.zeros((BURST_STEPS, rows, width), dtype=torch.int32, device=device),
            vocabulary=vocabulary,
        )

    def rows(self, num_rows: int) -> Rows:
        rows = slice(num_rows)
        return Rows(
            tokens_B=self.tokens_B[rows],
            positions_B=self.positions_B[rows],
            starts_B=self.starts_B[rows],
            moves_B=self.moves_B[rows],
            greedy_B=self.greedy_B[rows],
            scale_B=self.scale_B[rows],
            tables_BK=self.tables_BK[rows],
            noise_SB=self.noise_SB[:, rows],
            drawn_SB=self.drawn_SB[:, rows],
            logps_SB=self.logps_SB[:, rows],
            routes_SBLK=None if self.routes_SBLK is None else self.routes_SBLK[:, rows],
            shares_SBLK=None if self.shares_SBLK is None else self.shares_SBLK[:, rows],
            cut=None if self.cut is None else self.cut.first(num_rows),
        )

    def see(self, cache: KVCache) -> None:
        """Copy the addresses of the cache to the device if they have changed."""
        stores = cache.addresses()
        if stores != self._stores:
            self._stores = stores
            self._send(self.stores_LA, np.array(stores, dtype=np.int64))

    def clear(self) -> None:
        """Turn all rows into padding."""
        for tensor in (self.positions_B, self.starts_B, self.moves_B, self.tables_BK):
            tensor.zero_()

    def load(self, sequences: list[Sequence]) -> None:
        """Load the next inputs of these sequences; the rows after them become padding."""
        rows = np.zeros((5, self.max_rows), dtype=np.int32)
        scale_B = np.ones(self.max_rows, dtype=np.float32)
        for row, sequence in enumerate(sequences):
            temperature = sequence.request.sampling.temperature
            rows[:, row] = sequence.tokens[-1], sequence.cached, 0, 1, temperature == 0
            scale_B[row] = 1.0 / temperature if temperature > 0 else 1.0
        targets = (self.tokens_B, self.positions_B, self.starts_B, self.moves_B, self.greedy_B)
        for target, row in zip(targets, rows, strict=True):
            self._send(target, row)
        self._send(self.scale_B, scale_B)
        if self.cut is not None:
            self._load_cut(sequences, self.cut)

    def _load_cut(self, sequences: list[Sequence], cut: CutRows) -> None:
        is_cut_B, top_k_B = np.zeros((2, self.max_rows), dtype=np.int32)
        top_p_B, min_p_B = np.ones(self.max_rows), np.zeros(self.max_rows, dtype=np.float32)
        for row, sequence in enumerate(sequences):
            sampling = sequence.request.sampling
            is_cut_B[row] = sequence.is_cut
            top_k_B[row] = min(sampling.top_k or cut.vocabulary, cut.vocabulary)
            top_p_B[row], min_p_B[row] = sampling.top_p, sampling.min_p
        targets = (cut.is_cut_B, cut.top_k_B, cut.top_p_B, cut.min_p_B)
        for target, values in zip(targets, (is_cut_B, top_k_B, top_p_B, min_p_B), strict=True):
            self._send(target, values)

    def prepare(self, sequences: list[Sequence], *, ahead: int) -> None:
        """Copy the blocks and noise of the next burst. `ahead`: tokens in flight before it."""
        tables_BK = np.full((self.max_rows, self.num_blocks), SPARE_BLOCK, dtype=np.int32)
        for row, sequence in enumerate(sequences):
            tables_BK[row, : len(sequence.blocks)] = sequence.blocks
        keys_B = np.array([sequence.noise_key for sequence in sequences], dtype=np.uint64)
        first_B = np.array([sequence.num_new + ahead for sequence in sequences], dtype=np.uint64)
        steps_S = np.arange(BURST_STEPS, dtype=np.uint64)
        noise_SB = np.zeros((BURST_STEPS, self.max_rows))
        noise_SB[:, : len(sequences)] = uniforms(keys_B, first_B + steps_S[:, None])
        self._send(self.tables_BK, tables_BK)
        self._send(self.noise_SB, noise_SB)
        self.starts_B.copy_(self.positions_B)

    def drawn(
        self, num_rows: int, num_steps: int, *, with_weights: bool = False, is_cut: bool = False
    ) -> Drawing:
        """Start copying a burst's results to the host, and return the copy.

        `with_weights` includes the weights of experts, `is_cut` the words that cuts kept.
        """

        def fetched(tensor_SB: Tensor) -> Tensor:
            return self._fetched(tensor_SB[:num_steps, :num_rows])

        tokens_SB, logps_SB = fetched(self.drawn_SB), fetched(self.logps_SB)
        routes_SBLK = None if self.routes_SBLK is None else fetched(self.routes_SBLK)
        shares = self.shares_SBLK if with_weights else None
        shares_SBLK = None if shares is None else fetched(shares)
        cut = None
        if is_cut and self.cut is not None:
            # The next burst writes its own sets there.
            kept_SBK = self.cut.kept_SBK[:num_steps, :num_rows].clone()
            sizes_SB = self.cut.sizes_SB[:num_steps, :num_rows]
            cut = DrawingCut(
                fetched(self.cut.sampled_logps_SB),
                fetched(self.cut.sizes_SB),
                self._fetched(pack_sets(kept_SBK, sizes_SB, room=FEW_IDS * sizes_SB.numel())),
                kept_SBK,
            )
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return Drawing(tokens_SB, logps_SB, routes_SBLK, shares_SBLK, event, cut)

    def _fetched(self, tensor: Tensor) -> Tensor:
        is_cuda = self.device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda)
        return host.copy_(tensor, non_blocking=True)

    def _send(self, target: Tensor, array: np.ndarray) -> None:
        source = torch.from_numpy(array)
        if self.device.type == "cuda":
            source = source.pin_memory()
        target.copy_(source, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Rows:
    """Views of the first rows of the state. `scale_B` is 1 / temperature, 1 where greedy;
    `moves_B` is 0 for rows that are padding."""

    tokens_B: Tensor
    positions_B: Tensor
    starts_B: Tensor
    moves_B: Tensor
    greedy_B: Tensor
    scale_B: Tensor
    tables_BK: Tensor
    noise_SB: Tensor
    drawn_SB: Tensor
    logps_SB: Tensor
    routes_SBLK: Tensor | None
    shares_SBLK: Tensor | None
    cut: CutRows | None = None


@dataclass(frozen=True, slots=True)
class CutRows:
    """The settings that cut the distributions of rows (cutting.py), and what was kept of them.

    `top_k_B` is the vocabulary's size without top-k. `sizes_SB` counts what was kept, 0 for all,
    and `kept_SBK` holds the first of its ids.
    """

    is_cut_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    sampled_logps_SB: Tensor
    sizes_SB: Tensor
    kept_SBK: Tensor
    vocabulary: int

    def first(self, num_rows: int) -> CutRows:
        """Return views of the first rows."""
        rows = slice(num_rows)
        return CutRows(
            is_cut_B=self.is_cut_B[rows],
            top_k_B=self.top_k_B[rows],
            top_p_B=self.top_p_B[rows],
            min_p_B=self.min_p_B[rows],
            sampled_logps_SB=self.sampled_logps_SB[:, rows],
            sizes_SB=self.sizes_SB[:, rows],
            kept_SBK=self.kept_SBK[:, rows],
            vocabulary=self.vocabulary,
        )


@dataclass(frozen=True, slots=True)
class Drawing:
    """The tokens that a burst sampled, and the experts of the tokens that it ran to sample them;
    none in a dense model. `shares_SBLK`: the weights of the experts, where they are asked for.
    `cut` holds log-probs, sizes and ids of what was kept, if rows were cut.
    They are complete once the device has passed `event`."""

    tokens_SB: Tensor
    logps_SB: Tensor
    routes_SBLK: Tensor | None
    shares_SBLK: Tensor | None
    event: torch.cuda.Event | None
    cut: DrawingCut | None = None

    def wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, TakenCut | None]:
        """Return tokens, log-probs, routes (rollout/routes.py) and what was kept."""
        if self.event is not None:
            self.event.synchronize()
        routes, shares = self.routes_SBLK, self.shares_SBLK
        return (
            self.tokens_SB.numpy(),
            self.logps_SB.numpy(),
            None
            if routes is None
            else joined(routes.numpy(), None if shares is None else shares.numpy()),
            None if self.cut is None else self.cut.taken(self.event),
        )


@dataclass(frozen=True, slots=True)
class DrawingCut:
    """The results of a burst for rows that are cut. `first` are ids of their sets, packed row by
    row, as many as usually are enough; `kept_SBK` are all of them, padded, on the device."""

    sampled_logps_SB: Tensor
    sizes_SB: Tensor
    first: Tensor
    kept_SBK: Tensor

    def taken(self, event: torch.cuda.Event | None) -> TakenCut:
        """Return the results on the host, once the device has passed `event`."""
        sizes_BS = self.sizes_SB.numpy().T
        num_each_BS = np.minimum(sizes_BS, self.kept_SBK.shape[2])
        num_ids = int(num_each_BS.sum())
        if num_ids <= len(self.first):
            values = self.first.numpy()[:num_ids].copy()
        else:
            values = packed(self._fetched(event).numpy(), num_each_BS)
        return TakenCut(self.sampled_logps_SB.numpy().T, sizes_BS, values)

    def _fetched(self, event: torch.cuda.Event | None) -> Tensor:
        """Copy all ids beside the stream, on which the next burst is computed."""
        if event is None:
            return self.kept_SBK
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            stream.wait_event(event)
            return self.kept_SBK.cpu()
