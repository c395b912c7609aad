"""The GPU benchmarks, on a CPU and tiny: their parts fit the library as it is now."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from homeostat.config.loading.load import build_config

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(autouse=True)
def bench_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def test_engine_decode_counts_every_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import engine_decode

    monkeypatch.setattr("sys.argv", ["engine_decode.py", "--tiny", "--device", "cpu", "--peer"])
    engine_decode.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = result["tiny"]["batch_8"]
    assert found["step_ms"] == pytest.approx(8e3 / found["tokens_per_s"], rel=1e-3)
    assert found["share_of_floor"] == pytest.approx(
        found["floor_step_ms"] / found["step_ms"], rel=0.01
    )
    assert found["logp_difference_max"] < 1e-4


def test_scaling_measures_every_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import common
    import scaling

    small = replace(
        scaling.SWEEPS["cpu"],
        shape="tiny",
        row_tokens=8,
        update_rows=(1, 4),
        new_tokens=4,
        prompts=(1, 2),
        length_prompts=1,
        lengths=(2, 4),
    )
    monkeypatch.setitem(scaling.SWEEPS, "cpu", small)
    monkeypatch.setattr(common, "RESULTS_DIR", tmp_path)
    monkeypatch.setattr("sys.argv", ["scaling.py", "--device", "cpu"])
    scaling.main()
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "scaling_cpu.json").read_text()) == shown
    assert list(shown["update_by_tokens"]["seconds"]) == ["8", "32"]
    assert list(shown["step_by_prompts"]["seconds"]) == ["1", "2"]
    assert list(shown["step_by_length"]["seconds"]) == ["2", "4"]


def test_grpo_step_s_recipe_is_one_that_train_accepts(tmp_path: Path) -> None:
    import grpo_step_gpu
    from trl_grpo_side import Workload

    workload = Workload(folder=str(tmp_path), steps=3, **grpo_step_gpu.SIZES["0.5b"])
    recipe = grpo_step_gpu.recipe(workload, tmp_path, device="cuda")
    config = build_config(recipe, [], file=None)
    assert config.rollout.samples_per_step == 256
    assert config.rollout.max_new_tokens == 512


def test_optimizers_measures_memory_and_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import common
    import estimate
    import optimizers

    small = estimate.SHAPES["31M"] | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 256,
    }
    monkeypatch.setitem(estimate.SHAPES, "31M", small)
    monkeypatch.setattr(common, "RESULTS_DIR", tmp_path)
    line = ["optimizers.py", "--device", "cpu", "--inline", "--tokens", "64", "--only", "8bit"]
    monkeypatch.setattr("sys.argv", line)
    optimizers.main()
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "optimizers_cpu.json").read_text()) == shown
    assert [row["setting"] for row in shown["rows"]] == [
        name for name in optimizers.SETTINGS if "8bit" in name
    ]
    assert all(0 < row["step_ms"] < row["update_ms"] for row in shown["rows"])
