"""Compile caches: damage is found and removed, live runs share nothing, a user's folder is left."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.forks import Forked
from tests.support.patience import eventually

from homeostat.run.wiring.cache_damage import find_damage
from homeostat.run.wiring.compile_cache import (
    UNUSED_S,
    VARIABLES,
    cache_key,
    caches_in,
    clean,
    kernel_digest,
    own_compile_cache,
    view_caches,
)

KERNEL, LAUNCHER = "KERNELHASH", "LAUNCHERHASH"
# A real library of this Python, to be whole or cut.
LIBRARY = Path(math.__file__) if hasattr(math, "__file__") else Path(torch._C.__file__)


@pytest.fixture(autouse=True)
def no_users_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


def write_triton(cache: Path) -> None:
    """A kernel as Triton leaves it, with the list of its files, and a library without one."""
    kernel = cache / KERNEL
    kernel.mkdir(parents=True)
    (kernel / "add.json").write_text(json.dumps({"num_warps": 4}))
    (kernel / "add.ttir").write_text("module {}")
    shutil.copy(LIBRARY, kernel / "add.cubin")
    names = ("add.json", "add.ttir", "add.cubin")
    group = {"child_paths": {name: str(kernel / name) for name in names}}
    (kernel / "__grp__add.json").write_text(json.dumps(group))
    (cache / LAUNCHER).mkdir()
    shutil.copy(LIBRARY, cache / LAUNCHER / "launcher.so")


def write_inductor(cache: Path) -> None:
    (cache / "locks").mkdir(parents=True)
    (cache / "locks" / "abc.lock").touch()
    (cache / "fxgraph" / "ab" / "key").mkdir(parents=True)
    (cache / "fxgraph" / "ab" / "key" / "graph").write_bytes(pickle.dumps({"graph": [1, 2, 3]}))
    (cache / "ab").mkdir()
    (cache / "ab" / "code.py").write_text("def call(args):\n    return args\n")
    (cache / "ab" / "code.best_config").write_text('{"XBLOCK": 128}')


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Both kinds of entries in one folder."""
    write_triton(tmp_path / "cache")
    write_inductor(tmp_path / "cache")
    return tmp_path / "cache"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def leave_a_write(path: Path) -> None:
    (path.parent / "tmp.pid_123_abc").mkdir()


def link(path: Path) -> None:
    moved = path.with_name("moved")
    path.rename(moved)
    path.symlink_to(moved)


def forget(path: Path) -> None:
    path.unlink()


def move_elsewhere(path: Path) -> None:
    group = {"child_paths": {"add.json": "/elsewhere/add.json"}}
    path.write_text(json.dumps(group))


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "cubin cut off": (f"{KERNEL}/add.cubin", cut, "add.cubin is cut off"),
    "library half": (f"{LAUNCHER}/launcher.so", half, "launcher.so is cut off"),
    "library is text": (
        f"{LAUNCHER}/launcher.so",
        lambda path: path.write_text("oops"),
        "launcher.so is not a compiled library",
    ),
    "metadata half": (f"{KERNEL}/add.json", cut, "add.json is not valid JSON"),
    "file empty": (f"{KERNEL}/add.ttir", empty, "add.ttir is empty"),
    "member gone": (f"{KERNEL}/add.cubin", forget, "lacks add.cubin"),
    "list gone": (f"{KERNEL}/__grp__add.json", forget, "was never finished"),
    "list is odd": (f"{KERNEL}/__grp__add.json", lambda p: p.write_text("[]"), "lists no files"),
    "folder copied": (f"{KERNEL}/__grp__add.json", move_elsewhere, "moved or copied"),
    "write left": (f"{KERNEL}/add.json", leave_a_write, "never ended"),
    "link": (f"{KERNEL}/add.json", link, "is a link"),
    "pickle cut off": ("fxgraph/ab/key/graph", cut, "ab/key/graph is cut off"),
    "code half": ("ab/code.py", lambda p: p.write_text("def call(args"), "is not valid Python"),
    "choice half": ("ab/code.best_config", cut, "is not valid JSON"),
    "file at the top": ("stray.json", lambda p: p.write_text("{"), "is not valid JSON"),
}


def test_a_whole_cache_has_no_damage(cache: Path) -> None:
    assert find_damage(cache) == []
    assert clean(cache) == []


def test_a_cache_that_is_not_there_has_no_damage(tmp_path: Path) -> None:
    assert find_damage(tmp_path / "none") == []


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_its_entry_alone_removed(cache: Path, name: str) -> None:
    where, harm, why = DAMAGES[name]
    harm(cache / where)
    entries = sorted(entry.name for entry in cache.iterdir())
    (found,) = find_damage(cache)
    assert why in found.describe()
    assert found.entry == cache / where.split("/")[0]
    assert clean(cache) == [found]
    entries.remove(found.entry.name)
    assert sorted(entry.name for entry in cache.iterdir()) == entries
    assert find_damage(cache) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_trusted(cache: Path) -> None:
    os.chown(cache / LAUNCHER / "launcher.so", 12345, 12345)
    (found,) = find_damage(cache)
    assert "belongs to another user (id 12345)" in found.why


@pytest.mark.skipif(os.geteuid() == 0, reason="root can remove everything")
def test_what_cannot_be_removed_is_set_aside(cache: Path) -> None:
    empty(cache / KERNEL / "add.ttir")
    (cache / KERNEL).chmod(0o500)
    (found,) = clean(cache)
    assert found.entry.name == KERNEL
    assert list(cache.iterdir()) == []
    (aside,) = cache.parent.glob("cache.aside-*")
    assert (aside / KERNEL / "add.json").is_file()
    (aside / KERNEL).chmod(0o700)


Events = list[tuple[str, dict[str, Any]]]


def into(events: Events) -> Callable[..., None]:
    return lambda kind, **fields: events.append((kind, fields))


def test_both_compilers_are_pointed_at_the_run_s_own_folder(tmp_path: Path) -> None:
    events: Events = []
    with caches_in(tmp_path / "ours" / "compile" / "key", emit=into(events)) as slot:
        assert {name: os.environ[variable] for name, variable in VARIABLES.items()} == {
            "triton": str(slot / "triton"),
            "inductor": str(slot / "inductor"),
        }
        assert slot.stat().st_mode & 0o077 == 0
    assert not set(VARIABLES.values()) & set(os.environ)
    assert events == []


def test_what_a_killed_run_left_is_removed_and_told(tmp_path: Path) -> None:
    place = tmp_path / "ours" / "compile" / "key"
    with caches_in(place, emit=into([])) as slot:
        write_triton(slot / "triton")
    half(slot / "triton" / KERNEL / "add.cubin")
    events: Events = []
    with caches_in(place, emit=into(events)) as again:
        assert again == slot
        assert sorted(entry.name for entry in (slot / "triton").iterdir()) == [LAUNCHER]
    ((kind, fields),) = events
    assert kind == "compile_cache_damaged"
    assert fields["removed"]
    assert fields["entries"] == [f"{KERNEL}: add.cubin is cut off"]


def test_live_runs_have_folders_of_their_own(tmp_path: Path) -> None:
    """Also where the other is a process that is killed: its lock goes with it."""
    place = tmp_path / "ours" / "compile" / "key"
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from homeostat.run.wiring.compile_cache import caches_in\n"
        "with caches_in(Path(sys.argv[1]), emit=print) as slot:\n"
        "    Path(sys.argv[2]).symlink_to(slot)\n    time.sleep(120)\n"
    )
    link = tmp_path / "theirs"
    other = Forked(code, [str(place), str(link)], env=os.environ)
    try:
        assert eventually(link.is_symlink)
        theirs = link.readlink()
        with caches_in(place, emit=into([])) as ours:
            assert theirs == place / "0"
            assert ours == place / "1"
    finally:
        other.kill()
        other.wait(60)
    with caches_in(place, emit=into([])) as ours:
        assert ours == theirs


def test_what_no_run_used_for_long_is_removed(tmp_path: Path) -> None:
    compiled = tmp_path / "ours" / "compile"
    for key in ("old", "lately"):
        with caches_in(compiled / key, emit=into([])) as slot:
            write_triton(slot / "triton")
    long_ago = time.time() - UNUSED_S - 60
    os.utime(compiled / "old" / "0" / ".lock", (long_ago, long_ago))
    with caches_in(compiled / "new", emit=into([])):
        assert sorted(folder.name for folder in compiled.iterdir()) == ["lately", "new"]
    assert (compiled / "lately" / "0" / "triton" / KERNEL).is_dir()


def test_a_user_s_own_folder_is_used_as_it_is(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    empty(cache / KERNEL / "add.ttir")
    events: Events = []
    with caches_in(tmp_path / "ours" / "compile" / "key", emit=into(events)) as slot:
        assert os.environ["TRITON_CACHE_DIR"] == str(cache)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(slot / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(cache)
    assert (cache / KERNEL).is_dir()
    ((_, fields),) = events
    assert not fields["removed"]


@pytest.mark.parametrize("harm", ["writable by all", "not a folder"])
def test_a_place_that_will_not_do_gives_way_to_a_temporary_one(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "ours" / "compile" / "key"
    if harm == "not a folder":
        place.parent.parent.write_text("")
    else:
        place.parent.mkdir(parents=True)
        place.parent.chmod(0o777)
    with caches_in(place, emit=into([])) as slot:
        assert tmp_path not in slot.parents
        assert os.environ["TRITON_CACHE_DIR"] == str(slot / "triton")
    assert not slot.exists()
    assert "XDG_CACHE_HOME" in caplog.text


def test_on_a_cpu_nothing_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with own_compile_cache(torch.device("cpu"), emit=into([])):
        assert not set(VARIABLES.values()) & set(os.environ)
    assert list(tmp_path.iterdir()) == []


def test_a_view_changes_nothing_and_tells_whose_damage_it_is(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert view_caches(torch.device("cpu")).damaged == ()
    assert not (tmp_path / "home").exists()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    empty(cache / KERNEL / "add.ttir")
    facts = view_caches(torch.device("cpu")).facts()
    assert facts["damaged"] == [f"{KERNEL}: add.ttir is empty"]
    assert facts["damaged_by_user"] == [str(cache / KERNEL)]
    assert (cache / KERNEL).is_dir()


def test_the_run_s_own_damage_is_not_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = torch.device("cpu")
    with caches_in(tmp_path / "homeostat" / "compile" / cache_key(device), emit=into([])) as slot:
        write_triton(slot / "triton")
    empty(slot / "triton" / KERNEL / "add.ttir")
    facts = view_caches(device).facts()
    assert facts["damaged"]
    assert facts["damaged_by_user"] == []


def test_the_key_follows_the_kernels_alone(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    kernel, plain = tmp_path / "ops" / "kernel.py", tmp_path / "ops" / "plain.py"
    kernel.write_text("import triton\n")
    plain.write_text("import math\n")
    first = kernel_digest(tmp_path)
    plain.write_text("import cmath\n")
    assert kernel_digest(tmp_path) == first
    kernel.write_text("import triton\nBLOCK = 128\n")
    assert kernel_digest(tmp_path) != first
    assert cache_key(torch.device("cpu")) == cache_key(torch.device("cpu"))
