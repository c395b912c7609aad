"""A sample that a reward failed on is as if it had never been drawn: in advantages and in the loss.

From the values of several rewards to the weights of the update, for every algorithm, against
formulas in float64 written apart.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import tiny_rl

from homeostat.config import RunConfig
from homeostat.rewards.combine import RewardMoments, finish
from homeostat.rewards.groups import ScoredGroup
from homeostat.rollout.collect import StepRollouts
from homeostat.run.evaluation.rl_measure import _missing_metrics, _reward_metrics, _signal_metrics
from homeostat.run.learning.learn import Learned
from homeostat.run.learning.updates import build_update, step_advantages, step_rows
from homeostat.types import Completion, Prompt, RolloutGroup, Sample, Segment, StopReason

ALGORITHMS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "cpgd"]
WEIGHTS = {"right": 1.0, "form": 0.5}


@dataclass(frozen=True)
class Cell:
    """What the two rewards gave to a sample; "failed" is no value."""

    right: float | str | None
    form: float | str | None

    @property
    def failed(self) -> frozenset[str]:
        named = {"right": self.right, "form": self.form}
        return frozenset(name for name, value in named.items() if value == "failed")

    @property
    def values(self) -> dict[str, float | None]:
        named = {"right": self.right, "form": self.form}
        return {name: v if isinstance(v, float) else None for name, v in named.items()}

    @property
    def total(self) -> float | None:
        """The weighted sum, by hand."""
        if self.failed:
            return None
        terms = [WEIGHTS[name] * v for name, v in self.values.items() if v is not None]
        return sum(terms) if terms else None


value = st.sampled_from([0.0, 1.0, 0.25, None, "failed"])
cells = st.lists(
    st.lists(st.builds(Cell, value, value), min_size=2, max_size=5), min_size=1, max_size=4
)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    folder = tmp_path_factory.mktemp("recipes")
    functions = [
        {"type": "exact_match", "name": "right", "column": "first"},
        {"type": "regex_format", "name": "form", "pattern": "x", "weight": 0.5},
    ]
    return {
        name: tiny_rl.config(folder, algorithm={"type": name}, rewards={"functions": functions})
        for name in ALGORITHMS
    }


def groups_of(table: list[list[Cell]], config: RunConfig) -> list[RolloutGroup]:
    """As the collector makes them."""
    assert config.rewards is not None
    scored = [
        ScoredGroup(
            {name: [cell.values[name] for cell in row] for name in WEIGHTS},
            {name: frozenset(n for n, c in enumerate(row) if name in c.failed) for name in WEIGHTS},
        )
        for row in table
    ]
    sums = finish(scored, config.rewards, RewardMoments())
    return [
        RolloutGroup(
            Prompt(number, np.array([1, 2]), "p", {}),
            tuple(sample(cell, total) for cell, total in zip(row, totals, strict=True)),
        )
        for number, (row, totals) in enumerate(zip(table, sums, strict=True))
    ]


def sample(cell: Cell, total: float | None) -> Sample:
    segment = Segment(np.array([3, 4, 5]), np.zeros(3, dtype=np.float32), 0)
    completion = Completion("", (segment,), StopReason.STOP)
    return Sample(completion, "", cell.values, total, failed=cell.failed)


def expected(name: str, group: list[float], index: int, everything: list[float]) -> float:
    """The advantage of one sample among the ones with a reward, before whitening."""
    reward = group[index]
    if name == "reinforce_pp":
        return reward
    if max(group) == min(group):
        return 0.0
    if name == "rloo":
        others = group[:index] + group[index + 1 :]
        return reward - statistics.fmean(others)
    centred = reward - statistics.fmean(group)
    return centred if name == "dr_grpo" else centred / (statistics.stdev(group) + 1e-4)


@given(table=cells, name=st.sampled_from(ALGORITHMS))
def test_advantages_are_those_of_the_samples_without_a_failure(configs, table, name) -> None:
    config = configs[name]
    step = step_rows(groups_of(table, config), config.for_learning)
    found = step_advantages(step, config.for_learning, penalty_ST=None)
    per_sample = iter(zip(found, step.trained_S, strict=True))
    totals = [[cell.total for cell in row] for row in table]
    everything = [total for row in totals for total in row if total is not None]
    # REINFORCE++ whitens over the tokens of the batch; three tokens each change nothing in that.
    spread = statistics.pstdev(everything) if len(everything) > 1 else 0.0
    for row in totals:
        known = [total for total in row if total is not None]
        place = -1
        for total in row:
            advantage_T, trained = next(per_sample)
            assert trained == (total is not None)
            if total is None:
                assert not advantage_T.any()
                continue
            place += 1
            want = expected(name, known, place, everything)
            if name == "reinforce_pp":
                mean = statistics.fmean(everything)
                want = (want - mean) / (spread + 1e-8) if spread > 0 else 0.0
            assert advantage_T == pytest.approx(want, rel=1e-6, abs=1e-9)


@given(table=cells, name=st.sampled_from(ALGORITHMS))
def test_the_update_is_the_one_without_the_failed_samples(configs, table, name) -> None:
    """Same rows, weights, advantages and denominator as if they had never been drawn."""
    config = configs[name]
    kept = [[cell for cell in row if not cell.failed] for row in table]
    plans = [plan_of([row for row in rows if row], config) for rows in (table, kept)]
    assert plans[0] == plans[1]


def plan_of(table: list[list[Cell]], config: RunConfig) -> tuple | None:
    if not table:
        return None
    step = step_rows(groups_of(table, config), config.for_learning)
    plan = build_update(
        step,
        step_advantages(step, config.for_learning, penalty_ST=None),
        chosen=range(len(step.rows)),
        config=config.for_learning,
        sizes=config.trainer,
        kl_coefficient=None,
        step=1,
        epoch=0,
    ).plan
    if plan is None:
        return None
    rows = [row for batch in plan.micro_batches for row in batch.rows()]
    shown = [(row.weights_T.tolist(), row.columns["advantage"].tolist()) for row in rows]
    return plan.loss.denominator, sorted(shown)


def test_a_right_answer_whose_check_ran_out_of_time_is_not_punished(configs) -> None:
    """Four right answers in form; the check of one timed out. It had advantage -1.5."""
    row = [Cell(1.0, 1.0), Cell(1.0, 1.0), Cell(1.0, 1.0), Cell("failed", 1.0)]
    config = configs["grpo"]
    step = step_rows(groups_of([row], config), config.for_learning)
    found = step_advantages(step, config.for_learning, penalty_ST=None)
    assert not np.concatenate(found).any()
    assert step.trained_S.tolist() == [True, True, True, False]


def test_metrics_count_failures_apart_and_do_not_call_a_lost_group_alike(configs) -> None:
    config = configs["grpo"]
    table = [
        [Cell(1.0, 1.0), Cell(0.0, 1.0), Cell("failed", 1.0), Cell(None, 1.0)],
        [Cell("failed", 1.0)] * 3 + [Cell(1.0, 1.0)],
        [Cell(1.0, 1.0)] * 4,
    ]
    groups = groups_of(table, config)
    samples = [sample for group in groups for sample in group.samples]
    found = _missing_metrics(samples, ["right", "form"]) | _reward_metrics(
        groups, ["right", "form"]
    )
    assert found["rewards/right/failed"] == 4
    assert found["rewards/right/failed_share"] == pytest.approx(4 / 12)
    assert found["rewards/right/none"] == 1
    assert found["rewards/form/failed"] == found["rewards/form/none"] == 0
    assert found["rollout/failed_share"] == pytest.approx(4 / 12)
    # The second group has one reward left: nobody knows whether its rewards would be alike.
    assert found["frac_reward_zero_std"] == 0.5
    assert found["reward"] == pytest.approx((1.5 + 0.5 + 0.5 + 1.5 * 5) / 8)
    rows = step_rows(groups, config.for_learning)
    learned = Learned(
        rows=rows, advantages_S=step_advantages(rows, config.for_learning, penalty_ST=None)
    )
    signal = _signal_metrics(StepRollouts(groups), learned)
    assert signal["advantages/zero_share"] == pytest.approx(5 / 8)
    assert signal["rollout/untrained_share"] == pytest.approx(4 / 12)


def test_a_step_in_which_every_sample_failed_has_no_advantage_to_speak_of(configs) -> None:
    config = configs["grpo"]
    groups = groups_of([[Cell("failed", 1.0)] * 4], config)
    assert plan_of([[Cell("failed", 1.0)] * 4], config) is None
    found = _reward_metrics(groups, ["right", "form"])
    assert math.isnan(found["reward"])
    assert "frac_reward_zero_std" not in found
    rows = step_rows(groups, config.for_learning)
    learned = Learned(
        rows=rows, advantages_S=step_advantages(rows, config.for_learning, penalty_ST=None)
    )
    assert "advantages/zero_share" not in _signal_metrics(StepRollouts(groups), learned)
