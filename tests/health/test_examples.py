"""Training data is told from logs by its columns, whatever file it is in."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from homeostat.errors import DataError
from homeostat.health.readers import open_run, read_text
from homeostat.health.readers.files.examples import columns_of_examples
from homeostat.health.readers.input.source import HEAD_BYTES

Row = dict[str, Any]
TURNS = [{"role": "user", "content": "2 + 5"}, {"role": "assistant", "content": "7"}]
EXAMPLES: list[Row] = [
    {"prompt": "sort 3 1 2", "completion": "1 2 3"},
    {"prompt": "2 + 5 =", "completion": "7"},
    {"prompt": "12", "completion": "12", "label": True},
    {"messages": TURNS, "source": "mine"},
    {"conversations": TURNS},
    {"instruction": "Add.", "input": "2 5", "output": "7"},
    {"question": "How many?", "answer": 42, "id": 3},
    {"problem": "Add 2 and 5.", "solution": "7", "level": 3},
    {"prompt": "x", "chosen": "a", "rejected": "b"},
    {"prompt": "x", "chosen": TURNS, "rejected": TURNS, "score_chosen": 8.5, "score_rejected": 2.5},
    {"prompt": TURNS, "reward_model": {"style": "rule", "ground_truth": "42"}},
    {"text": "Once upon a time.", "url": "https://example.org", "language_score": 0.97, "id": "a"},
    {"text": "7"},
]
LOGS: list[Row] = [
    {"step": 1, "prompt": "2 + 5 =", "completion": "7", "reward": 1.0},
    {"prompt": "2 + 5 =", "completion": "7", "reward": 1.0},
    {"prompt": "2 + 5 =", "completion": "7", "rewards": {"accuracy": 1.0}},
    {"global_step": 1, "prompt": "2 + 5 =", "response": "7"},
    {"step": 1, "loss": 2.5, "text": "a sample"},
    {"epoch": 1, "accuracy": 0.5, "text": "a sample"},
    {"first_rate": 0.5, "second_rate": 0.25, "text": "a sample"},
    {"text": "step 1 loss 2.5", "record": {"level": "INFO"}},
    {"timestamp": "2026-11-16", "level": "INFO", "text": "step 1 loss 2.5"},
    {"prompt": 120, "completion": 300},
    {"input": 120, "output": 300},
    {"step": 1, "loss": 2.5},
]


def json_lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def indented_array(rows: Sequence[Row]) -> str:
    return json.dumps(list(rows), indent=2)


def below_a_key(rows: Sequence[Row]) -> str:
    return json.dumps({"version": "1.0", "data": list(rows)})


def columns(rows: Sequence[Row]) -> str:
    return json.dumps({name: [row[name] for row in rows] for name in rows[0]})


@pytest.mark.parametrize("row", EXAMPLES, ids=lambda row: ",".join(row))
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.jsonl", json_lines),
        ("rows.json", indented_array),
        ("rows.json", json_lines),
        ("rows.json", below_a_key),
        ("rows.json", columns),
    ],
)
def test_training_data_is_refused_with_its_columns(
    tmp_path: Path, row: Row, name: str, write: Callable[[Sequence[Row]], str]
) -> None:
    file = tmp_path / name
    file.write_text(write([row] * 20))
    with pytest.raises(DataError, match="looks like training data") as error:
        open_run(file)
    assert f"columns {', '.join(row)}." in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("sign", [",", "\t"])
def test_a_table_of_examples_is_refused_although_its_answers_are_digits(
    tmp_path: Path, sign: str
) -> None:
    text = io.StringIO()
    rows = [["id", "question", "answer"], *([n, f"What is\n{n} + {n}, please?", 2 * n] for n in
            range(30))]  # fmt: skip
    csv.writer(text, delimiter=sign).writerows(rows)
    file = tmp_path / ("quiz.csv" if sign == "," else "quiz.tsv")
    file.write_text(text.getvalue())
    with pytest.raises(DataError, match="columns id, question, answer"):
        open_run(file)


@pytest.mark.parametrize("row", LOGS, ids=lambda row: ",".join(row))
def test_rows_of_a_log_are_no_training_data(tmp_path: Path, row: Row) -> None:
    rows = [
        {name: value + n if name in ("step", "global_step", "epoch") else value
         for name, value in row.items()}
        for n in range(20)
    ]  # fmt: skip
    assert columns_of_examples(json_lines(rows).encode(), name="rows.jsonl") == ()
    (tmp_path / "rows.jsonl").write_text(json_lines(rows))
    open_run(tmp_path / "rows.jsonl")


def test_a_log_of_completions_with_rewards_is_read(tmp_path: Path) -> None:
    rows = [{"step": n, "prompt": "2 + 5 =", "completion": "7", "reward": n / 20} for n in
            range(1, 21)]  # fmt: skip
    (tmp_path / "log.jsonl").write_text(json_lines(rows))
    assert open_run(tmp_path / "log.jsonl").metrics["reward"].values[-1] == 1.0


def test_tables_of_metrics_with_texts_or_counts_of_tokens_are_read(tmp_path: Path) -> None:
    lines = ["step,loss,text", *(f"{n},{3 - n / 10},a sample" for n in range(1, 12))]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    assert len(open_run(tmp_path / "a.csv").metrics["train/loss"]) == 11
    counts = ["prompt,completion", *(f"{n},{300 + n}" for n in range(1, 12))]
    assert columns_of_examples("\n".join(counts).encode(), name="a.csv") == ()


def test_large_files_are_judged_by_their_beginning() -> None:
    text = json_lines([{"prompt": f"{n} + 1 =", "completion": str(n + 1)} for n in range(3_000)])
    head = text.encode()[:HEAD_BYTES]
    assert len(head) == HEAD_BYTES
    assert columns_of_examples(head, name="big.jsonl") == ("prompt", "completion")
    # A console log may begin with examples that the run prints.
    assert columns_of_examples(head, name="train.log") == ()
    array = json.dumps([{"prompt": f"{n} + 1 =", "completion": str(n + 1)} for n in range(3_000)])
    assert columns_of_examples(array.encode()[:HEAD_BYTES], name="big.json") != ()


def test_one_row_of_a_log_makes_the_file_a_log() -> None:
    rows = [*EXAMPLES[:1] * 5, {"step": 1, "loss": 2.0}]
    assert columns_of_examples(json_lines(rows).encode(), name="x.jsonl") == ()
    assert columns_of_examples(b'{"prompt": "a", "completion": "b"}\nstarted\n', name="x") == ()


def test_training_data_in_a_stream_is_refused() -> None:
    with pytest.raises(DataError, match="columns prompt, completion"):
        read_text(json_lines(EXAMPLES[:2]))
