"""Decides what the next step computes: which sequences are admitted, prefilled or retracted.

    waiting --admit--> running: prefill until one token is uncached, then decode until it ends
       ^------------------retract-----------'

Invariants: requests are admitted in the order of their arrival, and none overtakes another for a
place or a block. Every running sequence owns blocks for all its tokens. When blocks run out, the
youngest sequence returns its blocks and is computed again later, so that the oldest always
progresses.

A prompt that several requests share is computed by the first of them. The others wait for it (their
places are kept), then fork its blocks: full ones are shared, the last partial one is copied. Only
running sequences hold a prompt. Requests that still wait for a place when the last of these ends
compute the prompt again, unless a request asked for its cache to be kept for the next one of its
session (kept.py). `forget_prompts` makes sure that nothing computed by old weights is reused.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
from torch import Tensor

from homeostat.rollout.native.blocks import BlockPool
from homeostat.rollout.native.kept import KeptPrefix, KeptPrefixes, session_of
from homeostat.rollout.native.sequence import Sequence, ShareKey


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `end` of a sequence, to be computed in one forward pass."""

    sequence: Sequence
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the first `num_tokens` tokens of one block to another."""

    source: int
    target: int
    num_tokens: int


@dataclass(slots=True)
class SharedPrompt:
    """A prompt in the cache of `holders`. `hidden_D` predicts the token after it."""

    holders: list[Sequence]
    is_ready: bool = False
    hidden_D: Tensor | None = None


@dataclass(slots=True)
class Plan:
    """The work of one step: copies, then one of the other three kinds of work."""

    copies: list[Copy] = field(default_factory=list)
    forked: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Waiting and running sequences over a pool of blocks of `block_tokens` tokens each.

    `in_rows`: a block holds any sequence whole, and those that decode have the first blocks.
    """

    def __init__(self, *, max_running: int, prefill_tokens: int, in_rows: bool) -> None:
        self.pool = BlockPool(0)
        self.block_tokens = 1
        self.max_running = max_running
        self.prefill_tokens = prefill_tokens
        self.in_rows = in_rows
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.most_running = 0
        self.num_preempted = 0
        self.num_shared = 0
        self.kept = KeptPrefixes()
        self._prompts: dict[ShareKey, SharedPrompt] = {}
        self._num_commits = 0

    def refit(self, pool: BlockPool, *, block_tokens: int) -> None:
        """Use other blocks from now on. No sequence may be running."""
        holders = len(self.running) + len(self.kept)
        assert not holders, f"{holders} sequences or prefixes have blocks of the old pool"
        self.pool, self.block_tokens = pool, block_tokens

    def add(self, sequence: Sequence) -> None:
        sequence.share_key = sequence.sharing_key()
        insort(self.waiting, sequence, key=attrgetter("number"))

    def plan(self) -> Plan:
        plan = self.admit()
        if plan.forked:
            return plan
        plan.chunks = self._chunks()
        if not plan.chunks:
            self._reserve()
            if self.in_rows:
                self._line_up(plan)
            plan.decode = list(self.running)
        return plan

    def admit(self) -> Plan:
        """Move sequences that have a place from waiting to running.

        The plan that is returned has only copies and forked sequences.
        """
        plan = Plan()
        held_places = held_blocks = 0
        still_waiting: list[Sequence] = []
        for index, sequence in enumerate(self.waiting):
            num_blocks = self.blocks_for(len(sequence.tokens))
            prompt = self._prompts.get(sequence.share_key) if sequence.share_key else None
            full = len(self.running) + held_places >= self.max_running
            # Found before room is made, so that this prefix is the last to be evicted.
            found = self.kept.find(sequence) if self.kept and prompt is None and not full else None
            # Ignoring shared blocks here overestimates the need, which is safe.
            if full or not self._make_room(num_blocks + held_blocks):
                still_waiting += self.waiting[index:]
                break
            if prompt is not None and not prompt.is_ready:
                held_places, held_blocks = held_places + 1, held_blocks + num_blocks
                still_waiting.append(sequence)
                continue
            if prompt is not None:
                self._fork(sequence, prompt, plan)
            elif sequence.share_key:
                self._prompts[sequence.share_key] = SharedPrompt([sequence])
            if found is not None and found[0] in self.kept:
                prefix, num_tokens = found
                self._take_over(sequence, prefix.blocks, num_tokens, plan)
                if sequence.routes is not None and prefix.routes_TLK is not None:
                    sequence.routes.put(0, prefix.routes_TLK[:num_tokens])
            sequence.cached_by = self._num_commits
            missing = num_blocks - len(sequence.blocks)
            sequence.blocks += [self.pool.alloc() for _ in range(missing)]
            self.running.append(sequence)
        self.waiting = still_waiting
        self.most_running = max(self.most_running, len(self.running))
        return plan

    def keep_prompt(self, sequence: Sequence, hidden_D: Tensor) -> None:
        """Let waiting sequences fork this prompt, whose tokens are all cached now."""
        prompt = self._prompts.get(sequence.share_key) if sequence.share_key else None
        if prompt is not None and sequence in prompt.holders and not prompt.is_ready:
            prompt.is_ready = True
            prompt.hidden_D = hidden_D.clone() if sequence.is_fresh else None

    def kept_hidden(self, sequence: Sequence) -> Tensor:
        assert sequence.share_key is not None, sequence.request.id
        hidden_D = self._prompts[sequence.share_key].hidden_D
        assert hidden_D is not None, sequence.request.id
        return hidden_D

    def forget_prompts(self) -> None:
        """Stop sharing anything that is cached so far with sequences that start later."""
        self._prompts.clear()
        self._drop_kept()
        self._num_commits += 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that ended. Its blocks are freed unless they are kept."""
        if sequence in self.running:
            if sequence.request.keep_cache:
                self._keep(sequence)
            self._give_up_blocks(sequence)
        else:
            self.waiting.remove(sequence)

    def retract(self, sequence: Sequence) -> None:
        """Move a sequence back to the waiting ones; its cache is computed again."""
        self._give_up_blocks(sequence)
        self.add(sequence)

    def retract_all(self) -> None:
        """Retract every sequence and drop kept prefixes, so that nothing is cached afterwards."""
        for sequence in list(self.running):
            self.retract(sequence)
        self._drop_kept()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def reserve_ahead(self, sequences: list[Sequence], num_tokens: int) -> bool:
        """Blocks for the next `num_tokens` tokens of each, as far as it may get, or for none. The
        last token of a sequence is not cached."""
        missing = [
            self.blocks_for(min(len(s.tokens) + num_tokens, s.max_length) - 1) - len(s.blocks)
            for s in sequences
        ]
        if not self._make_room(sum(max(count, 0) for count in missing)):
            return False
        for sequence, count in zip(sequences, missing, strict=True):
            sequence.blocks += [self.pool.alloc() for _ in range(count)]
        return True

    def _fork(self, sequence: Sequence, prompt: SharedPrompt, plan: Plan) -> None:
        """Take over the prompt from a sequence that has it.

        A fresh sequence needs its last hidden state too: where that is not kept, the last token of
        the prompt is computed again.
        """
        starts = sequence.is_fresh and prompt.hidden_D is not None
        source = prompt.holders[0]
        wanted = len(sequence.tokens) - (0 if starts else 1)
        cached = min(sequence.num_prompt, wanted, source.cached)
        self._take_over(sequence, source.blocks, cached, plan)
        if sequence.routes is not None and source.routes is not None:
            sequence.routes.put(0, source.routes.first(cached))
        if starts:
            plan.forked.append(sequence)
        prompt.holders.append(sequence)

    def _take_over(
        self, sequence: Sequence, blocks: list[int], num_tokens: int, plan: Plan
    ) -> None:
        """Begin the cache of a sequence with tokens in others' blocks: full ones are shared."""
        full, partial = divmod(num_tokens, self.block_tokens)
        sequence.blocks = [self.pool.fork(block) for block in blocks[:full]]
        if partial:
            sequence.blocks.append(self.pool.alloc())
            plan.copies.append(Copy(blocks[full], sequence.blocks[-1], partial))
        sequence.cached = num_tokens
        self.num_shared += num_tokens

    def _chunks(self) -> list[Chunk]:
        """Choose whole sequences up to `prefill_tokens`; a longer one comes alone, in pieces."""
        chunks: list[Chunk] = []
        room = self.prefill_tokens
        for sequence in self.running:
            # The last piece of a prompt may be one token: those who share the prompt wait for it.
            if sequence.uncached > 1 or sequence.is_fresh:
                size = min(sequence.uncached, self.prefill_tokens)
                if size > room:
                    break
                chunks.append(Chunk(sequence, sequence.cached, sequence.cached + size))
                room -= size
        return chunks

    def _reserve(self) -> None:
        """Make a place for the next token of each; the youngest are retracted if there is none."""
        if self.in_rows:
            return
        for sequence in sorted(self.running, key=attrgetter("number")):
            while sequence.blocks and self.blocks_for(len(sequence.tokens)) > len(sequence.blocks):
                if self._make_room(1):
                    sequence.blocks.append(self.pool.alloc())
                else:
                    self.retract(max(self.running, key=attrgetter("number")))
                    self.num_preempted += 1

    def _line_up(self, plan: Plan) -> None:
        """Move sequences of one block each together, so that the n running have blocks 0 .. n-1,
        and go in this order: their cache is then one view. Kept prefixes make way."""
        for prefix in self.kept:
            (block,) = prefix.blocks
            if block < len(self.running):
                other = self.pool.alloc_from(len(self.running))
                if other is None:
                    self._evict(prefix)
                    continue
                plan.copies.append(Copy(block, other, len(prefix.tokens_T)))
                prefix.blocks = [other]
                self.pool.free((block,))
        for sequence in self.running:
            (block,) = sequence.blocks
            if block >= len(self.running):
                sequence.blocks = [self.pool.alloc()]
                plan.copies.append(Copy(block, sequence.blocks[0], sequence.cached))
                self.pool.free((block,))
        self.running.sort(key=attrgetter("blocks"))

    def _make_room(self, num_blocks: int) -> bool:
        """Evict kept prefixes until so many blocks are free. Returns False if there are too few."""
        while self.pool.num_free < num_blocks and self.kept:
            self._evict(self.kept.oldest())
        return self.pool.num_free >= num_blocks

    def _keep(self, sequence: Sequence) -> None:
        """Keep a cache that the current weights computed for the next request of its session."""
        session = session_of(sequence)
        if session is None or not sequence.cached or sequence.cached_by != self._num_commits:
            return
        blocks = sequence.blocks[: self.blocks_for(sequence.cached)]
        tokens_T = np.array(sequence.tokens[: sequence.cached])
        routes = sequence.routes
        prefix = KeptPrefix(
            session,
            tokens_T,
            [self.pool.fork(block) for block in blocks],
            None if routes is None else routes.first(sequence.cached).copy(),
        )
        for shorter in self.kept.extended_by(prefix):
            self._evict(shorter)
        self.kept.add(prefix)

    def _evict(self, prefix: KeptPrefix) -> None:
        self.kept.remove(prefix)
        self.pool.free(prefix.blocks)

    def _drop_kept(self) -> None:
        for prefix in self.kept:
            self._evict(prefix)

    def _give_up_blocks(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.free(sequence.blocks)
        sequence.blocks, sequence.cached = [], 0
        prompt = self._prompts.get(sequence.share_key) if sequence.share_key else None
        if prompt is not None and sequence in prompt.holders:
            prompt.holders.remove(sequence)
            if not prompt.holders:
                assert sequence.share_key is not None
                del self._prompts[sequence.share_key]
