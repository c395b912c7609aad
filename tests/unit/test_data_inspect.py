"""`inspect` shows the very tokens and labels that are trained on, and says what is amiss."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from homeostat.algorithms.row_loss import row_loss
from homeostat.cli.inspect import inspect, printable, show
from homeostat.config import load_config
from homeostat.data.inspection import Inspection, inspect_rows
from homeostat.data.tokenizer import load_tokenizer

TINY = Path(__file__).parents[2] / "recipes" / "assets" / "tiny-chat"
GOOD = [
    {"role": "user", "content": "is it\x1b[31m in?"},
    {"role": "assistant", "content": "the wörld 🙂\nyou"},
]


def write_recipe(folder: Path, rows: list[Any]) -> Path:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"name: x\nmodel: {{path: {TINY}, init: random}}\n"
        f"data: {{train: [{{type: messages, path: {folder}/rows.jsonl}}]}}\n"
    )
    return recipe


def run(recipe: Path, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(inspect)
    result = CliRunner().invoke(app, [str(recipe), *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def look(recipe: Path, folder: Path) -> Inspection:
    config = load_config(recipe)
    tokenizer = load_tokenizer(config.model)
    loss = row_loss(config.algorithm, preference=config.preference, data=config.data)
    place = {"cache_dir": folder / "c", "num_rows": 3, "row_ids": []}
    return inspect_rows(config.for_inputs, tokenizer, loss=loss, **place)


def test_trained_spans_stand_in_brackets_without_colour(tmp_path):
    result = run(write_recipe(tmp_path, [GOOD]))
    assert result.exit_code == 0
    assert "⟦the wörld 🙂↵\nyou<|im_end|>⟧↵\n" in result.output
    assert "user↵\nis it\\x1b[31m in?<|im_end|>↵" in result.output
    assert "\x1b" not in result.output


def test_trained_tokens_are_coloured_where_there_is_colour(tmp_path):
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", width=200, no_color=False
    )
    show(look(write_recipe(tmp_path, [GOOD]), tmp_path), console)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "⟦" not in output
    on_green = re.findall("\x1b\\[[0-9;]*48;2;0;[0-9]+;0m([^\x1b]*)", output)
    assert "".join(on_green).startswith("the wörld 🙂↵")
    assert on_green[-1] == "<|im_end|>"
    assert "\x1b[31m" not in output.replace("\\x1b[31m", "")


def test_json_holds_every_token_with_its_weight(tmp_path):
    result = run(write_recipe(tmp_path, [GOOD, GOOD]), "--row-id", "1", "--format", "json")
    found = json.loads(result.stdout)
    (row,) = found["rows"]
    assert (row["row_id"], row["origin"]) == (1, f"{tmp_path}/rows.jsonl:2")
    trained = "".join(token["text"] for token in row["tokens"] if token["weight"] > 0)
    assert trained == "the wörld 🙂\nyou<|im_end|>"
    whole = "".join(token["text"] for token in row["tokens"])
    assert whole.startswith("<|im_start|>user\nis it")
    assert row["num_trained"] == sum(token["weight"] > 0 for token in row["tokens"])
    assert next(token["text"] for token in row["tokens"] if token["special"]) == "<|im_start|>"
    assert found["report"]["seen"] == sum(length["rows"] for length in found["lengths"]) == 2
    assert found["updates"][0]["rows"] == 2


def test_rows_that_training_would_refuse_are_told_and_the_exit_code_says_so(tmp_path):
    recipe = write_recipe(tmp_path, [GOOD, GOOD[:1], "nonsense", GOOD])
    result = run(recipe)
    assert result.exit_code == 1
    assert "2 of 4 rows cannot be used" in result.output
    assert f"{tmp_path}/rows.jsonl:2: trains on nothing" in result.output
    assert "only 2 of 4 rows are left (50% dropped)" in result.output
    assert run(recipe, "data.bad_rows=drop").exit_code == 0
    long = [GOOD[0], {"role": "assistant", "content": "q" * 500}]
    recipe = write_recipe(tmp_path, [GOOD] * 20 + [long])
    options = ["data.max_length=100", "data.overlong=refuse"]
    result = run(recipe, *options)
    assert result.exit_code == 1
    assert "1 rows are longer than data.max_length=100" in result.output
    assert "rows.jsonl:21" in result.output


def test_a_row_that_is_not_there_is_an_error(tmp_path):
    app = typer.Typer()
    app.command()(inspect)
    result = CliRunner().invoke(app, [str(write_recipe(tmp_path, [GOOD])), "--row-id", "9"])
    assert "from 0 to 0" in str(result.exception)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\nb", "a|\nb"), ("\t\r\x00", "\\t\\r\\x00"), ("\u202ex", "\\u202ex"), ("ö 🙂", "ö 🙂")],
)
def test_control_characters_never_reach_the_terminal(text, shown):
    assert printable(text, newline="|") == shown
