"""Compressed logs are read as they are; what is no text, or empty, is refused and never healthy."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from homeostat.cli.doctor import doctor
from homeostat.cli.health_options import ReportFormat
from homeostat.errors import DataError, HomeostatError
from homeostat.health.readers import open_run, runs_at, runs_of_files
from homeostat.health.readers.input.packed import why_no_text

LOG = "\n".join(str({"loss": 2.0 - n / 10, "grad_norm": 1.0}) for n in range(1, 9)) + "\n"
PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_compressed_log_is_read_like_the_plain_one(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"train.log.{suffix}"
    path.write_bytes(PACKERS[suffix](LOG.encode()))
    assert open_run(path).metrics["train/loss"].values.tolist() == pytest.approx(
        [2.0 - n / 10 for n in range(1, 9)]
    )


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_a_compressed_log_that_breaks_off_is_read_as_far_as_it_goes(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    rng = random.Random(3)
    # Lines that differ, so that what is left of the file holds some of them.
    lines = (str({"loss": rng.random(), "grad_norm": rng.random()}) for _ in range(25_000))
    whole = pack("\n".join(lines).encode())
    path = tmp_path / "train.log.x"
    path.write_bytes(whole[: len(whole) * 2 // 3])
    view = open_run(path)
    assert len(view.metrics["train/loss"]) > 1000
    assert any("damaged or incomplete" in note for note in view.facts["reading"].notes)


def test_rotated_and_compressed_parts_are_one_text(tmp_path: Path) -> None:
    lines = LOG.splitlines(keepends=True)
    (tmp_path / "train.log.2.gz").write_bytes(gzip.compress("".join(lines[:3]).encode()))
    (tmp_path / "train.log.1").write_text("".join(lines[3:5]))
    (tmp_path / "train.log").write_text("".join(lines[5:]))
    losses = open_run(tmp_path).metrics["train/loss"].values.tolist()
    assert losses == pytest.approx([2.0 - n / 10 for n in range(1, 9)])


def test_standard_input_may_be_compressed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = io.TextIOWrapper(io.BufferedReader(io.BytesIO(gzip.compress(LOG.encode()))))
    monkeypatch.setattr(sys, "stdin", packed)
    with pytest.raises(typer.Exit) as end:
        doctor(["-"])
    assert end.value.exit_code == 0
    assert "2 metrics" in capsys.readouterr().out


@pytest.mark.parametrize("size", [500, 5_000, 100_000])
def test_bytes_that_are_no_text_are_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(b"\x00\x01" + random.Random(size).randbytes(size))
    with pytest.raises(DataError, match="binary, not text"):
        open_run(path)


def test_an_archive_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "logs.zip", "w") as archive:
        archive.writestr("train.log", LOG)
    with pytest.raises(DataError, match=r"zip archive.*[Uu]npack"):
        open_run(tmp_path / "logs.zip")


@pytest.mark.parametrize(
    "text",
    [
        b"\x00" * 5000 + LOG.encode(),
        b"\x1b[32mINFO\x1b[0m epoch 3\r 10%|#| 1/10 \x08\x08\n" * 50,
        "训练损失 1.5\n".encode("gb18030") * 50,
        b"\x01",
        b"",
    ],
    ids=["zeros of a rotated log", "colours and bars", "another encoding", "one byte", "nothing"],
)
def test_odd_text_is_still_text(text: bytes) -> None:
    assert why_no_text(text) == ""


def test_an_empty_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.log").touch()
    with pytest.raises(HomeostatError, match="is empty"):
        doctor([str(tmp_path / "train.log")])


def test_several_files_are_judged_like_those_of_a_folder(tmp_path: Path) -> None:
    for name in ("rank0.log", "rank1.log"):
        (tmp_path / name).write_text(LOG)
    ranks = [tmp_path / "rank0.log", tmp_path / "rank1.log"]
    (one,) = runs_of_files(ranks)
    assert one.files == tuple(ranks)
    for name in ("run1.log", "run2.log"):
        (tmp_path / name).write_text(LOG)
    assert len(runs_of_files([tmp_path / "run1.log", tmp_path / "run2.log"])) == 2
    assert len(runs_of_files([*ranks, tmp_path / "metrics.txt"])) == 2
    assert {run.files for run in runs_at(tmp_path)} == {
        run.files for run in runs_of_files(sorted(tmp_path.iterdir()))
    }


def test_standard_input_stands_alone(tmp_path: Path) -> None:
    with pytest.raises(HomeostatError, match="standard input"):
        doctor(["-", str(tmp_path)], format=ReportFormat.JSON)
