"""`homeostat push`, against a loopback hub that speaks huggingface_hub's protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.support import tiny
from tests.support.push_hub import PushHub
from tests.support.runs import train
from typer.testing import CliRunner

from homeostat.cli.verbs import app
from homeostat.errors import ConfigError, HubError
from homeostat.generation.hub_push import push_folder
from homeostat.generation.model_card import hub_name, shown_name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push")
    raw = {"max_steps": 4, "batch_rows": 4, "threads": 1, "lr": 1e-2}
    train(tiny.config(folder, name="shared", trainer=raw, eval={"interval_steps": 2},
                      data={"validation_share": 0.2}))  # fmt: skip
    # As the doctor writes it when something opens and stays open.
    finding = {
        "step": 3, "code": "LRN001", "name": "loss-rises", "level": "warn", "state": "fired",
        "message": "the loss has risen for two steps", "first_step": 2,
    }  # fmt: skip
    with (folder / "runs" / "shared" / "findings.jsonl").open("a") as file:
        file.write(json.dumps(finding) + "\n")
    return folder / "runs" / "shared"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[PushHub]:
    import huggingface_hub as library

    with PushHub(token="hf_right") as server:
        monkeypatch.setattr(library.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(library.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(library.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        library.close_session()
        yield server
        library.close_session()


def push(*words: str) -> str:
    result = CliRunner().invoke(app, ["push", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_all_files_arrive_in_a_private_repository(run: Path, hub: PushHub) -> None:
    url = push(str(run), "me/tiny", "--license", "mit")
    assert url.startswith(f"{hub.url}/me/tiny/commit/")
    asked = hub.repos["me/tiny"]
    assert asked.get("visibility") == "private" or asked.get("private") is True
    names = {name.removeprefix("me/tiny/") for name in hub.files}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= names
    assert hub.messages == ["Upload step 4 with homeostat"]


def test_pushing_again_changes_the_same_repository(run: Path, hub: PushHub) -> None:
    push(str(run), "me/tiny", "--public", "-m", "first")
    push(str(run), "me/tiny", "--private", "-m", "second")
    assert hub.messages == ["first", "second"]
    assert hub.repos["me/tiny"].get("visibility") != "private"


def test_the_card_says_how_the_model_was_made(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "look"
    assert push(str(run), "me/tiny", "--dry-run", str(folder)) == str(folder)
    _, head, text = (folder / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head) == {"library_name": "transformers", "tags": ["homeostat", "sft"]}
    assert "step 4 of a run that is finished" in text
    assert "- train: `rows.jsonl` (messages)" in text
    assert "| `eval/loss` |" in text
    assert "warn: LRN001 loss-rises (open at the end): the loss has risen" in text
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe["trainer"]["lr"] == 1e-2
    assert recipe["trainer"]["max_steps"] == 4
    assert "max_grad_norm" not in recipe["trainer"], "it has its default"
    assert str(run.parent.parent) not in text, "paths of this machine are nobody's business"


def test_a_refusal_says_what_to_do(run: Path, hub: PushHub, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    (tmp_path / "x").mkdir()
    with pytest.raises(HubError, match="hf auth login"):
        push_folder(tmp_path / "x", "me/tiny", is_public=False, message="m")
    result = CliRunner().invoke(app, ["push", str(run), "tiny"])
    assert isinstance(result.exception, ConfigError)  # wrong usage: exit code 2
    assert "OWNER/NAME" in str(result.exception)


def test_an_unreachable_hub_is_no_traceback(hub: PushHub, monkeypatch, tmp_path: Path) -> None:
    import huggingface_hub as library

    monkeypatch.setattr(library.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="me/tiny"):
        push_folder(tmp_path, "me/tiny", is_public=False, message="m")


def test_names_of_models_carry_no_folders(tmp_path: Path) -> None:
    assert hub_name("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    assert hub_name(str(tmp_path)) is None
    assert shown_name("somewhere/deep/models/SmolLM2") == "SmolLM2"
    assert shown_name("runs/a_run/checkpoints/step_00000025/hf") == "a_run, step 25"
