"""The fast reader of GGUF headers gives what the library's own gives, for either byte order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader, GGUFWriter

from homeostat.ops.gguf_reader import fast_reading, open_gguf


def write(path: Path, endian: GGUFEndian) -> Path:
    writer = GGUFWriter(path, "llama", endianess=endian)
    writer.add_block_count(3)
    writer.add_token_list(["a", "", "ü", "<|end|>", "x" * 300])
    writer.add_token_types([1, 1, 1, 3, 1])
    writer.add_token_scores([0.0, -1.5, 2.0, 0.25, 1e-6])
    writer.add_array("some.flags", [True, False])
    writer.add_array("nested", [["a", "b"], ["c"]])
    writer.add_tensor("token_embd.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain(reader: Any) -> list[Any]:
    fields = [
        (f.name, f.offset, list(f.types), list(f.data), [part.tolist() for part in f.parts])
        for f in reader.fields.values()
    ]
    tensors = [(t.name, t.shape.tolist(), np.asarray(t.data).tolist()) for t in reader.tensors]
    return [fields, tensors]


@pytest.mark.parametrize("endian", list(GGUFEndian))
def test_all_fields_and_tensors_are_those_of_the_library(
    tmp_path: Path, endian: GGUFEndian
) -> None:
    file = write(tmp_path / "a.gguf", endian)
    own, theirs = open_gguf(file), GGUFReader(file)
    assert plain(own) == plain(theirs)
    for name, field in theirs.fields.items():
        assert own.get_field(name).contents() == field.contents(), name


def test_the_librarys_reader_is_replaced_for_a_block_only(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", GGUFEndian.LITTLE)
    with fast_reading():
        assert isinstance(gguf.GGUFReader(file), GGUFReader)
        assert gguf.GGUFReader is not GGUFReader
    assert gguf.GGUFReader is GGUFReader
