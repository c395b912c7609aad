"""Engine and trainer on the same tokens: measures against plain loops, and what is gathered."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support import tiny_rl

from homeostat.algorithms.mismatch import (
    TokenPairs,
    effective_share,
    furthest,
    is_notable,
    mismatch_metrics,
)
from homeostat.config import RunConfig
from homeostat.observe.names import describe
from homeostat.run.learning.mismatch import NUM_WORST, Compared, compare, known_logp, with_text
from homeostat.run.learning.updates import (
    StepRows,
    build_update,
    split_groups,
    step_rows,
    with_column,
)
from homeostat.types import (
    Author,
    Completion,
    Prompt,
    RolloutGroup,
    Sample,
    Segment,
    StopReason,
    UpdateReport,
)


def pairs_of(rows: list[list[tuple[float, float]]], ages: list[int] | None = None) -> TokenPairs:
    flat = [pair for row in rows for pair in row]
    return TokenPairs(
        engine_logp_M=np.array([engine for engine, _ in flat]),
        trainer_logp_M=np.array([trainer for _, trainer in flat]),
        row_of_M=np.repeat(np.arange(len(rows)), [len(row) for row in rows]),
        age_M=None if ages is None else np.array(ages),
    )


def random_pairs(seed: int, *, spread: float = 0.3) -> list[list[tuple[float, float]]]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(12):
        engine = -rng.exponential(2.0, rng.integers(1, 9))
        rows.append(list(zip(engine, engine + spread * rng.standard_normal(len(engine)),
                             strict=True)))  # fmt: skip
    return rows


def ess(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_measured_equals_loops_over_the_tokens(seed: int) -> None:
    rows = random_pairs(seed)
    logs = [trainer - engine for row in rows for engine, trainer in row]
    ratios = [math.exp(log) for log in logs]
    products = [math.exp(sum(trainer - engine for engine, trainer in row)) for row in rows]
    want = {
        "sampling/sampling_logp_difference/mean": sum(map(abs, logs)) / len(logs),
        "sampling/sampling_logp_difference/max": max(map(abs, logs)),
        "sampling/importance_sampling_ratio/mean": sum(ratios) / len(ratios),
        "sampling/importance_sampling_ratio/max": max(ratios),
        "sampling/importance_sampling_ratio/min": min(ratios),
        "sampling/k3": sum(r - 1 - x for r, x in zip(ratios, logs, strict=True)) / len(logs),
        "sampling/ess": ess(ratios),
        "sampling/ess_sequence": ess(products),
    }
    assert mismatch_metrics(pairs_of(rows)) == pytest.approx(want, rel=1e-12)


def test_each_age_is_measured_by_itself() -> None:
    rows = random_pairs(5)
    ages = np.random.default_rng(5).choice([0, 1, 7], sum(map(len, rows)))
    found = mismatch_metrics(pairs_of(rows, ages.tolist()))
    flat = [pair for row in rows for pair in row]
    for age in (0, 1, 7):
        chosen = [pair for pair, each in zip(flat, ages, strict=True) if each == age]
        alone = mismatch_metrics(pairs_of([chosen]))
        place = f"sampling/by_age/{age}"
        assert found[f"{place}/share"] == pytest.approx(len(chosen) / len(flat))
        difference = alone["sampling/sampling_logp_difference/mean"]
        assert found[f"{place}/logp_difference"] == pytest.approx(difference)
        for name in ("k3", "ess"):
            assert found[f"{place}/{name}"] == pytest.approx(alone[f"sampling/{name}"])
    assert found["stale/steps/mean"] == pytest.approx(ages.mean())
    assert found["stale/steps/max"] == 7
    assert all(describe(name) is not None for name in found)


def test_equal_log_probs_have_no_mismatch_at_all() -> None:
    found = mismatch_metrics(pairs_of([[(-1.5, -1.5), (-0.1, -0.1)], [(-30.0, -30.0)]]))
    zeros = {name for name, value in found.items() if value == 0}
    assert zeros == {f"sampling/{name}" for name in (
        "sampling_logp_difference/mean", "sampling_logp_difference/max", "k3")}  # fmt: skip
    assert all(value == 1 for name, value in found.items() if name not in zeros)


def test_an_effective_share_knows_no_scale_and_never_overflows() -> None:
    logs = np.random.default_rng().normal(0, 0.5, 50)
    for shift in (-5000.0, 0.0, 5000.0):
        assert effective_share(logs + shift) == pytest.approx(effective_share(logs))
    assert effective_share(np.array([900.0, 0.0, 0.0, 0.0])) == pytest.approx(1 / 4)


def test_a_nan_is_seen_in_every_measure_it_is_part_of() -> None:
    rows = random_pairs(2)
    rows[3][0] = (math.nan, -1.0)
    ages = [0] * sum(map(len, rows))
    ages[0] = 1
    found = mismatch_metrics(pairs_of(rows, ages))
    own = {name for name, value in found.items() if not math.isnan(value)}
    assert {name for name in own if not name.startswith(("stale/", "sampling/by_age/1"))} == {
        "sampling/by_age/0/share"
    }


def test_nothing_compared_is_nothing_measured() -> None:
    assert mismatch_metrics(pairs_of([])) == {}


def test_a_difference_is_notable_by_the_size_of_the_log_prob() -> None:
    cases = {(-0.1, -0.25): True, (-0.1, -0.15): False, (-12.0, -12.5): False,
             (-12.0, -0.5): True, (-0.5, -12.0): True, (math.nan, -1.0): True}  # fmt: skip
    assert is_notable(pairs_of([list(cases)])).tolist() == list(cases.values())


def test_the_furthest_come_first_and_a_nan_before_all() -> None:
    pairs = pairs_of([[(-1.0, -1.2), (-1.0, -1.0), (math.nan, -1.0), (-2.0, -1.0), (-9.0, -9.1)]])
    assert furthest(pairs, 4).tolist() == [2, 3, 0, 4]


# What a step gathers.

VERSIONS = (3, 5)


def random_groups(seed: int) -> list[RolloutGroup]:
    """Completions of two policy versions, with a tool's words between them."""
    rng = np.random.default_rng(seed)

    def segment(author: Author, version: int) -> Segment:
        length = int(rng.integers(1, 5))
        logp_T = -rng.exponential(2.0, length).astype(np.float32)
        if author is Author.TOOL:
            logp_T[:] = np.nan
        return Segment(rng.integers(0, 13, length), logp_T, version, author=author)

    def sample(name: str) -> Sample:
        parts = [(Author.ENGINE, VERSIONS[0]), (Author.TOOL, 0), (Author.ENGINE, VERSIONS[1])]
        segments = tuple(segment(*part) for part in parts)
        return Sample(Completion(name, segments, StopReason.STOP), "", {}, float(rng.random()))

    return [
        RolloutGroup(
            Prompt(100 + number, rng.integers(0, 13, rng.integers(1, 6)), "", {}),
            tuple(sample(f"{number}/{place}") for place in range(2)),
        )
        for number in range(4)
    ]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return tiny_rl.config(tmp_path, rollout={"prompts_per_step": 4, "samples_per_prompt": 2})


def trainer_logp(rows: StepRows, seed: int = 1) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(seed)
    engine = [row.columns["engine_logp"][row.weights_T > 0] for row in rows.rows]
    return {
        index: (logp_M + 0.2 * rng.standard_normal(len(logp_M))).astype(np.float32)
        for index, logp_M in enumerate(engine)
    }


def compared(
    groups: list[RolloutGroup],
    rows: StepRows,
    known: dict[int, np.ndarray],
    version: int | None = 5,
) -> Compared:
    return compare(
        groups, rows, known, spans=split_groups(4, 2), updates_per_step=2, version=version
    )


def engine_tokens(groups: list[RolloutGroup]) -> list[tuple[int, int, Segment, int]]:
    """Row, position in the completion, segment and place in it, of every token of the engine."""
    found = []
    samples = [sample for group in groups for sample in group.samples]
    for row, sample in enumerate(samples):
        position = 0
        for segment in sample.completion.segments:
            for place in range(len(segment.tokens_T)):
                if segment.author is Author.ENGINE:
                    found.append((row, position, segment, place))
                position += 1
    return found


def test_staleness_counts_versions_and_the_updates_of_the_step(config: RunConfig) -> None:
    groups = random_groups(0)
    rows = step_rows(groups, config.for_learning)
    found = compared(groups, rows, trainer_logp(rows)).metrics
    ages = [5 - segment.policy_version for _, _, segment, _ in engine_tokens(groups)]
    # The last two of four groups are in the second update.
    updates = [
        2 * age + (row // 2 >= 2)
        for age, (row, *_) in zip(ages, engine_tokens(groups), strict=True)
    ]
    assert found["stale/steps/mean"] == pytest.approx(np.mean(ages))
    assert found["stale/updates/mean"] == pytest.approx(np.mean(updates))
    assert (found["stale/steps/max"], found["stale/updates/max"]) == (2, 5)
    assert found["sampling/by_age/2/share"] == pytest.approx(np.mean(np.array(ages) == 2))
    assert all(math.isfinite(value) for value in found.values()), "a tool's NaN is in it"
    assert all(describe(name) is not None for name in found)


def test_versions_of_another_run_have_no_age(config: RunConfig) -> None:
    groups = random_groups(0)
    rows = step_rows(groups, config.for_learning)
    found = compared(groups, rows, trainer_logp(rows), version=None).metrics
    assert not [name for name in found if name.startswith("stale/") or "by_age" in name]
    assert "sampling/ess" in found


def test_the_worst_tokens_are_found_with_their_text(config: RunConfig) -> None:
    groups = random_groups(3)
    rows = step_rows(groups, config.for_learning)
    known = trainer_logp(rows)
    known[5][-1] -= 40.0
    found = compared(groups, rows, known)
    assert found.notable
    logs = {}
    counters: dict[int, int] = {}
    for row, position, segment, place in engine_tokens(groups):
        number = counters.get(row, 0)
        counters[row] = number + 1
        logs[row, position] = abs(known[row][number] - segment.engine_logp_T[place])
    order = sorted(logs, key=lambda key: -logs[key])[:NUM_WORST]
    assert [(worst.row, worst.position) for worst in found.worst] == order
    worst, completion = found.worst[0], groups[2].samples[1].completion
    assert (worst.row, worst.prompt_id, worst.sample) == (5, 102, 1)
    assert worst.position == len(completion) - 1
    assert worst.token_id == completion.tokens_T[-1]
    assert worst.policy_version == VERSIONS[1]
    assert worst.difference == pytest.approx(-40, abs=1)
    shown = with_text(found.worst, rows, decode=lambda ids: "".join(f"<{id}>" for id in ids))
    assert shown[0]["text"] == f"<{worst.token_id}>"
    assert shown[0]["after"] == ""
    whole = np.concatenate([groups[2].prompt.tokens_T, completion.tokens_T]).tolist()
    assert "".join(f"<{id}>" for id in whole).endswith(shown[0]["before"] + shown[0]["text"])
    assert len(shown) == len(found.worst) == NUM_WORST


def test_rounding_is_not_worth_a_word(config: RunConfig) -> None:
    groups = random_groups(3)
    rows = step_rows(groups, config.for_learning)
    known = {
        index: row.columns["engine_logp"][row.weights_T > 0] + np.float32(1e-3)
        for index, row in enumerate(rows.rows)
    }
    assert not compared(groups, rows, known).notable


def test_nothing_known_is_nothing_compared(config: RunConfig) -> None:
    groups = random_groups(3)
    found = compared(groups, step_rows(groups, config.for_learning), {})
    assert (found.metrics, found.worst, found.notable) == ({}, (), False)


def test_log_probs_of_before_the_step_go_before_those_of_an_update(config: RunConfig) -> None:
    rows = step_rows(random_groups(1), config.for_learning)
    logp = trainer_logp(rows)
    rows.rows[1] = with_column(rows.rows[1], "old_logp", logp[1])
    report = UpdateReport(
        step=1, applied=True, loss=0.0, grad_norm=0.0, learning_rate=0.0, num_micro_batches=1,
        row_ids_B=np.array([2, 1]), row_losses_B=np.zeros(2, dtype=np.float32),
        row_logp=(logp[2], logp[1] - 1),
    )  # fmt: skip
    found = known_logp(rows, [report])
    assert sorted(found) == [1, 2]
    for index in (1, 2):
        np.testing.assert_array_equal(found[index], logp[index])


# Normalisation over the update.


@pytest.mark.parametrize("normalise", ["token", "sequence"])
def test_weights_are_divided_by_their_mean_over_all_rows_of_the_update(
    config: RunConfig, normalise: str
) -> None:
    rules = {"weight": {"type": "token", "high": 1.2}, "normalise": True}
    correction = type(config.algorithm.correction).model_validate(rules)
    changes = {"correction": correction, "normalise": normalise}
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update=changes)})
    groups = random_groups(4)
    rows = step_rows(groups, config.for_learning)
    logp = trainer_logp(rows)
    made = [with_column(row, "old_logp", logp[index]) for index, row in enumerate(rows.rows)]
    # Row 2 teaches nothing and is left out of the batches, row 3 is not trained at all.
    advantages = [np.full(s.completion.num_policy_tokens, 0.0 if i == 2 else 1.0)
                  for i, s in enumerate(s for g in groups for s in g.samples)]  # fmt: skip
    trained = np.arange(8) != 3
    plan = build_update(
        replace(rows, rows=made, trained_S=trained), advantages, chosen=range(8),
        config=config.for_learning,
        sizes=config.trainer, kl_coefficient=None,
        step=1, epoch=0,
    ).plan  # fmt: skip
    total = count = 0.0
    for index in np.flatnonzero(trained):
        row = made[index]
        engine = row.columns["engine_logp"][row.weights_T > 0].astype(float)
        weights = np.minimum(np.exp(logp[index].astype(float) - engine), 1.2)
        part = 1.0 if normalise == "token" else 1 / len(weights)
        total, count = total + part * weights.sum(), count + part * len(weights)
    assert plan is not None
    assert plan.loss.params["weight_mean"] == pytest.approx(total / count, rel=1e-12)
    assert sum(batch.num_rows for batch in plan.micro_batches) == 6
    off = correction.model_copy(update={"normalise": False})
    algorithm = config.algorithm.model_copy(update={"correction": off})
    bare = [replace(row, columns={"engine_logp": row.columns["engine_logp"]}) for row in made]
    plain = build_update(
        replace(rows, rows=bare, trained_S=trained), advantages, chosen=range(8),
        config=config.model_copy(update={"algorithm": algorithm}).for_learning,
        sizes=config.trainer, kl_coefficient=None, step=1, epoch=0,
    ).plan  # fmt: skip
    assert plain is not None
    assert plain.loss.params["weight_mean"] == 1.0
