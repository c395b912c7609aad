"""Recipes: strict, all problems at once, each with its place and the way out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from homeostat.config import RunConfig, load_config
from homeostat.config.combinations.check import find_length_conflicts
from homeostat.config.combinations.device import find_device_conflicts
from homeostat.config.loading.load import build_config
from homeostat.config.loading.resume import compare_configs
from homeostat.config.loading.schema import json_schema, known_keys, walk_keys
from homeostat.config.loading.yaml_file import parse_yaml
from homeostat.errors import ConfigError

MINIMAL = {
    "name": "a",
    "model": {"path": "m"},
    "data": {"train": [{"type": "text", "path": "x.jsonl"}]},
}


def build(*overrides: str, **changes: object) -> RunConfig:
    return build_config({**MINIMAL, **changes}, list(overrides), file=None)


def problems(*overrides: str, **changes: object) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        build(*overrides, **changes)
    return {problem.place: problem.render() for problem in caught.value.problems}


def test_defaults_make_a_whole_recipe() -> None:
    config = build()
    assert config.trainer.batch_rows == 32
    assert config.run_dir == Path("runs/a")


def test_numbers_words_and_truth_values_mean_what_they_look_like() -> None:
    text = "a: 1e-5\nb: on\nc: 2024-01-01\nd: 010\ne: true\nf: ~\ng: 1_000\nh: '3'"
    value, lines = parse_yaml(text, name="x")
    assert value == {
        "a": 1e-5, "b": "on", "c": "2024-01-01", "d": 10, "e": True, "f": None, "g": "1_000",
        "h": "3",
    }  # fmt: skip
    assert lines[("c",)] == 3


def test_values_are_never_coerced() -> None:
    found = problems("trainer.batch_rows='3'", "data.shuffle=1", "trainer.lr='x'")
    assert set(found) == {"trainer.batch_rows", "data.shuffle", "trainer.lr"}


def test_all_problems_of_a_file_are_reported_at_once_with_lines(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(
        "name: a\nmodel:\n  path: m\n  pth: n\ndata:\n  train:\n    - {type: messages, path: x, "
        "turn: all}\ntrainer:\n  lr: abc\n  epochs: 2\n  max_steps: 3\n  schedule: {type: cosin}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    text = str(caught.value)
    assert "r.yaml:4: model.pth: unknown key. Did you mean model.path?" in text
    assert "r.yaml:7: data.train.0.turn: unknown key. Did you mean data.train.0.turns?" in text
    assert "r.yaml:9: trainer.lr:" in text
    assert "there is no type 'cosin'. Did you mean cosine?" in text
    assert "trainer.epochs: trainer.max_steps is set too" in text


def test_what_the_command_line_says_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("name: a\nmodel: {path: m}\ndata: {train: [{type: text, path: x}]}\n")
    with pytest.raises(ConfigError, match=r"^command line: trainer\.lr: "):
        load_config(file, ["trainer.lr=abc"])


def test_a_key_in_the_wrong_place_is_pointed_to_the_right_one() -> None:
    assert "Did you mean trainer.lr?" in problems("lr=1e-4")["lr"]


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        (["trainer.epochs=1", "trainer.max_steps=1"], "trainer.epochs"),
        (["trainer.micro_batch_rows=2"], "trainer.micro_batch_rows"),
        (
            ["trainer.packing=false", "trainer.max_tokens_per_device=4096"],
            "trainer.max_tokens_per_device",
        ),
        (
            ["data.max_length=9000", "trainer.max_tokens_per_device=8192"],
            "trainer.max_tokens_per_device",
        ),
        (
            ["trainer.packing=false", "trainer.batch_rows=2", "trainer.micro_batch_rows=3"],
            "trainer.micro_batch_rows",
        ),
        (["trainer.max_steps=2", "observe.profiler={steps: [3]}"], "observe.profiler.steps"),
        (
            ["trainer.schedule={type: linear, warmup_steps: 1, warmup_share: 0.1}"],
            "trainer.schedule.warmup_share",
        ),
        (
            ["trainer.max_steps=2", "trainer.schedule={type: wsd, warmup_steps: 3}"],
            "trainer.schedule.warmup_steps",
        ),
        (
            ["data.validation_share=0.1", "data.validation=[{type: text, path: y}]"],
            "data.validation_share",
        ),
        (
            ["data.train=[{type: prompt_completion, path: y, chat: false, system: s}]"],
            "data.train.0.system",
        ),
        (["model.init=random", "model.path=x.gguf"], "model.init"),
        (["model.init=random", "lora={}"], "lora"),
        (["model.implementation=transformers", "model.attention=varlen"], "model.attention"),
        (["model.implementation=transformers", "model.meta_init=false"], "model.meta_init"),
        (["model.implementation=transformers", "model.path=x.gguf"], "model.implementation"),
        (["lora={targets: [all-linear, q_proj]}"], "lora.targets"),
        (["eval.patience=2"], "eval.patience"),
        (["checkpoint.load_step=2", "checkpoint.resume=never"], "checkpoint.load_step"),
        (
            ["trainer.on_nonfinite=halt", "trainer.max_nonfinite_steps=2"],
            "trainer.max_nonfinite_steps",
        ),
        (["checkpoint.export=off", "lora={export: merged}"], "lora.export"),
        (
            ["checkpoint.export=off", "checkpoint.max_shard_bytes=1GB"],
            "checkpoint.max_shard_bytes",
        ),
        (["lora={}", "checkpoint.max_shard_bytes=1GB"], "checkpoint.max_shard_bytes"),
        (["lora={publish: adapter}"], "lora.publish"),
        (["observe.precision_interval=5"], "observe.precision_interval"),
        (
            ["observe.sinks=[{type: wandb}, {type: tensorboard}, {type: wandb, project: b}]"],
            "observe.sinks.2",
        ),
        (["observe.sinks=[{type: tensorboard}, {type: tensorboard}]"], "observe.sinks.1"),
        (["observe.profiler={steps: [0]}"], "observe.profiler.steps.0"),
    ],
)
def test_combinations_that_cannot_work_are_refused(overrides: list[str], place: str) -> None:
    assert place in problems(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["observe.sinks=[{type: tensorboard}, {type: tensorboard, folder: b}, {type: wandb}]"],
        ["lora={export: merged}", "checkpoint.max_shard_bytes=1GB"],
        ["trainer.on_nonfinite=skip", "trainer.max_nonfinite_steps=2"],
        ["preset=debug", "trainer.max_steps=1"],
        ["trainer.epochs=1", "trainer.schedule={type: wsd, warmup_steps: 3}"],
    ],
)
def test_their_neighbours_that_work_are_accepted(overrides: list[str]) -> None:
    build(*overrides)


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ("trainer.precision=bf16", "model.numerics"),
        ("trainer.logits_chunk_bytes=64KiB", "trainer.logits_chunk_bytes"),
    ],
)
def test_invariant_numerics_have_limits_on_a_cpu_only(override: str, place: str) -> None:
    config = build_config(MINIMAL, ["model.numerics=invariant", override], file=None)
    assert [problem.place for problem in find_device_conflicts(config, device="cpu")] == [place]
    assert find_device_conflicts(config, device="cuda") == []


def test_what_lies_beyond_the_end_is_known_once_rows_are_counted() -> None:
    config = build(
        "trainer.schedule={type: wsd, warmup_steps: 3}", "observe.profiler={steps: [2, 4]}"
    )
    places = [problem.place for problem in find_length_conflicts(config, total_steps=2)]
    assert places == ["trainer.schedule.warmup_steps", "observe.profiler.steps"]
    assert find_length_conflicts(config, total_steps=4) == []


def test_presets_fill_in_and_give_way() -> None:
    config = build(preset="low_memory")
    assert config.trainer.gradient_checkpointing
    assert config.trainer.max_tokens_per_device == 2048
    assert build("preset=[low_memory]", "trainer.gradient_checkpointing=false").preset == (
        "low_memory",
    )
    longer = build("preset=low_memory", "data.max_length=4096")
    assert longer.trainer.max_tokens_per_device is None
    unpacked = build("preset=low_memory", "trainer.packing=false")
    assert "max_tokens_per_device" not in unpacked.trainer.model_fields_set
    assert "Did you mean low_memory?" in problems("preset=low_memry")["preset"]


@pytest.mark.parametrize("text", ["x", "=3", "a.b", "trainer.lr.x=1", "data.train.5.path=z"])
def test_bad_overrides_are_explained(text: str) -> None:
    assert problems(text)


@pytest.mark.parametrize(
    "text",
    [
        "a: [1", "a: &x [*x]", "a: !!python/object:os.system {}", "a: !!binary aGk=",
        "a: 1\na: 2", "? [1]\n: 2", "a: " + "[" * 60 + "]" * 60, "\x00", "- 1", "3",
        "a: &a [1,1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
        "c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\n"
        "e: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e,*e,*e]",
    ],
)  # fmt: skip
def test_hostile_yaml_is_refused_with_its_place(text: str, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"r\.yaml"):
        load_config(file)


def test_missing_binary_and_huge_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "h.yaml").write_bytes(b"#" * 2_000_000)
    for name in ("none.yaml", "b.yaml", "h.yaml", "."):
        with pytest.raises(ConfigError):
            load_config(tmp_path / name)


def test_sizes_may_be_written_with_units() -> None:
    assert build("checkpoint.max_bytes=20GB").checkpoint.max_bytes == 20 * 10**9
    assert build("trainer.logits_chunk_bytes=16MiB").trainer.logits_chunk_bytes == 16 * 2**20
    assert "checkpoint.max_bytes" in problems("checkpoint.max_bytes=lots")


def test_every_key_has_help_and_a_resume_class() -> None:
    for path, _, name, info in walk_keys(RunConfig):
        if name == "type":
            continue
        assert info.description, path
        assert isinstance(info.json_schema_extra, dict), path
        assert info.json_schema_extra["resume"] in ("free", "warn", "forbid"), path


def test_the_schema_describes_every_key() -> None:
    text = json.dumps(json_schema())
    for path in known_keys(RunConfig):
        assert f'"{path.split(".")[-1]}"' in text


def test_changes_are_classed_for_resume() -> None:
    old = build()
    new = build("trainer.batch_rows=8", "trainer.lr=1e-4", "observe.log_interval=5")
    classes = {change.path: change.resume for change in compare_configs(old, new)}
    assert classes == {
        "trainer.batch_rows": "forbid",
        "trainer.lr": "warn",
        "observe.log_interval": "free",
    }


def test_a_resolved_config_reads_back_equal() -> None:
    config = build("lora={rank: 4}", "observe.sinks=[{type: wandb}]", "trainer.max_steps=3")
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_every_recipe_parses() -> None:
    recipes = sorted(Path("recipes").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        load_config(recipe)
        assert yaml.safe_load(recipe.read_text())["name"] == recipe.stem


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 300, "/".join(["abc"] * 400)])
def test_a_path_that_no_disk_can_hold_is_refused_by_its_key(path: str) -> None:
    assert "model.path" in problems(model={"path": path})


def test_a_number_beyond_64_bits_is_refused_by_its_key() -> None:
    found = problems(trainer={"max_tokens_per_device": 10**60})
    assert "too large" in found["trainer.max_tokens_per_device"]


@pytest.mark.parametrize("part", ["\u00b2", "9" * 5000, "-1"])
def test_an_index_that_is_no_plain_number_is_explained(part: str) -> None:
    assert problems(f"data.train.{part}.path=x")
    assert problems(f"{part}=x")


def test_a_recipe_that_is_no_plain_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "r.yaml")
    with pytest.raises(ConfigError, match="plain file"):
        load_config(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    "data",
    [b"name: a\nb: \xff", b"name: a\nb: \0", b'name: a\nb: "\\uD800"', b'a: 1\n"\\uDFFF": 1'],
)
def test_characters_that_are_none_are_refused_with_their_line(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(data)
    with pytest.raises(ConfigError, match=r"r\.yaml:2: "):
        load_config(tmp_path / "r.yaml")


@pytest.mark.parametrize("depth", [33, 40, 300_000])
def test_brackets_nested_without_end_are_refused_where_they_are_too_deep(
    depth: int, tmp_path: Path
) -> None:
    (tmp_path / "r.yaml").write_text(f"data: {'[' * depth}{']' * depth}")
    with pytest.raises(ConfigError, match="nested deeper than 32 levels"):
        load_config(tmp_path / "r.yaml")


def test_an_override_nested_without_end_is_refused(tmp_path: Path) -> None:
    for name in (".".join(["a"] * 5000), "trainer." + ".".join(["0"] * 5000), "a" * 100_000):
        with pytest.raises(ConfigError) as caught:
            build_config({"name": "run"}, [f"{name}=1"], file=None)
        assert any("deeper" in p.message or "unknown" in p.message for p in caught.value.problems)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("trainer.batch_size=3", "trainer.batch_rows"),
        ("trainer.temperature=1", "rollout.temperature"),
        ("lr=1", "trainer.lr"),
        ("trainer.warmup_steps=3", "trainer.schedule.warmup_steps"),
    ],
)
def test_an_unknown_key_points_at_the_one_that_is_meant(override: str, meant: str) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "tiny_sort_grpo_cpu.yaml"
    with pytest.raises(ConfigError, match=rf"Did you mean {meant}\?"):
        load_config(recipe, [override])


def test_an_unknown_algorithm_is_the_only_problem() -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "tiny_sort_grpo_cpu.yaml"
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, ["algorithm.type=dqo"])
    assert [problem.place for problem in caught.value.problems] == ["algorithm.type"]


def test_a_name_with_dots_below_a_mapping_of_names_is_one_key() -> None:
    config = build("data.train.0.columns.messages.role=from", "health.options.RWD001.limit=3")
    assert config.data.train[0].columns == {"messages.role": "from"}  # type: ignore[union-attr]
    assert config.health.options == {"RWD001": {"limit": 3}}


def test_a_value_of_no_possible_type_is_one_problem_at_its_key() -> None:
    nested = {"train": [{**MINIMAL["data"]["train"][0], "columns": {"text": {"a": "b"}}}]}  # type: ignore[index]
    found = problems(data=nested)
    assert set(found) == {"data.train.0.columns.text"}
    assert "a valid string or a valid array" in found["data.train.0.columns.text"]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("algorithm=grpo", "command line: algorithm: .* Did you mean algorithm.type=grpo?"),
        ("cluster=ray", "command line: cluster: .* Did you mean cluster.type=ray?"),
        ("algorithm.type=null", "command line: algorithm.type: .* Choose one of sft, dpo, "),
        ("algorithm.low=1", "command line: algorithm.type: .* Choose one of sft, dpo, "),
        ("data.train=[a]", "command line: data.train.0.type: .* Choose one of messages, "),
    ],
)
def test_a_section_without_its_type_is_answered_with_the_types(override: str, hint: str) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "tiny_sort_grpo_cpu.yaml"
    raw = {
        key: value
        for key, value in yaml.safe_load(recipe.read_text()).items()
        if key != "algorithm"
    }
    with pytest.raises(ConfigError, match=hint):
        build_config(raw, [override], file="r.yaml")


def test_an_unknown_key_that_is_a_number_has_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("name: a\nmodel: {path: m}\ntrainer:\n  lr: 1.0\n  3: 4\n")
    with pytest.raises(ConfigError, match=r"r\.yaml:5: trainer\.3: unknown key"):
        load_config(tmp_path / "r.yaml")
