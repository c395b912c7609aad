"""The run directory: one writer, whole lines, strict JSON, nothing lost to a full disk."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forks import Forked

from homeostat.config.loading.load import build_config
from homeostat.errors import RunDirError, RunDirWriteError
from homeostat.observe.jsonl import JsonlWriter, encode, iter_jsonl, read_metrics
from homeostat.observe.run_dir import RunDir, RunPaths


def run_python(code: str, *args: object) -> str:
    """Run code in another process. Returns its output."""
    process = Forked(textwrap.dedent(code), [*map(str, args)], env=os.environ)
    return process.communicate()[0]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1), values, max_size=5))
def test_a_record_is_one_strict_line_and_reads_back(
    tmp_path_factory: pytest.TempPathFactory, record: dict[str, object]
) -> None:
    line = encode(record)
    assert line.count(b"\n") == 1

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    json.loads(line, parse_constant=refuse)
    path = tmp_path_factory.mktemp("jsonl") / "one.jsonl"
    path.write_bytes(line)
    assert encode(next(iter_jsonl(path))) == line


def test_values_that_are_not_finite_come_back_as_floats(tmp_path: Path) -> None:
    with RunDir(tmp_path / "run") as run_dir:
        run_dir.append_metrics(1, {"train/loss": math.nan, "grad_norm": math.inf})
        run_dir.append_metrics(2, {"train/loss": -math.inf, "grad_norm": np.float32(0.5)})  # type: ignore[dict-item]
    text = (tmp_path / "run/metrics.jsonl").read_text()
    assert '"nan"' in text
    assert "NaN" not in text
    first, second = read_metrics(tmp_path / "run/metrics.jsonl")
    assert math.isnan(first["train/loss"])
    assert first["grad_norm"] == math.inf
    assert second["train/loss"] == -math.inf
    assert second["grad_norm"] == 0.5


@pytest.mark.parametrize("torn", [b'{"step":3,"tr', b"\0\0\0\0", b'{"step":3}', b"\0\0\n{}["])
def test_a_torn_tail_is_dropped_and_the_rest_kept(tmp_path: Path, torn: bytes) -> None:
    with RunDir(tmp_path) as run_dir:
        run_dir.append_metrics(1, {"train/loss": 1.0})
        run_dir.append_metrics(2, {"train/loss": 2.0})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    with RunDir(tmp_path) as run_dir:
        run_dir.append_metrics(3, {"train/loss": 3.0})
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_reading_passes_over_a_line_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2')
    assert read_metrics(path) == [{"step": 1}]


def test_damage_in_the_middle_is_passed_over_and_told_with_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\nrubbish\n{"step":2}\n')
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    assert f"{path}: damaged lines were passed over: 2" in caplog.text


@given(st.data())
def test_a_damaged_line_costs_no_other_and_is_kept_aside(data: st.DataObject) -> None:
    """Whatever bytes stand in a line's place, the other records are read, appended to and cut."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        lines = [b'{"step":%d,"time":1.5,"train/loss":0.5}\n' % step for step in range(9)]
        bad = sorted(data.draw(st.sets(st.integers(0, 7), min_size=1)))
        garbage = st.binary(max_size=30).map(lambda text: text.replace(b"\n", b"") + b"\n")
        known = st.sampled_from([b'{"step":1,"time":1,"a":"x"}\n', b"[1]\n", b"{}\n", b"\n"])
        broken = {at: data.draw(st.one_of(garbage, known)) for at in bad}
        (path / "metrics.jsonl").write_bytes(
            b"".join(broken.get(n, x) for n, x in enumerate(lines))
        )
        with RunDir(path) as run_dir:
            assert run_dir.set_aside == {"metrics.jsonl": len(bad)}
            run_dir.append_metrics(9, {"train/loss": 0.25})
            run_dir.truncate_after(7)
        kept = [record["step"] for record in read_metrics(path / "metrics.jsonl")]
        assert kept == [step for step in range(8) if step not in bad]
        assert (path / "metrics.jsonl.damaged").read_bytes() == b"".join(broken[at] for at in bad)


def test_a_second_process_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    code = """
        import sys; from pathlib import Path
        from homeostat.errors import RunDirError, RunDirWriteError
        from homeostat.observe.run_dir import RunDir
        try:
            RunDir(Path(sys.argv[1])).close(); print("open")
        except RunDirError as error:
            print(error)
    """
    with RunDir(tmp_path):
        assert f"in use by process {os.getpid()}" in run_python(code, tmp_path)
    assert run_python(code, tmp_path).strip() == "open"


def test_a_killed_process_and_its_forked_children_leave_no_lock(tmp_path: Path) -> None:
    code = """
        import os, signal, sys, time; from pathlib import Path
        from homeostat.observe.run_dir import RunDir
        run_dir = RunDir(Path(sys.argv[1]))
        parent = os.getpid()
        # The child acts, so that it has let go of the lock before its parent is killed.
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            os.kill(parent, signal.SIGKILL); time.sleep(30); os._exit(0)
        time.sleep(30)
    """
    # Output goes to a file: a pipe would stay open as long as the orphan lives.
    with (tmp_path / "out").open("w+") as out:
        run = [str(tmp_path / "run")]
        done = Forked(textwrap.dedent(code), run, env=os.environ, output=out.fileno())
        done.wait(60)
        out.seek(0)
        child = int(out.read())
    try:
        assert done.returncode == -signal.SIGKILL
        os.kill(child, 0)  # the orphan still lives
        with RunDir(tmp_path / "run") as run_dir:
            assert not run_dir.was_used
    finally:
        os.kill(child, signal.SIGKILL)


def test_resuming_cuts_only_later_steps_and_counts_them(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        for step in range(1, 8):
            run_dir.append_metrics(step, {"train/loss": 1.0 / step})
            run_dir.append_row_losses(step, row_ids=np.arange(2), losses=np.array([0.5, math.nan]))
            run_dir.append_event("checkpoint_saved", step)
        before = (tmp_path / "metrics.jsonl").read_bytes()
    with RunDir(tmp_path) as run_dir:
        assert run_dir.was_used
        assert run_dir.truncate_after(5) == 4
        assert run_dir.truncate_after(5) == 0
        run_dir.append_metrics(6, {"train/loss": 9.0})
    after = (tmp_path / "metrics.jsonl").read_bytes()
    assert after.startswith(b"\n".join(before.split(b"\n")[:5]))
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")][-2:] == [5, 6]
    assert [record["step"] for record in iter_jsonl(tmp_path / "row_losses.jsonl")][-1] == 5
    assert len(list(iter_jsonl(tmp_path / "events.jsonl"))) == 7


def test_a_full_device_costs_no_training_and_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = JsonlWriter(Path("/dev/full"))
    for step in range(5):
        writer.append({"step": step})
    assert writer.num_failed_writes == 5
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    writer.close()
    assert "5 records could not be written" in caplog.text


def test_records_that_waited_for_disk_space_are_written_in_order(tmp_path: Path) -> None:
    code = """
        import resource, sys; from pathlib import Path
        from homeostat.observe.jsonl import JsonlWriter
        writer = JsonlWriter(Path(sys.argv[1]))
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        for step in range(50):
            writer.append({"step": step, "pad": "x" * 30})
        size = Path(sys.argv[1]).stat().st_size
        whole = Path(sys.argv[1]).read_bytes().endswith(b"}\\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        writer.append({"step": 50})
        writer.close()
        print(size <= 1000, whole, writer.num_failed_writes > 0)
    """
    assert run_python(code, tmp_path / "metrics.jsonl").split()[-3:] == ["True", "True", "True"]
    steps = [record["step"] for record in iter_jsonl(tmp_path / "metrics.jsonl")]
    assert steps == list(range(51))


def test_config_is_kept_resolved_and_as_given(tmp_path: Path) -> None:
    raw = {
        "name": "a",
        "model": {"path": "m"},
        "data": {"train": [{"type": "text", "path": "x.jsonl"}]},
    }
    config = build_config(raw, [], file=None)
    with RunDir(tmp_path) as run_dir:
        run_dir.write_config(config.model_dump_json(), recipe="name: a  # mine\n")
        rows = run_dir.write_offending_rows(4, [{"row": 1, "loss": math.inf}])
    assert json.loads((tmp_path / "config.json").read_text())["trainer"]["batch_rows"] == 32
    assert (tmp_path / "config.yaml").read_text() == "name: a  # mine\n"
    assert list(iter_jsonl(rows)) == [{"row": 1, "loss": math.inf}]
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]


def test_a_folder_setting_cannot_leave_the_run_directory(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    assert paths.inside("trace") == tmp_path / "run" / "trace"
    for folder in ("../other", "/tmp"):
        with pytest.raises(RunDirError, match="outside"):
            paths.inside(folder)


def test_a_path_that_cannot_be_a_folder_is_refused_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="runs_dir"):
        RunDir(tmp_path / "file" / "run")


@pytest.mark.parametrize("name", ["events.jsonl", "console.log", "config.json"])
def test_a_pipe_or_folder_in_the_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    for kind, make in (("pipe", os.mkfifo), ("folder", os.mkdir)):
        folder = tmp_path / kind
        folder.mkdir()
        make(folder / name)
        with pytest.raises(RunDirError, match=name):
            RunDir(folder)


@pytest.mark.parametrize(
    "line", ['{"kind": "x"}', '{"step": "1"}', '{"step": true}', '{"step": 1, "time": null}',
             '{"step": 1, "loss": 1' + "0" * 400 + "}"],
)  # fmt: skip
def test_a_record_that_is_none_of_ours_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    path, damaged = tmp_path / "metrics.jsonl", []
    path.write_text('{"step": 1}\n' + line + "\n")
    assert read_metrics(path, damaged=damaged) == [{"step": 1}]
    assert damaged == [2]


def test_cutting_a_damaged_file_cuts_what_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"kind": "x"}\n{"step": 2}\n')
    assert JsonlWriter(path).cut_after(1) == 1
    assert path.read_text() == '{"step": 1}\n'


def test_a_folder_that_vanishes_fails_the_run_once_and_loudly(tmp_path: Path) -> None:
    for kind, remove in (("deleted", shutil.rmtree), ("moved", lambda f: f.rename(f"{f}.old"))):
        with RunDir(tmp_path / kind) as run_dir:
            run_dir.append_metrics(1, {"train/loss": 1.0})
            remove(run_dir.path)
            with pytest.raises(RunDirWriteError, match="deleted, moved or replaced"):
                run_dir.append_metrics(2, {"train/loss": 1.0})
            # Telling of the failure must not raise another one.
            run_dir.append_event("run_failed", 2)
