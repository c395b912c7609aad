"""Names on the hub become folders in its cache; tested against a hub on loopback."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.support.hub_server import HubServer, local_hub

from homeostat.config.hub_names import CachedPath, cached_path, is_hub_name, parse_hub_name
from homeostat.errors import ConfigError, HubError
from homeostat.hub import failures
from homeostat.hub.choices import Need, dataset_files, model_files, one_file
from homeostat.hub.request import Request
from homeostat.hub.snapshot import fetch

WEIGHTS = bytes(range(256)) * 40
MODEL = {"config.json": "{}", "tokenizer.json": "{ }", "model.safetensors": WEIGHTS,
         "pytorch_model.bin": b"x" * 3000, "onnx/model.onnx": "x", "notes.md": "x"}  # fmt: skip
DATASET = {"README.md": "---\nlicense: mit\n---\n", "train.jsonl": '{"text": "a"}\n',
           "test.jsonl": '{"text": "b"}\n'}  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with local_hub(tmp_path / "home", monkeypatch) as server:
        server.add("model", "org/tiny", MODEL)
        server.add("dataset", "org/rows", DATASET)
        yield server


def asks(revision: str | None = None, *, name: str = "org/tiny", need: Need = "weights") -> Request:
    return Request(
        "model", name, revision, "model.path", need, model_files("model.path", need=need)
    )


def got(request: Request, told: list[str] | None = None) -> Path:
    return fetch(request, show=lambda done, total: None, tell=(told or []).append)


def names_in(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def test_only_what_is_needed_is_downloaded_and_only_once(hub: HubServer) -> None:
    folder = got(asks())
    assert names_in(folder) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    commit = hub.repositories["model", "org/tiny"].branches["main"]
    assert cached_path(str(folder)) == CachedPath("model", "org/tiny", commit, "")
    hub.downloads.clear()
    assert got(asks()) == folder
    assert hub.downloads == []
    hub.asked.clear()
    assert got(asks(commit)) == folder
    assert hub.asked == [], "a commit that was downloaded needs no hub"


def test_a_part_of_a_model_and_a_single_file_are_downloaded_alone(hub: HubServer) -> None:
    assert names_in(got(asks(need="config"))) == {"config.json"}
    assert names_in(got(asks(need="tokenizer"))) == {"config.json", "tokenizer.json"}
    hub.add("model", "org/packed", {"a-Q4.gguf": "x", "b-Q8.gguf": "y"})
    choose = one_file("model.path", "org/packed", "b-Q8.gguf")
    request = Request("model", "org/packed", None, "model.path", "b-Q8.gguf", choose)
    assert names_in(got(request)) == {"b-Q8.gguf"}
    with pytest.raises(ConfigError, match=r"holds GGUF files.*a-Q4\.gguf"):
        got(asks(name="org/packed"))


def test_a_split_of_a_dataset_is_downloaded_with_its_readme(hub: HubServer) -> None:
    choose = dataset_files("data.train.0", "org/rows", config=None, split=None, default="train")
    request = Request("dataset", "org/rows", None, "data.train.0.path", "/train", choose)
    assert names_in(got(request)) == {"README.md", "train.jsonl"}


def test_a_sharded_model_is_what_its_index_names(hub: HubServer) -> None:
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    files = {"model.safetensors.index.json": index, "config.json": "{}", "x.safetensors": "x"}
    shards = {"model-1.safetensors": "1", "model-2.safetensors": "2"}
    hub.add("model", "org/sharded", {**files, **shards})
    folder = got(asks(name="org/sharded"))
    assert names_in(folder) == {*files, *shards} - {"x.safetensors"}


def test_a_moved_branch_gives_the_new_files_and_a_commit_the_old_ones(hub: HubServer) -> None:
    first = got(asks())
    hub.repositories["model", "org/tiny"].commit(MODEL | {"config.json": '{"new": 1}'})
    second = got(asks())
    assert second != first
    assert (second / "config.json").read_text() == '{"new": 1}'
    assert (got(asks(first.name)) / "config.json").read_text() == "{}"


@pytest.mark.parametrize("way", ["offline", "no answer", "error 503"])
def test_a_copy_in_the_cache_stands_in_for_a_hub_that_does_not_answer(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    folder, told = got(asks()), []
    out_of_reach(hub, monkeypatch, way)
    assert fetch(asks(), show=lambda *_: None, tell=told.append) == folder
    assert folder.name[:12] in told[0]
    with pytest.raises(HubError, match=r"hf download org/other") as caught:
        got(asks(name="org/other"))
    assert ("HF_HUB_OFFLINE is set" in str(caught.value)) == (way == "offline")


def out_of_reach(hub: HubServer, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif way == "error 503":
        hub.status = 503
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")


def test_what_may_not_be_seen_names_the_login_command(hub: HubServer) -> None:
    hub.add("model", "org/gated", MODEL).gated = True
    with pytest.raises(ConfigError, match=r"org/gated is gated.*hf auth login"):
        got(asks(name="org/gated"))
    with pytest.raises(ConfigError, match=r"'org/none' does not exist on this disk.*hf auth login"):
        got(asks(name="org/none"))
    with pytest.raises(ConfigError, match=r"model\.revision: org/tiny has no revision 'v9'"):
        got(asks("v9"))


def test_a_repository_of_another_kind_is_refused_with_what_it_is(hub: HubServer) -> None:
    base = '{"base_model_name_or_path": "org/base"}'
    hub.add("model", "org/adapter", {"adapter_config.json": base, "adapter_model.safetensors": "x"})
    with pytest.raises(ConfigError, match=r"LoRA adapter.*base model \(org/base\).*lora\.path"):
        got(asks(name="org/adapter"))
    hub.add("model", "org/pickled", {"config.json": "{}", "pytorch_model.bin": "x"})
    with pytest.raises(ConfigError, match=r"only pickled ones \(pytorch_model\.bin\)"):
        got(asks(name="org/pickled"))


def test_a_damaged_file_is_refused_and_not_kept(hub: HubServer) -> None:
    hub.damages = True
    with pytest.raises(HubError, match=r"model\.safetensors arrived damaged: its checksum"):
        got(asks())
    hub.damages = False
    assert (got(asks()) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_lost_connection_is_taken_up_where_it_stopped(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.stops_after = 4096
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)
    monkeypatch.setattr(time, "sleep", lambda seconds: setattr(hub, "stops_after", None))
    assert (got(asks()) / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [asked for _, asked in hub.downloads if asked]
    assert ranges == ["bytes=4096-"]


def test_of_two_at_once_one_downloads_and_the_other_waits(hub: HubServer) -> None:
    hub.stops_after = 4096
    hub.may_go_on.clear()
    folders: list[Path] = []
    told: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: folders.append(
                fetch(asks(), show=lambda *_: None, tell=told.append)
            )
        )
        for _ in range(2)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    await_(lambda: told)
    hub.stops_after = None
    hub.may_go_on.set()
    for thread in threads:
        thread.join(60)
    assert folders[0] == folders[1]
    assert told == ["another process downloads org/tiny: waiting for it."]
    assert len(hub.downloads) == 3


CHILD = """
from homeostat.hub.choices import model_files
from homeostat.hub.request import Request
from homeostat.hub.snapshot import fetch
choose = model_files("model.path", need="weights")
fetch(Request("model", "org/tiny", None, "model.path", "weights", choose),
      show=lambda *_: None, tell=print)
"""


def test_another_process_goes_on_where_a_killed_one_stopped(hub: HubServer) -> None:
    hub.stops_after = 4096
    hub.may_go_on.clear()
    env = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": constants.HF_HOME,
        "HF_HUB_OFFLINE": "0",
    }
    child = subprocess.Popen([sys.executable, "-c", CHILD], env=env)
    try:
        await_(lambda: len(hub.downloads) == 3)
        snapshots = Path(constants.HF_HUB_CACHE) / "models--org--tiny" / "snapshots"
        await_(lambda: len(list(snapshots.glob("*/*.json"))) == 2)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(10)
    hub.stops_after = None
    hub.may_go_on.set()
    before = len(hub.downloads)
    assert (got(asks()) / "model.safetensors").read_bytes() == WEIGHTS
    assert len(hub.downloads) == before + 1, "complete files are not downloaded again"


def await_(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def test_a_disk_without_room_is_noticed_before_the_download(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(HubError, match=r"are to be downloaded, and 100 B are free.*HF_HOME"):
        got(asks())
    assert hub.downloads == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"is full\. Free some room.*HF_HOME"),
        (RuntimeError("Data processing error: CAS service error : Reqwest Error: 403"),
         "Xet storage.*HF_HUB_DISABLE_XET=1"),
        (RuntimeError("Internal error: xet_client::cas"), "HF_HUB_DISABLE_XET=1"),
        (OSError("Consistency check failed: file should be of size 3"), "hf download org/tiny"),
    ],
)  # fmt: skip
def test_an_error_says_what_to_do(error: Exception, message: str) -> None:
    with pytest.raises(HubError, match=f"model.path: org/tiny.*(?s:.*){message}"):
        raise failures.as_error(error, asks())


def test_the_command_fetches_what_was_asked_for() -> None:
    assert asks().command == "hf download org/tiny"
    rows = Request("dataset", "org/rows", "v1", "data.train.0.path", "", lambda *_: ())
    assert rows.command == "hf download org/rows --repo-type dataset --revision v1"


def test_a_name_is_told_from_a_path() -> None:
    assert is_hub_name("Qwen/Qwen2.5-0.5B-Instruct")
    for path in ("rows.jsonl", "data/rows.jsonl", "./org/name", "/org/name", "../org/name", "name",
                 "a/b/c", "org/name.gguf", "~/model"):  # fmt: skip
        assert not is_hub_name(path), path
    named = parse_hub_name("org/name/deep/file.gguf")
    assert named is not None
    assert (named.name, named.file) == ("org/name", "deep/file.gguf")
    assert cached_path("/somewhere/models--org--name/snapshots/main") is None
