"""Columns of any dtype and rank go with their tokens through rows, batches, files and workers."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import runs, tiny_rl

from homeostat import columns
from homeostat.algorithms.losses import LOSSES
from homeostat.columns import COLUMNS, Column, ColumnArray, Ragged, Reader
from homeostat.data.loader import repack
from homeostat.observe.jsonl import encode
from homeostat.rollout.group_arrays import decode as decode_groups
from homeostat.rollout.group_arrays import encode as encode_groups
from homeostat.run.learning.updates import StepRows, build_update, step_advantages, step_rows
from homeostat.train.lanes import split
from homeostat.train.local import LocalTrainer
from homeostat.types import (
    Author,
    Completion,
    LossSpec,
    Outputs,
    Prompt,
    Role,
    RolloutGroup,
    Sample,
    Segment,
    StepPlan,
    StopReason,
    TokenRow,
    TrainBatch,
)

LAYERS, EXPERTS = 3, 2
ROUTED = Column(
    "experts that the router chose",
    np.int16,
    frozenset({Reader.MODEL}),
    dims=("layers", "experts"),
    on_prompts=True,
    fill=-1,
)
KEPT = Column("tokens that top-p kept", np.int32, frozenset({Reader.MODEL}), is_ragged=True)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense block of small integers and a ragged list, as no column of today is."""
    monkeypatch.setitem(COLUMNS, "routed", ROUTED)
    monkeypatch.setitem(COLUMNS, "kept", KEPT)


def random_columns(rng: np.random.Generator, length: int) -> dict[str, ColumnArray]:
    lists = [rng.integers(0, 50, rng.integers(0, 4)) for _ in range(length)]
    return {
        "engine_logp": rng.standard_normal(length).astype(np.float32),
        "routed": rng.integers(0, 8, (length, LAYERS, EXPERTS)).astype(np.int16),
        "kept": Ragged.of(lists, np.int32),
    }


def random_rows(seed: int, lengths: list[int]) -> list[TokenRow]:
    rng = np.random.default_rng(seed)
    return [
        TokenRow(
            index,
            rng.integers(0, 13, length),
            np.ones(length, dtype=np.float32),
            random_columns(rng, length),
        )
        for index, length in enumerate(lengths)
    ]


def assert_same_column(left: ColumnArray, right: ColumnArray) -> None:
    assert left.dtype == right.dtype
    if isinstance(left, Ragged):
        assert isinstance(right, Ragged)
        np.testing.assert_array_equal(left.values, right.values)
        np.testing.assert_array_equal(left.offsets_T, right.offsets_T)
    else:
        np.testing.assert_array_equal(left, right)


def assert_same_rows(left: list[TokenRow], right: list[TokenRow]) -> None:
    assert [row.row_id for row in left] == [row.row_id for row in right]
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one.tokens_T, other.tokens_T)
        assert one.columns.keys() == other.columns.keys()
        for name, values in one.columns.items():
            assert_same_column(values, other.columns[name])


def by_id(rows: list[TokenRow]) -> list[TokenRow]:
    return sorted(rows, key=lambda row: row.row_id)


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=7)


@settings(deadline=None, max_examples=50)
@given(lengths=lengths, seed=st.integers(0, 1000))
def test_a_batch_gives_back_the_columns_of_its_rows(lengths: list[int], seed: int) -> None:
    COLUMNS.update(routed=ROUTED, kept=KEPT)
    rows = random_rows(seed, lengths)
    batch = TrainBatch.of(rows)
    assert batch.columns["routed"].shape == (sum(lengths), LAYERS, EXPERTS)
    assert len(batch.columns["kept"]) == sum(lengths)
    assert_same_rows(batch.rows(), rows)
    # As a worker channel sends it.
    assert_same_rows(pickle.loads(pickle.dumps(batch, protocol=5)).rows(), rows)


def test_columns_survive_another_packing_and_lanes() -> None:
    rows = random_rows(1, [5, 9, 3, 7, 2, 8])
    plan = StepPlan(1, 0, (TrainBatch.of(rows),), LossSpec("sft", 1.0))
    again = repack(plan, max_tokens=12, num_data_groups=2)
    assert len(again.micro_batches) == 4
    assert again.role is plan.role
    assert_same_rows(by_id([r for b in again.micro_batches for r in b.rows()]), rows)
    parts = split(plan.micro_batches[0], 3)
    assert_same_rows([row for part in parts for row in part.rows()], rows)


def test_rows_are_written_for_people_with_one_entry_per_token() -> None:
    (row,) = random_rows(2, [4])
    text = encode({name: columns.as_json(values) for name, values in row.columns.items()})
    shown = json.loads(text)
    assert [len(shown[name]) for name in row.columns] == [4, 4, 4]
    assert shown["routed"] == row.columns["routed"].tolist()
    assert shown["kept"] == [row.columns["kept"][token].tolist() for token in range(4)]


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("routde", np.zeros(3, np.float32), "not declared"),
        ("advantage", np.zeros(3, np.float64), "float64, declared as float32"),
        ("advantage", np.zeros((3, 2), np.float32), "2 dimensions"),
        ("advantage", np.zeros(4, np.float32), "4 tokens of 3"),
        ("kept", np.zeros(3, np.int32), "ragged by its declaration"),
    ],
)
def test_a_column_that_is_not_as_declared_is_refused(name: str, values, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        TokenRow(7, np.arange(3), np.ones(3, np.float32), {name: values})


def test_rows_of_a_batch_have_the_same_columns() -> None:
    first, second = random_rows(3, [3, 4])
    bare = replace(second, columns={})
    with pytest.raises(AssertionError, match=r"only one has .*'routed'"):
        TrainBatch.of([first, bare])


def test_every_column_that_a_loss_reads_is_declared_so() -> None:
    named = {name for loss in LOSSES.values() for name in loss.columns}
    assert named == {name for name, column in COLUMNS.items() if Reader.LOSS in column.readers}
    assert all(column.readers for column in COLUMNS.values())


# From segments to rows.


def segment(rng: np.random.Generator, length: int, author: Author, *, has_columns: bool) -> Segment:
    found = random_columns(rng, length)
    logp_T = found.pop("engine_logp") if author is Author.ENGINE else np.full(length, np.nan, "f4")
    return Segment(
        rng.integers(0, 13, length),
        np.asarray(logp_T),
        policy_version=2,
        author=author,
        columns=found if has_columns else {},
    )


def sample_of(rng: np.random.Generator, *, has_columns: bool, prompt: int) -> Sample:
    parts = (
        segment(rng, 4, Author.ENGINE, has_columns=has_columns),
        segment(rng, 3, Author.TOOL, has_columns=False),
        segment(rng, 5, Author.ENGINE, has_columns=has_columns),
    )
    routed = rng.integers(0, 8, (prompt, LAYERS, EXPERTS)).astype(np.int16)
    prompt_columns = {"routed": routed} if has_columns else {}
    completion = Completion("r", parts, StopReason.STOP, prompt_columns)
    reward = float(rng.integers(0, 2))
    return Sample(completion, "", {"r": reward}, reward)


def groups_of(seed: int = 0, *, has_columns: bool = True) -> list[RolloutGroup]:
    rng = np.random.default_rng(seed)
    return [
        RolloutGroup(
            Prompt(number, rng.integers(0, 13, 2 + number), "", {}),
            tuple(
                sample_of(rng, has_columns=has_columns and number == 0, prompt=2 + number)
                for _ in range(4)
            ),
        )
        for number in range(2)
    ]


def test_what_an_engine_recorded_of_tokens_reaches_the_rows(tmp_path: Path) -> None:
    groups = groups_of()
    step = step_rows(groups, tiny_rl.config(tmp_path).for_learning)
    assert {tuple(row.columns) for row in step.rows} == {("routed", "engine_logp", "kept")}
    completion, row = groups[0].samples[1].completion, step.rows[1]
    first, tool, last = completion.segments
    routed = row.columns["routed"]
    np.testing.assert_array_equal(routed[:2], completion.prompt_columns["routed"])
    np.testing.assert_array_equal(routed[2:6], first.columns["routed"])
    assert (routed[6:9] == -1).all(), "a tool's tokens were not routed"
    np.testing.assert_array_equal(routed[9:], last.columns["routed"])
    assert row.columns["kept"].sizes_T[[0, 1, 6, 7, 8]].tolist() == [0] * 5
    np.testing.assert_array_equal(row.columns["kept"][9], last.columns["kept"][0])
    # Samples of an engine that recorded nothing have the same columns, without values.
    assert (step.rows[5].columns["routed"] == -1).all()
    assert step.rows[5].columns["kept"].values.size == 0
    assert len(tool.tokens_T) == 3
    batch = TrainBatch.of(step.rows)
    assert batch.columns["routed"].shape[1:] == (LAYERS, EXPERTS)


def test_what_an_engine_recorded_survives_the_journal() -> None:
    groups = groups_of()
    legend, arrays = encode_groups(groups)
    prompts = {group.prompt.prompt_id: group.prompt for group in groups}
    again = decode_groups(legend, arrays, prompts.__getitem__, place=Path("journal"))
    for one, other in zip(groups, again, strict=True):
        for left, right in zip(one.samples, other.samples, strict=True):
            pairs = [(left.completion.prompt_columns, right.completion.prompt_columns)]
            segments = zip(left.completion.segments, right.completion.segments, strict=True)
            pairs += [(a.columns, b.columns) for a, b in segments]
            for before, after in pairs:
                assert before.keys() == after.keys()
                for name, values in before.items():
                    assert_same_column(values, after[name])
    # Where nothing was recorded, nothing is written.
    assert not [key for key in encode_groups(groups_of(has_columns=False))[1] if "columns" in key]


def test_scoring_gets_the_columns_of_the_rows_as_training_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Role, frozenset[str]]] = []
    original = LocalTrainer.forward

    def watched(self: LocalTrainer, role: Role, batches: list[TrainBatch], outputs: Outputs):
        seen.extend((role, frozenset(batch.columns)) for batch in batches)
        return original(self, role, batches, outputs)

    monkeypatch.setattr(LocalTrainer, "forward", watched)
    kl = {"type": "grpo", "kl": {"coefficient": 0.1}}
    runs.train(tiny_rl.config(tmp_path, "trainer.max_steps=1", algorithm=kl))
    assert (Role.REFERENCE, frozenset({"engine_logp"})) in seen
    assert (Role.POLICY, frozenset({"engine_logp", "ref_logp"})) in seen
    assert all("engine_logp" in names for _, names in seen)


# Several rows of one sample.


def in_two(step: StepRows) -> StepRows:
    """Each sample as two rows: the second has all tokens, the first trains those before a cut."""
    rows, places, samples = [], [], []
    for number, row in enumerate(step.rows):
        cut = int(step.starts_S[number]) + 4
        for end, is_mine in ((cut, slice(0, cut)), (len(row), slice(cut, len(row)))):
            weights_T = np.zeros(len(row), dtype=np.float32)
            weights_T[is_mine] = row.weights_T[is_mine]
            made = {name: values[:end] for name, values in row.columns.items()}
            rows.append(TokenRow(len(rows), row.tokens_T[:end], weights_T[:end], made))
            places.append(np.arange(end))
            samples.append(number)
    return replace(step, rows=rows, places=places, sample_R=np.array(samples))


@pytest.mark.parametrize("normalise", ["token", "sequence", "fixed"])
def test_a_sample_of_several_rows_counts_as_the_one_row_it_could_be(
    tmp_path: Path, normalise: str
) -> None:
    config = tiny_rl.config(tmp_path, algorithm={"type": "grpo", "normalise": normalise})
    step = step_rows(groups_of(5, has_columns=False), config.for_learning)
    advantages_S = step_advantages(step, config.for_learning, penalty_ST=None)
    assert np.concatenate(advantages_S).any()

    def update(made: StepRows):
        return build_update(
            made, advantages_S, chosen=range(len(made.rows)), config=config.for_learning,
            sizes=config.trainer, kl_coefficient=None, step=1, epoch=0,
        )  # fmt: skip

    one, two = update(step), update(in_two(step))
    assert one.plan is not None
    assert two.plan is not None
    assert one.plan.loss == two.plan.loss
    for plan, per_sample in ((one.plan, 1), (two.plan, 2)):
        ids = [row.row_id for batch in plan.micro_batches for row in batch.rows()]
        assert len(set(ids)) == len(ids)
        assert len(ids) % per_sample == 0

    def trained(plan: StepPlan, made: StepRows) -> dict[tuple[int, int], tuple[float, float]]:
        """(sample, place) -> weight and advantage of every trained token."""
        return {
            (int(made.sample_R[row.row_id]), int(place)): (float(weight), float(advantage))
            for batch in plan.micro_batches
            for row in batch.rows()
            for place, weight, advantage in zip(
                made.places[row.row_id], row.weights_T, row.columns["advantage"], strict=True
            )
            if weight
        }

    assert trained(one.plan, step) == trained(two.plan, in_two(step))
