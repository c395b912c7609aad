"""What is measured of quantised layers, against a few lines of numpy and runs of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import runs, tiny, tiny_rl

import homeostat
from homeostat.config import RunConfig
from homeostat.observe.jsonl import read_metrics
from homeostat.precision.recipe import Fp8Recipe
from homeostat.precision.statistics import MAX_ROWS, fp8_tally, int4_tally, metrics_of
from homeostat.train.inspection.precision_probe import compared, cosine

MEASURES = ("amax", "saturated_share", "flushed_share", "scale_min", "scale_max", "error")


def rounded_e4m3(x: np.ndarray) -> np.ndarray:
    """Round to e4m3 in float64: 3 bits of mantissa, subnormals below 2^-6, cut at 448."""
    size = np.abs(x)
    exponent = np.maximum(np.floor(np.log2(np.where(size > 0, size, 1))), -6)
    step = 2.0 ** (exponent - 3)
    return np.sign(x) * np.minimum(np.round(size / step) * step, 448)


def fp8(x: torch.Tensor, **how: object) -> dict[str, float]:
    tally = fp8_tally(x, Fp8Recipe("rowwise"), kind="input", **how)  # type: ignore[arg-type]
    found = metrics_of({"mlp": [tally]}, format="fp8")
    return {name.split("/")[-1]: value for name, value in found.items()}


def test_measures_of_fp8_are_those_of_numpy() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    x[3] = 0
    x[5, :90] *= 1e-7
    found = fp8(x)
    rows = x.double().numpy()
    scales = np.maximum(np.abs(rows).max(1, keepdims=True), 2.0**-100) / 448
    values = rounded_e4m3(rows / scales)
    back = values * scales
    assert found["amax"] == pytest.approx(np.abs(rows).max())
    assert found["saturated_share"] == 0
    assert found["flushed_share"] == pytest.approx(np.mean((rows != 0) & (values == 0)), abs=1e-9)
    assert found["flushed_share"] > 0.01
    assert found["scale_min"] == pytest.approx(scales.min())
    assert found["scale_max"] == pytest.approx(scales.max())
    error = np.sqrt(((rows - back) ** 2).sum() / (rows**2).sum())
    assert found["error"] == pytest.approx(error, rel=1e-3)


def test_only_what_rounding_does_not_explain_counts_as_cut() -> None:
    x = torch.tensor([[448.0, 463.0, 465.0, 900.0]])
    expected = torch.tensor([448.0])
    assert fp8(x, expected=expected)["saturated_share"] == 0.5


def test_a_number_that_is_not_finite_shows_in_the_scales() -> None:
    x = torch.ones(4, 8)
    x[0, 0] = torch.inf
    assert np.isnan(fp8(x)["scale_max"])


def test_rows_are_sampled_and_the_largest_number_is_that_of_all() -> None:
    x = torch.ones(3 * MAX_ROWS + 1, 4)
    x[1] = 7.0
    found = fp8(x)
    assert found["amax"] == 7.0
    assert found["scale_max"] == pytest.approx(1 / 448)


def test_measures_of_int4_are_those_of_numpy() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    found = metrics_of({"mlp": [int4_tally(weight, group_size=32)]}, format="int4")
    groups = weight.double().numpy().reshape(32, 2, 32)
    scales = np.abs(groups).max(-1, keepdims=True) / 7
    values = np.round(groups / scales)
    assert found["int4/mlp/amax"] == pytest.approx(np.abs(groups).max())
    assert found["int4/mlp/saturated_share"] == 0
    # Scales have five bits, so that values near a border fall on its other side.
    assert found["int4/mlp/flushed_share"] == pytest.approx(np.mean(values == 0), abs=0.02)
    assert found["int4/mlp/scale_max"] == pytest.approx(scales.max(), rel=0.04)
    error = np.sqrt(((groups - values * scales) ** 2).sum() / (groups**2).sum())
    assert found["int4/mlp/error"] == pytest.approx(error, rel=0.05)


def test_gradients_are_compared_by_their_direction() -> None:
    one = [torch.tensor([3.0, 0.0]), None, torch.tensor([4.0])]
    other = [torch.tensor([0.0, 3.0]), torch.ones(1), torch.tensor([4.0])]
    assert cosine(one, other) == pytest.approx(16 / 25)
    assert np.isnan(cosine([torch.zeros(2)], [torch.ones(2)]))


def test_tensors_are_chosen_from_all_over_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [torch.nn.Parameter(torch.zeros(size)) for size in (4, 4, 400, 4, 4, 4, 4, 4)]
    monkeypatch.setattr("homeostat.train.inspection.precision_probe.MAX_ELEMENTS", 16)
    assert [param.numel() for param in compared(params)] == [4] * 4


def quantised_run(folder: Path, name: str, **settings: object) -> RunConfig:
    sections = {"trainer": {"max_steps": 4, "max_tokens_per_device": 512, "batch_rows": 8,
                            "lr": 1e-2, "threads": 1, **settings}}  # fmt: skip
    return tiny.config(
        folder,
        f"name={name}",
        "data.validation_share=0.2",
        "eval.interval_steps=2",
        "observe.precision_interval=4",
        **sections,
    )


@pytest.mark.parametrize(
    ("format", "settings"),
    [
        ("fp8", {"recipe": "blockwise", "start_step": 2}),
        ("fp8", {"recipe": "tensorwise", "scaling": "delayed", "start_step": 2}),
        ("int4", {"group_size": 32, "start_step": 2}),
    ],
)
def test_a_run_measures_its_quantised_layers(
    tmp_path: Path, format: str, settings: dict[str, object]
) -> None:
    config = quantised_run(tmp_path, "run", **{format: settings})
    runs.train(config)
    records = read_metrics(config.run_dir / "metrics.jsonl")
    for group in ("attention", "mlp"):
        for measure in MEASURES:
            name = f"{format}/{group}/{measure}"
            assert [name in record for record in records] == [False, True, True, True], name
    cosines = [record[f"{format}/grad_cosine"] for record in records[1:]]
    assert all(0.3 < value < 0.99999 for value in cosines), cosines
    last = records[-1]
    gap = last["eval/loss"] - last["eval/bf16_shadow_loss"]
    assert last["eval/quantised_gap"] == pytest.approx(gap)
    assert 0 < abs(gap) < 0.5
    (switched,) = runs.events(config, "precision_switched")
    assert (switched["step"], switched["format"], switched["sensitive"]) == (2, format, [])
    assert switched["layers"] == 14


@pytest.mark.parametrize("start", [1, 3])
def test_a_switch_is_recorded_once_however_often_the_run_is_resumed(
    tmp_path: Path, start: int
) -> None:
    for steps in (4, 5, 6):
        how = {"fp8": {"start_step": start}, "max_steps": steps}
        config = quantised_run(tmp_path, "run", **how)
        runs.train(config)
    assert [event["step"] for event in runs.events(config, "precision_switched")] == [start]
    # Gone back to before the switch, it comes again.
    runs.train(quantised_run(tmp_path, "late", fp8={"start_step": 3}))
    late = quantised_run(tmp_path, "late", fp8={"start_step": 3})
    saving = late.checkpoint.model_copy(update={"load_step": 2})
    runs.train(late.model_copy(update={"checkpoint": saving}))
    assert [event["step"] for event in runs.events(late, "precision_switched")] == [3, 3]


def test_measuring_changes_no_bit_of_the_run(tmp_path: Path) -> None:
    losses = []
    for interval in ("null", "1"):
        settings = {"fp8": {"recipe": "tensorwise", "scaling": "delayed"}}
        config = quantised_run(tmp_path, f"every_{interval}", **settings)
        observe = config.observe.model_copy(
            update={"precision_interval": None if interval == "null" else 1}
        )
        config = config.model_copy(update={"observe": observe})
        runs.train(config)
        losses.append(runs.losses(config))
    assert losses[0] == losses[1]


def test_rl_scores_samples_with_and_without_quantisation(tmp_path: Path) -> None:
    config = tiny_rl.config(tmp_path, "trainer.fp8={recipe: rowwise}", "trainer.max_steps=2")
    runs.train(config)
    records = read_metrics(config.run_dir / "metrics.jsonl")
    for record in records:
        assert record["eval/bf16_shadow_loss"] > 0
        assert 0 < abs(record["eval/quantised_gap"]) < 0.2
        assert record["fp8/grad_cosine"] < 1


@pytest.mark.parametrize("section", ["int4={group_size: 32, start_step: 2}", "fp8={start_step: 2}"])
def test_a_checkpoint_is_evaluated_in_the_precision_of_its_step(
    tmp_path: Path, section: str
) -> None:
    """Also if a remedy has moved it; and the export that a complete run makes afterwards."""
    overrides = [f"trainer.{section}", "trainer.max_steps=2", "data.validation_share=0.2"]
    overrides += ["eval.interval_steps=1", "checkpoint.interval_steps=1"]
    config = tiny.config(tmp_path, *overrides)
    runs.train(config)
    first, last = read_metrics(config.run_dir / "metrics.jsonl")
    found = [homeostat.evaluate(config.run_dir, step=step)["eval/loss"] for step in (1, 2)]
    assert found == [first["eval/loss"], last["eval/loss"]]
    folder = config.run_dir / "checkpoints" / "step_00000002"
    if config.trainer.int4 is not None:
        runs.train(tiny.config(tmp_path, *overrides, "checkpoint.export=final"))
        written = json.loads((folder / "hf" / "config.json").read_text())
        assert "quantization_config" in written
    state = json.loads((folder / "state.json").read_text())
    key = section.partition("=")[0]
    overlay = {f"trainer.{key}.start_step": {"value": 3, "step": 2}}
    state["health"]["healing"]["overlay"] = overlay
    (folder / "state.json").write_text(json.dumps(state))
    runs.sign(folder)
    moved = homeostat.evaluate(config.run_dir, step=2)["eval/loss"]
    assert moved == last["eval/bf16_shadow_loss"] != last["eval/loss"]
