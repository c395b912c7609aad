"""Runs of a tiny model with experts, end to end: check, train, resume, export, report."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.parity.test_models_vs_transformers import packed_logits, rows, separate_logits
from tests.support import runs, tiny, tiny_moe_runs, tiny_rl
from transformers import AutoModelForCausalLM

from homeostat.config import RunConfig
from homeostat.config.loading.load import build_config
from homeostat.config.model import ModelConfig
from homeostat.models.build import load_model
from homeostat.observe.jsonl import iter_jsonl, read_metrics
from homeostat.observe.report import write_report
from homeostat.run.preflight.check import Preflight
from homeostat.train.saving.checkpoint import CheckpointStore

CPU = torch.device("cpu")
MOVED = ("model.moe.balancing=bias", "model.moe.router_bias_update_rate=0.01")


def sft(folder: Path, name: str) -> RunConfig:
    settings = (*MOVED, "model.moe.z_loss_coefficient=0.001", f"name={name}")
    return tiny_moe_runs.config(
        folder, *settings, family="dots1", checkpoint={"interval_steps": 2, "export": "final"}
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunConfig]:
    folder = tmp_path_factory.mktemp("moe_run")
    config = sft(folder, "straight")
    runs.train(config)
    return folder, config


def test_check_and_estimate_know_the_experts(finished: tuple[Path, RunConfig]) -> None:
    folder, _ = finished
    preflight = Preflight(sft(folder, "checked"), progress=lambda done, total: None)
    items = list(preflight.run())
    assert preflight.exit_code == 0, [item.text for item in items if item.level == "error"]
    (experts,) = [item for item in items if item.name == "experts"]
    assert "8 experts in 2 layers, 2 for each token" in experts.text
    assert "their bias is moved by 0.01" in experts.text
    plan = preflight.memory_plan(preflight.config)
    assert preflight.preview is not None
    assert plan.peak > 12 * preflight.preview.num_params


def test_metrics_and_report_show_the_load(finished: tuple[Path, RunConfig]) -> None:
    _, config = finished
    records = read_metrics(config.run_dir / "metrics.jsonl")
    assert len(records) == 6
    for record in records:
        assert 0 <= record["moe/load_min_share"] <= 1 <= 1 + record["moe/max_violation"]
        assert 0 <= record["moe/dead_experts"] < 1
        assert record["moe/z_loss"] > 0
    biases = [record["moe/bias_max"] for record in records]
    assert biases == pytest.approx([0.0, 0.01, *biases[2:]])
    loads = list(iter_jsonl(config.run_dir / "expert_load.jsonl"))
    assert [(one["first_step"], one["step"]) for one in loads] == [(n, n) for n in range(1, 7)]
    for record, load in zip(records, loads, strict=True):
        load_LE = np.array(load["load"])
        assert load_LE.shape == (2, 8)
        assert load_LE.mean(axis=1) == pytest.approx([1, 1], abs=0.01)
        assert load_LE.max() - 1 == pytest.approx(record["moe/max_violation"], abs=0.01)
    page = write_report(config.run_dir).read_text(encoding="utf-8")
    assert "Load at the start" in page
    assert "Load at the end" in page
    (told,) = re.findall(r"In step 6 expert (\d) of layer (\d)", page)
    assert load_LE[int(told[1]), int(told[0])] == load_LE.max()


def test_the_export_is_the_model_for_transformers_too(finished: tuple[Path, RunConfig]) -> None:
    _, config = finished
    store = CheckpointStore(config.run_dir / "checkpoints")
    folder = store.path(store.steps()[-1]) / "hf"
    theirs, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    biases = {name: b for name, b in theirs.named_buffers() if "e_score_correction_bias" in name}
    assert len(biases) == 2
    assert all(bias.abs().max() > 0 for bias in biases.values())
    ours = load_model(
        ModelConfig(path=str(folder)),
        None,
        dtype=torch.float32,
        device=CPU,
        seed=0,
        gradient_checkpointing=False,
    ).module
    documents = rows(seed=2)
    with torch.no_grad():
        pair = packed_logits(ours, documents), separate_logits(theirs.eval(), documents)
    torch.testing.assert_close(*pair, atol=1e-5, rtol=0)


def test_a_resumed_run_is_an_uninterrupted_one(finished: tuple[Path, RunConfig]) -> None:
    folder, straight = finished
    config = sft(folder, "resumed")
    runs.train(config)
    newest = CheckpointStore(config.run_dir / "checkpoints").path(6) / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-4])
    runs.train(config)
    assert runs.events(config, "run_resumed")[0]["step"] == 4
    assert runs.final_tensors(config) == runs.final_tensors(straight)
    files = [one.run_dir / "expert_load.jsonl" for one in (config, straight)]
    assert files[0].read_text() == files[1].read_text()


def test_rl_counts_the_load_and_trains_every_row_with_a_router_loss(tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "model", **tiny_moe_runs.EXPERTS["qwen3_moe"])
    settings = ["model.moe={balancing: aux, aux_loss_coefficient: 0.01}", "trainer.max_steps=2"]
    config = build_config(tiny_rl.recipe(tmp_path), settings, file=None)
    runs.train(config)
    records = read_metrics(config.run_dir / "metrics.jsonl")
    per_step = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    for record in records:
        assert record["moe/aux_loss"] >= 0.9
        # Groups without an advantage have a gradient of the routers' loss all the same.
        assert record["data/trained_rows"] == per_step
    assert (config.run_dir / "expert_load.jsonl").is_file()
