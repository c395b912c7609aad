"""Rows with preferences: every form that TRL documents, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from homeostat.config.data import DataConfig, PreferenceSource, UnpairedPreferenceSource
from homeostat.config.model import ModelConfig
from homeostat.data.preferences import encode_labelled
from homeostat.data.prepare import prepare_rows, split_rows
from homeostat.data.sources import BadRowError
from homeostat.data.tokenizer import ChatTokenizer, load_tokenizer
from homeostat.errors import DataError

TINY = Path(__file__).parents[2] / "recipes" / "assets" / "tiny-chat"
USER = {"role": "user", "content": "turn around abc"}


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return load_tokenizer(ModelConfig(path=str(TINY)))


def pair_of(row: dict[str, Any], tokenizer: ChatTokenizer, **settings: Any) -> list[Any]:
    source = PreferenceSource(type="preference", path="x", **settings)
    return encode_labelled(row, source=source, tokenizer=tokenizer)


def trained(encoded: Any, tokenizer: ChatTokenizer) -> str:
    tokens_T, weights_T = encoded
    return tokenizer.decode(tokens_T[weights_T > 0].tolist())


EXPLICIT = {"prompt": [USER], "chosen": said("cba"), "rejected": said("abc")}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": USER["content"], "chosen": "cba", "rejected": "abc"},
        {"chosen": [USER, *said("cba")], "rejected": [USER, *said("abc")]},
        # As in ultrafeedback_binarized: the prompt is there twice.
        {"prompt": "x", "chosen": [USER, *said("cba")], "rejected": [USER, *said("abc")]},
        {"prompt": USER["content"], "chosen": said("cba"), "rejected": said("abc")},
    ],
)
def test_all_forms_of_a_pair_give_the_same_rows(row: dict, tokenizer: ChatTokenizer) -> None:
    wanted, found = pair_of(EXPLICIT, tokenizer), pair_of(row, tokenizer)
    for (one, label), (other, other_label) in zip(wanted, found, strict=True):
        assert label == other_label
        assert np.array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])
    assert [label for _, label in found] == [1.0, -1.0]
    assert trained(found[0][0], tokenizer).startswith("cba")
    assert trained(found[1][0], tokenizer).startswith("abc")


def test_plain_texts_without_a_prompt_share_their_first_tokens(tokenizer: ChatTokenizer) -> None:
    row = {"chosen": "the sky is blue", "rejected": "the sky is green"}
    (good, _), (bad, _) = pair_of(row, tokenizer, chat=False)
    shared = int(np.flatnonzero(good[1])[0])
    assert shared == int(np.flatnonzero(bad[1])[0])
    assert np.array_equal(good[0][:shared], bad[0][:shared])
    assert good[0][shared] != bad[0][shared]
    assert int(good[0][-1]) == int(bad[0][-1]) == tokenizer.eos_id
    with pytest.raises(BadRowError, match="chat: false"):
        pair_of(row, tokenizer)


def test_plain_texts_with_a_prompt_train_the_completion(tokenizer: ChatTokenizer) -> None:
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    (good, _), _ = pair_of(row, tokenizer, chat=False)
    assert trained(good, tokenizer).startswith("4")


def test_assistant_turns_of_the_prompt_are_context(tokenizer: ChatTokenizer) -> None:
    prompt = [USER, *said("cba"), {"role": "user", "content": "again"}]
    row = {"prompt": prompt, "chosen": said("abc"), "rejected": said("no")}
    (good, _), _ = pair_of(row, tokenizer)
    assert "cba" not in trained(good, tokenizer)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "the same"),
        ({"prompt": "a", "chosen": "b"}, "no column is named 'rejected'"),
        ({"prompt": "a", "chosen": said("b"), "rejected": "c"}, "one completion is a text"),
        ({"chosen": said("b"), "rejected": said("c")}, "begin with other messages"),
        ({"prompt": " ", "chosen": "b", "rejected": "c"}, "holds no text"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "holds a int"),
        ({"prompt": "a", "chosen": [], "rejected": said("c")}, "holds no message"),
    ],
)
def test_a_row_that_says_nothing_is_refused(row: dict, why: str, tokenizer: ChatTokenizer) -> None:
    with pytest.raises(BadRowError, match=why):
        pair_of(row, tokenizer)


@pytest.mark.parametrize(("label", "wanted"), [(True, 1.0), (False, -1.0), (1, 1.0), (0, -1.0)])
def test_labels_are_signs(label: Any, wanted: float, tokenizer: ChatTokenizer) -> None:
    source = UnpairedPreferenceSource(type="unpaired_preference", path="x")
    row = {"prompt": "a", "completion": "b", "label": label}
    ((_, found),) = encode_labelled(row, source=source, tokenizer=tokenizer)
    assert found == wanted


@pytest.mark.parametrize("label", [0.7, "yes", 2])
def test_a_label_that_is_no_yes_or_no_is_refused(label: Any, tokenizer: ChatTokenizer) -> None:
    source = UnpairedPreferenceSource(type="unpaired_preference", path="x")
    row = {"prompt": "a", "completion": "b", "label": label}
    with pytest.raises(BadRowError, match="not true or false"):
        encode_labelled(row, source=source, tokenizer=tokenizer)


ROWS = [{"prompt": f"p{i}", "chosen": "x" * (i + 1), "rejected": "y" * (9 - i)} for i in range(8)]


def test_a_pair_is_kept_or_dropped_as_one(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS))
    source = PreferenceSource(type="preference", path=str(file), chat=False)
    lengths = [[len(one[0][0]) for one in pair_of(row, tokenizer, chat=False)] for row in ROWS]
    limit = sorted(max(pair) for pair in lengths)[4]
    data = DataConfig(train=(source,), max_length=limit)
    store = prepare_rows([source], tokenizer, data, cache_dir=tmp_path / "cache")
    kept = [pair for pair in lengths if max(pair) <= limit]
    assert 0 < len(kept) < len(ROWS)
    assert store.lengths.tolist() == [length for pair in kept for length in pair]
    assert (store.report.seen, store.report.kept) == (len(ROWS), len(kept))
    assert store.labels_B.tolist() == [1.0, -1.0] * len(kept)
    assert store[1].columns["label"].tolist() == [-1.0] * len(store[1])
    train, held_out = split_rows(store.made_from_B, 0.4, 0)
    for ids in (train, held_out):
        assert (ids[::2] % 2 == 0).all()
        assert (ids[1::2] == ids[::2] + 1).all()


def test_parquet_pairs_need_no_prompt_column(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    file = tmp_path / "rows.parquet"
    chats = [{"chosen": [USER, *said(r["chosen"])], "rejected": [USER, *said(r["rejected"])]}
             for r in ROWS]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(chats), file)
    source = PreferenceSource(type="preference", path=str(file))
    store = prepare_rows([source], tokenizer, DataConfig(train=(source,)), cache_dir=tmp_path / "c")
    assert len(store) == 2 * len(ROWS)


def test_other_labels_are_other_data(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    prints = set()
    for turn in range(2):
        file = tmp_path / f"{turn}.jsonl"
        rows = [{"prompt": "a", "completion": "b", "label": bool((i + turn) % 2)} for i in range(4)]
        file.write_text("\n".join(json.dumps(row) for row in rows))
        source = UnpairedPreferenceSource(type="unpaired_preference", path=str(file))
        data = DataConfig(train=(source,))
        prints.add(prepare_rows([source], tokenizer, data, cache_dir=tmp_path / "c").fingerprint)
    assert len(prints) == 2


def test_a_missing_column_is_named(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b"}))
    source = PreferenceSource(type="preference", path=str(file))
    with pytest.raises(DataError, match="rejected"):
        prepare_rows([source], tokenizer, DataConfig(train=(source,)), cache_dir=tmp_path / "c")
