"""Whole preference runs of a tiny model: they learn, go on to the same bits, and compare with the
reference that the recipe names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import ranks, runs, tiny, tiny_preference
from typer.testing import CliRunner

from homeostat.config import RunConfig
from homeostat.config.loading.live import editable_keys
from homeostat.config.loading.load import build_config
from homeostat.config.model import ModelConfig
from homeostat.data.inputs import RowSet
from homeostat.data.prepare import prepare_rows
from homeostat.data.tokenizer import load_tokenizer
from homeostat.errors import CheckpointError, ConfigError
from homeostat.models.build import load_model
from homeostat.models.hf import save_hf
from homeostat.observe.jsonl import read_metrics
from homeostat.run.learning.mismatched import Mismatched, partners

STEADY = {"schedule": {"type": "constant", "warmup_steps": 0}}


def metrics_of(config: RunConfig) -> list[dict[str, Any]]:
    return list(read_metrics(config.run_dir / "metrics.jsonl"))


def trained(folder: Path, algorithm: str, *overrides: str, **sections: Any) -> RunConfig:
    sections["trainer"] = {**STEADY, "max_steps": 4, **sections.get("trainer", {})}
    config = tiny_preference.config(folder, algorithm, *overrides, **sections)
    runs.train(config)
    return config


def write_weights(model: Path, folder: Path, *, seed: int) -> None:
    """Write a checkpoint of the tiny model with random weights."""
    made = load_model(
        ModelConfig(path=str(model), init="random"),
        None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=seed,
        gradient_checkpointing=False,
    )
    shutil.copytree(model, folder)
    named = made.module.causal_lm.named_parameters()
    save_hf(named, folder, source_config=made.sheet.source_config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preferences")


@pytest.fixture(scope="module")
def dpo(folder: Path) -> RunConfig:
    return trained(folder, "dpo", name="dpo")


@pytest.fixture(scope="module")
def kto(folder: Path) -> RunConfig:
    return trained(folder, "kto", name="kto")


@pytest.mark.parametrize(
    "algorithm",
    [
        "dpo",
        "kto",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ipo", "orpo", "simpo")),
    ],
)
def test_each_algorithm_learns_to_tell_the_pairs_apart(folder: Path, algorithm: str) -> None:
    config = trained(
        folder,
        algorithm,
        name=f"learns_{algorithm}",
        trainer={"max_steps": 24, "lr": 5e-3},
        data={"validation_share": 0.2},
        eval={"interval_steps": 24, "at_start": True},
        checkpoint={"interval_steps": 100},
    )
    before, *_, last = metrics_of(config)
    assert last["eval/preference_accuracy"] >= 0.85
    assert last["eval/preference_margin"] > before["eval/preference_margin"]
    assert last["eval/loss"] < before["eval/loss"]
    assert last["preference/chosen_logp"] > last["preference/rejected_logp"]


def test_before_the_first_update_the_policy_is_its_reference(dpo: RunConfig) -> None:
    first = metrics_of(dpo)[0]
    assert first["train/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert abs(first["preference/chosen_reward"]) < 1e-5


@pytest.mark.parametrize("low", ["fp8={}", "int4={group_size: 32}"])
def test_in_low_precision_the_policy_is_its_reference_at_first(folder: Path, low: str) -> None:
    how = {"name": f"low_{low[:3]}", "trainer": {"max_steps": 1}}
    first = metrics_of(trained(folder, "dpo", f"trainer.{low}", **how))[0]
    assert first["train/loss"] == pytest.approx(np.log(2), abs=1e-6)


@pytest.mark.parametrize("low", ["fp8", "int4"])
def test_a_reference_scored_before_a_switch_of_precision_is_refused(folder: Path, low: str) -> None:
    late, live = f"trainer.{low}={{start_step: 3}}", "preference.reference_logps=live"
    with pytest.raises(ConfigError, match=rf"trainer\.{low}\.start_step.*reference_logps=live"):
        tiny_preference.config(folder, "dpo", late)
    switching = tiny_preference.config(folder, "dpo", late, live)
    assert f"trainer.{low}.start_step" in editable_keys(switching)
    # No remedy may move the switch of the other kind, either.
    scored = tiny_preference.config(folder, "dpo", f"trainer.{low}={{}}")
    assert not {key for key in editable_keys(scored) if low in key}
    # orpo has no reference.
    tiny_preference.config(folder, "orpo", late)


def test_another_precision_is_scored_again(folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "precise" / "model")
    for recipe in ("blockwise", "rowwise"):
        run = trained(folder / "precise", "dpo", f"trainer.fp8={{recipe: {recipe}}}")
        assert runs.events(run, "reference_scored")[-1]["is_new"]


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_a_resumed_run_is_an_uninterrupted_one_and_scores_nothing_again(
    folder: Path, algorithm: str, request: pytest.FixtureRequest
) -> None:
    straight = request.getfixturevalue(algorithm)
    half = trained(folder, algorithm, name=f"halves_{algorithm}", trainer={"max_steps": 2})
    assert all(event["is_new"] for event in runs.events(half, "reference_scored"))
    whole = trained(folder, algorithm, name=f"halves_{algorithm}")
    assert not any(event["is_new"] for event in runs.events(whole, "reference_scored")[-1:])
    assert runs.final_tensors(whole) == runs.final_tensors(straight)
    assert runs.losses(whole) == runs.losses(straight)


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_a_live_reference_is_the_precomputed_one(
    folder: Path, algorithm: str, request: pytest.FixtureRequest
) -> None:
    live = trained(folder, algorithm, "preference.reference_logps=live", name=f"live_{algorithm}")
    wanted = runs.losses(request.getfixturevalue(algorithm))
    assert runs.losses(live) == pytest.approx(wanted, rel=1e-5)
    assert not (live.run_dir / "reference").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.max_tokens_per_device=1024"],
        ["trainer.packing=false", "trainer.micro_batch_rows=3"],
        ["trainer.share_prompts=false"],
    ],
)
@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_no_split_of_an_update_changes_what_is_learnt(
    folder: Path, algorithm: str, overrides: list[str], request: pytest.FixtureRequest
) -> None:
    name = f"split_{algorithm}_{overrides[0].partition('=')[0]}"
    raw = tiny_preference.recipe(folder, algorithm, name=name, trainer={**STEADY, "max_steps": 4})
    if "packing" in name:
        del raw["trainer"]["max_tokens_per_device"]
    config = build_config(raw, overrides, file=None)
    runs.train(config)
    wanted = request.getfixturevalue(algorithm)
    assert runs.losses(config) == pytest.approx(runs.losses(wanted), rel=1e-5)


def test_lanes_keep_a_pair_in_one_piece(folder: Path, dpo: RunConfig) -> None:
    config = trained(folder, "dpo", "trainer.lanes=2", name="lanes")
    assert runs.losses(config) == pytest.approx(runs.losses(dpo), rel=1e-5)


def test_another_reference_is_scored_freed_and_told_from_the_policy(
    tmp_path: Path, dpo: RunConfig
) -> None:
    model = tiny.write_model(tmp_path / "model")
    write_weights(model, tmp_path / "other", seed=5)
    found = {}
    for how in ("precomputed", "live"):
        config = trained(
            tmp_path,
            "dpo",
            f"preference.reference_logps={how}",
            name=how,
            reference={"type": "checkpoint", "path": str(tmp_path / "other")},
        )
        found[how] = runs.losses(config)
        assert abs(metrics_of(config)[0]["preference/chosen_reward"]) > 1e-3
    assert found["live"] == pytest.approx(found["precomputed"], rel=1e-5)
    assert found["live"] != pytest.approx(runs.losses(dpo), rel=1e-3)


def test_an_adapter_is_compared_with_the_model_without_it(tmp_path: Path) -> None:
    lora = {"rank": 4, "targets": ["all-linear"]}
    model = tiny.write_model(tmp_path / "model")
    write_weights(model, tmp_path / "base", seed=0)
    path = {"path": str(tmp_path / "base"), "init": "pretrained"}
    config = trained(tmp_path, "dpo", lora=lora, model=path)
    first, *_, last = metrics_of(config)
    assert first["train/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert last["preference/margin"] > 0


@pytest.mark.ranks
@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_ranks_learn_what_one_process_learns(
    folder: Path, algorithm: str, request: pytest.FixtureRequest
) -> None:
    with ranks.forked():
        config = trained(folder, algorithm, *ranks.over(2), name=f"ranks_{algorithm}")
    wanted = runs.losses(request.getfixturevalue(algorithm))
    assert runs.losses(config) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.ranks
def test_ranks_free_a_reference_that_has_scored(tmp_path: Path) -> None:
    write_weights(tiny.write_model(tmp_path / "model"), tmp_path / "other", seed=5)
    reference = {"type": "checkpoint", "path": str(tmp_path / "other")}
    alone = trained(tmp_path, "dpo", name="alone", reference=reference)
    with ranks.forked():
        over = trained(tmp_path, "dpo", *ranks.over(2), name="over", reference=reference)
    assert runs.losses(over) == pytest.approx(runs.losses(alone), rel=1e-5)


def test_a_damaged_file_of_scores_is_computed_again(tmp_path: Path) -> None:
    config = trained(tmp_path, "dpo", trainer={"max_steps": 2})
    (file,) = (config.run_dir / "reference").glob("*/logp.npy")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    again = trained(tmp_path, "dpo")
    assert runs.events(again, "reference_scored")[-1]["is_new"]


def test_a_reference_can_follow_the_policy(folder: Path, dpo: RunConfig) -> None:
    overrides = ["preference.reference_logps=live"]
    reference = {"type": "initial", "refresh_steps": 2}
    config = trained(folder, "dpo", *overrides, name="follows", reference=reference)
    # Refreshed before step 3: there the policy is its reference again.
    assert runs.losses(config)[2] == pytest.approx(np.log(2), abs=1e-6)
    assert runs.losses(config)[:2] == pytest.approx(runs.losses(dpo)[:2], rel=1e-5)


def test_prompts_of_the_baseline_have_completions_of_other_rows(folder: Path) -> None:
    config = tiny_preference.config(folder, "kto")
    tokenizer = load_tokenizer(config.model)
    store = prepare_rows(config.data.train, tokenizer, config.data, cache_dir=folder / "cache")
    ids = np.arange(17)
    found = Mismatched.of(RowSet(store, ids), config.for_rows)
    # The rows of a pair have one prompt, so that the completions of other pairs are taken.
    assert [found.partners[i] for i in (0, 1, 2, 7, 8, 9)] == [6, 7, 0, 5, 14, 15]
    assert found.partners[16] == 15
    (row,) = found.rows([1])
    own, other = store[1], store[7]
    cut, start = (int(np.flatnonzero(one.weights_T)[0]) for one in (own, other))
    assert row.tokens_T.tolist() == [*own.tokens_T[:cut], *other.tokens_T[start:]]
    assert row.weights_T.tolist() == [*[0.0] * cut, *other.weights_T[start:]]


def test_no_row_is_its_own_partner() -> None:
    for count in range(2, 12):
        ids = np.arange(count) * 3
        for prompts in (np.arange(count), np.zeros(count, dtype=np.int64)):
            found = partners(ids, prompts, batch_rows=4)
            assert set(found) == set(ids.tolist())
            assert all(row != partner for row, partner in found.items())


@pytest.mark.parametrize("batch_rows", [2, 3, 4, 5, 8])
def test_no_prompt_of_a_pair_gets_its_own_other_completion(batch_rows: int) -> None:
    for count in range(3, 24):
        ids = np.arange(count)
        found = partners(ids, ids // 2, batch_rows=batch_rows)
        assert all(row // 2 != partner // 2 for row, partner in found.items())
    # As in TRL where all prompts differ.
    found = partners(ids, ids, batch_rows=batch_rows)
    assert [found[row] for row in range(batch_rows)] == [batch_rows - 1, *range(batch_rows - 1)]


def test_labelled_rows_train_as_pairs_that_were_taken_apart(folder: Path, kto: RunConfig) -> None:
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    file = folder / "labelled.jsonl"
    sides = [(row["prompt"], row[side], side == "chosen")
             for row in rows for side in ("chosen", "rejected")]  # fmt: skip
    names = ("prompt", "completion", "label")
    made = [json.dumps(dict(zip(names, one, strict=True))) for one in sides]
    file.write_text("\n".join(made), encoding="utf-8")
    source = {"type": "unpaired_preference", "path": str(file)}
    config = trained(folder, "kto", name="labelled", data={"train": [source]})
    assert runs.losses(config) == runs.losses(kto)


def test_check_and_inspect_show_pairs(folder: Path) -> None:
    from homeostat.cli.verbs import app

    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps(tiny_preference.recipe(folder, "kto", name="looked_at")))
    found = CliRunner().invoke(app, ["check", str(recipe)])
    assert "40 desirable and 40 undesirable rows" in found.output, found.output
    assert "scores all rows before the first step" in " ".join(found.output.split())
    shown = CliRunner().invoke(app, ["inspect", str(recipe), "algorithm.type=dpo", "--rows", "1"])
    assert "chosen of pair 0" in shown.output, shown.output
    assert "rejected of pair 0" in shown.output
    assert "40 kept of 40" in shown.output


def test_a_run_is_not_resumed_against_another_reference(folder: Path) -> None:
    config = tiny_preference.config(folder, "dpo", name="moved_reference")
    start = folder / "reference_that_moves"
    write_weights(Path(config.model.path), start, seed=1)
    changed = {"model": {"path": str(start), "init": "pretrained"}, "name": "moved_reference"}
    trained(folder, "dpo", **changed)
    shutil.rmtree(start)
    write_weights(Path(config.model.path), start, seed=2)
    with pytest.raises(CheckpointError, match="trained with another reference"):
        trained(folder, "dpo", **changed, trainer={"max_steps": 6})
