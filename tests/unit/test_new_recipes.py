"""`homeostat new`: recipes from answers, sized by the estimate; recipes that come along."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from tests.support import tiny
from typer.testing import CliRunner

from homeostat.authoring.draft import (
    Answers,
    DataFacts,
    Method,
    ModelFacts,
    Task,
    default_name,
    make_draft,
    source_of,
)
from homeostat.authoring.fitting import choose_fit
from homeostat.authoring.gpus import Gpus, find_gpus, parse_answer
from homeostat.cli.verbs import app
from homeostat.config.loading.beside import input_paths, placed
from homeostat.config.loading.load import load_config
from homeostat.config.model import ModelConfig
from homeostat.config.run import RunConfig
from homeostat.data.opening import kind_of
from homeostat.errors import ConfigError, DataError, HomeostatError, ModelError
from homeostat.generation.choice import Choice
from homeostat.generation.exporting import export_model
from homeostat.models.build import open_source
from homeostat.run.sizing.estimate import MemoryPlan
from homeostat.shipped import shipped_folder
from homeostat.train.estimating.estimate import UpdateMemory

PAIR = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
ROWS = {
    Task.SFT: {"question": "1+1", "answer": "2"},
    Task.RL: {"question": "1+1", "answer": "2"},
    Task.PREFERENCES: PAIR,
    Task.REWARD_MODEL: PAIR,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with 256 positions and real weights."""
    folder = tmp_path_factory.mktemp("model")
    tiny.write_model(folder / "shape", max_position_embeddings=256)
    choice = Choice(ModelConfig(path=str(folder / "shape"), init="random"))
    export_model(choice, folder / "whole")
    return folder / "whole"


@pytest.fixture
def place(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder outside of the repository with a small model."""
    (tmp_path / "model").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Terminal:
    """A standard input that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def write(file: Path, row: dict, count: int = 12) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(count)))


def new(*words: str) -> str:
    result = CliRunner().invoke(app, ["new", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    "task",
    [Task.SFT, *(pytest.param(t, marks=pytest.mark.slow) for t in Task if t is not Task.SFT)],
)
def test_a_recipe_of_each_task_passes_check(task: Task, place: Path) -> None:
    write(place / "rows.jsonl", ROWS[task])
    new("my.yaml", "--task", task, "--model", "model", "--data", "rows.jsonl")
    raw = yaml.safe_load((place / "my.yaml").read_text())
    assert raw["data"]["max_length"] + raw.get("rollout", {}).get("max_new_tokens", 0) == 256
    result = CliRunner().invoke(app, ["check", "my.yaml"])
    assert result.exit_code == 0, result.output
    assert "ready to train" in result.output


def plan_with(room: int):
    """An estimate that counts 8 bytes for each trained weight of 1000, and 1 for each token."""

    def plan(config: RunConfig) -> MemoryPlan:
        trained = 8000 if config.lora is None else 500
        held = 250 if config.model.quantization else 1000
        work = config.trainer.tokens_per_device // (
            2 if config.trainer.gradient_checkpointing else 1
        )
        parts = {"weights": held, "optimizer": trained, "gradients": 0, "reference": 0}
        return MemoryPlan("cpu", room, 0, UpdateMemory(**parts, work=work))

    return plan


QLORA = ["lora.rank=16", "model.quantization=nf4"]
SMALL = "trainer.max_tokens_per_device=256"


@pytest.mark.parametrize(
    ("room", "settings"),
    [
        (10**6, []),
        (9_000 + 1_100, ["trainer.max_tokens_per_device=1024"]),
        (9_000 + 200, [SMALL, "trainer.gradient_checkpointing=selective"]),
        (1_500 + 1_100, ["lora.rank=16", "trainer.max_tokens_per_device=1024"]),
        (750 + 300, [*QLORA, SMALL]),
    ],
)
def test_the_first_method_that_fits_is_taken(room: int, settings: list[str]) -> None:
    raw = {
        "name": "x", "model": {"path": "m"},
        "data": {"train": [{"type": "text", "path": "d"}], "max_length": 256},
    }  # fmt: skip
    fit = choose_fit(raw, plan_with(room), method=Method.AUTO, may_offload=False)
    assert fit.plan.fits
    assert fit.changes == settings
    assert not choose_fit(raw, plan_with(100), method=Method.AUTO, may_offload=False).plan.fits


@pytest.mark.slow
def test_too_little_memory_becomes_an_adapter(place: Path) -> None:
    write(place / "rows.jsonl", ROWS[Task.SFT])
    words = ("--task", "sft", "--model", "model", "--data", "rows.jsonl", "--memory")
    new("roomy.yaml", *words, "24GiB")
    assert "lora" not in yaml.safe_load((place / "roomy.yaml").read_text())
    shown = new("tight.yaml", *words, "540KB")
    text = (place / "tight.yaml").read_text()
    assert yaml.safe_load(text)["lora"] == {"rank": 16}
    assert "all weights would need" in text
    assert "all weights: about" in shown
    new("full.yaml", *words, "500KB", "--method", "full")
    assert "LOOK: nothing that was tried fits" in (place / "full.yaml").read_text()


def test_gpus_are_known_by_name_or_by_their_memory() -> None:
    assert find_gpus("NVIDIA GeForce RTX 4090", None, 1) == Gpus(24564 * 2**20, 1, "rtx4090")
    assert find_gpus("A100 80GB", None, 2) == Gpus(81920 * 2**20, 2, "a100-80")
    assert find_gpus(None, "141GB", 1) == Gpus(141 * 10**9)
    assert find_gpus(None, None, 1) is None
    assert Gpus(24 * 2**30, 4).describe() == "4 x GPU with 24 GiB"
    assert (parse_answer(" 24 GB "), parse_answer("h100")) == ((None, "24 GB"), ("h100", None))
    for name, memory, count, words in [
        ("h300", None, 1, "Did you mean h"),
        ("h100", "80GB", 1, "Leave one of the two out"),
        (None, None, 2, "Add --gpu NAME or --memory SIZE"),
        (None, "much", 1, "is not a size"),
    ]:
        with pytest.raises(ConfigError, match=words):
            find_gpus(name, memory, count)


def test_several_gpus_become_ranks(place: Path) -> None:
    words = ("--task", "rl", "--model", "some/model", "--data", "some/rows", "--gpu", "h100")
    new(*words, "--gpus", "4")
    config = load_config("recipe.yaml")
    assert (config.cluster.type, config.cluster.processes) == ("torchrun", 4)
    assert config.trainer.backend.type == "fsdp"
    assert config.engine.own_process
    with pytest.raises(ConfigError, match="exclude each other"):
        new("other.yaml", *words, "--device", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("task", [Task.SFT, Task.RL])
def test_a_recipe_for_several_gpus_passes_check(task: Task, place: Path) -> None:
    write(place / "rows.jsonl", ROWS[task])
    words = ("--task", task, "--model", "model", "--data", "rows.jsonl", "--method", "full")
    one = new("one.yaml", *words, "--memory", "1GB")
    two = new("two.yaml", *words, "--memory", "1GB", "--gpus", "2")
    assert "2 x GPU with" in two
    # A rank holds half of the weights and of the optimizer's state.
    whole, half = (float(told.partition("about ")[2].split()[0]) for told in (one, two))
    assert task is Task.RL or half < whole
    result = CliRunner().invoke(app, ["check", "two.yaml"])
    assert result.exit_code == 0, result.output


def test_a_recipe_in_another_folder_finds_its_files(place: Path) -> None:
    write(place / "rows.jsonl", ROWS[Task.SFT])
    new("deep/er/my.yaml", "--task", "sft", "--model", "model", "--data", "rows.jsonl")
    raw = yaml.safe_load((place / "deep/er/my.yaml").read_text())
    assert raw["model"]["path"] == "../../model"
    config = load_config("deep/er/my.yaml")
    assert Path(config.model.path).samefile(place / "model")
    assert Path(config.data.train[0].path).samefile(place / "rows.jsonl")


def test_nothing_is_asked_where_no_one_answers(place: Path) -> None:
    with pytest.raises(HomeostatError, match="--model, --data: needed"):
        new("--task", "sft")
    (place / "recipe.yaml").touch()
    with pytest.raises(HomeostatError, match="exists already"):
        new("--task", "sft", "--model", "m", "--data", "d")


def test_a_model_that_is_elsewhere_gives_a_recipe_with_a_remark(place: Path) -> None:
    new("--task", "sft", "--model", "some/model", "--data", "some/rows", "--method", "qlora")
    text = (place / "recipe.yaml").read_text()
    assert "not estimated: some/model and some/rows could not be found on this" in text
    config = load_config("recipe.yaml")
    assert config.lora is not None
    assert config.model.quantization == "nf4"


def test_rows_are_read_even_if_the_model_is_elsewhere(place: Path) -> None:
    write(place / "rows.jsonl", ROWS[Task.SFT])
    new("my.yaml", "--task", "sft", "--model", "some/model", "--data", "rows.jsonl")
    text = (place / "my.yaml").read_text()
    assert "not on this disk" not in text
    assert yaml.safe_load(text)["data"]["train"][0]["columns"] == {
        "prompt": "question",
        "completion": "answer",
    }


def test_a_question_lists_its_choices_once_and_is_asked_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place / "rows.jsonl", ROWS[Task.SFT])
    monkeypatch.setattr("homeostat.cli.new.sys", SimpleNamespace(stdin=Terminal()))
    typed = "sft\nsome/model\nrows.jsonl\nh1000\nh100\n"
    result = CliRunner().invoke(app, ["new", "my.yaml"], input=typed, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.output.count("reward_model") == 1
    assert "'h1000' is not known" in result.output
    assert result.output.count("GPU to plan for") == 2


def test_the_demo_brings_its_files_along(place: Path) -> None:
    new("--demo")
    config = load_config("recipes/tiny_sort_sft_cpu.yaml")
    assert Path(config.model.path, "tokenizer.json").is_file()
    assert Path(config.data.train[0].path).is_file()
    new("--demo")
    (place / "recipes" / "tiny_sort_sft_cpu.yaml").write_text("name: mine\n")
    with pytest.raises(HomeostatError, match="exists already"):
        new("--demo")
    with pytest.raises(HomeostatError, match="Did you mean tiny_sort_dpo_cpu"):
        new("--example", "tiny_sort_dpo")


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["mine.yaml", "--demo"], "RECIPE"),
        (["--demo", "--task", "rl"], "--task"),
        (["--demo", "--example", "tiny_sort_dpo_cpu"], "--example"),
        (["--example", "tiny_sort_dpo_cpu", "--name", "mine"], "--name"),
    ],
)
def test_what_a_copied_recipe_cannot_follow_is_refused(
    words: list[str], refused: str, place: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{refused}: .*finished recipes"):
        new(*words)
    assert not (place / "recipes").exists()


def test_every_recipe_that_comes_along_can_be_copied_whole(tmp_path: Path) -> None:
    from homeostat.authoring.examples import copy_examples, example_names

    recipes = shipped_folder("recipes")
    for file in copy_examples(recipes, example_names(recipes), tmp_path):
        raw = yaml.safe_load(file.read_text())
        inside = [path for path in input_paths(raw) if path.startswith("assets/")]
        assert all((tmp_path / path).exists() for path in inside)
    assert not list(tmp_path.rglob("*.py"))


def test_columns_decide_what_the_rows_are() -> None:
    chat = [{"role": "user", "content": "a"}]
    assert source_of(Task.SFT, {"messages": chat}) == {"type": "messages"}
    assert source_of(Task.SFT, {"instruction": "a", "input": "b", "output": "c"}) == {
        "type": "prompt_completion",
        "columns": {"prompt": ["instruction", "input"], "completion": "output"},
    }
    assert source_of(Task.SFT, None) == {}, "recognised when the rows are read"
    assert source_of(Task.SFT, {"text": "a"}) == {"type": "text"}
    assert source_of(Task.SFT, {"prompt": "a", "completion": "b"}) == {"type": "prompt_completion"}
    assert source_of(Task.PREFERENCES, {"prompt": "a", "completion": "b", "label": True}) == {
        "type": "unpaired_preference"
    }
    with pytest.raises(DataError, match="these have one, two"):
        source_of(Task.SFT, {"one": 1, "two": 2})
    draft = make_draft(
        Answers(Task.PREFERENCES, "m", "d"),
        DataFacts({"prompt": "a", "completion": "b", "label": True}, 1000),
        ModelFacts(),
        folder=Path(),
    )
    assert draft.raw["algorithm"] == {"type": "kto"}
    assert draft.raw["data"]["validation_share"] == 0.05
    assert "chat" not in draft.raw["data"]["train"][0]
    rows = DataFacts({"prompt": "a", "completion": "b"}, 10)
    base = ModelFacts(has_chat_template=False)
    plain = make_draft(Answers(Task.SFT, "m", "d"), rows, base, folder=Path())
    assert plain.raw["data"]["train"][0]["chat"] is False
    assert default_name(Answers(Task.RL, "org/My Model!", "d")) == "my_model_rl"


def test_a_reward_is_a_name_or_a_function(place: Path) -> None:
    (place / "score.py").write_text("def right(completions, **_):\n    return [1.0]\n")
    words = ("--task", "rl", "--model", "m", "--data", "d", "--reward")
    new("a.yaml", *words, "score.py:right")
    assert load_config("a.yaml").rewards.functions[0].path == "score.py:right"
    with pytest.raises(ConfigError, match="neither a built-in reward"):
        new("b.yaml", *words, "right")
    with pytest.raises(ConfigError, match="sft has no rewards"):
        new("c.yaml", "--task", "sft", "--model", "m", "--data", "d", "--reward", "exact_match")


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"answer": "2"}, None),
        ({"solution": "2"}, "solution"),
        ({"ground_truth": "2", "target": "3"}, "ground_truth"),
        ({"reply": "2"}, "answer"),
    ],
)
def test_the_reward_names_the_column_of_the_right_answers(
    columns: dict, named: str | None, tmp_path: Path
) -> None:
    facts = DataFacts({"prompt": "1+1", **columns}, 1)
    draft = make_draft(
        Answers(Task.RL, "m", "d", "exact_match"), facts, ModelFacts(), folder=tmp_path
    )
    assert draft.raw["rewards"]["functions"][0].get("column") == named
    assert ("no such column" in draft.render(header=[])) == ("reply" in columns)


def test_files_are_looked_for_beside_the_recipe_first(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "score.py").touch()
    (tmp_path / "runs").mkdir()
    raw = {
        "runs_dir": "runs",
        "model": {"path": "elsewhere"},
        "data": {"train": [{"path": "rows.jsonl"}]},
        "rewards": {"functions": [{"path": "score.py:f", "options": {"path": "rows.jsonl"}}]},
    }
    found = placed(raw, tmp_path)
    assert found["data"]["train"][0]["path"] == str(tmp_path / "rows.jsonl")
    assert found["rewards"]["functions"][0] == {
        "path": f"{tmp_path / 'score.py'}:f",
        "options": {"path": "rows.jsonl"},
    }
    assert (found["runs_dir"], found["model"]["path"]) == ("runs", "elsewhere")


def test_a_file_that_is_not_there_is_named_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as model:
        open_source(ModelConfig(path="deep/er"))
    assert str(model.value).startswith(f"model.path: {tmp_path / 'deep' / 'er'} does not exist.")
    assert "beside the recipe, then in the folder" in str(model.value)
    with pytest.raises(DataError) as rows:
        kind_of(str(tmp_path / "rows.jsonl"))
    assert str(rows.value) == f"{tmp_path / 'rows.jsonl'} does not exist."
