"""Any rows of any tensor come back, however a checkpoint was cut."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from homeostat.errors import CheckpointError
from homeostat.train.saving.shards import Rows, TensorReader, copy_rows, write_shard, write_whole

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def random_tensors(shapes: list[tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer.{index}.weight": torch.randint(-99, 99, shape, generator=generator).to(
            DTYPES[index % len(DTYPES)]
        )
        for index, shape in enumerate(shapes)
    }


def split(tensors: dict[str, torch.Tensor], cuts: list[int], rank: int) -> dict[str, Rows]:
    """Rank `rank` has the rows between two cuts, as many of them as there are."""
    parts = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if not shape:
            parts[name] = Rows(tensor, 0, ())
            continue
        start, stop = (min(cut, shape[0]) for cut in cuts[rank : rank + 2])
        parts[name] = Rows(tensor[start:stop], start, shape)
    return parts


def write(folder: Path, tensors: dict[str, torch.Tensor], cuts: list[int], stem: str) -> None:
    size = len(cuts) - 1
    for rank in range(size):
        write_shard(folder, stem, split(tensors, cuts, rank), rank=rank, size=size)


SHAPES = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(1, 9)),
        st.tuples(st.integers(1, 9), st.integers(1, 3)),
        st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 2)),
    ),
    min_size=1,
    max_size=5,
)


@given(shapes=SHAPES, inner=st.lists(st.integers(0, 9), max_size=4), data=st.data())
def test_any_rows_come_back(shapes: list[tuple[int, ...]], inner: list[int], data) -> None:
    tensors = random_tensors(shapes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, tensors, [0, *sorted(inner), 9], "model")
        write_whole(folder, "plain", tensors)
        for stem in ("model", "plain"):
            reader = TensorReader(folder, stem)
            assert reader.shapes == {name: tuple(t.shape) for name, t in tensors.items()}
            for name, tensor in tensors.items():
                bounds = st.integers(0, tensor.shape[0] if tensor.ndim else 0)
                start, stop = sorted((data.draw(bounds), data.draw(bounds)))
                expected = tensor[start:stop] if tensor.ndim else tensor
                found = reader.rows(name, start, stop)
                assert found.dtype == tensor.dtype
                assert found.shape == expected.shape
                assert torch.equal(found, expected)


def test_a_folder_of_shards_reads_as_one_of_whole_tensors(tmp_path: Path) -> None:
    tensors = random_tensors([(7, 2), (), (3,)])
    write(tmp_path, tensors, [0, 3, 6, 9], "optimizer")
    write_whole(tmp_path, "frozen", {"x": torch.tensor(5)})
    found = {stem: TensorReader(tmp_path, stem).whole() for stem in ("optimizer", "frozen")}
    assert int(found["frozen"]["x"]) == 5
    assert found["optimizer"].keys() == tensors.keys()
    assert all(torch.equal(found["optimizer"][name], t) for name, t in tensors.items())


def test_rows_go_from_one_cut_to_another(tmp_path: Path) -> None:
    tensors = random_tensors([(9, 2), (2,), ()])
    write(tmp_path, tensors, [0, 4, 9], "model")
    for rank in range(4):
        empty = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        own = split(empty, [0, 3, 6, 9, 9], rank)
        copy_rows(own, TensorReader(tmp_path, "model"), what="model")
        for name, rows in split(tensors, [0, 3, 6, 9, 9], rank).items():
            assert torch.equal(own[name].tensor, rows.tensor)


@pytest.mark.parametrize(
    "other", [{"a": (4, 2)}, {"a": (5, 2), "b": (1,)}, {"b": (5, 2)}, {}], ids=str
)
def test_other_tensors_are_refused(tmp_path: Path, other: dict[str, tuple[int, ...]]) -> None:
    write(tmp_path, {"a": torch.zeros(5, 2)}, [0, 3, 5], "model")
    own = {name: Rows(torch.zeros(shape), 0, shape) for name, shape in other.items()}
    with pytest.raises(CheckpointError, match="model in the checkpoint belongs to another"):
        copy_rows(own, TensorReader(tmp_path, "model"), what="model")


def test_a_stem_that_is_not_there_has_no_tensors(tmp_path: Path) -> None:
    assert TensorReader(tmp_path, "model").shapes == {}


def shard_with(folder: Path, rank: int, size: int, places: object) -> None:
    metadata = {"rows": places if isinstance(places, str) else json.dumps(places)}
    file = folder / f"model.{rank}of{size}.safetensors"
    save_file({"a": torch.zeros(3, 2)}, file, metadata=metadata)


def missing(folder: Path) -> None:
    (folder / "model.1of2.safetensors").unlink()


def twice(folder: Path) -> None:
    write(folder, {"a": torch.zeros(6, 2)}, [0, 2, 4, 6], "model")


def beside_a_whole_one(folder: Path) -> None:
    write_whole(folder, "model", {"a": torch.zeros(6, 2)})


def truncated(folder: Path) -> None:
    file = folder / "model.1of2.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def gap(folder: Path) -> None:
    shard_with(folder, 1, 2, {"a": {"shape": [7, 2], "start": 4}})
    shard_with(folder, 0, 2, {"a": {"shape": [7, 2], "start": 0}})


def too_few_rows(folder: Path) -> None:
    shard_with(folder, 1, 2, {"a": {"shape": [7, 2], "start": 3}})
    shard_with(folder, 0, 2, {"a": {"shape": [7, 2], "start": 0}})


def two_shapes(folder: Path) -> None:
    shard_with(folder, 1, 2, {"a": {"shape": [9, 2], "start": 3}})


def other_width(folder: Path) -> None:
    shard_with(folder, 1, 2, {"a": {"shape": [6, 3], "start": 3}})


def no_place(folder: Path) -> None:
    shard_with(folder, 1, 2, {})


def no_numbers(folder: Path) -> None:
    shard_with(folder, 1, 2, {"a": {"shape": "wide", "start": 3}})


def no_json(folder: Path) -> None:
    shard_with(folder, 1, 2, "{")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (missing, "model.1of2.safetensors is missing"),
        (twice, "more than once"),
        (beside_a_whole_one, "more than once"),
        (truncated, "cannot be read"),
        (gap, "no shard has the rows of a from row 3 on"),
        (too_few_rows, "has 6 rows in its shards, not 7"),
        (two_shapes, "another shape in another shard"),
        (other_width, "of a tensor of"),
        (no_place, "does not name the tensors"),
        (no_numbers, "does not say which rows"),
        (no_json, "does not say which rows"),
    ],
)
def test_what_is_broken_is_said(tmp_path: Path, damage, words: str) -> None:
    write(tmp_path, {"a": torch.zeros(6, 2)}, [0, 3, 6], "model")
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        TensorReader(tmp_path, "model").whole()
