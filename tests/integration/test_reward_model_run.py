"""A reward model from recipe to reward: it learns, resumes, and scores as transformers does."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from safetensors.torch import load_file, save_file
from tests.integration.test_sft_run import stop_at
from tests.support import ranks, runs, tiny_preference
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from homeostat.config import RunConfig
from homeostat.config.loading.load import build_config
from homeostat.data.inputs import prepare_row_part
from homeostat.data.tokenizer import load_tokenizer
from homeostat.errors import ConfigError, DataError, ModelError
from homeostat.generation.choice import Choice, choose
from homeostat.generation.exporting import export_model
from homeostat.generation.gguf_export import export_gguf
from homeostat.generation.loading import load_text_model
from homeostat.observe.jsonl import read_metrics
from homeostat.rewards.functions import load_reward
from homeostat.run.preflight.check import Preflight
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.runtime import resolve_runtime
from homeostat.train.saving.checkpoint import CheckpointStore
from homeostat.types import Outputs, Role, TrainBatch

SETTINGS = {
    "trainer": {"lr": 1e-2, "max_steps": 40, "max_tokens_per_device": 512},
    "eval": {"interval_steps": 20},
    "checkpoint": {"interval_steps": 100, "export": "final"},
}


def write_scored(file: Path, *, last: float = 0.1) -> Path:
    """Twenty-four rows: some letters are worth 0.9 and others 0.1, except in the last row."""
    rows = [
        {"prompt": f"say {n}", "completion": "ab"[n % 2] * 5, "score": (0.9, 0.1)[n % 2]}
        for n in range(24)
    ]
    rows[-1]["score"] = last
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("reward_model")
    config = build_config(recipe(folder), [], file=None)
    runs.train(config)
    return config


def recipe(folder: Path, **more: Any) -> dict[str, Any]:
    data = {"validation_share": 0.2}
    return tiny_preference.recipe(folder, "reward_model", data=data, **SETTINGS, **more)


def exported(config: RunConfig) -> Path:
    store = CheckpointStore(config.run_dir / "checkpoints")
    return store.path(store.steps()[-1]) / "hf"


def test_it_learns_which_completion_is_better(trained: RunConfig) -> None:
    records = read_metrics(trained.run_dir / "metrics.jsonl")
    first, last = records[0], records[-1]
    assert last["train/loss"] < 0.5 * first["train/loss"]
    assert last["reward_model/accuracy"] > 0.9
    assert last["reward_model/margin"] > first["reward_model/margin"]
    assert last["eval/reward_model_accuracy"] > 0.8
    assert last["eval/reward_model_margin"] > 0


def test_transformers_and_the_reward_give_the_trainers_scores(trained: RunConfig) -> None:
    """Of packed rows here, of padded rows there, and of rows one by one."""
    folder, tokenizer = exported(trained), load_tokenizer(trained.model)
    cache_dir = trained.run_dir / "data"
    store = prepare_row_part(trained.data, tokenizer, "train", cache_dir=cache_dir)
    rows = [store[number] for number in range(10)]
    trainer = local_trainer(trained.for_trainer, resolve_runtime(trained, kept=PLAIN))
    trainer.load(folder.parent)
    (found,) = trainer.forward(Role.POLICY, [TrainBatch.of(rows)], Outputs(value=True))
    assert found.value_B is not None
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.config.pad_token_id not in {int(row.tokens_T[-1]) for row in rows}
    assert AutoTokenizer.from_pretrained(folder).pad_token_id == model.config.pad_token_id
    with torch.no_grad():
        alone = [model(torch.from_numpy(row.tokens_T)[None]).logits[0, 0].item() for row in rows]
    np.testing.assert_allclose(found.value_B, alone, rtol=0, atol=1e-5)
    settings = {"output": None, "score": "logit", "format": "template", "dtype": "float32"}
    sizes = {"device": "cpu", "batch_size": 4, "max_length": 64, "overlong": "fail"}
    reward = load_reward("reward_model", {"path": str(folder), **settings, **sizes})
    raw = [json.loads(line) for line in Path(trained.data.train[0].path).read_text().splitlines()]
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in raw[:5] for _ in range(2)]
    answers = [row[side] for row in raw[:5] for side in ("chosen", "rejected")]
    completions = [[{"role": "assistant", "content": answer}] for answer in answers]
    scores = reward(prompts=prompts, completions=completions)
    np.testing.assert_allclose(found.value_B, scores, rtol=0, atol=1e-5)


def test_stop_and_resume_is_an_uninterrupted_run_to_the_bit(
    trained: RunConfig, tmp_path: Path
) -> None:
    raw = recipe(Path(trained.runs_dir).parent, name="halting")
    process = runs.start(raw, tmp_path, prelude=stop_at(17, "SIGTERM"))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, output
    again = build_config(raw, [], file=None)
    assert CheckpointStore(again.run_dir / "checkpoints").steps() == [17]
    runs.train(again)
    assert runs.final_tensors(again) == runs.final_tensors(trained)
    assert runs.losses(again) == runs.losses(trained)


@pytest.mark.ranks
def test_two_ranks_train_the_same_reward_model(tmp_path: Path) -> None:
    found = []
    for name, layout in (("local", ()), ("ranks", ranks.over(2))):
        steps = ("trainer.max_steps=4", f"name={name}", "checkpoint.export=final")
        config = build_config(recipe(tmp_path), [*steps, *layout], file=None)
        with ranks.forked():
            runs.train(config)
        model = AutoModelForSequenceClassification.from_pretrained(exported(config))
        found.append((runs.losses(config), model.score.weight.detach().numpy()))
    (losses, head), (sharded_losses, sharded_head) = found
    assert sharded_losses == pytest.approx(losses, rel=1e-5)
    np.testing.assert_allclose(sharded_head, head, atol=1e-5)


@pytest.mark.parametrize("error", ["mse", "bce"])
def test_given_scores_are_learnt(error: str, tmp_path: Path) -> None:
    source = {"type": "scored", "path": str(write_scored(tmp_path / "scored.jsonl"))}
    loss = f"algorithm.loss={{type: pointwise, error: {error}}}"
    data = {"train": [source], "max_length": 64}
    config = tiny_preference.config(
        tmp_path, "reward_model", loss, "trainer.max_steps=30", "trainer.lr=1e-2", data=data
    )
    runs.train(config)
    records = read_metrics(config.run_dir / "metrics.jsonl")
    # The loss of bce has a floor: the scores are no labels.
    errors = [record["reward_model/error"] for record in records]
    assert np.mean(errors[-3:]) < 0.5 * np.mean(errors[:3])
    assert np.mean(runs.losses(config)[-3:]) < np.mean(runs.losses(config)[:3])
    assert "preference/margin" not in records[-1]


def test_scores_outside_of_0_and_1_are_refused_for_bce(tmp_path: Path) -> None:
    source = {"type": "scored", "path": str(write_scored(tmp_path / "scored.jsonl", last=1.5))}
    loss = "algorithm.loss={type: pointwise, error: bce}"
    data = {"train": [source], "max_length": 64}
    config = tiny_preference.config(tmp_path, "reward_model", loss, data=data)
    with pytest.raises(DataError, match=r"24.*the score is 1\.5"):
        runs.train(config)


def test_a_margin_asks_for_more(tmp_path: Path) -> None:
    """A pair that is apart by less than its margin has a loss above log 2."""
    pairs = tiny_preference.write_pairs(tmp_path / "pairs.jsonl", num_rows=8)
    rows = [json.loads(line) | {"by": 3.0} for line in pairs.read_text().splitlines()]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"type": "preference", "path": str(pairs)}
    found = []
    for name, more in (("plain", {}), ("margin", {"margin_column": "by"})):
        data = {"train": [{**source, **more}], "max_length": 64}
        config = tiny_preference.config(
            tmp_path, "reward_model", "trainer.max_steps=1", f"name={name}", data=data
        )
        runs.train(config)
        found += runs.losses(config)
    assert found[0] == pytest.approx(np.log(2), abs=0.1)
    assert found[1] == pytest.approx(np.log1p(np.exp(3)), abs=0.2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm.loss={type: pointwise}",), r"data\.train\.0\.type"),
        (("reference={type: initial}",), "compare it with another model"),
        (("model.implementation=transformers",), "needs the native decoder"),
        (("preference.beta=0.1",), "does not learn from preferences"),
        (("algorithm.type=dpo", "data.train.0.margin_column=m"), "does not read margins"),
        (("rollout.max_new_tokens=8",), "samples nothing"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_preference.config(tmp_path, "reward_model", *overrides)


def test_check_shows_the_labels_and_plans_the_memory(trained: RunConfig) -> None:
    items = list(Preflight(trained, progress=lambda done, total: None).run())
    assert not [item for item in items if item.level == "error"]
    (labels,) = [item for item in items if item.name == "labels"]
    assert labels.text == "32 pairs, all to differ by more than 0"
    (memory,) = [item for item in items if item.name == "memory"]
    assert memory.facts["training_peak_bytes"] > 0


@pytest.mark.parametrize("use", [load_text_model, lambda one: export_gguf(one, Path("m.gguf"))])
def test_a_reward_model_writes_no_texts_and_the_error_says_so(
    use: Callable[[Choice], Any], trained: RunConfig
) -> None:
    for place in (trained.run_dir, exported(trained)):
        with pytest.raises(ModelError, match="is a reward model: it scores texts"):
            use(choose(place))


def scores(folder: Path) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(3, 12)[None]).logits


def test_an_adapter_of_a_reward_model_is_exported_as_a_whole_classifier(tmp_path: Path) -> None:
    """From a checkpoint without an export, from the adapter alone, and as peft writes it."""
    config = build_config(recipe(tmp_path), [], file=None)
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model.path))
    base.save_pretrained(tmp_path / "base")
    for file in Path(config.model.path).glob("*token*"):
        shutil.copy(file, tmp_path / "base")
    model = {"path": str(tmp_path / "base"), "init": "pretrained"}
    lora = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}
    short = ("trainer.max_steps=4", "checkpoint.export=off")
    config = build_config(recipe(tmp_path, model=model, lora=lora), [*short], file=None)
    runs.train(config)
    run = choose(config.run_dir)
    export_model(run, tmp_path / "merged")
    export_model(run, tmp_path / "adapter", adapter_only=True)
    export_model(choose(tmp_path / "adapter"), tmp_path / "merged_later")
    wanted = scores(tmp_path / "merged")
    assert wanted.abs() > 1e-4
    assert torch.equal(scores(tmp_path / "merged_later"), wanted)
    theirs = AutoPeftModelForSequenceClassification.from_pretrained(
        tmp_path / "adapter", num_labels=1
    )
    theirs.save_pretrained(tmp_path / "peft")
    export_model(choose(tmp_path / "peft", base=tmp_path / "base"), tmp_path / "merged_of_peft")
    torch.testing.assert_close(scores(tmp_path / "merged_of_peft"), wanted, atol=1e-6, rtol=0)
    with torch.no_grad():
        found = theirs.eval()(torch.arange(3, 12)[None]).logits
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_an_exported_reward_model_can_be_exported_again(trained: RunConfig, tmp_path: Path) -> None:
    export_model(choose(trained.run_dir), tmp_path / "once")
    export_model(choose(tmp_path / "once"), tmp_path / "twice", dtype="bf16")
    assert torch.equal(scores(tmp_path / "once"), scores(exported(trained)))
    config = json.loads((tmp_path / "twice" / "config.json").read_text())
    assert (config["dtype"], config["num_labels"]) == ("bfloat16", 1)
    assert not (tmp_path / "once" / "generation_config.json").exists()


def test_a_classifier_without_its_head_is_not_exported(trained: RunConfig, tmp_path: Path) -> None:
    shutil.copytree(exported(trained), tmp_path / "headless")
    file = tmp_path / "headless" / "model.safetensors"
    tensors = load_file(file)
    del tensors["score.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"hold no score\.weight"):
        export_model(choose(tmp_path / "headless"), tmp_path / "copy")
