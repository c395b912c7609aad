"""A notebook is read as what its cells printed: tables, bars, streams and tracebacks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from homeostat.errors import DataError
from homeostat.health.diagnose import diagnose
from homeostat.health.finding import Level
from homeostat.health.readers import open_run, refuse_empty
from homeostat.health.registry import RULES
from homeostat.health.view import RunView
from homeostat.health.vital_signs.ending import ending_of

STAND_IN = "<IPython.core.display.HTML object>"


def html(*rows: tuple[str, ...], names: tuple[str, ...], at: int, of: int, epoch: str) -> str:
    """The HTML that the HF trainer draws in a notebook."""
    cells = "".join(
        "<tr>\n" + "".join(f"<td>{cell}</td>\n" for cell in row) + "</tr>" for row in rows
    )
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        f"<div>\n <progress value='{at}' max='{of}' style='width:300px;'></progress>\n"
        f"[{at:3d}/{of} 02:29 &lt; 10:16, 0.13 it/s{epoch}]\n</div>\n"
        f"<table border='1' class='dataframe'><thead><tr style='text-align: left;'>{head}</tr>"
        f"</thead><tbody>{cells}</tbody></table><p>"
    )


def drawn(text: str) -> dict[str, Any]:
    data = {"text/html": text.splitlines(keepends=True), "text/plain": [STAND_IN]}
    return {"output_type": "display_data", "data": data}


def stream(text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}


def read(tmp_path: Path, *outputs: dict[str, Any], indent: int | None = 1) -> RunView:
    code = {"cell_type": "code", "source": ["raise ValueError('CUDA out of memory')"]}
    cells = [{"cell_type": "markdown", "source": ["# CUDA out of memory"]}]
    cells.append({**code, "outputs": list(outputs)})
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}, indent=indent), encoding="utf-8")
    return open_run(path)


@pytest.mark.parametrize("indent", [1, None])
def test_the_trainers_table_and_its_bar(tmp_path: Path, indent: int | None) -> None:
    names = ("Step", "Training Loss", "reward", "completions / mean_length")
    rows = [(str(step), f"{2 / step:.6f}", "0.5", "17.25") for step in range(1, 31)]
    table = html(*rows, names=names, at=30, of=400, epoch=", Epoch 0.1/3")
    evaluated = html(names=(), at=7, of=9, epoch="")
    view = read(tmp_path, stream("Loading\n"), drawn(table), drawn(evaluated), indent=indent)
    loss, length = view.metrics["train/loss"], view.metrics["completions/mean_length"]
    assert loss.steps.tolist() == list(range(1, 31))
    assert loss.values[3] == 0.5
    assert set(length.values.tolist()) == {17.25}
    assert view.total_steps == 400
    assert ending_of(view).how.value == "open"


def test_columns_of_evaluations_have_the_names_that_transformers_logs(tmp_path: Path) -> None:
    names = ("Epoch", "Training Loss", "Validation Loss", "Nll Loss", "F1")
    rows = [(str(epoch), "No log", f"{epoch}.5", "0.25", "0.75") for epoch in range(1, 5)]
    view = read(tmp_path, drawn(html(*rows, names=names, at=4, of=4, epoch=", Epoch 4/4")))
    assert view.metrics["eval/loss"].values.tolist() == [1.5, 2.5, 3.5, 4.5]
    assert {"eval_nll_loss", "eval_f1"} <= set(view.metrics)
    assert "train/loss" not in view.metrics


def test_a_table_that_was_saved_each_time_it_grew_is_one_run(tmp_path: Path) -> None:
    names = ("Step", "Training Loss")
    rows = [(str(step), f"{step / 4}") for step in range(1, 9)]
    grown = [
        drawn(html(*rows[:count], names=names, at=count, of=8, epoch=", Epoch 1/1"))
        for count in (2, 5, 8)
    ]
    view = read(tmp_path, *grown)
    assert view.metrics["train/loss"].steps.tolist() == list(range(1, 9))
    assert view.total_steps == 8


def test_an_error_of_a_cell_is_found_and_its_code_is_not_read(tmp_path: Path) -> None:
    traceback = [
        "\x1b[0;31m-----\x1b[0m",
        "\x1b[0;31mValueError\x1b[0m      Traceback (most recent call last)",
        "\x1b[0;32m/tmp/ipykernel_1/2.py\x1b[0m in \x1b[0;36m<module>\x1b[0;34m()\x1b[0m",
        "\x1b[0;32m----> 1\x1b[0m build(\x1b[0;34m'x'\x1b[0m)",
        "\x1b[0;31mValueError\x1b[0m: Tokenizer class Frobnicator does not exist",
    ]
    error = {"output_type": "error", "ename": "ValueError", "evalue": "", "traceback": traceback}
    view = read(tmp_path, stream("start\n"), error)
    ending = ending_of(view)
    assert ending.how.value == "exception"
    assert "Frobnicator" in ending.words
    assert not view.log.has("out of memory")


def test_words_about_errors_in_a_run_that_finished_are_no_error(tmp_path: Path) -> None:
    names = ("Step", "Training Loss")
    rows = [(str(step), f"{2.5 - step / 40:.4f}") for step in range(1, 61)]
    said = (
        "Unsloth: Removed 9 samples. This prevents NaN loss during training.\n"
        "Passing `generation_config` together with arguments is deprecated; give one, not both; "
        "they are mutually exclusive.\n"
        "{% if x %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
        "\nException = '>' not supported between instances of 'int' and 'str'"
        "\nThe answer: two matrices of Incompatible shapes have no product.\n"
    )
    table = drawn(html(*rows, names=names, at=60, of=60, epoch=", Epoch 1/1"))
    view = read(tmp_path, stream(said), table, stream(said))
    assert [one.code for one in diagnose(view, RULES).findings if one.level is Level.ERROR] == []
    died = read(tmp_path, stream(said), table, stream("ValueError: Incompatible shapes: 3 and 4\n"))
    codes = [one.code for one in diagnose(died, RULES).findings if one.level is Level.ERROR]
    assert "ERR434" in codes


def test_odd_outputs_of_notebooks(tmp_path: Path) -> None:
    odd = [
        {"output_type": "stream"},
        {"output_type": "display_data", "data": {"text/plain": "<Figure size 640x480>"}},
        {"output_type": "display_data", "data": {"image/png": "iVBORw0KGgo="}},
        {"output_type": "display_data", "data": None},
        {"output_type": "execute_result", "data": {"text/plain": ["Trainer", "Output"]}},
        drawn("<style>loss: 3</style><b>bold</b> and <table><tr><td>1<td>2</table>"),
        {"output_type": "error", "traceback": None},
    ]
    view = read(tmp_path, *odd)
    assert [line.text for line in view.log.lines] == ["TrainerOutput", "bold and", "1 | 2"]
    nothing = read(tmp_path)
    with pytest.raises(DataError, match="is empty"):
        refuse_empty(nothing, name="train.ipynb")


@pytest.mark.parametrize("outputs", [5, {"a": 1}, None, [None, 3], [{"data": {"text/html": 7}}]])
def test_a_damaged_notebook_is_read_as_far_as_it_goes(tmp_path: Path, outputs: Any) -> None:
    cells = [None, 3, {"outputs": outputs}, {"outputs": [stream("CUDA out of memory")]}]
    path = tmp_path / "odd.ipynb"
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}), encoding="utf-8")
    assert [line.text for line in open_run(path).log.lines] == ["CUDA out of memory"]


@pytest.mark.parametrize("piece", ["<!--", "<a ", "<", "<td>", "</", "<![x ", "<?", "&", "[ 1/2 "])
def test_html_that_is_never_closed_takes_linear_time(tmp_path: Path, piece: str) -> None:
    start = time.process_time()
    read(tmp_path, drawn(piece * 50_000))
    assert time.process_time() - start < 5
