"""The scheduler alone: a pretended model caches what was planned and appends tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from homeostat.rollout.engine import Request, Sampling
from homeostat.rollout.native.blocks import BlockPool
from homeostat.rollout.native.scheduler import Plan, Scheduler
from homeostat.rollout.native.sequence import Sequence


def sequence(
    number: int, prompt: list[int], new: int, key: str | None = None, *, keep: bool = False
) -> Sequence:
    request = Request(
        f"{number}", np.array(prompt), Sampling(new), seed=0, session_key=key, keep_cache=keep
    )
    return Sequence(request, number=number, now=0.0, decode=None)


def scheduler(num_blocks: int, *, block_tokens: int = 4, in_rows: bool = False) -> Scheduler:
    made = Scheduler(max_running=5, prefill_tokens=12, in_rows=in_rows)
    made.refit(BlockPool(num_blocks), block_tokens=block_tokens)
    return made


class Machine:
    """What a block holds is the tokens that were computed into it: (position, token) pairs."""

    def __init__(self, under_test: Scheduler) -> None:
        self.scheduler = under_test
        self.memory: dict[tuple[int, int], int] = {}
        self.done: list[Sequence] = []

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        self._copy(plan)
        assert sum(map(bool, (plan.forked, plan.chunks, plan.decode))) <= 1
        assert sum(c.end - c.start for c in plan.chunks) <= self.scheduler.prefill_tokens
        whole = []
        for chunk in plan.chunks:
            assert chunk.start == chunk.sequence.cached
            self._compute(chunk.sequence, chunk.end)
            if chunk.sequence.uncached == 0:
                self.scheduler.keep_prompt(chunk.sequence, torch.zeros(1))
                whole.append(chunk.sequence)
        if plan.chunks:
            joined = self.scheduler.admit()
            self._copy(joined)
            whole += joined.forked
        for row, decoding in enumerate(plan.decode):
            assert decoding.uncached == 1
            assert not self.scheduler.in_rows or decoding.blocks == [row]
            self._compute(decoding, decoding.cached + 1)
        for ready in [*plan.forked, *whole, *plan.decode]:
            self._sample(ready)
        return plan

    def _copy(self, plan: Plan) -> None:
        for copy in plan.copies:
            for offset in range(copy.num_tokens):
                self.memory[copy.target, offset] = self.memory[copy.source, offset]

    def _compute(self, computed: Sequence, end: int) -> None:
        size = self.scheduler.block_tokens
        for position in range(computed.cached, end):
            block = computed.blocks[position // size]
            assert self.scheduler.pool.owners(block) == 1, "a shared block is never written to"
            self.memory[block, position % size] = computed.tokens[position]
        computed.cached = end
        self._check(computed)

    def _sample(self, ready: Sequence) -> None:
        self._check(ready)
        token = (31 * len(ready.tokens) + 7 * ready.number) % 97
        if ready.append(token, 0.0, 0.0, version=0) is not None:
            self.scheduler.remove(ready)
            self.done.append(ready)

    def _check(self, checked: Sequence) -> None:
        """Every cached position of it holds its own token."""
        size = self.scheduler.block_tokens
        held = [self.memory[checked.blocks[p // size], p % size] for p in range(checked.cached)]
        assert held == checked.tokens[: checked.cached].tolist()


@pytest.mark.parametrize("seed", range(100))
def test_caches_hold_their_own_tokens_and_all_blocks_come_back(seed: int) -> None:
    rng = random.Random(seed)
    in_rows = rng.random() < 0.4
    made = scheduler(rng.randint(8, 14), block_tokens=40 if in_rows else 4, in_rows=in_rows)
    machine = Machine(made)
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 15))] for _ in range(4)]
    number, ended = 0, []
    for _ in range(150):
        act = rng.random()
        if act < 0.25:
            prompt = rng.choice(prompts)
            if machine.done and rng.random() < 0.5:
                # The next turn of some request, or a branch of it.
                before = rng.choice(machine.done).tokens.tolist()
                prompt = [*before[: rng.randint(1, 14)], rng.randrange(97)]
            key = rng.choice([None, "key", "key"])
            keep = key is not None and rng.random() < 0.5
            made.add(sequence(number, prompt, rng.randint(1, 12), key, keep=keep))
            number += 1
        elif act < 0.3 and (flying := made.waiting + made.running):
            ended.append(rng.choice(flying))
            made.remove(ended[-1])
        elif act < 0.33 and made.running:
            made.retract(rng.choice(made.running))
        elif act < 0.35:
            made.forget_prompts()
        elif made.waiting or made.running:
            machine.step()
        assert len(made.running) <= made.max_running
    while made.waiting or made.running:
        machine.step()
    assert sorted(s.number for s in machine.done + ended) == list(range(number))
    made.forget_prompts()
    assert made.pool.num_used == 0


def test_a_kept_prefix_is_found_by_the_next_turn_alone() -> None:
    made = scheduler(20)
    machine = Machine(made)
    first = sequence(0, [1] * 7, 6, "a", keep=True)
    made.add(first)
    while not machine.done:
        machine.step()
    # All but the last token, which nothing was computed from: 12 tokens in 3 blocks.
    assert (len(made.kept), made.pool.num_used) == (1, 3)
    next_turn = [*first.tokens.tolist(), 5, 6]
    made.add(sequence(1, next_turn, 4, "b"))
    made.add(sequence(2, next_turn, 4))
    made.add(sequence(3, next_turn, 4, "a"))
    made.plan()
    assert {s.number: s.cached for s in made.running} == {1: 0, 2: 0, 3: 12}
    made.forget_prompts()
    assert len(made.kept) == 0


def test_a_longer_prefix_takes_the_place_of_what_it_begins_with() -> None:
    made = scheduler(30)
    machine = Machine(made)
    turn = [1] * 7
    for number in range(3):
        made.add(sequence(number, turn, 6, "a", keep=True))
        while len(machine.done) <= number:
            machine.step()
        turn = [*machine.done[-1].tokens.tolist(), 3]
    (prefix,) = made.kept
    assert prefix.tokens_T.tolist() == machine.done[-1].tokens.tolist()[:-1]
    assert made.pool.num_used == len(prefix.blocks)


def test_kept_prefixes_give_up_their_room_the_least_recently_used_first() -> None:
    made = scheduler(12)
    machine = Machine(made)
    for number, key in enumerate("abc"):
        made.add(sequence(number, [number] * 9, 4, key, keep=True))
        while len(machine.done) <= number:
            machine.step()
    assert [prefix.session[1] for prefix in made.kept] == ["a", "b", "c"]
    # Session a is used again, and another request wants more blocks than are free.
    made.add(sequence(3, [*machine.done[0].tokens.tolist(), 9], 1, "a"))
    machine.step()
    assert machine.done[-1].number == 3
    made.add(sequence(4, [7] * 17, 3))
    while len(machine.done) < 5:
        machine.step()
    assert [prefix.session[1] for prefix in made.kept] == ["c", "a"]
    assert made.num_preempted == 0


def test_what_old_weights_have_computed_is_not_kept() -> None:
    made = scheduler(20)
    machine = Machine(made)
    made.add(sequence(0, [1] * 7, 6, "a", keep=True))
    machine.step()
    # As an update in place does: the sequence goes on with the cache that it has.
    made.forget_prompts()
    while not machine.done:
        machine.step()
    assert (len(made.kept), made.pool.num_used) == (0, 0)


def test_the_youngest_gives_way_and_the_oldest_gets_on() -> None:
    made = scheduler(4)
    machine = Machine(made)
    old, young = sequence(0, [1] * 7, 8), sequence(1, [2] * 7, 8)
    made.add(old)
    made.add(young)
    while not machine.done:
        machine.step()
    assert machine.done == [old]
    assert made.num_preempted > 0
    while made.waiting or made.running:
        machine.step()
    assert machine.done == [old, young]


def test_nobody_overtakes() -> None:
    made = scheduler(4)
    large, small = sequence(1, [2] * 13, 2), sequence(2, [3], 2)
    for added in (sequence(0, [1] * 5, 3), large, small):
        made.add(added)
    made.plan()
    assert [s.number for s in made.running] == [0]
    assert made.waiting == [large, small]


def test_places_are_kept_for_those_who_wait_for_a_prompt() -> None:
    made = scheduler(50)
    group = [sequence(n, [5] * 6, 4, "group") for n in range(4)]
    others = [sequence(n, [n] * 3, 4) for n in range(4, 8)]
    for added in group + others:
        made.add(added)
    plan = made.plan()
    assert [s.number for s in made.running] == [0, 4]
    assert [chunk.sequence.number for chunk in plan.chunks] == [0, 4]
    machine = Machine(made)
    machine.step()
    assert sorted(s.number for s in made.running) == [0, 1, 2, 3, 4]
    shared = [s.blocks[0] for s in made.running if s.number < 4]
    assert len(set(shared)) == 1
    assert made.pool.owners(shared[0]) == 4


def test_a_prompt_whose_holder_goes_before_it_is_ready_is_computed_by_the_next() -> None:
    made = scheduler(50)
    group = [sequence(n, list(range(30)), 4, "group") for n in range(3)]
    for added in group:
        made.add(added)
    machine = Machine(made)
    machine.step()
    assert made.running == [group[0]]
    made.remove(group[0])
    plan = machine.step()
    assert [(c.sequence, c.start) for c in plan.chunks] == [(group[1], 0)]
    while made.waiting or made.running:
        machine.step()
    assert made.pool.num_used == 0
