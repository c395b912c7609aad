"""The doctor inside other trainers: transformers' own Trainer, and verl's way of logging."""

from __future__ import annotations

import importlib
import json
import math
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from homeostat.errors import HomeostatError
from homeostat.health.frameworks import ALL
from homeostat.health.readers import open_run
from homeostat.integrations.live import FINDINGS_FILE, Guard, LiveDoctor, say
from homeostat.integrations.transformers import HealthCallback, framework_of
from homeostat.integrations.verl import BACKEND, install

if TYPE_CHECKING:
    # It takes half a second to import, and most processes that collect this file run none of it.
    from transformers import Trainer


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index % 7, index % 7 + 8)
        return {"input_ids": ids, "labels": ids}


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        )
    )  # fmt: skip


def train(
    tmp_path: Path, callback: HealthCallback, *, is_broken: bool = False, **settings: Any
) -> Trainer:
    from transformers import Trainer, TrainingArguments

    model = tiny_model()
    if is_broken:
        model.model.norm.weight.data[0] = math.nan
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        **{"max_steps": 12, "learning_rate": 1e-3, **settings},
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=Rows(), callbacks=[callback])
    trainer.train()
    return trainer


def test_a_healthy_run_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = HealthCallback(stop_on="warn")
    trainer = train(tmp_path, callback)
    assert trainer.state.global_step == 12
    assert callback.failure == ""
    assert callback.doctor is not None
    assert callback.doctor.num_records == 12
    assert callback.doctor.open == []
    assert not (tmp_path / "out" / FINDINGS_FILE).exists()
    assert "homeostat" not in capsys.readouterr().err


def test_an_ill_run_is_told_written_down_and_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = HealthCallback(stop_on="error")
    trainer = train(tmp_path, callback, is_broken=True, logging_nan_inf_filter=False)
    assert trainer.state.global_step < 12, "it was asked to stop"
    err = capsys.readouterr().err
    assert err.count("homeostat: step") == 1
    assert "train/loss is nan" in err
    assert "asking the trainer to stop because of VIT004" in err
    lines = (tmp_path / "out" / FINDINGS_FILE).read_text().splitlines()
    assert [json.loads(line)["finding"]["code"] for line in lines] == ["VIT004"]
    trainer.save_state()
    view = open_run(tmp_path / "out")
    assert not any("value" in name for name in view.metrics), "our own file is no metrics"


def test_a_finding_is_no_part_of_the_line_of_a_progress_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = tqdm(total=10, file=sys.stderr, mininterval=0.0)
    bar.update(3)
    say("homeostat: a finding")
    bar.close()
    shown = [line.rpartition("\r")[2] for line in capsys.readouterr().err.splitlines()]
    assert "homeostat: a finding" in shown


def test_an_error_of_the_doctor_is_told_once_and_ends_no_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug of the doctor's")

    monkeypatch.setattr(LiveDoctor, "record", broken)
    callback = HealthCallback()
    assert train(tmp_path, callback, max_steps=3).state.global_step == 3
    assert callback.failure == "ZeroDivisionError: a bug of the doctor's"
    assert capsys.readouterr().err.count("a bug of the doctor's") == 1


def test_mistakes_in_the_callback_are_told_when_it_is_made() -> None:
    for wrong in ({"stop_on": "fatal"}, {"ignore": ["XYZ999"]}, {"webhook": "nowhere"}):
        with pytest.raises(HomeostatError):
            HealthCallback(**wrong)


def test_only_the_first_process_judges() -> None:
    from transformers import TrainingArguments

    class State:
        is_world_process_zero = False

    callback = HealthCallback()
    callback.on_train_begin(TrainingArguments, State(), object())
    callback.on_log(TrainingArguments, State(), object(), logs={"loss": math.nan})
    assert callback.doctor is None


def test_the_framework_is_that_of_the_arguments() -> None:
    from transformers import TrainingArguments

    made = {
        name: type("Args", (TrainingArguments,), {"__module__": module})
        for name, module in (
            ("axolotl", "axolotl.core.training_args"),
            ("llama_factory", "llamafactory.hparams.training_args"),
            ("trl", "trl.trainer.grpo_config"),
        )
    }
    for name, kind in made.items():
        assert framework_of(kind.__new__(kind)).name == name
    assert framework_of(TrainingArguments.__new__(TrainingArguments)).name == "transformers"
    # Axolotl's arguments of GRPO derive from TRL's.
    both = type("Both", (made["axolotl"], made["trl"]), {"__module__": "axolotl.core.trainers"})
    assert framework_of(both.__new__(both)).name == "axolotl"


def live(**settings: Any) -> LiveDoctor:
    given = {"num_generations": 8, "learning_rate": 1e-6}
    return LiveDoctor(run="r", framework=ALL["trl"], settings=given, total_steps=100, **settings)


def test_records_of_a_resumed_run_are_taken_up() -> None:
    doctor = live()
    past = [{"loss": 0.1, "grad_norm": 0.5, "reward": 0.5, "step": step} for step in range(1, 30)]
    doctor.restore([*past, {"train_runtime": 3.0, "train_loss": 0.1, "step": 29}])
    doctor.record(30, {"loss": 0.1, "grad_norm": 0.5, "reward": 0.5})
    assert doctor._monitor is not None
    assert doctor._monitor.metrics["reward"].steps.tolist() == list(range(1, 31))
    assert doctor._monitor.metrics["train/loss"].steps[-1] == 30


def test_a_name_keeps_the_meaning_that_it_had_first() -> None:
    doctor = live()
    doctor.record(1, {"loss": 1.0, "lr": 0.1})
    doctor.record(2, {"loss": 1.0, "lr": 0.1, "learning_rate": 0.2})
    metrics = doctor._monitor.metrics if doctor._monitor else {}
    assert metrics["learning_rate"].values.tolist() == [0.1, 0.1]
    assert metrics["raw/learning_rate"].values.tolist() == [0.2]


def test_a_guard_calls_nothing_after_the_first_error() -> None:
    guard, calls = Guard(), []
    guard.call(calls.append, 1)
    guard.call(lambda: [][0])
    guard.call(calls.append, 2)
    assert calls == [1]


class Tracking:
    """The shape of verl's class of this name: a list of names, and loggers that it calls."""

    supported_backend = ("console",)

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | list[str] = "console",
        config: Any = None,
    ) -> None:
        named = [default_backend] if isinstance(default_backend, str) else default_backend
        assert all(one in self.supported_backend for one in named)
        self.logger: dict[str, Any] = {}

    def log(self, data: dict[str, Any], step: int) -> None:
        for one in self.logger.values():
            one.log(data=data, step=step)


def test_verl_gets_a_backend_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError):
        Tracking("p", "e", ["console", BACKEND])
    for _ in range(2):
        install(Tracking)
    assert list(Tracking.supported_backend).count(BACKEND) == 1
    assert Tracking("p", "e").logger == {}
    config = {"trainer": {"default_local_dir": str(tmp_path), "total_training_steps": 40}}
    tracking = Tracking("p", "e", ["console", BACKEND], config)
    for step in range(1, 13):
        loss = np.float32(math.nan if step > 6 else 0.1)
        tracking.log({"actor/pg_loss": loss, "actor/grad_norm": loss, "critic/score/mean": 0.5,
                      "response_length/mean": 100.0}, step)  # fmt: skip
    told = [json.loads(line) for line in (tmp_path / FINDINGS_FILE).read_text().splitlines()]
    assert "NUM002" in [one["finding"]["code"] for one in told]
    assert told[0]["framework"] == "verl"
    assert "NUM002" in capsys.readouterr().err


def test_axolotl_gets_the_callback_from_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    # The parts of axolotl 0.18.0 that a plug-in is loaded with.
    base = types.ModuleType("axolotl.integrations.base")
    monkeypatch.setattr(base, "BasePlugin", type("BasePlugin", (), {}), raising=False)
    for module in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", base)
    monkeypatch.delitem(sys.modules, "homeostat.integrations.axolotl", raising=False)
    module = importlib.import_module("homeostat.integrations.axolotl")
    plugin = module.HealthPlugin()
    assert plugin.get_input_args() == "homeostat.integrations.axolotl.HealthArgs"
    (callback,) = plugin.add_callbacks_pre_trainer(module.HealthArgs(), None)
    assert isinstance(callback, HealthCallback)
    with pytest.raises(HomeostatError, match="stop_on='often'"):
        plugin.add_callbacks_pre_trainer(module.HealthArgs(homeostat_stop_on="often"), None)
    monkeypatch.delitem(sys.modules, "homeostat.integrations.axolotl")
