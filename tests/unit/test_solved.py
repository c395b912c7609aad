"""Which reward decides what is solved, and pass@k against counting all choices."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from homeostat.config.rewards import RewardsConfig
from homeostat.rewards.solved import deciding_rewards, is_solved, pass_at, pass_metrics
from homeostat.run.evaluation.rl_eval import reward_metrics
from homeostat.types import Completion, Prompt, RolloutGroup, Sample, StopReason

FORMAT = {"type": "regex_format", "pattern": "x"}
LENGTH = {"type": "length", "free_tokens": 1, "max_tokens": 2}
EXACT = {"type": "exact_match"}
MATH = {"type": "math_verify"}
MINE = {"type": "function", "path": "m:mine"}
YOURS = {"type": "function", "path": "m:yours"}


def judges(*functions: dict[str, Any], solved_by: str | None = None) -> dict[str, Any]:
    config = RewardsConfig.model_validate({"functions": functions})
    return dict(deciding_rewards(config, solved_by=solved_by))


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        ((EXACT, FORMAT), {"": ("exact_match",)}),
        ((FORMAT, MATH, MINE, LENGTH), {"": ("math_verify",)}),
        ((EXACT, MATH), {"": ("exact_match", "math_verify")}),
        ((FORMAT,), {"": ("regex_format",)}),
        ((MINE,), {"": ("mine",)}),
        ((FORMAT, MINE, LENGTH), {"": ("mine",)}),
        ((MINE, YOURS), {"/mine": ("mine",), "/yours": ("yours",)}),
        ((FORMAT, LENGTH), {"/regex_format": ("regex_format",), "/length": ("length",)}),
    ],
)
def test_correctness_decides_and_format_does_not(functions: Any, expected: Any) -> None:
    assert judges(*functions) == expected
    assert judges(*functions, solved_by="named") == {"": ("named",)}


def sample(failed: tuple[str, ...] = (), **rewards: float | None) -> Sample:
    return Sample(Completion("", (), StopReason.STOP), "", rewards, None, failed=frozenset(failed))


def group(*samples: Sample) -> RolloutGroup:
    return RolloutGroup(Prompt(0, np.array([1]), "p", {}), samples)


def test_a_well_formed_wrong_answer_is_not_solved() -> None:
    """The case that was counted as pass@1 = 1.0 with accuracy 0.0."""
    wrong = group(sample(exact_match=0.0, regex_format=1.0))
    found = pass_metrics([wrong], judges(EXACT, FORMAT), at=1.0, samples_per_prompt=1)
    assert found == {"eval/pass@1": 0.0}


def test_what_is_not_known_is_neither_solved_nor_unsolved() -> None:
    labels = ("a", "b")
    assert is_solved(sample(a=1.0, b=1.0), labels, at=1.0) is True
    assert is_solved(sample(a=1.0, b=0.9), labels, at=1.0) is False
    assert is_solved(sample(a=1.0, b=None), labels, at=1.0) is True
    assert is_solved(sample(a=None, b=None), labels, at=1.0) is None
    assert is_solved(sample(("b",), a=1.0, b=None), labels, at=1.0) is None
    # One that is wrong is wrong, whatever the other would have said.
    assert is_solved(sample(("b",), a=0.0, b=None), labels, at=1.0) is False


@pytest.mark.parametrize("num_samples", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_all_choices_with_a_solved_one(num_samples: int) -> None:
    for num_solved in range(num_samples + 1):
        flags = [index < num_solved for index in range(num_samples)]
        for k in range(1, num_samples + 1):
            choices = [any(chosen) for chosen in itertools.combinations(flags, k)]
            found = pass_at(k, num_samples=num_samples, num_solved=num_solved)
            assert found == pytest.approx(sum(choices) / len(choices), abs=1e-12)


def test_pass_at_k_is_over_the_samples_that_were_judged() -> None:
    rng = np.random.default_rng()
    groups, expected = [], {1: [], 2: [], 4: []}
    for _ in range(60):
        values = [None if rng.random() < 0.3 else float(rng.random() < 0.4) for _ in range(4)]
        groups.append(group(*(sample(("r",) if v is None else (), r=v) for v in values)))
        known = [value == 1.0 for value in values if value is not None]
        for k, found in expected.items():
            if choices := [any(c) for c in itertools.combinations(known, k)]:
                found.append(sum(choices) / len(choices))
    found = pass_metrics(groups, {"": ("r",)}, at=1.0, samples_per_prompt=4)
    for k, values in expected.items():
        assert found[f"eval/pass@{k}"] == pytest.approx(float(np.mean(values)), abs=1e-12)


def test_a_k_that_no_prompt_has_samples_for_is_not_reported() -> None:
    lost = group(sample(("r",), r=None), sample(r=1.0))
    found = pass_metrics([lost], {"": ("r",)}, at=1.0, samples_per_prompt=2)
    assert found == {"eval/pass@1": 1.0}


def test_failures_leave_the_mean_and_lower_the_coverage() -> None:
    samples = [
        sample(right=1.0, form=1.0, watched=0.0),
        sample(("right",), right=None, form=1.0, watched=0.0),
        sample(right=None, form=0.5, watched=0.0),
        sample(("watched",), right=0.0, form=0.0, watched=None),
    ]
    weights = {"right": 2.0, "form": 1.0, "watched": 0.0}
    functions = tuple(
        {"type": "regex_format", "pattern": "x", "name": name, "weight": weight}
        for name, weight in weights.items()
    )
    found = reward_metrics(samples, RewardsConfig.model_validate({"functions": functions}))
    assert found["eval/reward"] == pytest.approx((3.0 + 0.5 + 0.0) / 3)
    assert found["eval/reward_coverage"] == 0.75
    assert [found[f"eval/rewards/{name}/failed"] for name in ("right", "form", "watched")] == [
        1,
        0,
        1,
    ]
    assert found["eval/rewards/form/mean"] == pytest.approx(2.5 / 4)
