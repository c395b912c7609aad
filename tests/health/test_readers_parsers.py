"""The parsers below the formats: no text is an error, and no value is changed."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homeostat.errors import DataError, HomeostatError
from homeostat.health.readers import open_run, read_text
from homeostat.health.readers.files.protobuf import TornError, fields
from homeostat.health.readers.values.literals import mapping_at, plain_value
from homeostat.health.readers.values.numbers import decimals_of, number
from homeostat.health.readers.values.settings import flat, read_config, settings_in

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}(/[a-z]{1,6})?", fullmatch=True)
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | FLOATS | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
# Pieces that formats are made of, so that odd texts come near to them.
PIECES = st.sampled_from(
    ["{'loss': ", "'", '"', "step:1 - ", " - a:1", "%|", "| 3/9 [00:01, x=1]", "nan", "{", "}", "[",
     "Step 3", "\r", "\x1b[31m", "\\", "loss: 0.5, ", "(A pid=1) ", "Namespace(", "a=1", "--x ",
     "\n", "[response] ", "=== Step 2/9 ===", "  * kl: 1,000.5", "Step\tTraining Loss", "\n1\t0.5",
     "\x00"]
)  # fmt: skip
few = settings(max_examples=40, deadline=None)


def same(left: object, right: object) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@few
@given(FLOATS)
def test_every_float_that_python_prints_is_read_back(value: float) -> None:
    assert same(number(repr(value)), value)


@few
@given(st.integers(-(10**15), 10**15), st.sampled_from(["", "s", " tokens/s", "GiB", " (48.0%)"]))
def test_thousands_separators_and_units(value: int, unit: str) -> None:
    assert number(f"{value:,}{unit}") == float(value)


@few
@given(st.floats(-1e6, 1e6), st.integers(0, 4))
def test_decimals_are_those_printed(value: float, count: int) -> None:
    assert decimals_of(f"{value:,.{count}f}") == count
    assert decimals_of(f"{value:.{count}f}%") == count + 2


@pytest.mark.parametrize("text", ["", "abc", "1.2.3", "12:30", "1,23", "0x10", "--1", "9" * 100])
def test_what_is_no_number(text: str) -> None:
    assert number(text) is None


@few
@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=5))
def test_python_literals_are_read_back(mapping: dict[str, object]) -> None:
    text = repr(mapping)
    found = mapping_at(f"before {text} after", 7)
    assert found is not None
    assert same(found[0], mapping)
    assert found[1] == 7 + len(text)


@few
@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=5))
def test_json_is_read_back(mapping: dict[str, object]) -> None:
    found = mapping_at(json.dumps(mapping))
    assert found is not None
    assert same(found[0], mapping)


def test_calls_are_read_as_their_keywords_or_their_number() -> None:
    text = "Config(lr=1e-06, inner=Inner(n=2), kind=<Kind.A: 'a'>, x=np.float64(0.5), name='a(b')"
    found = mapping_at(text)
    assert found is not None
    expected = {"lr": 1e-06, "inner": {"n": 2}, "kind": "<Kind.A: 'a'>", "x": 0.5, "name": "a(b"}
    assert found == (expected, len(text))


@pytest.mark.parametrize(
    "text", ["{" * 5000, "[" * 5000, "{'a': " * 3000, "f(" * 3000, "{'a'", "{'a': 'b"]
)
def test_torn_and_endless_literals_are_none(text: str) -> None:
    assert mapping_at(text) is None


@few
@given(st.text(max_size=60))
def test_a_settings_value_is_itself_or_what_it_says(text: str) -> None:
    value = plain_value(text)
    assert value is None or isinstance(value, str | bool | int | float | list | dict)


@few
@given(NAMES.filter(lambda name: "/" not in name), st.integers(-99, 10**9) | st.booleans())
def test_settings_of_a_line(name: str, value: object) -> None:
    if name not in {"pid", "ip", "rank", "line", "host", "errno"}:
        assert dict(settings_in(f"with {name}={value}, and more")) == {name: value}
        assert dict(settings_in(f"$ python train.py --{name} {value}"))[name] == value


@few
@given(st.recursive(st.integers(), lambda x: st.dictionaries(NAMES, x, min_size=1), max_leaves=9))
def test_flat_settings_keep_every_value(nested: object) -> None:
    def count(value: object) -> int:
        return sum(map(count, value.values())) if isinstance(value, dict) else 1

    if isinstance(nested, dict):
        assert len(flat(nested)) == count(nested)


@given(st.lists(PIECES | st.text(max_size=8), max_size=30))
def test_no_text_is_too_odd(pieces: list[str]) -> None:
    view = read_text("".join(pieces))
    for series in view.metrics.values():
        assert len(series.steps) == len(series.values)
        assert (series.steps[1:] > series.steps[:-1]).all()


@few
@given(
    data=st.binary(max_size=400),
    name=st.sampled_from(["x.wandb", "x.tfevents.1", "x.csv", "x.jsonl", "x.json", "x.log"]),
)
def test_no_file_is_too_odd(
    data: bytes, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path: Path = tmp_path_factory.mktemp("odd") / name
    path.write_bytes(data)
    with contextlib.suppress(HomeostatError):
        assert open_run(path).facts["sources"] == (str(path),)


@few
@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_end_or_are_torn(data: bytes) -> None:
    try:
        found = list(fields(data))
    except TornError:
        return
    assert len(found) <= len(data)


@few
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20),
    st.sampled_from(["dict", "json", "verl", "csv"]),
)
def test_a_series_comes_back_from_every_format(values: list[float], form: str) -> None:
    lines = {
        "dict": [f"{{'loss': {value!r}, 'epoch': 0.1}}" for value in values],
        "json": [json.dumps({"step": n, "loss": value}) for n, value in enumerate(values, 1)],
        "verl": [f"step:{n} - train/loss:{value!r}" for n, value in enumerate(values, 1)],
        "csv": ["step,loss", *(f"{n},{value!r}" for n, value in enumerate(values, 1))],
    }[form]
    series = read_text("\n".join(lines)).metrics["train/loss"]
    assert series.values.tolist() == values
    assert series.steps.tolist() == list(range(1, len(values) + 1))


def test_a_config_that_would_take_minutes_to_parse_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("".join(f"key_{number}: {number}\n" for number in range(60_000)))
    with pytest.raises(DataError, match="at most"):
        read_config(file)
