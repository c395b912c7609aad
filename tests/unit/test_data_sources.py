"""Rows by number from every kind of file; whatever the bytes, only DataError comes out."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homeostat.config.data import TextSource
from homeostat.data.inputs import require_source
from homeostat.data.opening import open_rows, row_files, source_files
from homeostat.data.sources import BadRowError
from homeostat.errors import DataError

ROWS = [{"text": f"row {number}", "n": number} for number in range(25)]


def files_of(path: Path) -> list[Path]:
    return source_files(TextSource(type="text", path=str(path)))


def write_parquet(path: Path, rows: list[dict] = ROWS) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def save_dataset(folder: Path, rows: list[dict] = ROWS, shards: int = 1) -> Path:
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(str(folder), num_shards=shards)
    return folder


def read_all(path: Path) -> None:
    rows = open_rows(str(path), columns=["text"])
    for index in range(min(len(rows), 100)):
        try:
            rows.row(index)
        except BadRowError:
            continue


def test_json_lines_by_number_with_blank_lines_and_bom(tmp_path):
    file = tmp_path / "a.jsonl"
    lines = [json.dumps(row) for row in ROWS]
    file.write_bytes(b"\xef\xbb\xbf" + "\n\n".join(lines).encode() + b"\n  \n")
    rows = open_rows(str(file), columns=["text"])
    assert len(rows) == 25
    assert [rows.row(index) for index in (24, 0, 7)] == [ROWS[24], ROWS[0], ROWS[7]]
    assert [rows.number(index) for index in (0, 1, 24)] == [1, 3, 49]
    assert rows.brackets == (f"{file}:", "")


@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf", b"\n "])
def test_one_json_list_by_number(tmp_path, head):
    file = tmp_path / "a.json"
    file.write_bytes(head + json.dumps([*ROWS, 3], indent=1).encode())
    rows = open_rows(str(file), columns=["text"])
    assert len(rows) == 26
    assert [rows.row(index) for index in (24, 0)] == [ROWS[24], ROWS[0]]
    assert (rows.brackets, rows.number(7)) == ((f"{file}[", "]"), 7)
    with pytest.raises(BadRowError, match="this is a int"):
        rows.row(25)


@pytest.mark.parametrize("kind", ["parquet", "saved", "shards"])
def test_columns_by_row_number(tmp_path, kind):
    if kind == "parquet":
        path = write_parquet(tmp_path / "a.parquet")
    else:
        path = save_dataset(tmp_path / "saved", shards=3 if kind == "shards" else 1)
    rows = open_rows(str(path), columns=["text"])
    assert len(rows) == 25
    assert [rows.row(index)["text"] for index in (24, 0, 7)] == ["row 24", "row 0", "row 7"]
    assert set(rows.row(0)) == {"text"}
    assert all(file.is_file() for file in files_of(path))


def test_fields_that_a_row_did_not_have_are_absent(tmp_path):
    cells = [[{"role": "user"}, {"role": "assistant", "train": True}]]
    path = write_parquet(tmp_path / "a.parquet", [{"messages": cell} for cell in cells])
    assert open_rows(str(path), columns=["messages"]).row(0)["messages"] == cells[0]


def test_an_indices_mapping_is_honoured(tmp_path):
    folder = save_dataset(tmp_path / "saved")
    table = pa.table({"indices": pa.array([3, 20, 3], pa.uint64())})
    with pa.ipc.new_stream(str(folder / "indices.arrow"), table.schema) as writer:
        writer.write_table(table)
    state = json.loads((folder / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    rows = open_rows(str(folder), columns=["text"])
    assert [rows.row(index)["text"] for index in range(len(rows))] == ["row 3", "row 20", "row 3"]
    assert folder / "indices.arrow" in files_of(folder)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b", "\ud800", 7, None])
def test_a_listed_name_that_is_no_file_name_is_refused(tmp_path, name):
    folder = save_dataset(tmp_path / "saved")
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"] = [{"filename": name}]
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match="no file name"):
        files_of(folder)


def test_a_saved_folder_of_splits_is_read_by_split(tmp_path):
    from datasets import Dataset, DatasetDict

    part = Dataset.from_list(ROWS)
    DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(DataError, match=r"Set split to one of: train, test"):
        open_rows(str(tmp_path / "d"), columns=["text"])
    with pytest.raises(DataError, match=r"no split is named 'dev'\. There are: train, test"):
        open_rows(str(tmp_path / "d"), columns=["text"], split="dev")
    assert row_files(str(tmp_path / "d"), split="test") == [tmp_path / "d" / "test"]
    assert len(open_rows(str(tmp_path / "d"), columns=["text"], split="train")) == 25
    assert len(open_rows(str(tmp_path / "d" / "test"), columns=["text"])) == 25


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "empty"),
        ("a.jsonl", b"\n \n", "empty"),
        ("a.jsonl", b'[{"text": "x"}]', "holds a JSON list"),
        ("a.json", b"[]", "the list is empty"),
        ("a.json", b'[{"text": "x"}', "not a JSON list"),
        ("a.json", b"[" * 100_000, "not a JSON list"),
        ("a.jsonl", '{"text": 1}\n'.encode("utf-16"), "UTF-16"),
        ("a.parquet", b"", "not a whole Parquet file"),
        ("a.parquet", b"PAR1abcPAR1", "not a whole Parquet file"),
        ("a.csv", b"a,b", "the file is empty"),
        ("a.csv", b'a,b\n"x', "not a whole .csv file"),
        ("a.csv", b"a,a\n1,2\n", "two columns are named 'a'"),
        ("a.jsonl.gz", b"\x1f\x8b\x08no", "not a whole .jsonl file"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n', mtime=0)[:-9], "not a whole .jsonl file"),
        ("a.jsonl.zst", b"no zstd", "not a whole .jsonl file"),
        ("a.parquet.gz", b"", "kind .gz is not known"),
        ("a.xml", b"a,b", "kind .xml is not known"),
        ("a", b"{}", "kind .none. is not known"),
    ],
)
def test_an_unusable_file_is_refused_by_name(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{tmp_path / name}.*{message}"):
        open_rows(str(tmp_path / name), columns=["text"])


@pytest.mark.parametrize("path", ["nowhere.jsonl", "nul\0.jsonl", "x" * 5000, "/dev/null", ""])
def test_a_path_that_is_no_file_is_refused(path):
    with pytest.raises(DataError):
        open_rows(path, columns=["text"])


@pytest.mark.parametrize("path", ["nowhere.jsonl", "nul\0.jsonl", "/dev/null", __file__])
def test_a_path_that_leads_to_no_rows_is_refused_with_its_setting(path):
    with pytest.raises(DataError, match=r"^data\.train: "):
        require_source(path, setting="data.train")


def test_a_folder_without_rows_is_refused_with_its_files(tmp_path):
    (tmp_path / "notes.md").write_text("none")
    with pytest.raises(DataError, match=r"no file of a known kind.*Its files: notes\.md"):
        open_rows(str(tmp_path), columns=["text"])


def test_a_missing_column_is_refused_with_those_there_are(tmp_path):
    for path in (write_parquet(tmp_path / "a.parquet"), save_dataset(tmp_path / "saved")):
        with pytest.raises(DataError, match=r"no column is named 'body'\. Its columns: text, n"):
            open_rows(str(path), columns=["body"])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":' * 100_000, "not JSON"),
        (b'{"a": ' + b"1" * 10_000 + b"}", "not JSON"),
        (b"3", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'"\xff"', "not UTF-8 text"),
    ],
)
def test_a_bad_line_is_a_bad_row(tmp_path, line, reason):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    rows = open_rows(str(file), columns=["text"])
    assert rows.row(0) == {"text": "good"}
    with pytest.raises(BadRowError) as caught:
        rows.row(1)
    assert caught.value.reason == reason


@given(content=st.binary(max_size=300) | st.text(max_size=100).map(lambda text: text.encode()))
def test_any_bytes_as_json_lines_give_rows_or_data_errors(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    file.write_bytes(content)
    try:
        read_all(file)
    except DataError as error:
        assert str(file) in str(error)  # noqa: PT017


@pytest.mark.parametrize("kind", ["parquet", "arrow", "state"])
def test_damaged_columnar_files_give_rows_or_data_errors(tmp_path, kind):
    if kind == "parquet":
        path = target = write_parquet(tmp_path / "a.parquet")
    else:
        path = save_dataset(tmp_path / "saved")
        target = path / ("state.json" if kind == "state" else "data-00000-of-00001.arrow")
    whole = target.read_bytes()
    noise = random.Random(7)
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(noise.choice([1, 1, 4, 16])):
            content[noise.randrange(len(content))] = noise.randrange(256)
        cut = noise.choice([None, None, noise.randrange(len(content))])
        # A new file each time: the old one may still be memory mapped.
        target.unlink()
        target.write_bytes(content[:cut])
        try:
            read_all(path)
        except DataError as error:
            assert str(tmp_path) in str(error)  # noqa: PT017


def test_a_column_name_that_is_no_text_is_a_data_error(tmp_path):
    folder = save_dataset(tmp_path / "saved")
    file = folder / "data-00000-of-00001.arrow"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content.replace(b"text", b"te\xfft"))
    with pytest.raises(DataError, match="damaged"):
        open_rows(str(folder), columns=["text"])
