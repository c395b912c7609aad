"""Completions on disk: every row readable by any Parquet reader, and shown by `inspect`."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import resource
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from tests.support.rollouts import random_groups
from typer.testing import CliRunner, Result

from homeostat.cli.completions import show_step
from homeostat.cli.verbs import app
from homeostat.errors import HomeostatError, RunDirError
from homeostat.observe.completions import (
    best_and_worst,
    completion_steps,
    completions_file,
    read_completions,
    write_completions,
)
from homeostat.observe.report.page import write_report
from homeostat.types import Completion, Prompt, RolloutGroup, Sample, Segment, StopReason

TINY = Path(__file__).parents[2] / "recipes" / "assets" / "tiny-chat"
Group = list[tuple[str, float | None]]


def make_group(prompt_id: int, prompt: Any, answers: Group) -> RolloutGroup:
    """A group whose samples say `answers` and earn what stands beside them."""
    samples = []
    for text, reward in answers:
        size = len(text)
        parts = [
            Segment(np.arange(size), np.zeros(size, np.float32), policy_version=version)
            for version in (8, 7)
        ]
        stop = StopReason.LENGTH if text.endswith("...") else StopReason.STOP
        completion = Completion(f"{prompt_id}/{text}", tuple(parts), stop)
        samples.append(Sample(completion, text, {"exact_match": reward, "length": -0.5}, reward))
    columns = {"answer": "cba", "when": np.float32(1.5)}
    return RolloutGroup(Prompt(prompt_id, np.arange(3), prompt, columns), tuple(samples))


MESSAGES = [{"role": "system", "content": "brief"}, {"role": "user", "content": "turn \x1b abc"}]
GROUPS = [
    make_group(4, MESSAGES, [("cba", 1.0), ("abc", 0.0)]),
    make_group(9, "plain ö", [("no...", None), ("half", 0.25)]),
]
ADVANTAGES = [[0.5, -0.5], [None, 0.0]]


def write(folder: Path, step: int = 12, **options: Any) -> Path:
    return write_completions(folder, step, GROUPS, advantages=ADVANTAGES, **options)


def test_a_row_holds_where_it_is_from_what_it_says_and_what_it_earned(tmp_path):
    path = write(tmp_path / "completions")
    assert path == tmp_path / "completions" / "step_00000012.parquet"
    rows = read_completions(tmp_path / "completions")
    assert rows == pq.read_table(path).to_pylist()
    assert [(row["prompt_id"], row["group"], row["sample"]) for row in rows] == [
        (4, 0, 0), (4, 0, 1), (9, 1, 0), (9, 1, 1),
    ]  # fmt: skip
    assert {row["step"] for row in rows} == {12}
    first, cut = rows[0], rows[2]
    assert json.loads(first["prompt"]) == MESSAGES
    assert cut["prompt"] == "plain ö"
    assert json.loads(first["columns"]) == {"answer": "cba", "when": "1.5"}
    assert (first["completion"], first["num_tokens"], first["stop_reason"]) == ("cba", 6, "stop")
    assert (first["reward"], first["advantage"], first["policy_version"]) == (1.0, 0.5, 7)
    assert (first["reward/exact_match"], first["reward/length"]) == (1.0, -0.5)
    assert (cut["reward"], cut["advantage"], cut["reward/exact_match"]) == (None, None, None)
    assert cut["stop_reason"] == "length"


def test_text_of_a_reward_function_need_not_be_valid_unicode(tmp_path):
    group = make_group(4, "turn", [("cba", 1.0)])
    sample = replace(group.samples[0], extras={"judge/why": "half \ud83d of a pair"})
    write_completions(tmp_path, 1, [replace(group, samples=(sample,))], advantages=[[0.5]])
    (row,) = read_completions(tmp_path, 1)
    assert row["extra/judge/why"] == '"half \\ud83d of a pair"'


@pytest.mark.parametrize("seed", range(8))
def test_rollouts_of_any_shape_can_be_written(tmp_path, seed):
    groups = random_groups(np.random.default_rng(seed), seed)
    advantages = [[0.1] * len(group.samples) for group in groups]
    write_completions(tmp_path, 1, groups, advantages=advantages)
    rows = read_completions(tmp_path, 1)
    samples = [sample for group in groups for sample in group.samples]
    assert [row["num_tokens"] for row in rows] == [s.completion.num_policy_tokens for s in samples]
    for row, sample in zip(rows, samples, strict=True):
        for name, value in sample.rewards.items():
            found = row[f"reward/{name}"]
            assert found == value or (math.isnan(found) and math.isnan(value))


def test_differences_stand_beside_the_tokens_they_are_of(tmp_path):
    lengths = [[len(sample.completion) for sample in group.samples] for group in GROUPS]
    given = [
        [np.linspace(-1e-3, 2.0, n, dtype=np.float32) for n in of_group] for of_group in lengths
    ]
    given[0][0] = None
    write(tmp_path, logp_differences=given)
    rows = read_completions(tmp_path)
    samples = [sample for group in GROUPS for sample in group.samples]
    assert [row["token_ids"] for row in rows] == [s.completion.tokens_T.tolist() for s in samples]
    assert rows[0]["logp_difference"] is None
    for row, wanted in zip(
        rows[1:], [one for of_group in given for one in of_group][1:], strict=True
    ):
        np.testing.assert_allclose(row["logp_difference"], wanted, rtol=1e-3, atol=1e-7)


def test_max_rows_keeps_the_first(tmp_path):
    write(tmp_path, max_rows=3)
    assert [row["completion"] for row in read_completions(tmp_path)] == ["cba", "abc", "no..."]


def test_the_newest_step_is_read_by_default(tmp_path):
    for step in (3, 100, 20):
        write(tmp_path, step)
    (tmp_path / ".step_00000200.parquet.partial").touch()
    assert completion_steps(tmp_path) == [3, 20, 100]
    assert read_completions(tmp_path)[0]["step"] == 100
    assert read_completions(tmp_path, 3)[0]["step"] == 3
    with pytest.raises(RunDirError, match=r"of step 4\. Steps there: 3, 20, 100"):
        read_completions(tmp_path, 4)
    with pytest.raises(RunDirError, match="Only RL runs write them"):
        read_completions(tmp_path / "none")


def test_a_damaged_file_is_refused_by_name(tmp_path):
    path = write(tmp_path)
    whole, expected = path.read_bytes(), read_completions(tmp_path)
    rng = np.random.default_rng(2)
    for length in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(RunDirError, match=r"step_00000012\.parquet: not a whole Parquet file"):
            read_completions(tmp_path)
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for place in rng.integers(0, len(whole), 80):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with suppress(RunDirError):
            found = read_completions(tmp_path)
            # Parquet's footer, which names the columns, has no checksum.
            assert found == expected or place >= footer
    pq.write_table(pq.read_table(io.BytesIO(whole)).drop(["reward"]), path)
    with pytest.raises(RunDirError, match="no column 'reward'"):
        read_completions(tmp_path)


def test_what_cannot_be_listed_or_is_no_file_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "completions"
    folder.mkdir()
    # Reading a pipe would wait for its writer.
    os.mkfifo(completions_file(folder, 3))
    with pytest.raises(RunDirError, match=r"step_00000003\.parquet: is not a plain file"):
        read_completions(folder, 3)

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    # Not by the folder's permissions, which root ignores.
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(RunDirError, match=r"completions: cannot be read: Permission denied\."):
        completion_steps(folder)


def test_a_full_disk_is_an_os_error_and_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


def test_the_best_and_the_worst_never_overlap():
    rewards = [0.5, None, 1.0, 0.0, math.nan, 0.25]
    rows = [{"reward": reward} for reward in rewards]

    def chosen(n: int) -> tuple[list[float], list[float]]:
        best, worst = best_and_worst(rows, n)
        return [row["reward"] for row in best], [row["reward"] for row in worst]

    assert chosen(1) == ([1.0], [0.0])
    assert chosen(3) == ([1.0, 0.5, 0.25], [0.0])
    assert chosen(9) == ([1.0, 0.5, 0.25, 0.0], [])
    assert chosen(0) == ([], [])


def run_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    write(folder / "completions", 3)
    write(folder / "completions", 12)
    return folder


def inspect(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, (SystemExit, HomeostatError))
    return result


def test_inspect_shows_the_completions_of_a_run(tmp_path):
    output = inspect(run_folder(tmp_path)).output
    assert "step 12, prompt 4, group 0, sample 0" in output
    assert "user: turn \\x1b abc\ncba\nreward 1.000, exact_match 1.000, length -0.5" in output
    assert "advantage 0.5" in output
    assert "ended by stop" in output
    assert "4 of 2 prompts, 1 cut off" in output
    assert "\x1b" not in output
    assert "step 3, prompt 4" in inspect(tmp_path, "--step", 3).output


def test_a_prompt_that_is_no_chat_but_deeply_nested_is_shown_as_it_is(tmp_path):
    deep = '[{"a":' + "[" * 50_000
    group = make_group(4, deep, [("cba", 1.0), ("abc", 0.0)])
    folder = run_folder(tmp_path)
    write_completions(folder / "completions", 12, [group], advantages=[[0.5, -0.5]])
    (folder / "config.json").write_text('{"a":' * 50_000)
    assert deep[:50] in inspect(folder).output
    assert "[{&quot;a&quot;:[[[" in write_report(folder).read_text()


def test_inspect_colours_a_completion_by_its_advantage(tmp_path):
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", width=200, no_color=False
    )
    show_step(run_folder(tmp_path), None, console, num_rows=3, as_json=False)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[32mcba\x1b[0m" in output
    assert "\x1b[31mabc\x1b[0m" in output


def test_inspect_gives_completions_to_programs(tmp_path):
    found = json.loads(inspect(run_folder(tmp_path), "--rows", 1, "--format", "json").stdout)
    assert found["completions"] == 4
    assert [row["completion"] for row in found["best"]] == ["cba"]
    assert [row["completion"] for row in found["worst"]] == ["abc"]


def test_inspect_refuses_what_does_not_belong_together(tmp_path):
    run = run_folder(tmp_path / "run")
    assert "belong to a recipe" in str(inspect(run, "trainer.lr=1").exception)
    assert "belong to a recipe" in str(inspect(run, "--row-id", 1).exception)
    assert "not the folder of a run" in str(inspect(tmp_path).exception)
    assert "of step 5" in str(inspect(run, "--step", 5).exception)
    recipe = write_recipe(tmp_path, [{"prompt": "abc"}])
    assert "belongs to the folder of a run" in str(inspect(recipe, "--step", 5).exception)


def write_recipe(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"name: x\nmodel: {{path: {TINY}, init: random}}\nalgorithm: {{type: grpo}}\n"
        f"data: {{train: [{{type: prompts, path: {folder}/rows.jsonl}}]}}\n"
        "rewards: {functions: [{type: exact_match}]}\n"
    )
    return recipe


def test_inspect_shows_prompts_up_to_where_the_answer_begins(tmp_path):
    recipe = write_recipe(tmp_path, [{"prompt": "is it\x1b[31m in?", "answer": "the\n1"}])
    result = inspect(recipe)
    assert result.exit_code == 0, result.output
    shown = "user↵\nis it\\x1b[31m in?<|im_end|>↵\n<|im_start|>assistant↵\nanswer: the\\n1\n"
    assert shown in result.output
    assert "prompt 0" in result.output
    assert "1 prompts to train on" in result.output
    assert "updates" not in result.output
    found = json.loads(inspect(recipe, "--format", "json").stdout)
    assert found["rows"][0]["columns"] == {"answer": "the\\n1"}
    tokens = "".join(token["text"] for token in found["rows"][0]["tokens"])
    assert tokens.endswith("<|im_start|>assistant\n")


def test_inspect_tells_which_prompts_a_run_would_refuse(tmp_path):
    recipe = write_recipe(tmp_path, [{"prompt": "a"}] * 5 + [{"prompt": ""}, {"prompt": "b " * 99}])
    result = inspect(recipe, "data.max_length=60")
    assert result.exit_code == 1
    assert f"{tmp_path}/rows.jsonl:6: empty prompt" in result.output
    assert "only 5 of 7 rows are left (29% dropped). Raise data.max_length." in result.output
