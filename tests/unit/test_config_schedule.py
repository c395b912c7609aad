"""The learning rate over a run: every update learns, and the peak is used."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import optimization

from homeostat.config.trainer import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    Schedule,
    TrainerConfig,
    WsdSchedule,
)

SCHEDULES: dict[str, type[Any]] = {
    "constant": ConstantSchedule,
    "linear": LinearSchedule,
    "cosine": CosineSchedule,
    "wsd": WsdSchedule,
}


def factors(schedule: Schedule, total: int) -> list[float]:
    return [schedule.factor(step, total) for step in range(1, total + 1)]


@given(
    kind=st.sampled_from(list(SCHEDULES)),
    total=st.integers(1, 400),
    warmup=st.one_of(st.integers(0, 400), st.floats(0, 0.99)),
    floor=st.floats(0, 1),
    decay=st.floats(0.01, 1),
)
def test_every_update_learns_and_the_peak_is_used(
    kind: str, total: int, warmup: float, floor: float, decay: float
) -> None:
    keys: dict[str, Any] = {"type": kind}
    keys |= {"warmup_steps" if isinstance(warmup, int) else "warmup_share": warmup}
    keys |= {"min_lr_share": floor} if kind != "constant" else {}
    keys |= {"decay_share": decay} if kind == "wsd" else {}
    schedule = SCHEDULES[kind](**keys)
    found = factors(schedule, total)
    num_warmup = schedule.num_warmup_steps(total)
    assert all(0 < factor <= 1 for factor in found)
    # Without an update after the warm-up, its last one has the peak.
    assert max(found) == 1.0
    assert found[min(num_warmup, total - 1)] == 1.0
    rising, falling = found[:num_warmup], found[num_warmup:]
    assert rising == sorted(rising)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(falling))
    assert all(factor >= floor - 1e-12 for factor in falling) or kind == "constant"


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_the_decay_ends_one_update_short_of_its_floor(kind: str, floor: float) -> None:
    """The way left at the last update is one of n - w equal parts of the decay."""
    schedule = SCHEDULES[kind](type=kind, warmup_steps=3, min_lr_share=floor)
    last, after = schedule.factor(23, 23), schedule.after_warmup(1.0)
    assert after == pytest.approx(floor, abs=1e-12)
    left = {"linear": 1 / 20, "wsd": 1 / 20 / 0.2, "cosine": 0.00615583}[kind]
    assert (last - floor) / (1 - floor) == pytest.approx(left, rel=1e-6)


@pytest.mark.parametrize("kind", list(SCHEDULES))
@pytest.mark.parametrize("keys", [{}, {"warmup_steps": 0}, {"warmup_steps": 1}])
def test_a_run_of_one_update_trains_with_the_whole_rate(kind: str, keys: dict[str, int]) -> None:
    schedule = SCHEDULES[kind](type=kind, **keys)
    trainer = TrainerConfig(lr=0.5, max_steps=1, schedule=schedule)
    assert trainer.learning_rate(1, 1) == 0.5


@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (10, 0), (10, 4), (57, 7)])
@pytest.mark.parametrize("kind", list(SCHEDULES))
def test_after_the_warm_up_the_rate_is_that_of_transformers(
    kind: str, total: int, warmup: int
) -> None:
    """And in the warm-up it is one update ahead: transformers spends the first one on nothing."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    rest = total - warmup
    theirs = {
        "constant": lambda: optimization.get_constant_schedule_with_warmup(optimizer, warmup),
        "linear": lambda: optimization.get_linear_schedule_with_warmup(optimizer, warmup, total),
        "cosine": lambda: optimization.get_cosine_schedule_with_warmup(optimizer, warmup, total),
        "wsd": lambda: optimization.get_wsd_schedule(
            optimizer,
            warmup,
            num_decay_steps=rest // 2,
            num_training_steps=total,
            decay_type="linear",
        ),
    }[kind]()
    keys: dict[str, Any] = {"type": kind, "warmup_steps": warmup}
    keys |= {"min_lr_share": 0.0} if kind != "constant" else {}
    keys |= {"decay_share": max(rest // 2, 1) / rest} if kind == "wsd" else {}
    ours = SCHEDULES[kind](**keys)
    for step in range(1, total + 1):
        # Its first value is that of update 1.
        at = step if step > warmup else step + 1
        expected = theirs.lr_lambdas[0](at - 1)
        if kind == "wsd" and rest < 2:
            continue
        assert ours.factor(step, total) == pytest.approx(expected, rel=1e-9), step
