"""Runs in a world that means them harm: signals, full disks, closed pipes, changed files, NaN."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support import runs, tiny

from homeostat.algorithms.sft import loss_spec
from homeostat.config import RunConfig
from homeostat.data.packing import pack
from homeostat.errors import CheckpointError, RunDirError, TrainingHaltedError
from homeostat.models.build import load_model
from homeostat.models.hf import save_hf
from homeostat.observe.durable import sha256_of
from homeostat.observe.jsonl import read_metrics
from homeostat.run.session.signals import StopRequest
from homeostat.train.inspection.nonfinite import Replay, find_bad_rows, trace_origin
from homeostat.train.local import LocalTrainer
from homeostat.train.roles import RoleModel
from homeostat.train.runtime import resolve_runtime
from homeostat.train.saving.checkpoint import CheckpointStore
from homeostat.train.saving.run_state import RunState
from homeostat.types import LossSpec, Role, StepPlan, TokenRow, TrainBatch

EVALUATED = {"data": {"validation_share": 0.2}, "eval": {"interval_steps": 1, "at_start": True}}


def sends(name: str, *, times: int = 1) -> str:
    return "; ".join([f"os.kill(os.getpid(), signal.{name})"] * times)


FULL_DISK = "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))"


def store_of(config: RunConfig) -> CheckpointStore:
    return CheckpointStore(config.run_dir / "checkpoints")


def run_child(tmp_path: Path, prelude: str, **sections: object) -> tuple[int, str, RunConfig]:
    raw = tiny.recipe(tmp_path, **sections)
    process = runs.start(raw, tmp_path, prelude=prelude)
    output, _ = process.communicate(timeout=120)
    assert "Traceback" not in output, output
    return process.returncode, output, tiny.build_config(raw, [], file=None)


@pytest.mark.slow
def test_a_run_begun_anew_has_one_record_of_its_start(tmp_path: Path) -> None:
    kill = runs.before("homeostat.run.publication.saving", "Saver.save", sends("SIGKILL"))
    code, _, config = run_child(tmp_path, kill, **EVALUATED)
    assert code == -signal.SIGKILL
    assert [r["step"] for r in read_metrics(config.run_dir / "metrics.jsonl")] == [0, 1]
    runs.train(config)
    assert [r["step"] for r in read_metrics(config.run_dir / "metrics.jsonl")] == list(range(7))


@pytest.mark.slow
def test_before_the_first_step_a_signal_ends_at_once(tmp_path: Path) -> None:
    prelude = runs.before("homeostat.train.build", "load_model", sends("SIGTERM"))
    code, output, config = run_child(tmp_path, prelude)
    assert code == 128 + signal.SIGTERM, output
    assert runs.events(config, "run_stopped")[0]["signal"] == "SIGTERM"
    assert not (config.run_dir / "traceback.txt").exists()
    assert store_of(config).steps() == []
    assert runs.train(config).step == 6


@pytest.mark.slow
def test_a_signal_during_a_save_ends_with_that_save(tmp_path: Path) -> None:
    prelude = runs.before("homeostat.train.saving.checkpoint", "_write_manifest", sends("SIGTERM"))
    code, output, config = run_child(tmp_path, prelude)
    assert code == 128 + signal.SIGTERM, output
    assert "A second signal ends it at once" in output
    assert store_of(config).steps() == [2]


@pytest.mark.slow
def test_a_second_signal_during_a_save_ends_at_once_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    straight = tiny.config(tmp_path, name="straight")
    runs.train(straight)
    prelude = runs.before(
        "homeostat.train.saving.checkpoint", "_write_manifest", sends("SIGTERM", times=2),
        only_if="args[0].name.endswith('4')",
    )  # fmt: skip
    code, output, config = run_child(tmp_path, prelude)
    assert code == 128 + signal.SIGTERM, output
    names = sorted(path.name for path in (config.run_dir / "checkpoints").iterdir())
    assert names == ["latest", "step_00000002"]
    runs.train(config)
    assert runs.final_tensors(config) == runs.final_tensors(straight)
    assert runs.losses(config) == runs.losses(straight)


def test_a_signal_that_is_ignored_stays_so() -> None:
    outer = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest().listening() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, outer)


def test_a_disk_that_fills_up_costs_nothing_saved(tmp_path: Path) -> None:
    straight = tiny.config(tmp_path, name="straight")
    runs.train(straight)
    full = runs.before(
        "homeostat.train.local", "LocalTrainer.apply", FULL_DISK, only_if="kwargs['step'] == 3"
    )
    code, output, config = run_child(tmp_path, full, observe={"report": True, "console": "plain"})
    assert code == 1, output
    assert "error: step_00000006 was not saved: the disk of" in output
    assert store_of(config).steps() == [2]
    runs.train(config)
    assert runs.final_tensors(config) == runs.final_tensors(straight)
    assert runs.losses(config) == runs.losses(straight)


@pytest.mark.parametrize(
    ("place", "name", "told"),
    [
        ("homeostat.run.session.session", "RunDir", "cannot use the run directory"),
        pytest.param(
            *("homeostat.run.session.session", "find_resume_point", "cannot be written"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("homeostat.data.inputs", "prepare_rows", "tokenised rows cannot be written"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_full_disk_at_the_start_is_told(tmp_path: Path, place: str, name: str, told: str) -> None:
    code, output, config = run_child(tmp_path, runs.before(place, name, FULL_DISK))
    assert code == 1, output
    assert told in output
    assert runs.train(config).step == 6


@pytest.mark.slow
@pytest.mark.parametrize("where", ["pipe", "/dev/full"])
def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path, where: str) -> None:
    action = "r, w = os.pipe(); os.close(r); os.dup2(w, 1)"
    if where != "pipe":
        action = f"os.dup2(os.open({where!r}, os.O_WRONLY), 1)"
    prelude = runs.before("homeostat.run.row_loop", "set_up", action)
    code, output, config = run_child(tmp_path, prelude, observe={"console": "plain"})
    assert code == 0, output
    assert runs.events(config, "run_finished")


def pretrained(tmp_path: Path) -> Path:
    """A folder with the weights of the tiny model."""
    config = tiny.config(tmp_path)
    loaded = load_model(
        config.model, None, dtype=torch.float32, device=torch.device("cpu"), seed=0,
        gradient_checkpointing=False,
    )  # fmt: skip
    folder = tiny.write_model(tmp_path / "pretrained")
    save_hf(loaded.module.state_dict().items(), folder, source_config=loaded.sheet.source_config)
    return folder


def change_weights(folder: Path, factor: float) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name] * factor
    save_file(tensors, file, metadata={"format": "pt"})


def test_weights_that_are_not_finite_halt_the_run_at_once(tmp_path: Path) -> None:
    folder = pretrained(tmp_path)
    change_weights(folder, math.nan)
    config = tiny.config(tmp_path, model={"path": str(folder), "init": "pretrained"})
    with pytest.raises(TrainingHaltedError, match=r"stored weights, model\.layers\.1.*model\.path"):
        runs.train(config)
    assert [event["step"] for event in runs.events(config, "step_skipped")] == [1]


def test_an_adapter_does_not_go_on_over_another_base(tmp_path: Path) -> None:
    folder = pretrained(tmp_path)
    model = {"path": str(folder), "init": "pretrained"}
    runs.train(tiny.config(tmp_path, "trainer.max_steps=2", model=model, lora={"rank": 2}))
    longer = tiny.config(tmp_path, model=model, lora={"rank": 2})
    original = (folder / "model.safetensors").read_bytes()
    change_weights(folder, 1.001)
    with pytest.raises(CheckpointError, match=r"those of model\.path: 1 tensors differ"):
        runs.train(longer)
    (folder / "model.safetensors").write_bytes(original)
    assert runs.train(longer).step == 6


def test_steps_skipped_before_a_resume_count_towards_the_halt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflowing(models: dict[Role, RoleModel], *args: Any, **kwargs: Any) -> LocalTrainer:
        norm = models[Role.POLICY].loaded.module.get_submodule("model.norm")
        norm.register_full_backward_pre_hook(lambda module, grads: (grads[0] * math.inf,))
        return LocalTrainer(models, *args, **kwargs)

    monkeypatch.setattr("homeostat.train.build.LocalTrainer", overflowing)
    runs.train(tiny.config(tmp_path, "trainer.max_steps=2"))
    config = tiny.config(tmp_path)
    with pytest.raises(TrainingHaltedError, match=r"^step 3: .* 3 updates in a row were skipped"):
        runs.train(config)
    assert [event["step"] for event in runs.events(config, "step_skipped")] == [1, 2, 3]


class Measured(LocalTrainer):
    """Remembers the largest batch it was given."""

    most_tokens = 0

    def accumulate(
        self, role: Role, batches: Sequence[TrainBatch], spec: LossSpec, *, step: int
    ) -> None:
        self.most_tokens = max(self.most_tokens, *(batch.num_tokens for batch in batches))
        super().accumulate(role, batches, spec, step=step)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_gradient_that_overflows_names_its_module_within_the_steps_memory(
    tmp_path: Path, implementation: str
) -> None:
    model = {"init": "random", "implementation": implementation, "path": str(tmp_path / "model")}
    config = tiny.config(tmp_path, model=model)
    loaded = load_model(
        config.model, None, dtype=torch.float32, device=torch.device("cpu"), seed=0,
        gradient_checkpointing=False,
    )  # fmt: skip
    models = {Role.POLICY: RoleModel(loaded, config.trainer)}
    trainer = Measured(models, config.trainer, runtime=resolve_runtime(config), seed=0)
    module = trainer.roles[Role.POLICY].model.causal_lm.get_submodule("model.layers.0.mlp.up_proj")
    module.register_full_backward_pre_hook(lambda module, grads: (grads[0] * math.inf,))
    tokens = torch.randint(3, 90, (12, 20)).numpy()
    ones = torch.ones(20).numpy()
    rows = [TokenRow(number, tokens_T, ones) for number, tokens_T in enumerate(tokens)]
    batches = [[rows[index] for index in chosen] for chosen in pack([20] * 12, 40)]
    plan = StepPlan(1, 0, tuple(map(TrainBatch.of, batches)), loss_spec(config.algorithm, rows))
    replay = Replay(trainer, trainer.roles[Role.POLICY], plan)
    bad = find_bad_rows(replay, rows)
    assert [row.row_id for row in bad] == list(range(12))
    for suspects in (bad, []):
        origin = trace_origin(replay, suspects)
        assert origin.direction == "backward pass"
        assert origin.module.endswith("model.layers.0.mlp.up_proj")
    assert trainer.most_tokens <= 40
    assert all(
        parameter.grad is None for parameter in trainer.roles[Role.POLICY].model.parameters()
    )


def test_an_evaluation_that_is_not_finite_is_never_the_best() -> None:
    state = RunState()
    losses = [math.nan, math.inf, 3.0, math.nan, 2.0]
    assert [state.judge(loss, min_delta=0.0) for loss in losses] == [
        False,
        False,
        True,
        False,
        True,
    ]
    assert state.best_eval == 2.0
    assert state.evals_without_better == 0


@pytest.mark.slow
def test_best_is_set_right_when_a_run_goes_on(tmp_path: Path) -> None:
    sections = {**EVALUATED, "checkpoint": {"keep_last": 9}}
    config = tiny.config(tmp_path, "trainer.max_steps=4", **sections)
    runs.train(config)
    store = store_of(config)
    assert store.best_step() == 4
    # As if the process had been killed between the save of step 4 and the mark.
    store.mark_best(2)
    runs.train(tiny.config(tmp_path, "trainer.max_steps=5", "trainer.lr=0.0", **sections))
    assert store.best_step() == 4
    back = tiny.config(tmp_path, "checkpoint.load_step=3", "trainer.max_steps=4", **sections)
    killed = runs.before("homeostat.train.step", "GuardedStep.run", sends("SIGKILL"))
    raw = json.loads(back.model_dump_json(exclude_unset=True))
    process = runs.start(raw, tmp_path, prelude=killed)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, output
    assert store.steps()[-1] == 3
    assert store.best_step() == 3


def test_checkpoints_of_an_unknown_run_are_not_taken_over(tmp_path: Path) -> None:
    config = tiny.config(tmp_path)
    runs.train(config)
    (config.run_dir / "events.jsonl").unlink()
    with pytest.raises(RunDirError, match=r"holds checkpoints, but events\.jsonl is missing"):
        runs.train(config)


def test_a_lower_token_budget_in_the_recipe_wins_over_the_one_found(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, "trainer.max_steps=2")
    runs.train(config)
    path = store_of(config).path(2)
    state = json.loads((path / "state.json").read_text())
    state["run"]["token_budget"] = 250
    (path / "state.json").write_text(json.dumps(state))
    manifest = json.loads((path / "manifest.json").read_text())
    size = (path / "state.json").stat().st_size
    manifest["state.json"] = {"bytes": size, "sha256": sha256_of(path / "state.json")}
    (path / "manifest.json").write_text(json.dumps(manifest))
    smaller = tiny.config(tmp_path, "trainer.max_tokens_per_device=128")
    runs.train(smaller)
    records = read_metrics(config.run_dir / "metrics.jsonl")
    assert records[2]["data/micro_batches"] > records[1]["data/micro_batches"]
    assert all(0.5 < record["data/packing_fill"] <= 1.0 for record in records)
