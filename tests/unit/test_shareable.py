"""What leaves the machine holds no secret: config by an allow-list, texts through the scrubber."""

from __future__ import annotations

import json
import logging
import os
import random
import stat
import string
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from homeostat.config.loading.beside import not_there
from homeostat.config.loading.load import build_config
from homeostat.config.loading.shareable import (
    REMOVED,
    private_values,
    shared_config,
    shared_override,
)
from homeostat.errors import ConfigError
from homeostat.health.vocabulary import FAMILY_OF
from homeostat.observe.environment import TorchFacts, gather_environment
from homeostat.observe.logs import logging_to
from homeostat.observe.redact import Scrubber
from homeostat.observe.report import write_report
from homeostat.observe.run_dir import RunDir
from homeostat.observe.sheet import bug_sheet


def word(count: int) -> str:
    return "".join(random.choices(string.ascii_letters, k=count))


def recipe(options: dict[str, object]) -> dict[str, object]:
    reward = {"type": "function", "path": "rewards/judge.py:score", "options": options}
    return {
        "name": "run",
        "algorithm": {"type": "grpo"},
        "model": {"path": "/data/models/Tiny-1B"},
        "data": {"train": [{"type": "prompts", "path": "rows.jsonl", "system": "be a pirate"}]},
        "rewards": {"functions": [reward]},
        "trainer": {"lr": 1e-4, "max_steps": 3},
    }


@pytest.fixture
def options() -> dict[str, object]:
    return {
        "judge_key": word(9),
        "pw": f"{word(4)} {word(5)}",
        "auth": f"{word(4)},{word(5)}",
        "blob": json.dumps({"inner": f"{word(5)} {word(4)}"}),
        "pin": 48151623,
        "url": f"https://h.example/x?sig={word(8)}",
        "pem": f"-----BEGIN KEY-----\n{word(20)}\n-----END KEY-----",
        "quoted": f"{word(4)}\"{word(4)}'{word(3)}",
    }


def test_numbers_and_choices_are_shared_and_free_text_is_not(options: dict[str, object]) -> None:
    config = build_config(recipe(options), [], file=None)
    raw = json.loads(config.model_dump_json())
    shown = shared_config(raw)
    reward = shown["rewards"]["functions"][0]
    assert reward["options"] == dict.fromkeys(options, REMOVED)
    assert reward["path"] == "judge.py:score"
    assert shown["model"]["path"] == "Tiny-1B"
    assert shown["data"]["train"][0]["system"] == REMOVED
    assert shown["data"]["train"][0]["prompt_column"] == raw["data"]["train"][0]["prompt_column"]
    for section, name in (("algorithm", "type"), ("trainer", "lr"), ("trainer", "optimizer")):
        assert shown[section].get(name) == raw[section].get(name)
    assert shown["name"] == "run"
    assert {*map(str, options.values()), "be a pirate"} <= {*private_values(raw)}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("trainer.lr=1e-5", "trainer.lr=1e-5"),
        ("engine.type=vllm", "engine.type=vllm"),
        ("model.path=/a/b/c", "model.path=c"),
        ("rewards.functions.0.options.k=abc", f"rewards.functions.0.options.k={REMOVED}"),
        ("rewards.functions.0.options={k: abc}", f"rewards.functions.0.options={REMOVED}"),
        ("no.such.key=abc", f"no.such.key={REMOVED}"),
        ("recipe.yaml", "recipe.yaml"),
    ],
)
def test_an_override_is_shown_as_far_as_its_key_allows(given: str, shown: str) -> None:
    assert shared_override(given) == shown


def test_a_refused_option_is_not_echoed() -> None:
    hidden = word(12)
    for options in ({"k": [hidden]}, {"k": {"x": hidden}}):
        with pytest.raises(ConfigError) as caught:
            build_config(recipe(options), [], file=None)
        assert hidden not in str(caught.value)


def test_what_a_run_leaves_for_others_holds_no_secret(
    tmp_path: Path, options: dict[str, object]
) -> None:
    """Whatever quotes them: an event, a finding, a log line, a traceback."""
    config = build_config(recipe(options), [], file=None)
    hidden, terminal = [str(value) for value in options.values()], StringIO()
    with RunDir(tmp_path / "run") as run_dir:
        run_dir.protect(json.loads(config.model_dump_json()))
        run_dir.write_config(config.model_dump_json(), recipe="given")
        console, log = Console(file=terminal, width=400), run_dir.console_log
        with logging_to(console, level="info", console_log=log, scrubber=run_dir.scrubber):
            for text in hidden:
                run_dir.append_event("reward_trouble", 1, message=f"401 for {text!r}", told=[text])
                logging.getLogger("judge").warning("asked with %s", text)
            logging.getLogger("judge").warning("asked with %r", options)
        finding = {"code": "RWD011", "name": "x", "level": "warn", "state": "open", "family": "x"}
        run_dir.append_finding(1, {**finding, "evidence": hidden})
        run_dir.append_event("run_failed", 1, error="ValueError", message=" ".join(hidden))
        run_dir.write_traceback(f"ValueError: {options!r}")
    write_report(run_dir.path)
    found = {path.name: path.read_text() for path in run_dir.path.iterdir() if path.is_file()}
    saved = [found.pop(name) for name in ("config.json", "config.yaml")]
    environment = gather_environment(TorchFacts(error="none"), folder=run_dir.path)
    found["sheet"] = bug_sheet(run_dir.path, environment, environ={"RAY_X": hidden[0]})
    found["terminal"] = terminal.getvalue()
    for name, text in found.items():
        for value in (part for one in hidden for part in one.splitlines()):
            assert value.startswith("-----") or value not in text, (name, value)
    assert "1e-4" in found["sheet"] or "0.0001" in found["sheet"]
    assert all(json.dumps(value) in saved[0] for value in options.values())
    for path in (run_dir.config_json, run_dir.config_yaml):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_user_s_own_terminal_shows_files_that_exist(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.touch()
    config = {"data": {"train": [{"type": "messages", "path": str(file)}]}}
    shown = Scrubber.of(config, environ={}, shows_paths=True).text(f"{file}:3 is no JSON")
    assert shown == f"{file}:3 is no JSON"
    assert Scrubber.of(config, environ={}).text(f"{file}:3") == "rows.jsonl:3"


def test_a_path_that_does_not_exist_is_shown_in_full_on_a_user_s_own_terminal_only() -> None:
    config = recipe({"folder": "/vault/key"})
    config["model"] = {"path": "some/folder/hf"}
    told = f"model.path: {not_there('some/folder/hf')} /vault/key"
    own = Scrubber.of(config, environ={}, shows_paths=True).text(told)
    assert os.path.abspath("some/folder/hf") in own
    assert "/vault" not in own, "a value for the user's own code"
    shared = Scrubber.of(config, environ={}).text(told)
    assert shared.startswith("model.path: hf does not exist. A relative path in a recipe")


def test_names_of_columns_are_no_secrets_so_texts_keep_such_words() -> None:
    raw = recipe({})
    raw["data"] = {"train": [{"type": "prompts", "path": "rows.jsonl", "prompt_column": "output"}]}
    assert "output" not in set(private_values(raw))
    assert Scrubber.of(raw, environ={}).text("outputs/run is new") == "outputs/run is new"


def test_no_name_of_an_illness_is_taken_for_a_secret_s_name() -> None:
    told = [f"{name}: The call does not fit." for name in FAMILY_OF]
    assert [Scrubber().text(text) for text in told] == told
