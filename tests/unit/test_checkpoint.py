"""Checkpoints are whole or not there, and nothing saved is ever lost by saving more."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.support.forks import Forked

from homeostat.errors import CheckpointError, DiskFullError
from homeostat.train.saving.checkpoint import (
    CheckpointStore,
    why_broken,
)
from homeostat.train.saving.run_state import RunState
from homeostat.train.saving.shards import Rows, TensorReader, copy_rows, write_whole


def tensors(value: float = 0.0, size: int = 64) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((size,), value)}, "optimizer": {"m": torch.zeros(size)}}


def save(
    store: CheckpointStore, step: int, files: dict[str, dict[str, torch.Tensor]], state: dict
) -> None:
    def write(folder: Path) -> None:
        for stem, group in files.items():
            write_whole(folder, stem, group)

    store.save(step, write, state, num_bytes=512)


def saved(folder: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(folder)
    for step in steps:
        save(store, step, tensors(step), {"n": step})
    return store


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    found = saved(tmp_path, 1, 2).newest_valid()
    assert found is not None
    assert (found.step, found.state, found.passed_over) == (2, {"n": 2}, ())
    assert torch.equal(TensorReader(found.path, "model").whole()["w"], torch.full((64,), 2.0))
    assert (tmp_path / "latest").read_text().strip() == "step_00000002"


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none").newest_valid() is None


def damage(path: Path, how: str) -> None:
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    if how == "flipped":
        content[-1] ^= 1
        file.write_bytes(content)
    elif how == "short":
        file.write_bytes(content[:-8])
    elif how == "missing":
        file.unlink()
    elif how == "no manifest":
        (path / "manifest.json").unlink()
    else:
        (path / "manifest.json").write_text("[3")


@pytest.mark.parametrize("how", ["flipped", "short", "missing", "no manifest", "bad manifest"])
def test_a_broken_one_is_passed_over_and_told(tmp_path: Path, how: str) -> None:
    store = saved(tmp_path, 1, 2)
    damage(store.path(2), how)
    found = store.newest_valid()
    assert found is not None
    assert found.step == 1
    assert found.passed_over[0][0] == "step_00000002"
    with pytest.raises(CheckpointError, match="load_step=2"):
        store.at_step(2)
    damage(store.path(1), how)
    with pytest.raises(CheckpointError, match="none of the 2"):
        store.newest_valid()


def test_every_single_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path, 1).path(1)
    rng = random.Random(0)
    for file in sorted(path.iterdir()):
        if file.name == "manifest.json":
            continue
        original = file.read_bytes()
        for _ in range(20):
            changed = bytearray(original)
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            file.write_bytes(changed)
            assert why_broken(path) is not None
        file.write_bytes(original)
    assert why_broken(path) is None


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3, 4, 5)
    store.mark_best(2)
    assert store.prune(keep_last=2, max_bytes=None) == [1, 3]
    assert store.steps() == [2, 4, 5]
    assert store.prune(keep_last=2, max_bytes=1) == [4]
    assert store.steps() == [2, 5]


def test_going_back_sets_the_later_ones_aside(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, 3)
    store.mark_best(3)
    assert store.set_aside_after(1) == [2, 3]
    assert store.steps() == [1]
    assert store.best_step() is None
    assert sorted(p.name for p in tmp_path.glob("set_aside_*/*")) == [
        "step_00000002",
        "step_00000003",
    ]


def test_an_unknown_step_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Steps there: 1, 2"):
        saved(tmp_path, 1, 2).at_step(7)


LIMITED = """
import resource, sys, torch
from pathlib import Path
from types import SimpleNamespace
from homeostat.errors import CheckpointError, DiskFullError
from homeostat.train.saving.checkpoint import CheckpointStore
from homeostat.train.saving.shards import write_whole
store = CheckpointStore(Path(sys.argv[1]))
def save(step, tensor):
    write = lambda folder: write_whole(folder, "model", {"w": tensor})
    store.save(step, write, {}, num_bytes=tensor.nbytes)
save(1, torch.ones(64))
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    save(2, torch.ones(64_000))
except CheckpointError as error:
    print(error)
"""


def test_a_full_disk_costs_nothing_already_saved(tmp_path: Path) -> None:
    process = Forked(LIMITED, [str(tmp_path)], env=os.environ)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "Earlier checkpoints are untouched" in output
    assert "runs_dir" in output
    assert [path.name for path in tmp_path.glob("*step*")] == ["step_00000001"]
    assert CheckpointStore(tmp_path).newest_valid() is not None


KILLED = """
import os, sys, threading, torch
from pathlib import Path
from types import SimpleNamespace
from homeostat.train.saving.checkpoint import CheckpointStore
from homeostat.train.saving.shards import write_whole
store = CheckpointStore(Path(sys.argv[1]))
step = 0
while True:
    step += 1
    tensor = torch.full((20_000,), float(step))
    write = lambda folder: write_whole(folder, "model", {"w": tensor})
    store.save(step, write, {"step": step}, num_bytes=80_000)
    store.prune(keep_last=2, max_bytes=None)
    if step == 1:
        threading.Timer(float(sys.argv[2]), lambda: os.kill(os.getpid(), 9)).start()
"""


@pytest.mark.parametrize("attempts", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_kill_nine_at_any_moment_leaves_a_whole_one(tmp_path: Path, attempts: int) -> None:
    rng = random.Random(os.getpid())
    for attempt in range(attempts):
        folder = tmp_path / str(attempt)
        # The clock starts when there is one to lose, however slow the machine is.
        process = Forked(KILLED, [str(folder), str(rng.random() / 4)], env=os.environ)
        output, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, output
        store = CheckpointStore(folder)
        found = store.newest_valid()
        assert found is not None
        assert found.passed_over == ()
        assert float(TensorReader(found.path, "model").whole()["w"][0]) == found.state["step"]
        save(store, found.step + 1, tensors(), {})
        assert not list(folder.glob(".*_step_*"))


def resealed(path: Path, name: str, content: bytes) -> None:
    """Change a file and its checksum: what a hand that means well might do."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff"])
def test_a_state_that_is_no_object_is_named(tmp_path: Path, content: bytes) -> None:
    store = saved(tmp_path, 1)
    resealed(store.path(1), "state.json", content)
    with pytest.raises(CheckpointError, match=r"step_00000001/state\.json"):
        store.newest_valid()


def test_tensors_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    store = saved(tmp_path, 1)
    resealed(store.path(1), "model.safetensors", b"x" * 40)
    found = store.newest_valid()
    assert found is not None
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        TensorReader(found.path, "model")
    with pytest.raises(CheckpointError, match="run is None"):
        found.section("run")


@pytest.mark.parametrize(
    "odd", [{}, {"w": torch.ones(3)}, {"w": torch.ones(2), "x": torch.ones(1)}]
)
def test_tensors_of_another_model_are_refused_and_nothing_is_copied(
    tmp_path: Path,
    odd: dict[str, torch.Tensor],
) -> None:
    own = {"w": Rows(torch.zeros(2), 0, (2,))}
    write_whole(tmp_path, "model", odd)
    with pytest.raises(CheckpointError, match="another model"):
        copy_rows(own, TensorReader(tmp_path, "model"), what="model")
    assert not own["w"].tensor.any()


@pytest.mark.parametrize(
    ("name", "value"),
    [("step", "x"), ("step", True), ("step", -1), ("num_tokens", None), ("threads", 0),
     ("threads", 10**30), ("stopped_early", 1), ("best_eval", "x"), ("extra", 1)],
)  # fmt: skip
def test_a_damaged_run_state_names_file_and_field(name: str, value: object) -> None:
    whole = RunState(step=3, best_eval=0.5).as_json()
    assert RunState.from_json(whole, place="p").as_json() == whole
    with pytest.raises(CheckpointError, match=f"p: run.{name}"):
        RunState.from_json({**whole, name: value}, place="p")


@pytest.mark.parametrize("text", ['{"\\ud800": {}}', '{"a": {"bytes": "\\ud800"}}', "{}", "[]"])
def test_a_damaged_manifest_never_gets_into_a_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    broken = why_broken(tmp_path)
    assert broken is not None
    assert broken.isprintable()


def test_saving_a_step_again_never_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end comes between moving the old one away and putting the new one in its place."""
    store = saved(tmp_path, 5)
    rename = os.rename

    def ends(source: Path, target: Path) -> None:
        if ".building_" in str(source):
            raise SystemExit
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", ends)
        with pytest.raises(SystemExit):
            save(store, 5, tensors(7), {"n": 7})
    assert store.steps() == []
    found = CheckpointStore(tmp_path).newest_valid()
    assert found is not None
    assert (found.step, found.state) == (5, {"n": 5})
    save(store, 5, tensors(7), {"n": 7})
    assert store.at_step(5).state == {"n": 7}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000005"]


def test_a_refusal_for_lack_of_space_needs_more_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=2_100_000)
    monkeypatch.setattr("homeostat.train.saving.checkpoint.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(DiskFullError, match=r"2\.68 MB are needed and 2\.10 MB are free"):
        CheckpointStore(tmp_path).save(1, lambda folder: None, {}, num_bytes=1_600_000)
