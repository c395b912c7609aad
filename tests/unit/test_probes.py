"""Invariants of updates: what is measured when all is well, and when something was changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import tiny

from homeostat.algorithms import sft
from homeostat.config.algorithm import SftConfig
from homeostat.errors import OutOfMemoryHaltError
from homeostat.observe.events import EVENTS
from homeostat.observe.run_dir import RunDir
from homeostat.ops.attention import PackedLayout
from homeostat.run.learning.probes import ScoredAgain, last_packed, plan_probes
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.local import LocalTrainer
from homeostat.train.oom import MemoryGuard
from homeostat.train.roles import Training
from homeostat.train.runtime import resolve_runtime
from homeostat.train.saving.frozen import CHUNK_ELEMENTS, checksums
from homeostat.train.saving.run_state import RunState
from homeostat.train.scoring import score
from homeostat.train.step import GuardedStep
from homeostat.types import Role, StepPlan, TokenRow, TrainBatch, UpdateReport


def make_trainer(folder: Path, **sections: object) -> LocalTrainer:
    config = tiny.config(folder, **sections)
    return local_trainer(config.for_trainer, resolve_runtime(config, kept=PLAIN))


def make_plan(step: int = 1) -> StepPlan:
    rng = np.random.default_rng(step)
    rows = [
        TokenRow(i, rng.integers(3, 20, size=9), (np.arange(9) > 3).astype(np.float32))
        for i in range(5)
    ]
    batches = (TrainBatch.of(rows[:3]), TrainBatch.of(rows[3:]))
    return StepPlan(step, 0, batches, sft.loss_spec(SftConfig(type="sft"), rows))


def training(trainer: LocalTrainer) -> Training:
    """What the policy has because it is trained."""
    found = trainer.roles[Role.POLICY].training
    assert found is not None
    return found


def update(trainer: LocalTrainer, plan: StepPlan, *, learning_rate: float = 1e-3) -> UpdateReport:
    trainer.accumulate(Role.POLICY, plan.micro_batches, plan.loss, step=plan.step)
    return trainer.apply(Role.POLICY, step=plan.step, learning_rate=learning_rate)


def test_an_update_is_measured_as_the_weights_say(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, trainer={"optimizer": {"weight_decay": 0.0}, "max_steps": 9})
    before = {name: p.detach().clone() for name, p in training(trainer).optimizer.params.items()}
    probes = update(trainer, make_plan()).probes
    assert probes["probe/trained_unchanged"] == 0
    assert probes["probe/frozen_changed"] == 0
    assert probes["probe/dtype_odd"] == 0
    after = training(trainer).optimizer.params
    layers = [name for name in before if "layers.0." in name]
    moved = sum((after[n] - before[n]).double().square().sum() for n in layers)
    size = sum(after[n].double().square().sum() for n in layers)
    ratio = probes["update/weight_ratio/layers_1of2"]
    assert ratio == pytest.approx(float((moved / size).detach().sqrt()), rel=1e-3)


def test_between_measured_steps_nothing_is_measured(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert update(trainer, make_plan(11)).probes == {}
    assert update(trainer, make_plan(20)).probes
    assert update(trainer, make_plan(30), learning_rate=0.0).probes == {}


def test_tensors_that_were_frozen_behind_the_back_are_counted(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    update(trainer, make_plan(1))
    frozen = [name for name in training(trainer).optimizer.params if "layers.0." in name]
    for name in frozen:
        training(trainer).optimizer.params[name].requires_grad_(False)
    probes = update(trainer, make_plan(2)).probes
    assert probes["probe/trained_unchanged"] == len(frozen)
    assert probes["probe/dtype_odd"] == len(frozen)


def test_a_base_that_moves_under_its_adapter_is_counted(tmp_path: Path) -> None:
    random_weights = make_trainer(tmp_path)
    random_weights.export(Role.POLICY, tmp_path / "model", tiny.config(tmp_path).for_export)
    model = {"path": str(tmp_path / "model"), "init": "pretrained"}
    trainer = make_trainer(tmp_path, lora={"rank": 2}, model=model)
    assert update(trainer, make_plan(1)).probes["probe/frozen_changed"] == 0
    base = next(
        p for p in trainer.roles[Role.POLICY].model.causal_lm.parameters() if not p.requires_grad
    )
    with torch.no_grad():
        base.view(-1)[0] += 0.5
    assert update(trainer, make_plan(2)).probes["probe/frozen_changed"] == 1


def test_the_loss_sees_the_tokens_that_it_was_given(tmp_path: Path) -> None:
    trainer, plan = make_trainer(tmp_path), make_plan()
    report = update(trainer, plan)
    found = plan_probes(plan, report)
    assert found["probe/mask_difference"] == 0
    assert found["data/rows_without_training"] == 0
    short = replace(report, row_logp=(report.row_logp[0][:-2], *report.row_logp[1:]))
    assert plan_probes(plan, short)["probe/mask_difference"] == 2
    lost = replace(report, row_logp=report.row_logp[1:], row_ids_B=report.row_ids_B[1:])
    assert plan_probes(plan, lost)["probe/mask_difference"] == 5


def test_the_first_ratio_is_one_only_for_the_same_weights(tmp_path: Path) -> None:
    trainer, plan = make_trainer(tmp_path), make_plan()
    batch = TrainBatch.of(plan.micro_batches[0].rows())
    scores = score(trainer, Role.POLICY, [batch])[0]
    scored = dict(zip(batch.row_ids_B.tolist(), np.split(scores, 3), strict=True))
    report = update(trainer, plan)
    assert ScoredAgain(scored).compared(report)["probe/first_ratio_off"] < 1e-5
    later = ScoredAgain(scored).compared(update(trainer, make_plan(1)))
    assert later["probe/first_ratio_off"] > 1e-4
    assert ScoredAgain({99: scores}).compared(report) == {}
    # Trained on other tokens than it was to be: the mask's probe says so.
    assert ScoredAgain({row: one[:-1] for row, one in scored.items()}).compared(report) == {}


def test_a_packed_row_is_what_it_is_alone_unless_attention_leaks(tmp_path: Path) -> None:
    trainer, plan = make_trainer(tmp_path), make_plan()
    row = last_packed(plan)
    assert row is not None
    alone = ScoredAgain(alone={row.row_id: score(trainer, Role.POLICY, [TrainBatch.of([row])])[0]})
    model = trainer.roles[Role.POLICY].model
    hidden = model.hidden

    def leaking(tokens_N: Any, positions_N: Any, layout: PackedLayout, **how: Any) -> Any:
        one = PackedLayout.of([layout.num_tokens], device=tokens_N.device)
        return hidden(tokens_N, positions_N, one, **how | {"sharing": None})

    model.hidden = leaking
    assert alone.compared(update(trainer, plan))["probe/packing_difference"] > 1e-3
    model.hidden = hidden
    again = score(trainer, Role.POLICY, [TrainBatch.of([row])])[0]
    report = update(trainer, plan)
    found = ScoredAgain(alone={row.row_id: again}).compared(report)
    assert found["probe/packing_difference"] < 1e-5


def test_the_optimizer_counts_the_updates_that_it_has_seen(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    counts = [update(trainer, make_plan(step)).probes["probe/optimizer_updates"] for step in (1, 2)]
    assert counts == [1, 2]
    for slot in training(trainer).optimizer.slots.values():
        for tensor in slot.state.values():
            tensor.zero_()
    assert update(trainer, make_plan(3)).probes["probe/optimizer_updates"] == 1


def run_guarded(
    folder: Path, trainer: LocalTrainer, plans: list[StepPlan]
) -> tuple[list[UpdateReport], list[tuple[str, int]]]:
    """Updates as a run makes them, which begins again where memory runs out; and the events."""
    config, state, events = tiny.config(folder), RunState(), []
    run_dir = RunDir(folder / "guarded")

    def emit(kind: str, step: int, **fields: object) -> None:
        assert set(fields) <= set(EVENTS[kind].fields)
        events.append((kind, step))

    guarded = GuardedStep(
        trainer,
        config.trainer,
        moe=config.model.moe,
        memory=MemoryGuard(trainer, config.for_trainer, run_dir=run_dir, emit=emit, state=state),
        origin=str,
        run_dir=run_dir,
        emit=emit,
        decode=str,
        state=state,
    )
    try:
        return [guarded.run(plan, learning_rate=1e-3) for plan in plans], events
    finally:
        run_dir.close()


def fail_from_call(work: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Memory runs out at this call of `work`, counted from 1, and only then."""
    calls = iter(range(1, 1000))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise torch.OutOfMemoryError("tried to allocate 8 bytes per element")
        return work(*args, **kwargs)

    return failing


def test_an_update_is_applied_once_where_measuring_it_runs_out_of_memory(tmp_path: Path) -> None:
    plans = [make_plan(step) for step in (1, 2)]
    undisturbed, disturbed = make_trainer(tmp_path), make_trainer(tmp_path)
    run_guarded(tmp_path, undisturbed, plans)
    # The first call is before the first update, the second after it, when weights are written.
    probe = training(disturbed).probe
    probe.frozen = fail_from_call(probe.frozen, 2)
    reports, events = run_guarded(tmp_path, disturbed, plans)
    assert ("update_unmeasured", 1) in events
    assert "8 bytes" in reports[0].unmeasured
    assert reports[0].probes == {}
    assert reports[1].probes["probe/trained_unchanged"] == 0
    for name, expected in undisturbed.state()["model"].items():
        assert torch.equal(disturbed.state()["model"][name].tensor, expected.tensor), name
    for name, expected in undisturbed.state()["optimizer"].items():
        assert torch.equal(disturbed.state()["optimizer"][name].tensor, expected.tensor), name


def test_memory_that_runs_out_before_the_update_is_measured_is_retried(tmp_path: Path) -> None:
    plans = [make_plan(step) for step in (1, 2)]
    undisturbed, disturbed = make_trainer(tmp_path), make_trainer(tmp_path)
    run_guarded(tmp_path, undisturbed, plans)
    probe = training(disturbed).probe
    probe.frozen = fail_from_call(probe.frozen, 1)
    reports, events = run_guarded(tmp_path, disturbed, plans)
    assert events == []
    assert all(report.probes for report in reports)
    for name, expected in undisturbed.state()["model"].items():
        assert torch.equal(disturbed.state()["model"][name].tensor, expected.tensor), name


def test_memory_that_runs_out_while_weights_are_written_is_never_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path)
    calls: list[int] = []

    def fail(*_: object) -> None:
        calls.append(1)
        raise torch.OutOfMemoryError("tried to allocate 1 GB")

    monkeypatch.setattr(training(trainer).optimizer, "write_back", fail)
    with pytest.raises(OutOfMemoryHaltError, match=r"step 1 .*last checkpoint"):
        run_guarded(tmp_path, trainer, [make_plan(1)])
    assert len(calls) == 1


def test_checksums_take_a_bounded_amount_of_memory() -> None:
    tensor = torch.randn(5 * CHUNK_ELEMENTS + 3)
    odd = torch.randn(CHUNK_ELEMENTS // 2, 7)[:, 1:6]
    with torch.profiler.profile(profile_memory=True) as profiler:
        found = checksums([("whole", tensor), ("odd", odd.bfloat16())])
    # A sum of integers is a sum of a copy of them: 8 bytes each.
    assert max(event.cpu_memory_usage for event in profiler.events()) <= 8 * CHUNK_ELEMENTS
    expected = tensor.numpy().view(np.int32).astype(np.int64).sum()
    assert int(found["whole"]) == expected
    bits = odd.bfloat16().contiguous().view(torch.int16).numpy().astype(np.int64)
    assert int(found["odd"]) == bits.sum()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_trainer_that_nobody_holds_frees_its_weights_at_once(
    tmp_path: Path, precision: str
) -> None:
    """A reference cycle would keep gigabytes on the device until Python collects garbage."""
    trainer = make_trainer(tmp_path, trainer={"precision": precision, "max_steps": 9})
    update(trainer, make_plan())
    weights = [
        weakref.ref(param) for param in trainer.roles[Role.POLICY].model.causal_lm.parameters()
    ]
    gc.collect()
    gc.disable()
    try:
        del trainer
        assert not any(weight() is not None for weight in weights)
    finally:
        gc.enable()
