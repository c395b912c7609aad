"""Draws by source, by difficulty and again: deterministic, resumed to the same prompts, bounded."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from homeostat.config.curriculum import CurriculumConfig
from homeostat.data.curriculum import CurriculumDraws
from homeostat.data.mixing import EpochOrder, Mixture
from homeostat.data.prompts import Outcome
from homeostat.errors import DataError

NUM = 60
# Prompt n is solved at this rate: the first third never, the last third always.
TRUE_RATES = np.concatenate([np.zeros(20), np.full(20, 0.5), np.ones(20)])
DIFFICULTY = {"difficulty": {"explore": 0.1}}


def draws(
    curriculum: dict[str, Any] | None = None, *, weights: tuple[float, ...] = (), **changes: Any
) -> CurriculumDraws:
    parts = np.array_split(np.arange(NUM), max(1, len(weights)))
    options: dict[str, Any] = {"num_prompts": NUM, "seed": 5, "fingerprint": "f"} | changes
    key = (options["seed"],)
    return CurriculumDraws(
        [EpochOrder(ids, key=(*key, n), shuffle=True) for n, ids in enumerate(parts)],
        mixture=Mixture([f"s{n}" for n in range(len(weights))], weights) if weights else None,
        curriculum=None if curriculum is None else CurriculumConfig.model_validate(curriculum),
        **options,
    )


def run(found: CurriculumDraws, steps: range, *, count: int = 12) -> list[list[int]]:
    """Draw two rounds a step, and learn how often their prompts are solved."""
    taken = []
    for step in steps:
        ids = found.draw(count, step=step, round=0) + found.draw(3, step=step, round=1)
        found.learn(step, [Outcome(n, float(TRUE_RATES[n])) for n in sorted(ids)])
        taken.append(ids)
    return taken


SETTINGS = {
    "weights": {"weights": (1.0, 2.0, 0.5)},
    "difficulty": {"curriculum": DIFFICULTY},
    "replay": {"curriculum": {"replay": {"share": 0.3, "max_times": 2}}},
    "all": {"curriculum": {**DIFFICULTY, "replay": {"of": "solved"}}, "weights": (3.0, 1.0)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_go_on_exactly_where_a_checkpoint_left_them(name: str) -> None:
    whole, first = draws(**SETTINGS[name]), draws(**SETTINGS[name])
    expected = run(whole, range(1, 21))
    assert run(first, range(1, 8)) == expected[:7]
    state = json.loads(json.dumps(first.state()))
    second = draws(**SETTINGS[name], state=state)
    assert run(second, range(8, 21)) == expected[7:]
    assert second.state() == whole.state()
    assert second.epoch == whole.epoch == 20 * 15 / NUM
    assert second.metrics() == whole.metrics()
    assert run(draws(**SETTINGS[name], seed=6), range(1, 21)) != expected


def test_draws_of_a_step_do_not_repeat_a_prompt() -> None:
    for ids in run(draws(DIFFICULTY), range(1, 21)):
        assert len(set(ids)) == len(ids)


def test_prompts_of_the_wanted_difficulty_are_drawn_and_none_is_given_up() -> None:
    found = draws(DIFFICULTY)
    # Long enough that all estimates are known.
    run(found, range(1, 31))
    late = np.bincount(np.concatenate(run(found, range(31, 431))), minlength=NUM)
    middle, ends = late[20:40].sum(), late[:20].sum() + late[40:].sum()
    assert middle > 0.8 * late.sum()
    # Every prompt keeps explore / N of each draw. Draws without replacement only add to it.
    least = 400 * 15 * 0.1 / NUM
    assert late.min() > least - 4 * np.sqrt(least)
    assert ends > 0
    assert found.metrics()["curriculum/seen_share"] == 1.0


def test_without_replacement_draws_have_the_chances_that_are_written_down() -> None:
    """Against numpy's own weighted choice, for a single draw a step."""
    found = draws({"difficulty": {"explore": 0.4, "prior": 0.5}})
    found.learn(0, [Outcome(n, float(TRUE_RATES[n])) for n in range(NUM)])
    num = 4000
    taken = np.bincount(
        [found.draw(1, step=step, round=0)[0] for step in range(1, num + 1)], minlength=NUM
    )
    weights = TRUE_RATES * (1 - TRUE_RATES)
    chances = 0.4 / NUM + 0.6 * weights / weights.sum()
    assert chances.sum() == pytest.approx(1.0)
    spread = np.sqrt(num * chances * (1 - chances))
    assert (np.abs(taken - num * chances) < 5 * spread).all()


def test_an_estimate_is_an_exponential_average_that_starts_at_the_first_group() -> None:
    found = draws({"difficulty": {"memory": 0.75}})
    for step, rate in enumerate((1.0, 0.0, 0.5, None), 1):
        found.learn(step, [Outcome(7, rate)])
    known = found.state()["rates"]
    assert known["prompts"] == [7]
    assert known["rate"] == [0.75 * (0.75 * 1.0) + 0.25 * 0.5]
    assert (known["count"], known["last_step"], known["newest"]) == ([3], [3], [0.5])


def test_a_band_without_any_prompt_draws_from_all() -> None:
    found = draws({"difficulty": {"prefer": {"type": "band", "low": 0.9, "high": 0.95}}})
    taken = np.concatenate(run(found, range(1, 61)))
    assert len(set(taken.tolist())) == NUM


def test_failed_prompts_come_again_within_their_limits() -> None:
    rules = {"share": 0.25, "max_times": 2, "max_age_steps": 3}
    found = draws({"replay": rules})
    failed_at: dict[int, int] = {}
    again: dict[int, int] = {}
    for step in range(1, 41):
        ids = found.draw(12, step=step, round=0)
        replayed = ids[: round(found._num_replayed)]
        assert len(replayed) <= 3
        for number in replayed:
            again[number] = again.get(number, 0) + 1
            assert TRUE_RATES[number] == 0
            assert step - failed_at[number] <= 3
        found.learn(step, [Outcome(n, float(TRUE_RATES[n])) for n in ids])
        failed_at |= {n: step for n in ids if TRUE_RATES[n] == 0}
    assert len(again) > 10
    assert max(again.values()) == 2
    assert found.metrics()["curriculum/replayed_share"] <= 0.25


def test_a_share_of_less_than_one_prompt_comes_now_and_then() -> None:
    found = draws({"replay": {"share": 0.25, "max_times": 9}})
    replayed = []
    for step in range(1, 41):
        ids = found.draw(2, step=step, round=0)
        found.learn(step, [Outcome(n, 0.0) for n in ids])
        replayed.append(found._num_replayed)
    assert replayed[:8] == [0, 1] * 4


def test_more_prompts_than_there_are_come_twice() -> None:
    assert sorted(draws(DIFFICULTY).draw(NUM + 3, step=1, round=0))[:3] == [0, 1, 2]
    ids = draws(DIFFICULTY).draw(NUM + 3, step=1, round=0)
    assert len(set(ids)) == NUM


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "other"}, "not those that the run started with"),
        ({"cursors": [0, 0]}, "damaged: 2 cursors of 1 sources"),
        ({"rates": {"prompts": [999]}}, "damaged: prompt 999 of 60"),
        ({"rates": None}, "damaged"),
        ({"drawn": "x"}, "damaged"),
    ],
)
def test_a_state_of_other_prompts_or_a_damaged_one_is_refused(change, message) -> None:
    state = draws(DIFFICULTY).state() | change
    with pytest.raises(DataError, match=message):
        draws(DIFFICULTY, state=state)


def test_other_settings_are_not_continued() -> None:
    state = draws(DIFFICULTY).state()
    for other in (draws, lambda **more: draws({"difficulty": {"explore": 0.2}}, **more)):
        with pytest.raises(DataError, match="not those that the run started with"):
            other(state=state)
