"""Files that can only be read forwards, folders with splits, renamed columns, recognised rows."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import tiny

from homeostat.config.combinations.source import find_words_of_two_roles
from homeostat.config.data import (
    MessagesSource,
    PromptCompletionSource,
    PromptSource,
    TextSource,
)
from homeostat.config.kind import RunKind
from homeostat.data.column_map import MappedRows
from homeostat.data.dataset_folder import choose_files
from homeostat.data.opening import open_rows, open_source
from homeostat.data.recognise import recognise
from homeostat.data.rows import encode_row
from homeostat.data.sources import BadRowError
from homeostat.data.tokenizer import load_tokenizer
from homeostat.errors import DataError

ROWS = [{"prompt": f"say {n}", "completion": f"{n}, gladly\nand again"} for n in range(30)]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"\n\n".join(json.dumps(row).encode() for row in rows) + b"\n"


def write(folder: Path, name: str, rows: list[dict[str, Any]] = ROWS) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    plain = file.with_name("plain")
    if ".csv" in name or ".tsv" in name:
        with plain.open("w", newline="", encoding="utf-8-sig") as out:
            table = csv.DictWriter(out, rows[0].keys(), delimiter="\t" if "tsv" in name else ",")
            table.writeheader()
            table.writerows(rows)
    else:
        plain.write_bytes(lines(rows))
    content = plain.read_bytes()
    plain.unlink()
    if name.endswith(".gz"):
        content = gzip.compress(content)
    if name.endswith(".zst"):
        # Two frames: what a tool that appends leaves behind.
        codec, half = pa.Codec("zstd"), len(content) // 2
        parts = (content[:half], content[half:])
        content = b"".join(codec.compress(part, asbytes=True) for part in parts)
    file.write_bytes(content)
    return file


FORWARD = ["a.csv", "a.tsv", "a.csv.gz", "a.csv.zst", "a.jsonl.gz", "a.jsonl.zst", "a.json.gz"]


@pytest.mark.parametrize("name", FORWARD)
def test_packed_lines_and_tables_give_the_rows_in_any_order(tmp_path: Path, name: str) -> None:
    rows = open_rows(str(write(tmp_path, name)), columns=["prompt", "completion"])
    assert [rows.row(index) for index in range(len(rows))] == ROWS
    assert [rows.row(index) for index in (7, 2, 2, 29)] == [ROWS[7], ROWS[2], ROWS[2], ROWS[29]]
    copy = pickle.loads(pickle.dumps(rows))
    assert copy.row(3) == ROWS[3]


def test_rows_of_a_table_are_found_by_their_lines(tmp_path: Path) -> None:
    rows = open_rows(str(write(tmp_path, "a.jsonl.gz")), columns=None)
    assert [rows.number(index) for index in range(3)] == [1, 3, 5]
    (tmp_path / "b.csv").write_text('a,b\n"1\n2",x\n3\n,y\n')
    rows = open_rows(str(tmp_path / "b.csv"), columns=None)
    assert rows.row(0) == {"a": "1\n2", "b": "x"}
    assert rows.number(0) == 3
    with pytest.raises(BadRowError, match="1 cells, and the first line names 2 columns"):
        rows.row(1)
    assert rows.row(2) == {"a": None, "b": "y"}


def test_a_cell_may_be_longer_than_the_csv_module_allows_by_itself(tmp_path: Path) -> None:
    file = write(tmp_path, "a.csv", [{"text": "x" * 300_000}])
    assert len(open_rows(str(file), columns=None).row(0)["text"]) == 300_000


@given(st.binary(max_size=60), st.sampled_from([".csv", ".jsonl.gz", ".jsonl.zst", ".csv.gz"]))
def test_whatever_the_bytes_only_data_errors_come_out(content: bytes, suffix: str) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        with contextlib.suppress(DataError):
            rows = open_rows(file.name, columns=None)
            for index in range(len(rows)):
                with contextlib.suppress(BadRowError):
                    rows.row(index)


README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-*]
- config_name: socratic
  data_files: socratic/**
---
# A dataset
"""
HUB_FILES = ["README.md", "main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet",
             "main/test-00000-of-00001.parquet", "socratic/deep/a.jsonl", "main/x.py"]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "readme", "config", "split", "expected"),
    [
        (HUB_FILES, README, "main", "train", HUB_FILES[1:3]),
        (HUB_FILES, README, "main", "test", HUB_FILES[3:4]),
        (HUB_FILES, README, "socratic", None, HUB_FILES[4:5]),
        (HUB_FILES, None, "main", "test", HUB_FILES[3:4]),
        (["data/train.jsonl", "data/val.jsonl"], None, None, "validation", ["data/val.jsonl"]),
        (["train.csv", "train.jsonl.gz", "train.parquet", "train2.csv"], None, None, "train",
         ["train.parquet", "train2.csv"]),
        (["train/eval_like.jsonl", "test/a.jsonl"], None, None, "train", ["train/eval_like.jsonl"]),
        (["default/train/0000.parquet", "default/odd/0000.parquet"], None, "default", "odd",
         ["default/odd/0000.parquet"]),
        (["data/train_sft-00000-of-00001.parquet"], None, None, None,
         ["data/train_sft-00000-of-00001.parquet"]),
        (["b.csv.gz", "a.jsonl", ".git/x.json", "dataset_infos.json"], None, None, "train",
         ["a.jsonl", "b.csv.gz"]),
        (["a.jsonl"], "---\nlicense: mit\n---\n", None, None, ["a.jsonl"]),
    ],
)  # fmt: skip
def test_the_files_of_a_split_are_chosen(names, readme, config, split, expected) -> None:
    chosen = choose_files(names, readme, config=config, split=split, place="d", default="train")
    assert list(chosen.files) == expected


@pytest.mark.parametrize(
    ("names", "readme", "how", "message"),
    [
        (HUB_FILES, README, {}, "several configurations. Set config to one of: main, socratic"),
        (HUB_FILES, README, {"config": "x"}, "no configuration is named 'x'. There are: main"),
        (HUB_FILES, README, {"config": "main", "split": "dev"}, "There are: train, test"),
        (HUB_FILES, None, {"config": "x"}, "There are: main, socratic"),
        (["train.jsonl", "test.jsonl"], None, {"default": "validation"}, "one of: test, train"),
        (["a.py"], None, {}, "no file of a known kind"),
        (["a.jsonl"], "---\n{: \n---\n", {}, "the header of README.md cannot be read"),
    ],
)
def test_a_split_that_is_not_there_is_refused_with_those_that_are(
    names, readme, how, message
) -> None:
    given = {"config": None, "split": None, "place": "d", **how}
    with pytest.raises(DataError, match=f"d.*{message}"):
        choose_files(names, readme, **given)


def test_a_folder_is_read_as_one_sequence_of_rows(tmp_path: Path) -> None:
    write(tmp_path, "data/train-00000-of-00002.jsonl", ROWS[:10])
    write(tmp_path, "data/train-00001-of-00002.jsonl.gz", ROWS[10:])
    write(tmp_path, "data/test-00000-of-00001.csv", ROWS[:3])
    rows = open_rows(str(tmp_path), columns=None, split="train")
    assert [rows.row(index) for index in range(len(rows))] == ROWS
    assert rows.brackets == (f"{tmp_path}[", "]")
    assert len(open_rows(str(tmp_path), columns=None, split="test")) == 3
    with pytest.raises(DataError, match="set split to one of: test, train"):
        open_rows(str(tmp_path), columns=None)
    with pytest.raises(DataError, match="split is set, but a single file cannot have one"):
        open_rows(str(tmp_path / "data/test-00000-of-00001.csv"), columns=None, split="test")


class Some:
    """Rows in memory."""

    brackets = ("rows[", "]")

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def number(self, index: int) -> int:
        return index

    def row(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def test_columns_are_renamed_and_joined() -> None:
    row = {"instruction": "add", "input": "", "more": "1 2", "output": "3", "id": 7}
    mapping = {"prompt": ("instruction", "input", "more"), "completion": "output"}
    found = MappedRows(Some(row), mapping).row(0)
    assert found == {"prompt": "add\n\n1 2", "completion": "3", "id": 7}
    with pytest.raises(BadRowError, match="column 'id' holds a int"):
        MappedRows(Some(row), {"prompt": ("instruction", "id")}).row(0)


def test_messages_get_the_usual_keys_and_roles() -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho", "weight": 0.5}]
    mapping = {"messages": "talk", "messages.role": "from", "messages.content": "value"}
    found = MappedRows(Some({"talk": turns}, {"talk": [{"from": "elf", "value": ""}]}), mapping)
    assert found.row(0)["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho", "weight": 0.5},
    ]
    with pytest.raises(BadRowError, match="'elf' is not a known name"):
        found.row(1)


def test_words_for_roles_are_named_beside_the_usual_ones() -> None:
    turns = [{"role": "Caller", "content": "hi"}, {"role": "user", "content": "you"}]
    mapping = {"messages.user": "caller", "messages.assistant": ("agent", "model")}
    found = MappedRows(Some({"messages": turns}, {"messages": [{"role": "elf"}]}), mapping)
    assert [turn["role"] for turn in found.row(0)["messages"]] == ["user", "user"]
    with pytest.raises(BadRowError, match=r"Add it to columns, for example {messages.user: \[elf"):
        found.row(1)
    twice = {"messages.user": ("caller",), "messages.tool": ("Caller",)}
    source = MessagesSource(type="messages", path="a.jsonl", columns=twice)
    (problem,) = find_words_of_two_roles("data.train.0", source)
    assert "'Caller' is also listed under messages.user" in problem.message


def test_a_wrong_column_is_reported_once_with_those_that_there_are(tmp_path: Path) -> None:
    file = write(tmp_path, "a.jsonl")
    message = r"no column is named 'text'\. Its columns: prompt, completion\. Name the right ones"
    with pytest.raises(DataError, match=message):
        open_source(TextSource(type="text", path=str(file)), columns=["text"])
    renamed = TextSource(type="text", path=str(file), columns={"text": "completion"})
    assert open_source(renamed, columns=["text"]).row(0)["text"] == ROWS[0]["completion"]
    asked = PromptSource(type="prompts", path=str(file), columns={"prompt": "question"})
    with pytest.raises(DataError, match="no column is named 'question'"):
        open_source(asked, columns=None, required=["prompt"])


CHAT = [{"role": "user", "content": "hi"}]
TALK = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
SHAREGPT = {"messages.role": "from", "messages.content": "value"}


@pytest.mark.parametrize(
    ("kind", "row", "expected", "columns"),
    [
        ("sft", {"messages": CHAT}, "messages", {}),
        ("sft", {"conversations": TALK}, "messages", {"messages": "conversations", **SHAREGPT}),
        ("sft", {"conversations": CHAT}, "messages", {"messages": "conversations"}),
        ("sft", {"prompt": "a", "completion": "b"}, "prompt_completion", {}),
        ("sft", {"prompt": CHAT, "completion": CHAT}, "prompt_completion", {}),
        ("sft", {"instruction": "a", "input": "", "output": "b", "text": "ab"},
         "prompt_completion", {"prompt": ("instruction", "input"), "completion": "output"}),
        ("sft", {"instruction": "a", "input": "b", "response": "c"}, "prompt_completion",
         {"prompt": ("instruction", "input"), "completion": "response"}),
        ("sft", {"question": "a", "answer": "b"}, "prompt_completion",
         {"prompt": "question", "completion": "answer"}),
        ("sft", {"text": "a"}, "text", {}),
        ("sft", {"chosen": "a", "rejected": "b"}, None, {}),
        ("preference", {"prompt": "q", "chosen": "a", "rejected": "b"}, "preference", {}),
        ("preference", {"chosen": CHAT, "rejected": CHAT}, "preference", {}),
        ("preference", {"question": "q", "chosen": "a", "rejected": "b"}, "preference",
         {"prompt": "question"}),
        ("preference", {"instruction": "a", "input": "b", "chosen": "c", "rejected": "d"},
         "preference", {"prompt": ("instruction", "input")}),
        ("preference", {"chosen": TALK, "rejected": TALK}, "preference", SHAREGPT),
        ("preference", {"prompt": "q", "completion": "a", "label": True},
         "unpaired_preference", {}),
        ("reward_model", {"prompt": "q", "completion": "a", "score": 0.5}, "scored", {}),
        ("rl", {"question": "q", "answer": "4"}, "prompts", {"prompt": "question"}),
        ("rl", {"instruction": "a", "input": "b", "output": "c"}, "prompts",
         {"prompt": ("instruction", "input")}),
        ("rl", {"prompt": CHAT, "answer": "4"}, "prompts", {}),
        ("rl", {"answer": "4"}, None, {}),
    ],
)  # fmt: skip
def test_rows_are_recognised_by_their_columns(kind, row, expected, columns) -> None:
    found = recognise(row, kind=RunKind(kind))
    assert (found.type if found else None) == expected
    assert (found.columns if found else {}) == columns


def test_the_tools_of_a_chat_are_recognised_too() -> None:
    for row in ({"messages": CHAT, "tools": [{}]}, {"conversations": TALK, "tools": "[]"}):
        found = recognise(row, kind=RunKind.SFT)
        assert found is not None
        assert found.settings() == {"tools_column": "tools"}
        assert found.describe().endswith(", tools_column: tools")
    found = recognise({"messages": CHAT, "tools": None}, kind=RunKind.SFT)
    assert found is not None
    assert found.settings() == {}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from homeostat.config.model import ModelConfig

    folder = tiny.write_model(tmp_path_factory.mktemp("model"))
    return load_tokenizer(ModelConfig(path=str(folder)))


def test_conversational_prompts_and_completions_are_tokenised_as_texts_are(tokenizer) -> None:
    source = PromptCompletionSource(type="prompt_completion", path="rows", system="Be brief.")
    (texts,) = encode_row({"prompt": "say 1", "completion": "one"}, source=source,
                          tokenizer=tokenizer)  # fmt: skip
    row = {
        "prompt": [{"role": "user", "content": "say 1"}],
        "completion": [{"role": "assistant", "content": "one"}],
    }
    for changed in (row, row | {"prompt": "say 1"}, row | {"completion": "one"}):
        (found,) = encode_row(changed, source=source, tokenizer=tokenizer)
        for one, other in zip(found, texts, strict=True):
            np.testing.assert_array_equal(one, other)


def test_assistant_turns_of_a_conversational_prompt_are_context(tokenizer) -> None:
    source = PromptCompletionSource(type="prompt_completion", path="rows")
    turns = [("user", "one"), ("assistant", "two"), ("user", "three")]
    row = {"prompt": [{"role": role, "content": text} for role, text in turns], "completion": "4"}
    ((tokens_T, weights_T),) = encode_row(row, source=source, tokenizer=tokenizer)
    trained = tokenizer.decode(tokens_T[weights_T > 0].tolist())
    assert "4" in trained
    assert "two" not in trained
