"""Packers on rank 0: each is used again where it comes again, until it is forgotten."""

from __future__ import annotations

from typing import Any, cast

from tests.support.first_rank import Counting, opened

from homeostat.train.sharded import ShardedTrainer
from homeostat.types import Role
from homeostat.workers.in_process import InProcessGroup


def test_a_packer_is_open_from_its_first_use_until_it_is_forgotten() -> None:
    group = InProcessGroup(
        "tests.support.first_rank:FirstRank", {}, name="trainer", host="127.0.0.1"
    )
    nothing = cast(Any, None)
    trainer = ShardedTrainer(group, nothing, runtime=nothing, timeout_s=5)

    def send(packer: Counting) -> None:
        assert list(trainer.weight_buckets(Role.POLICY, packer)) == []

    policy, reference = Counting("policy"), Counting("reference")
    for _ in range(2):
        send(policy)
        send(reference)
    # What is sent by one does not close the other.
    assert [(one.name, one.num_streams, one.is_open) for one in opened[-2:]] == [
        ("policy", 2, True),
        ("reference", 2, True),
    ]
    # The engine died: its packer is closed as the next one comes.
    trainer.forget_packer(policy)
    send(Counting("policy"))
    assert [(one.name, one.is_open) for one in opened[-3:]] == [
        ("policy", False),
        ("reference", True),
        ("policy", True),
    ]
