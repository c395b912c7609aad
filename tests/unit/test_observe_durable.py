"""What has to survive a power cut is flushed to disk, and only then takes its name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.support import runs, tiny

from homeostat.observe.durable import sync_file, sync_folder, write_atomically


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The calls of fsync and replace, in order: which, and the path that it was called for."""
    calls: list[tuple[str, str]] = []
    replace = os.replace

    def fsync(descriptor: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def replacing(source: Any, target: Any, **kwargs: Any) -> None:
        calls.append(("replace", os.fspath(source)))
        replace(source, target, **kwargs)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replacing)
    return calls


def test_a_file_is_flushed_before_it_takes_its_name(
    tmp_path: Path, seen: list[tuple[str, str]]
) -> None:
    write_atomically(tmp_path / "a", "text")
    partial = str(tmp_path / ".a.partial")
    assert seen == [("fsync", partial), ("replace", partial)]
    assert (tmp_path / "a").read_text() == "text"
    sync_file(tmp_path / "a")
    sync_folder(tmp_path)
    assert seen[2:] == [("fsync", str(tmp_path / "a")), ("fsync", str(tmp_path))]


def test_a_run_flushes_its_checkpoints_and_records(
    tmp_path: Path, seen: list[tuple[str, str]]
) -> None:
    config = tiny.config(tmp_path, "trainer.max_steps=2")
    runs.train(config)
    flushed = {Path(path).name for what, path in seen if what == "fsync"}
    (folder,) = (config.run_dir / "checkpoints").glob("step_*")
    assert flushed >= {file.name for file in folder.iterdir()}
    # The folder that holds the checkpoint's name, and the name of the newest one.
    assert flushed >= {"checkpoints", ".latest.partial", "events.jsonl"}
