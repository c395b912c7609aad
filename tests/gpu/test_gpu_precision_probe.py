"""Quantised layers are measured on a GPU as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support import runs, tiny

from homeostat.observe.jsonl import read_metrics
from homeostat.precision.recipe import Fp8Recipe
from homeostat.precision.statistics import fp8_tally, int4_tally

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODEL = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.mark.parametrize("scaling", ["blockwise", "rowwise", "tensorwise"])
def test_tallies_are_those_of_a_cpu(scaling: str) -> None:
    x = torch.randn(300, 384, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    x[5] = 0
    recipe = Fp8Recipe(scaling)
    for kind in ("input", "weight", "gradient"):
        there = fp8_tally(x.cuda(), recipe, kind=kind).cpu()
        torch.testing.assert_close(there, fp8_tally(x, recipe, kind=kind), rtol=1e-5, atol=0)
    here = int4_tally(x[:, :256], group_size=64)
    there = int4_tally(x[:, :256].cuda(), group_size=64).cpu()
    torch.testing.assert_close(there, here, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("format", "section", "max_error"),
    [
        ("fp8", "fp8={recipe: blockwise}", 0.15),
        # Scales lag behind the first updates of random weights: what they cut is most of the error,
        # on a CPU as well (0.78 in the third step).
        ("fp8", "fp8={recipe: tensorwise, scaling: delayed}", 1.0),
        ("int4", "int4={group_size: 64}", 0.15),
    ],
)
def test_a_run_on_a_gpu_measures_its_layers(
    tmp_path: Path, format: str, section: str, max_error: float
) -> None:
    tiny.write_model(tmp_path / "model", **MODEL)
    config = tiny.config(
        tmp_path,
        f"trainer.{section}",
        "trainer.device=cuda",
        "trainer.precision=bf16",
        "trainer.max_steps=3",
        "data.validation_share=0.2",
        "eval.interval_steps=3",
    )
    runs.train(config)
    records = read_metrics(config.run_dir / "metrics.jsonl")
    cosines = [record[f"{format}/grad_cosine"] for record in records]
    assert all(0.5 < value <= 1.0 for value in cosines), cosines
    for record in records:
        assert record[f"{format}/mlp/saturated_share"] < 0.05
        assert 0.01 < record[f"{format}/mlp/error"] < max_error
        assert record[f"{format}/attention/scale_min"] > 0
    assert abs(records[-1]["eval/quantised_gap"]) < 0.2
