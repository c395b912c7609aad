"""JSON that others wrote: whatever is wrong with it is a ValueError, and its readers go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.run_folders import write_run

from homeostat.config.loading.resume import saved_config
from homeostat.data.store import open_store
from homeostat.errors import DataError
from homeostat.health.diagnose import diagnose
from homeostat.health.formats.as_json import as_json
from homeostat.health.readers import open_run, runs_at
from homeostat.health.readers.places.own_runs import our_config
from homeostat.health.registry import RULES
from homeostat.json_text import MAX_DEPTH, parse_json
from homeostat.observe.jsonl import iter_jsonl
from homeostat.rewards.judge_cache import JudgeCache
from homeostat.run.healing.tokenizer_probe import _token_ids
from homeostat.run.learning.reference_scores import kept_scores
from homeostat.run.wiring.cache_damage import find_damage

# The second is parsed by Python's parser, but overflows the stack of those who walk through it.
DEPTHS = (MAX_DEPTH + 1, 480, 5_000)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def nested(depth: int, *, lists: bool = False) -> str:
    return "[" * depth + "]" * depth if lists else '{"a":' * depth + "1" + "}" * depth


@given(VALUES)
def test_sound_json_is_parsed_as_the_standard_library_does(value: Any) -> None:
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize("lists", [True, False])
def test_a_text_is_parsed_down_to_the_deepest_level_that_is_allowed(lists: bool) -> None:
    sound = nested(MAX_DEPTH, lists=lists)
    assert parse_json(sound) == json.loads(sound)
    # The many brackets of a wide text, and those inside of its strings, are not depth.
    assert parse_json(json.dumps({"a": [{}] * 500, "b": "[{" * 500}))
    for depth in DEPTHS:
        for text in (nested(depth, lists=lists), nested(depth, lists=lists).encode("utf-16")):
            with pytest.raises(ValueError, match=f"nested deeper than {MAX_DEPTH} levels"):
                parse_json(text)


@pytest.mark.parametrize("text", [b'{"a": "\xff"}', b"\x00" * 9, "", '{"a"', "9" * 5_000, b"\xef"])
def test_every_other_defect_is_a_value_error_too(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


@pytest.mark.parametrize("depth", DEPTHS)
def test_settings_of_a_run_that_nest_too_deeply_are_not_read(tmp_path: Path, depth: int) -> None:
    run = write_run(tmp_path / "run", {"train/loss": [2.0, 1.5, 1.0]})
    file = run / "config.json"
    file.write_text(f'{file.read_text().strip()[:-1]}, "more": {nested(depth)}}}')
    assert our_config(run) is None
    with pytest.raises(ValueError, match=r"."):
        saved_config(file)
    for place in runs_at(run):
        view = open_run(place)
        assert json.dumps(as_json(diagnose(view, RULES), view))


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_record_that_nests_too_deeply_is_one_damaged_line(tmp_path: Path, depth: int) -> None:
    file = tmp_path / "events.jsonl"
    sound = '{"step": 1, "time": 1.0, "kind": "a"}\n'
    file.write_text(f'{sound}{{"step": 2, "time": 1.0, "kind": {nested(depth)}}}\n{sound}')
    damaged: list[int] = []
    assert len(list(iter_jsonl(file, damaged=damaged))) == 2
    assert damaged == [2]


def _store(folder: Path, text: str) -> None:
    (folder / "meta.json").write_text(text)
    assert open_store(folder) is None


def _scores(folder: Path, text: str) -> None:
    (folder / "meta.json").write_text(text)
    scores, is_new = kept_scores(folder, lambda: [1.0])  # type: ignore[arg-type, return-value]
    assert (list(scores), is_new) == ([1.0], True)


def _judged(folder: Path, text: str) -> None:
    file = folder / "judge.jsonl"
    file.write_text(f'{text}\n{{"key": "k", "answer": "yes"}}\n')
    assert JudgeCache(file)["k"] == "yes"


def _tokenizer(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    assert _token_ids(folder / "tokenizer.json") == {}


def _compiled(folder: Path, text: str) -> None:
    (folder / "kernel.json").write_text(text)
    assert [one.why for one in find_damage(folder)] == ["is not valid JSON"]


@pytest.mark.parametrize("read", [_store, _scores, _judged, _tokenizer, _compiled])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_kept_file_that_nests_too_deeply_counts_as_damaged(
    tmp_path: Path, depth: int, read: Callable[[Path, str], None]
) -> None:
    read(tmp_path, nested(depth))


def test_a_row_that_nests_too_deeply_is_named(tmp_path: Path) -> None:
    from homeostat.data.sources import parse_line

    with pytest.raises(DataError, match=f"not JSON.*deeper than {MAX_DEPTH}"):
        parse_line(nested(5_000).encode())
