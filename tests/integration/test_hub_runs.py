"""Runs, checks and exports of recipes that name models and datasets on the hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import runs, tiny
from tests.support.hub_server import HubServer, local_hub, set_home
from typer.testing import CliRunner

import homeostat
from homeostat.cli.verbs import app
from homeostat.config import RunConfig
from homeostat.config.hub_names import cached_path
from homeostat.config.loading.load import build_config
from homeostat.config.loading.resume import saved_config
from homeostat.config.model import ModelConfig
from homeostat.errors import ConfigError, DataError, ModelError
from homeostat.generation.choice import Choice, choose
from homeostat.generation.exporting import export_model
from homeostat.hub.resolve import resolve_names
from homeostat.models.adapter_files import adapter_base, find_base

README = """---
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
"""


def alpaca(first: int, count: int = 20) -> str:
    rows = [
        {"instruction": f"say {number}", "input": "now", "output": str(number) * 3}
        for number in range(first, first + count)
    ]
    return "\n".join(map(json.dumps, rows))


def dataset(first: int = 0) -> dict[str, bytes | str]:
    return {
        "README.md": README,
        "main/train-00000-of-00002.jsonl": alpaca(first),
        "main/train-00001-of-00002.jsonl": alpaca(first + 100),
        "main/test-00000-of-00001.jsonl": alpaca(first + 200),
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with local_hub(tmp_path / "home", monkeypatch) as server:
        folder = tiny.write_model(tmp_path / "model")
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        server.add("model", "org/tiny", files)
        server.add("dataset", "org/rows", dataset())
        yield server


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    raw = tiny.recipe(folder)
    raw["model"]["path"] = "org/tiny"
    raw["data"] = {
        "train": [{"path": "org/rows"}],
        "validation": [{"path": "org/rows", "split": "test"}],
        "max_length": 128,
    }
    return raw | changes


def config_of(raw: dict[str, Any], *overrides: str, told: list[str] | None = None) -> RunConfig:
    lines = told if told is not None else []
    return resolve_names(build_config(raw, list(overrides), file=None), tell=lines.append)


def test_a_recipe_of_names_trains_and_resumes_on_the_same_bytes(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = config_of(recipe(tmp_path, name="whole"))
    runs.train(whole)
    raw = recipe(tmp_path)
    runs.train(config_of(raw, "trainer.max_steps=2"))
    # Both branches move, and the cache lies elsewhere: the run goes on with what it began with.
    hub.repositories["dataset", "org/rows"].commit(dataset(first=500))
    hub.repositories["model", "org/tiny"].commit({"config.json": "{}", "tokenizer.json": "{}"})
    os.rename(tmp_path / "home", tmp_path / "moved")
    set_home(tmp_path / "moved", monkeypatch)
    hub.asked.clear()
    resumed = config_of(raw)
    assert hub.asked == []
    runs.train(resumed)
    assert runs.events(resumed, "run_resumed")
    assert runs.final_tensors(resumed) == runs.final_tensors(whole)
    pinned = cached_path(saved_config(resumed.run_dir / "config.json").model.path)
    assert pinned is not None
    assert pinned.commit == cached_path(whole.model.path).commit  # type: ignore[union-attr]
    hub.repositories["model", "org/tiny"].branches["v2"] = pinned.commit
    other = config_of(raw, "model.revision=v2")
    with pytest.raises(ConfigError, match="the value is now 'v2', but the run began"):
        runs.train(other)


def test_what_was_resolved_and_recognised_is_told(hub: HubServer, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(tmp_path)))
    found = CliRunner().invoke(app, ["inspect", str(file), "--rows", "1"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    commit = hub.repositories["dataset", "org/rows"].branches["main"][:12]
    assert f"data.train.0.path: org/rows at commit {commit}" in found.output
    assert (
        "recognised as Alpaca -> type: prompt_completion, columns: {prompt: [instruction, input], "
        "completion: output}" in found.output.replace("\n", " ")
    )
    checked = CliRunner().invoke(app, ["check", str(file), "--format", "json"])
    items = json.loads(checked.stdout)["items"]
    assert [item["name"] for item in items[:2]] == ["names", "names"]
    assert "org/tiny at commit" in items[0]["text"]


def test_a_path_that_exists_is_preferred_to_a_name(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.write_model(tmp_path / "org" / "tiny")
    raw = recipe(tmp_path, data=tiny.recipe(tmp_path)["data"])
    assert config_of(raw).model.path == "org/tiny"
    assert hub.asked == []
    with pytest.raises(ConfigError, match=r"model\.revision: org/tiny exists on this disk"):
        config_of(raw, "model.revision=v1")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("data.train.0.split=dev", DataError, "no split is named 'dev'. There are: train, test"),
        ("data.train.0.config=x", DataError, "no configuration is named 'x'. There are: main"),
        ("data.train.0.revision=v9", ConfigError, r"data\.train\.0\.revision: org/rows has no"),
        ("data.validation.0.split=null", DataError, r"data\.validation\.0: .*one of: train, test"),
        ("data.train.0.columns={a: [instruction, input]}", ConfigError, "are not recognised"),
        ("model.path=org/other", ConfigError, "'org/other' does not exist on this disk, and"),
        ("data.train.0.path=org/other", ConfigError, "has no dataset of that name"),
    ],
)
def test_what_is_not_there_is_named(
    hub: HubServer, tmp_path: Path, change: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        config_of(recipe(tmp_path), change)


def test_a_model_is_used_by_its_name(hub: HubServer, tmp_path: Path) -> None:
    hub.add("model", "org/packed", {"a.gguf": "x"})
    path = choose(Path("org/packed/a.gguf")).model.path
    held = cached_path(path)
    assert held is not None
    assert (held.name, held.file) == ("org/packed", "a.gguf")
    base = adapter_base(path)
    assert (base.place, base.revision, base.gguf_file) == ("org/packed", held.commit, "a.gguf")


def test_a_revision_of_a_model_is_used_from_python_and_refused_for_a_folder(
    hub: HubServer, tmp_path: Path
) -> None:
    export_model(
        Choice(ModelConfig(path=str(tmp_path / "model"), init="random")), tmp_path / "whole"
    )
    files = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    repository = hub.add("model", "org/whole", files)
    main = repository.branches["main"]
    trial = repository.commit({**repository.commits[main], "note.json": "{}"}, branch="trial")
    model = homeostat.Model("org/whole", revision="trial", tokenizer="org/tiny", context=32)
    held = cached_path(model.name)
    assert held is not None
    assert held.commit == trial != main
    answers = model.generate("1", max_new_tokens=2, temperature=0.0, chat=False)
    assert answers[0][0].num_tokens >= 1
    with pytest.raises(ConfigError, match="nowhere"):
        choose(Path("org/whole"), revision="nowhere")
    with pytest.raises(ModelError, match="--revision has no meaning here"):
        choose(tmp_path / "model", revision="trial")


def test_an_exported_adapter_names_its_base_for_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny.config(tmp_path, "model.path=model", "checkpoint.export=final")
    runs.train(config)
    (trained,) = config.run_dir.glob("checkpoints/step_*/hf")
    adapted = tiny.config(
        tmp_path, f"model.path={os.path.relpath(trained)}", "model.init=pretrained",
        "lora={rank: 2}", "checkpoint.export=final", "name=adapted", "trainer.max_steps=1",
    )  # fmt: skip
    result = runs.train(adapted)
    assert result.export is not None
    settings = json.loads((result.export / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(trained)
    assert find_base(result.export, settings) == str(trained)
