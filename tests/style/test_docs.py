"""Docs that are true: generated pages are fresh, and every snippet is run or parsed.

yaml    filled up with a minimal recipe (of SFT or RL, by its keys), and checked as a config
jsonl   encoded by the demo's tokenizer
python  run beside real run folders
bash    cheap `homeostat` verbs are run, `train` is parsed with its overrides; make targets
        and extras must exist
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main
from tests.support import runs, tiny
from typer.testing import CliRunner

from homeostat.cli.verbs import app
from homeostat.config import load_config
from homeostat.config.data import (
    MessagesSource,
    PreferenceSource,
    PromptCompletionSource,
    PromptSource,
    TextSource,
    UnpairedPreferenceSource,
)
from homeostat.config.loading.load import build_config
from homeostat.config.loading.schema import walk_keys
from homeostat.config.loading.tree import fill
from homeostat.config.loading.yaml_file import parse_yaml
from homeostat.config.model import ModelConfig
from homeostat.config.run import RunConfig

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *GUIDES]
# A run of SFT; the two acts of the demo, of which the second is RL.
SFT_RUN = "tiny_wordplay_cpu"
ACTS = ("tiny_sort_sft_cpu", "tiny_sort_grpo_cpu")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)")
BASE = {
    "name": "docs",
    "model": {"path": "some/folder"},
    "data": {"train": [{"type": "messages", "path": "rows.jsonl"}]},
}
RL_BASE = {
    **BASE,
    "algorithm": {"type": "grpo"},
    "data": {"train": [{"type": "prompts", "path": "prompts.jsonl"}]},
    "rewards": {"functions": [{"type": "exact_match"}]},
}
PREFERENCE_BASE = {
    **BASE,
    "algorithm": {"type": "dpo"},
    "data": {"train": [{"type": "preference", "path": "pairs.jsonl"}]},
}
PREFERENCES = {"dpo", "ipo", "kto", "orpo", "simpo"}
RL_KEYS = {"rollout", "engine", "rewards", "reference", "debug"}
RL_SOURCES = {"prompts", "reasoning_gym"}


# Verbs whose commands are parsed and not run. scaffold would write to this checkout
# (tests/health/test_scaffold.py runs it in a copy), new and docs write elsewhere
# (tests/unit/test_new_recipes.py, test_documentation.py), and watch would wait for more
# (tests/health/test_cli_watch.py); the others need a model that is not in the repository, a
# keyboard, a port or a hub (tests/integration/test_generation.py, test_push.py).
PARSED = (
    "scaffold",
    "dev",
    "watch",
    "generate",
    "chat",
    "serve",
    "export",
    "push",
    "eval",
    "new",
    "docs",
    "dashboard",
)


def blocks(language: str) -> list[Any]:
    """Every fenced block of a language, named by its page and number."""
    found = []
    for page in PAGES:
        texts = [text for kind, text in FENCE.findall(page.read_text()) if kind == language]
        found += [pytest.param(text, id=f"{page.stem}-{n}") for n, text in enumerate(texts)]
    return found


def commands() -> list[Any]:
    found = {}
    for block in blocks("bash"):
        for line in block.values[0].splitlines():
            if line.strip() and not line.startswith("#"):
                # These take seconds: one of each kind is run by day, the others at night. Those of
                # many GPUs take longest; tests/integration/test_estimate_gpus.py plans by day.
                is_repeated = any(kind_of(line) == kind_of(other) for other in found)
                is_slow = kind_of(line) and (is_repeated or "--gpus" in line)
                marks = [pytest.mark.slow] if is_slow else []
                found.setdefault(line, pytest.param(line, id=line, marks=marks))
    return list(found.values())


def kind_of(line: str) -> tuple[str, ...]:
    """Return the verb, where it looks, and its options, of a command that looks at a whole run."""
    words = line.split()
    if len(words) < 3 or words[1] not in ("check", "inspect", "estimate"):
        return ()
    options = {word for word in words if word.startswith("--")}
    options = {"--gpus"} if "--gpus" in options else options
    return (words[1], words[2].partition("/")[0], *sorted(options))


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def fresh_pages() -> dict[str, str]:
    return load_generator().pages()


@pytest.fixture(scope="module")
def beside_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the guides have it: recipes/, runs/ with runs of SFT and RL, another's log."""
    folder = tmp_path_factory.mktemp("clone")
    rows = [{"loss": 2.0 - 0.1 * step, "grad_norm": 0.5, "epoch": 0.1 * step} for step in range(9)]
    (folder / "train.log").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    foreign = {"base_model": "m", "sequence_len": 64, "micro_batch_size": 2, "num_epochs": 1}
    (folder / "config.yaml").write_text(json.dumps(foreign), encoding="utf-8")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    raw = tiny.recipe(
        folder,
        name=SFT_RUN,
        runs_dir=str(folder / "runs"),
        observe={
            "console": "quiet",
            "report": True,
            "sinks": [{"type": "tensorboard"}],
            "profiler": {},
        },
        eval={"interval_steps": 2},
        checkpoint={"interval_steps": 2, "export": "every"},
    )
    raw["data"]["validation_share"] = 0.1
    runs.train(build_config(raw, [], file=None))
    first, second = (ROOT / "recipes" / f"{act}.yaml" for act in ACTS)
    own = [f"runs_dir={folder / 'runs'}", "observe.console=quiet"]
    made = runs.train(load_config(first, [*own, "trainer.max_steps=2"])).export
    small = ["trainer.max_steps=2", "rollout.prompts_per_step=8", f"model.path={made}"]
    runs.train(load_config(second, own + small))
    # Recipes that start from the first act name its last step.
    checkpoints = folder / "runs" / ACTS[0] / "checkpoints"
    (checkpoints / "step_00000025").symlink_to("step_00000002")
    return folder


@pytest.mark.parametrize(
    "name", ["config.md", "metrics.md", "events.md", "run_folder.md", "cli.md", "rules.md"]
)
def test_the_reference_is_fresh(name: str) -> None:
    fresh = fresh_pages()
    assert name in fresh
    stored = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert stored == fresh[name], "stale: run `make docs`"


def test_the_pages_of_the_rules_are_fresh() -> None:
    fresh = {name: text for name, text in fresh_pages().items() if "/" in name}
    stored = {
        f"rules/{file.name}": file.read_text(encoding="utf-8")
        for file in (ROOT / "docs" / "reference" / "rules").glob("*.md")
    }
    assert stored.keys() == fresh.keys(), "stale: run `make docs`"
    assert [name for name, text in fresh.items() if stored[name] != text] == []


def test_the_reference_has_no_other_pages() -> None:
    folder = ROOT / "docs" / "reference"
    files = (file for file in folder.rglob("*") if file.is_file())
    assert {file.relative_to(folder).as_posix() for file in files} == set(fresh_pages())


def test_every_key_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "config.md").read_text()
    # Both lists of sources share their tables.
    keys = {path.replace("data.validation[]", "data.train[]") for path, *_ in walk_keys(RunConfig)}
    assert not [path for path in sorted(keys) if f"| `{path}` |" not in page]


def test_a_run_writes_nothing_that_is_not_documented(beside_a_run: Path) -> None:
    known = {path.split("/")[0] for path in load_generator().RUN_FOLDER}
    written = {
        name: {entry.name for entry in (beside_a_run / "runs" / name).iterdir()}
        for name in (SFT_RUN, *ACTS)
    }
    assert {"tensorboard", "trace", "report.html", "checkpoints"} <= written[SFT_RUN]
    assert {"journal", "completions", "rewards.log"} <= written[ACTS[1]]
    assert set().union(*written.values()) <= known


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_is_a_recipe_or_a_part_of_one(text: str) -> None:
    raw, _ = parse_yaml(text, name="docs")
    build_config(fill(raw, base_of(raw)), [], file=None)


def base_of(raw: dict[str, Any]) -> dict[str, Any]:
    types = {source.get("type") for source in raw.get("data", {}).get("train", [])}
    algorithm = raw.get("algorithm", {}).get("type", "sft")
    # A plug-in's name does not say what it learns from, and its rows do.
    if algorithm in (*PREFERENCES, "reward_model") or "preference" in raw or "preference" in types:
        return PREFERENCE_BASE
    is_rl = algorithm != "sft" or bool(RL_KEYS & raw.keys() or RL_SOURCES & types)
    return RL_BASE if is_rl else BASE


@pytest.mark.parametrize("text", blocks("jsonl"))
def test_rows_can_be_trained_on(text: str) -> None:
    from homeostat.data.preferences import encode_labelled
    from homeostat.data.prompts import make_prompt
    from homeostat.data.rows import encode_row
    from homeostat.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(path=str(tiny.ASSETS / "tiny-chat")))
    sources = {
        "messages": MessagesSource(type="messages", path="x"),
        "completion": PromptCompletionSource(type="prompt_completion", path="x"),
        "text": TextSource(type="text", path="x"),
    }
    labelled = {
        "chosen": PreferenceSource(type="preference", path="x"),
        "label": UnpairedPreferenceSource(type="unpaired_preference", path="x"),
    }
    for line in text.splitlines():
        row = json.loads(line)
        source = next((source for column, source in labelled.items() if column in row), None)
        if source is not None:
            made = encode_labelled(row, source=source, tokenizer=tokenizer)
            assert all(weights_T.any() for (_, weights_T), _ in made)
            continue
        source = next((source for column, source in sources.items() if column in row), None)
        if source is None:
            prompts = PromptSource(type="prompts", path="x")
            assert make_prompt(row, 0, prompts, tokenizer).columns
            continue
        ((_, weights_T),) = encode_row(row, source=source, tokenizer=tokenizer)
        assert weights_T.any()


@pytest.mark.parametrize("text", blocks("python"))
def test_python_runs_beside_a_run(
    text: str,
    beside_a_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(beside_a_run)
    exec(compile(text, "docs", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("line", commands())
def test_a_command_does_what_is_said(
    line: str, beside_a_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(line)
    monkeypatch.chdir(beside_a_run)
    if words[0] == "homeostat":
        run_or_parse(words[1:])
    elif words[0] == "make":
        targets = re.findall(r"^([\w%-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets or any(fits(words[1], target) for target in targets)
    elif words[:2] == ["pip", "install"]:
        assert extras_of(words[-1]) <= set(known_extras())
    else:
        # The body of the curl line is a request of tests/integration/test_generation.py.
        assert words[0] in ("source", "python", "curl", "ssh"), "say here how this is checked"
        assert words[0] != "python" or (ROOT / words[-1]).is_file()


def run_or_parse(arguments: list[str]) -> None:
    if arguments[0] in PARSED:
        group: Any = typer.main.get_command(app)
        group.commands[arguments[0]].make_context(arguments[0], list(arguments[1:]))
        return
    if arguments[0] != "train":
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert result.output.strip()
        return
    command: Any = typer.main.get_command(app)
    command.commands["train"].make_context("train", list(arguments[1:]))
    recipe, *rest = arguments[1:]
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if Path(recipe).exists():
        load_config(recipe, overrides)
    else:
        build_config(BASE, overrides, file=None)


def fits(target: str, pattern: str) -> bool:
    return "%" in pattern and target.startswith(pattern.split("%")[0])


def extras_of(requirement: str) -> set[str]:
    match = re.search(r"\[(.*)\]", requirement)
    return set(match.group(1).split(",")) if match else set()


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def known_extras() -> dict[str, list[str]]:
    return project()["optional-dependencies"]


def test_every_dependency_has_its_reason() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    listed = [*project()["dependencies"], *(name for n in known_extras().values() for name in n)]
    names = {re.split(r"[\[<>=~! ]", name)[0] for name in listed} - {"homeostat"}
    assert not [name for name in sorted(names) if f"| `{name}` |" not in page]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    assert not [target for target in targets if not (page.parent / target).exists()]
