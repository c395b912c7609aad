"""Energy-based fine-tuning as runs: both forms resume exactly, and refuse what cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import runs, tiny_rl

from homeostat.config import RunConfig
from homeostat.errors import ConfigError, DataError
from homeostat.observe.jsonl import read_metrics
from homeostat.run.preflight.check import Preflight
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.runtime import resolve_runtime
from homeostat.types import Role

# Not whitened, the energy is the difference of two metrics.
EBFT = {"algorithm": {"type": "ebft"}, "rewards": None, "ebft": {"whitening": False}}
STRIDED = {
    **EBFT,
    "ebft": {
        "mode": "strided",
        "stride": 4,
        "context_length": 4,
        "generate_length": 3,
        "whitening": False,
    },
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 3, "max_new_tokens": 3},
}


def texts(folder: Path, *, length: int = 24) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    digits = ["".join(rng.choice(list("0123456789"), length)) for _ in range(6)]
    lines = [json.dumps({"text": text}) for text in digits]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return {"train": [{"type": "text", "path": str(folder / "texts.jsonl")}], "max_length": 32}


def strided(folder: Path, *overrides: str, **sections: Any) -> RunConfig:
    merged = {**STRIDED, **({} if "data" in sections else {"data": texts(folder)}), **sections}
    return tiny_rl.config(folder, *overrides, **merged)


def structured(folder: Path, *overrides: str, **sections: Any) -> RunConfig:
    return tiny_rl.config(folder, *overrides, **{**EBFT, **sections})


@pytest.mark.parametrize("make", [strided, pytest.param(structured, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path, make: Any) -> None:
    # A schedule that does not depend on the last step.
    how = ("ebft.ce_coefficient=0.1", "trainer.schedule={type: constant, warmup_steps: 0}")
    whole = make(tmp_path / "whole", *how)
    runs.train(whole)
    for steps in (2, 4):
        halves = make(tmp_path / "halves", *how, f"trainer.max_steps={steps}")
        runs.train(halves)
    assert runs.final_tensors(whole) == runs.final_tensors(halves)
    records = read_metrics(whole.run_dir / "metrics.jsonl")
    assert len(records) == 4
    for record in records:
        assert -2 <= record["ebft/diversity"] <= 2
        assert 0 <= record["ebft/cfm_loss"] <= 4
        want = record["ebft/alignment"] - record["ebft/diversity"]
        assert record["reward"] == record["rewards/energy/mean"] == pytest.approx(want)
        assert record["probe/round_trip_bad"] == record["probe/mask_difference"] == 0
        assert record["sampling/sampling_logp_difference/max"] < 1e-3
        assert ("completions/clipped_ratio" in record) == (make is structured)


def test_features_under_a_fresh_adapter_need_no_copy(tmp_path: Path) -> None:
    start = structured(tmp_path)
    trainer = local_trainer(start.for_trainer, resolve_runtime(start, kept=PLAIN))
    trainer.export(Role.POLICY, tmp_path / "hf", start.for_export)
    model = {"path": str(tmp_path / "hf"), "init": "pretrained"}
    config = structured(tmp_path, lora={"rank": 2}, model=model)
    trainer = local_trainer(config.for_trainer, resolve_runtime(config, kept=PLAIN))
    features = trainer.roles[Role.FEATURES]
    assert features.model is trainer.roles[Role.POLICY].model
    assert features.without_adapter
    config = structured(tmp_path, "algorithm.kl={coefficient: 0.1}")
    trainer = local_trainer(config.for_trainer, resolve_runtime(config, kept=PLAIN))
    assert trainer.roles[Role.FEATURES].model is trainer.roles[Role.REFERENCE].model


def test_rewards_are_added_to_the_energy(tmp_path: Path) -> None:
    rewards = {"functions": [{"type": "exact_match", "column": "first", "extract": "[0-9]"}]}
    config = structured(tmp_path, "trainer.max_steps=1", rewards=rewards)
    runs.train(config)
    (record,) = read_metrics(config.run_dir / "metrics.jsonl")
    want = record["rewards/energy/mean"] + record["rewards/exact_match/mean"]
    assert record["reward"] == pytest.approx(want)
    assert record["rewards/exact_match/mean"] > 0


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"correction": {"normalise": True}, "kl": {"coefficient": 0.1}, "entropy_bonus": 0.1}],
)
def test_without_its_policy_gradient_it_imitates_the_truth(
    tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    ebft = {"feature_layers": [0.5, 1.0], "rl_coefficient": 0.0, "ce_coefficient": 1.0}
    changes = {"algorithm": {"type": "ebft", **algorithm}, "ebft": ebft}
    config = structured(tmp_path, "trainer.max_steps=1", "trainer.updates_per_step=1", **changes)
    runs.train(config)
    (record,) = read_metrics(config.run_dir / "metrics.jsonl")
    # The mean cross-entropy of random weights is near that of equal probabilities.
    assert record["train/loss"] == pytest.approx(record["ebft/ce_loss"], rel=1e-5)
    assert 1.0 < record["train/loss"] < 5.0
    assert "entropy" not in record


def items(config: RunConfig) -> dict[str, Any]:
    checks = Preflight(config, progress=lambda done, total: None)
    return {item.name: item for item in checks.run()}


def test_check_says_what_is_compared(tmp_path: Path) -> None:
    found = items(structured(tmp_path))
    assert found["energy"].facts["layers"] == [1, 2]
    # Three depths of a model of two layers.
    assert found["energy"].level == "warning"
    assert "rewards" not in found
    found = items(strided(tmp_path, "ebft.feature_layers=[0.5, 1.0]"))
    assert found["energy"].level == "ok"
    assert found["energy"].facts["anchors"] == 6 * 5


def test_rows_without_a_reference_are_refused_or_dropped(tmp_path: Path) -> None:
    config = structured(tmp_path)
    file = Path(config.data.train[0].path)  # type: ignore[union-attr]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    del rows[3]["answer"]
    rows[5]["answer"] = "0123456789"
    file.write_text("\n".join(map(json.dumps, rows)))
    error = items(config)["data"]
    assert error.level == "error"
    assert "no column is named 'answer'" in error.text
    assert "at most rollout.max_new_tokens=6" in error.text
    found = items(structured(tmp_path, "data.bad_rows=drop"))
    assert found["data"].facts["kept"] == len(rows) - 2


def test_texts_that_are_too_short_or_too_long_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no room for ebft\.context_length=4"):
        runs.train(strided(tmp_path, data=texts(tmp_path, length=4)))
    long = {**texts(tmp_path, length=60), "overlong": "truncate"}
    assert items(strided(tmp_path, data=long))["energy"].facts["anchors"] == 6 * 7


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("ebft.feature_layers=[1.5]", "less than or equal to 1"),
        ("ebft.feature_layers=[]", "at least 1"),
        ("ebft.embed_method=concat", "differ in length"),
        ("ebft.stride=4", "would have no effect"),
        ("ebft={alignment_coefficient: 0.0, diversity_coefficient: 0.0}", "nothing is rewarded"),
        ("ebft={rl_coefficient: 0.0}", "the loss would always be 0"),
        ("algorithm.dynamic_sampling={}", "are hardly ever equal"),
        ("data.validation_share=0.2", "judged by reward functions"),
        ("algorithm={type: grpo}", "this section would have no effect"),
    ],
)
def test_structured_settings_that_cannot_work_are_refused(
    tmp_path: Path, change: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        structured(tmp_path, "ebft.whitening=true", change)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("rollout.max_new_tokens=5", "ebft.generate_length=3"),
        ("rollout.stop=['x']", "nothing ends them earlier"),
        ("algorithm.overlong={type: mask}", "reach its full length"),
        ("data.max_length=6", "no room"),
        ("data.validation_share=0.2", "held out"),
        ("ebft.reference_column=answer", "the text itself"),
        ("debug={mode: train_only, rollouts: elsewhere}", "saved groups"),
    ],
)
def test_strided_settings_that_cannot_work_are_refused(
    tmp_path: Path, change: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        strided(tmp_path, change)
