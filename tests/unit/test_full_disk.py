"""A full disk under what the commands write: a message that names the place, and no half files."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.support import tiny

from homeostat.cli.output_file import LineFile, write_output
from homeostat.data.store import StoreWriter
from homeostat.data.tokenizer import load_tokenizer
from homeostat.errors import DiskFullError, OutputError
from homeostat.generation.exporting import building
from homeostat.observe.durable import FileErrorsAsOsError
from homeostat.train.saving.checkpoint import CheckpointStore


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """Let files grow to this size and no further, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def write_weights(folder: Path) -> None:
    save_file({"a": torch.zeros(9_000)}, folder / "model.safetensors")


def write_tokenizer(folder: Path) -> None:
    load_tokenizer(tiny.config(folder).model).save(folder)


@pytest.mark.parametrize("write", [write_weights, write_tokenizer])
def test_what_rust_libraries_cannot_write_is_a_full_disk_too(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    errors = pytest.raises(OSError, match="File too large")
    with files_end_at(400), errors as raised, FileErrorsAsOsError():
        write(tmp_path)
    assert raised.value.errno == errno.EFBIG


@pytest.mark.parametrize("write", [write_weights, write_tokenizer])
def test_an_export_that_a_full_disk_ends_leaves_nothing_and_names_the_place(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    def export() -> None:
        with building(tmp_path / "out") as hidden:
            hidden.mkdir()
            write(hidden)

    with files_end_at(400), pytest.raises(OutputError, match=r"/out: cannot write it.*Free some"):
        export()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", [write_weights, write_tokenizer])
def test_a_checkpoint_that_a_full_disk_ends_is_a_failed_save(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    with files_end_at(400), pytest.raises(DiskFullError, match="Free some space"):
        store.save(2, write, {}, num_bytes=0)
    assert store.steps() == []
    assert list(store.folder.iterdir()) == []


def test_tokenised_rows_that_a_full_disk_ends_give_their_space_back(tmp_path: Path) -> None:
    def add() -> None:
        with StoreWriter(tmp_path / "rows") as writer:
            writer.add(
                np.arange(300),
                np.ones(300),
                lengths_B=np.array([300]),
                origins_B2=np.zeros((1, 2)),
                labels_B=np.zeros(1),
            )

    with files_end_at(200), pytest.raises(OSError, match="File too large"):
        add()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_a_command_is_whole_or_not_there(tmp_path: Path) -> None:
    file, link = tmp_path / "a.yaml", tmp_path / "link"
    with files_end_at(10), pytest.raises(OutputError, match=r"a\.yaml: cannot write it.*Free some"):
        write_output(file, "x" * 100)
    assert list(tmp_path.iterdir()) == []
    write_output(file, "first")
    link.symlink_to(file)
    write_output(link, "second")
    assert (link.is_symlink(), file.read_text()) == (True, "second")
    with pytest.raises(OutputError, match=r"/dev/full: cannot write it: No space left"):
        write_output(Path("/dev/full"), "text")
    with pytest.raises(OutputError, match=r"missing/a: cannot write it: No such file"):
        write_output(tmp_path / "missing" / "a", "text")


def test_a_file_of_lines_keeps_the_whole_ones(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    with LineFile(file) as lines:
        lines.write("one\n")
        with files_end_at(7), pytest.raises(OutputError, match=r"answers\.jsonl: cannot write"):
            lines.write("two and more\n")
        lines.write("three\n")
    assert file.read_text() == "one\nthree\n"
    with pytest.raises(OutputError, match=r"missing/a: cannot write it"):
        LineFile(tmp_path / "missing" / "a")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("format", ["text", "json"])
def test_an_output_on_a_full_disk_ends_with_a_message(unbuffered: str, format: str) -> None:
    command = [sys.executable, "-m", "homeostat", "rules", "--format", format]
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environ, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the output: cannot write it: No space left on device.")
    assert done.stderr.count("\n") == 1
