"""The services, for real and offline: what they were given is what they hold, once per step."""

from __future__ import annotations

import builtins
import json
import os
import struct
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.forks import Forked

from homeostat.config.observe import TensorboardSink, TrackioSink, WandbSink
from homeostat.errors import ConfigError, MissingDependencyError
from homeostat.observe.run_dir import RunDir
from homeostat.observe.sinks import build_sinks
from homeostat.observe.sinks.base import SentMark

LOSSES = {step: 10.0 / step for step in range(1, 9)}

# What a process of these has imported when it is forked: a vendor's package takes seconds. Not
# trackio, which reads at its import where it is to store.
IMPORTED = (
    "homeostat.observe.recorder",
    "homeostat.observe.sinks",
    "tensorboard.summary.writer.event_file_writer",
    "wandb",
)
# One process of a run: a real one ends before the next begins, and vendors keep global state.
PROCESS = """
    import json, sys
    from pathlib import Path
    from pydantic import TypeAdapter
    from homeostat.config.observe import AnySink
    from homeostat.observe.recorder import Recorder
    from homeostat.observe.run_dir import RunDir
    from homeostat.observe.sinks import build_sinks
    path, raw, first, last, resumed = json.loads(sys.argv[1])
    config = TypeAdapter(AnySink).validate_python(raw)
    with RunDir(Path(path)) as run_dir:
        sinks = build_sinks([config], run_dir, run_name="my-run", resumed_from=resumed)
        recorder = Recorder(run_dir, sinks, log_interval=1)
        for step in range(first, last + 1):
            recorder.log(step, {"train/loss": 10.0 / step, "learning_rate": 1e-5})
        recorder.close()
    assert "torch" not in sys.modules
"""


def process(path: Path, config: dict[str, Any], first: int, last: int, resumed: int | None) -> None:
    """Steps first..last; `resumed` is the step the process goes on from."""
    forked(PROCESS, json.dumps([str(path), config, first, last, resumed]))
    assert "sink_failed" not in (path / "events.jsonl").read_text()


def forked(code: str, *arguments: str) -> str:
    """Run the code in its own process. Returns what it printed."""
    one = Forked(textwrap.dedent(code), arguments, env=os.environ, imported=IMPORTED)
    output, _ = one.communicate()
    assert one.returncode == 0, output
    return output


def interrupted_run(path: Path, config: dict[str, Any]) -> None:
    """Steps 1 to 6, then a resume from the checkpoint of step 4, up to step 8."""
    process(path, config, 1, 6, None)
    process(path, config, 5, 8, 4)


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    interrupted_run(tmp_path, {"type": "tensorboard", "folder": "boards"})
    assert len(list((tmp_path / "boards").iterdir())) == 2
    events = EventAccumulator(str(tmp_path / "boards")).Reload()
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert [event.step for event in events.Scalars("train/loss")] == list(LOSSES)
    assert shown == pytest.approx(LOSSES, rel=1e-6)


def test_tensorboard_forgets_a_start_that_came_to_nothing(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = {"type": "tensorboard"}
    process(tmp_path, config, 1, 3, None)
    process(tmp_path, config, 1, 2, None)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a 7-byte head, then LevelDB's log format."""
    block, head, part = 32768, 7, b""
    offset = 7
    while offset + head <= len(data):
        if block - offset % block < head:
            offset += block - offset % block
            continue
        length, kind = struct.unpack_from("<HB", data, offset + 4)
        part += data[offset + head : offset + head + length]
        offset += head + length
        # 1: whole record; 2, 3, 4: its first, middle and last part.
        if kind in (1, 4):
            yield part
            part = b""


def read_wandb(path: Path) -> list[tuple[str, int, float]]:
    """Run id, step and loss of each history record in W&B's offline files."""
    from wandb.proto import wandb_internal_pb2

    found: list[tuple[str, int, float]] = []
    for file in sorted(path.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            if "train/loss" in items:
                run_id = file.stem.removeprefix("run-")
                found.append((run_id, int(items["_step"]), float(items["train/loss"])))
    return found


def test_wandb_continues_one_run_and_sends_each_step_once(tmp_path: Path) -> None:
    interrupted_run(tmp_path, {"type": "wandb", "project": "p", "mode": "offline"})
    found = read_wandb(tmp_path)
    assert [step for _, step, _ in found] == list(LOSSES)
    assert {step: loss for _, step, loss in found} == pytest.approx(LOSSES)
    assert len({run_id for run_id, _, _ in found}) == 1


@pytest.mark.parametrize("content", ["", "4\x00", "four"])
def test_a_damaged_mark_counts_as_the_step_resumed_from(tmp_path: Path, content: str) -> None:
    mark = tmp_path / "wandb_mine.step"
    mark.write_text(content)
    sent = SentMark(mark, service="W&B", resumed_from=4)
    assert [step for step in range(3, 7) if sent.is_new(step)] == [5, 6]
    sent.move_to(5)
    assert SentMark(mark, service="W&B", resumed_from=4).step == 5


def test_the_evaluation_before_the_first_step_is_sent(tmp_path: Path) -> None:
    mark = tmp_path / "service.step"
    sent = SentMark(mark, service="W&B", resumed_from=None)
    assert sent.is_new(0)
    sent.move_to(0)
    again = SentMark(mark, service="W&B", resumed_from=0)
    assert [step for step in range(3) if again.is_new(step)] == [1, 2]


def test_a_place_that_cannot_be_written_is_told_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder belongs")
    with RunDir(tmp_path) as run_dir, pytest.raises(ConfigError, match=r"observe\.sinks: tensorb"):
        build_sinks([TensorboardSink(type="tensorboard")], run_dir, run_name="a", resumed_from=None)


def test_wandb_takes_the_run_id_and_name_of_the_recipe(tmp_path: Path) -> None:
    config = {"type": "wandb", "mode": "offline", "run_id": "mine42", "name": "shown"}
    process(tmp_path, config, 1, 1, None)
    assert read_wandb(tmp_path) == [("mine42", 1, 10.0)]
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert b"shown" in next(folder.glob("*.wandb")).read_bytes()


def test_wandb_online_without_an_account_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
    with RunDir(tmp_path / "run") as run_dir, pytest.raises(ConfigError, match="mode: offline"):
        build_sinks([WandbSink(type="wandb")], run_dir, run_name="a", resumed_from=None)


def test_trackio_continues_one_run_and_sends_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    interrupted_run(tmp_path / "run", {"type": "trackio", "project": "p", "name": "shown"})
    code = """
        import json
        from trackio import Api
        from trackio.sqlite_storage import SQLiteStorage
        runs = [(run.name, run.id) for run in Api().runs("p")]
        print(json.dumps([[n, SQLiteStorage.get_logs("p", n, run_id=i)] for n, i in runs]))
    """
    ((name, logs),) = json.loads(forked(code).splitlines()[-1])
    assert name == "shown"
    assert {entry["step"]: entry["train/loss"] for entry in logs} == pytest.approx(LOSSES)
    assert len(logs) == len(LOSSES)


@pytest.mark.parametrize(
    ("config", "package", "extra"),
    [
        (TensorboardSink(type="tensorboard"), "tensorboard", "tensorboard"),
        (WandbSink(type="wandb", mode="offline"), "wandb", "wandb"),
        (TrackioSink(type="trackio"), "trackio", "trackio"),
    ],
)
def test_a_missing_package_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any, package: str, extra: str
) -> None:
    monkeypatch.setattr(builtins, "__import__", without(package, builtins.__import__))
    with (
        RunDir(tmp_path) as run_dir,
        pytest.raises(MissingDependencyError, match=rf"pip install 'homeostat\[{extra}\]'"),
    ):
        build_sinks([config], run_dir, run_name="a", resumed_from=None)


def without(package: str, real_import: Callable[..., Any]) -> Callable[..., Any]:
    """An import that behaves as if the package were not installed."""

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(f"No module named {package!r}", name=package)
        return real_import(name, *args, **kwargs)

    return importing
