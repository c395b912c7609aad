"""Streams and pipes are read like files: bounded in memory, and never waited for by a scan."""

from __future__ import annotations

import array
import fcntl
import io
import os
import random
import signal
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
import typer
from tests.support.patience import eventually

from homeostat.cli.doctor import doctor
from homeostat.errors import DataError
from homeostat.health.diagnose import diagnose
from homeostat.health.diagnose import named as shown
from homeostat.health.finding import Cause, Fix, Grade, Sighting
from homeostat.health.frameworks import ALL
from homeostat.health.readers import open_run, read_stream, read_text
from homeostat.health.readers.files.long_logs import LongLogReader
from homeostat.health.readers.files.one_file import found_in_file
from homeostat.health.readers.files.text import MAX_TEXT, TextReader
from homeostat.health.readers.growing import GrowingLog
from homeostat.health.readers.input.source import MAX_LINE, Source
from homeostat.health.readers.lines.kept_lines import MAX_LAST_CHARS, LineKeeper
from homeostat.health.readers.values.numbers import number_of
from homeostat.health.records import Change, State
from homeostat.health.registry import BY_CODE, RULES
from homeostat.health.view import RunView
from homeostat.integrations.telling import Message, News
from homeostat.observe.ailments import finding_line

ROWS = [str({"loss": 2.0 - n / 10, "grad_norm": 1.0, "epoch": n / 10}) for n in range(1, 9)]


class Endless(io.RawIOBase):
    """A pipe that never ends: rows, then the same line for ever."""

    def __init__(self) -> None:
        self.num_read = 0
        self._rows = "\n".join(ROWS).encode() + b"\n"

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:
        data = self._rows or b"GET /health 200 OK\n" * (len(buffer) // 19)
        self._rows = b""
        buffer[: len(data)] = data
        self.num_read += len(data)
        return len(data)


def test_an_endless_stream_is_judged_up_to_the_limit_and_says_so() -> None:
    pipe = Endless()
    view = read_stream(Source(io.BufferedReader(pipe), name="-", limit=3_000_000))
    assert len(view.metrics["train/loss"]) == 8
    assert pipe.num_read < 5_000_000
    (note,) = view.facts["reading"].notes
    assert "stopped after" in note


def test_an_interrupted_stream_is_judged_as_far_as_it_came() -> None:
    pipe = Endless()
    source = Source(io.BufferedReader(pipe), name="-")

    def press() -> None:
        assert eventually(lambda: pipe.num_read > 100_000)
        source.interrupt()

    threading.Thread(target=press).start()
    view = read_stream(source)
    assert len(view.metrics["train/loss"]) == 8
    assert "interrupted" in view.facts["reading"].notes[0]


def test_ctrl_c_ends_the_reading_and_not_the_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.write(writing, "\n".join(ROWS).encode() + b"\n")
    before = signal.getsignal(signal.SIGINT)

    def is_drained() -> bool:
        waiting = array.array("i", [0])
        fcntl.ioctl(reading, termios.FIONREAD, waiting)
        return waiting[0] == 0

    def press() -> None:
        assert eventually(lambda: signal.getsignal(signal.SIGINT) is not before)
        assert eventually(is_drained)
        time.sleep(0.3)
        # Not to this thread: the handler runs in the main one, which waits for the pipe.
        os.kill(os.getpid(), signal.SIGINT)

    with os.fdopen(reading, "rb") as pipe:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(pipe))
        threading.Thread(target=press).start()
        with pytest.raises(typer.Exit):
            doctor(["-"])
    os.close(writing)
    shown = capsys.readouterr()
    assert "reading was interrupted" in shown.err
    assert "8 steps" in shown.out or "step 8" in shown.out, shown.out
    assert signal.getsignal(signal.SIGINT) is before


def test_a_pipe_that_the_user_names_is_read_like_standard_input(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write() -> None:
        pipe.write_text("\n".join(ROWS) + "\n")

    writer = threading.Thread(target=write)
    writer.start()
    view = open_run(pipe)
    writer.join()
    assert len(view.metrics["train/loss"]) == 8


def test_a_folder_s_scan_opens_no_pipe_and_says_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.log")
    (tmp_path / "other.log").write_text("\n".join(ROWS) + "\n")
    (tmp_path / "loop.log").symlink_to(tmp_path / "loop.log")
    view = open_run(tmp_path)
    assert len(view.metrics["train/loss"]) == 8
    notes = " ".join(view.facts["reading"].notes)
    assert "train.log: is not a regular file" in notes
    assert "loop.log: is not a regular file" in notes
    with pytest.raises(DataError, match="neither a file nor a folder"):
        found_in_file(tmp_path / "train.log")


def test_an_over_long_line_keeps_its_beginning_and_its_end_and_is_told(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    line = "ValueError: first " + "x" * (2 * MAX_LINE + 500_000) + " last"
    file.write_text("\n".join([*ROWS, line, *ROWS]) + "\n")
    view = open_run(file)
    found = view.log.first("ValueError: first")
    assert found is not None
    assert found.text.endswith(" last")
    assert found.number == 9
    notes = " ".join(view.facts["reading"].notes)
    assert f"1 line is longer than {MAX_LINE:,} bytes" in notes
    assert f"more than {MAX_TEXT:,} characters" in notes


def test_a_long_json_row_is_read_whole() -> None:
    row = '{"step": 3, "loss": 0.5, "text": "' + "y" * (2 * MAX_TEXT) + '"}'
    assert read_text(row + "\n").metrics["train/loss"].values.tolist() == [0.5]


def test_bars_that_are_redrawn_for_megabytes_are_all_seen(tmp_path: Path) -> None:
    total = 90_000
    drawn = (
        f"\r {n * 100 // total}%|###| {n}/{total} [00:01<00:02, loss={n}]" for n in range(1, total)
    )
    bars = "".join(drawn)
    assert len(bars) > MAX_LINE
    file = tmp_path / "train.log"
    file.write_text(bars + "\n")
    assert len(open_run(file).metrics["train/loss"]) == total - 1


def test_a_very_long_line_that_grows_is_one_line() -> None:
    log = GrowingLog("-")
    data = b"a\n" + b"y" * (2 * MAX_LINE) + b"\nRuntimeError: CUDA out of memory\n"
    for start in range(0, len(data), 1 << 16):
        log.feed(data[start : start + (1 << 16)])
    log.finish()
    assert [line.number for line in log.view().log.lines] == [1, 2, 3]


def test_kept_lines_are_bounded_by_their_size() -> None:
    keeper = LineKeeper()
    for number in range(1, 6_000):
        keeper.add((number, "z" * 20_000, None, 0))
    lines = keeper.log().lines
    assert sum(len(line.text) for line in lines) < 2 * MAX_LAST_CHARS
    assert lines[0].number == 1
    assert lines[-1].number == 5_999


def test_lines_of_a_known_shape_give_what_reading_each_of_them_gives() -> None:
    """The prefilter against the plain way: the same rows, log, events, samples and counts."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    try:
        import large_log
    finally:
        sys.path.pop(0)
    lines = list(large_log.lines(seed=5, num_steps=12)) * 2
    lines += [f"[step {n}] reward function took 0.{n} s and 1.{n} s\n" for n in range(400)]
    # Ids, numbers without letters, and lines that are too long to be remembered.
    for n in range(60):
        ids = f"{random.getrandbits(64):016x} {random.getrandbits(20)} {n:04d}"
        lines += [f"request {ids} done\n", f"loss={n} of {ids}\n", f"{ids} x\n", f"x {ids * 60}\n"]
    lines += ["===== Step 3/500 =====\n", "  * Loss: 0.5\n", "  * Loss: 0.6\n", "Step  Loss  KL\n"]
    quick, plain = LongLogReader(), TextReader()
    for reader in (quick, plain):
        # As if all lines that may be settings had been read.
        reader.skip_settings()
    rest = [line.rstrip("\n").encode() for line in lines]
    while rest:
        size = random.choice((1, 3, 50, 1_000))
        quick.feed_bytes(rest[:size])
        rest = rest[size:]
    plain.feed(lines)
    assert quick.recorder.forms == plain.recorder.forms
    ours, theirs = quick.recorder.series(), plain.recorder.series()
    assert ours.keys() == theirs.keys()
    for name, series in ours.items():
        assert series.values.tolist() == theirs[name].values.tolist()
        assert series.steps.tolist() == theirs[name].steps.tolist()
    assert quick.kept.log().lines == plain.kept.log().lines
    assert quick.events == plain.events
    assert quick.samples.found == plain.samples.found
    assert quick.reading().num_unread_rows == plain.reading().num_unread_rows > 0
    assert quick.reading().num_lines == plain.reading().num_lines


def test_a_bar_that_tqdm_write_clears_still_gives_the_step_of_the_row() -> None:
    text = ""
    for step in range(1, 121):
        text += f"\r {step * 100 // 120:2d}%|███       | {step}/120 [00:01<00:10,  9.1it/s]"
        if step % 5 == 0:
            row = {"loss": 2 - step / 100, "learning_rate": 1e-5 * (1 - step / 120), "epoch": 1.0}
            text += "\r" + " " * 60 + f"\r{row}\n"
    series = read_text(text).series("train/loss")
    assert series is not None
    assert series.steps.tolist() == list(range(5, 121, 5))


@pytest.mark.parametrize(
    ("batch", "epochs", "last"),
    [
        # 40 steps in an epoch.
        ("80", 3, 120),
        # max_steps ends the run in the middle of its second epoch.
        ("40", 2, 120),
    ],
)
def test_without_bars_the_epochs_place_rows_that_are_logged_every_few_steps(
    batch: str, epochs: int, last: int
) -> None:
    head = "[INFO|trainer.py:2414] 2025-05-12 11:12:00,123 >>   "
    text = f"{head}Num examples = 3,200\n{head}Num Epochs = {epochs}\n"
    text += f"{head}Total train batch size (w. parallel, distributed & accumulation) = {batch}\n"
    text += f"{head}Total optimization steps = 120\n"
    for step in range(5, 121, 5):
        row = {
            "loss": 2 - step / 100,
            "learning_rate": 1e-4 * (1 - step / 120),
            "epoch": round(step * int(batch) / 3200, 2),
        }
        text += f"{row}\n"
    view = read_text(text + "{'train_runtime': 182.9, 'train_loss': 1.2, 'epoch': 3.0}\n")
    assert (view.last_step, view.total_steps) == (last, 120)
    found = [one.code for one in diagnose(view, RULES).findings]
    assert "LRN007" not in found
    assert "VIT003" not in found


def test_a_row_that_a_callback_prints_again_is_one_step() -> None:
    text = ""
    for step in range(1, 11):
        same = {"loss": 2 - step / 100, "learning_rate": 1e-4, "epoch": step / 10}
        text += f"[INFO|2025-05-12 11:12:11] callbacks:143 >> {same | {'throughput': 8211.2}}\n"
        text += f"{same | {'grad_norm': 0.9}}\n"
    assert read_text(text).last_step == 10


def test_a_decimal_comma_is_not_read_as_thousands() -> None:
    rows = "".join(f'{i},"0,{907 + i}"\n' for i in range(20))
    assert read_text("step,grad_norm\n" + rows).series("grad_norm") is None
    assert number_of("6,821,680,128.0") == 6821680128.0


def test_the_steps_of_fairseq_are_its_updates() -> None:
    text = "".join(
        f"2025-06-01 10:00:00 | INFO | train_inner | epoch 001: {at:6d} / 2000 "
        f"loss={9 - at / 500}, "
        f"ppl=14.02, wps=31211, num_updates={at}, lr=0.0005, gnorm=1.2\n"
        for at in range(100, 2100, 100)
    )
    series = read_text(text).series("train/loss")
    assert series is not None
    assert series.steps.tolist() == list(range(100, 2100, 100))


def messages() -> list[str]:
    """Return what the doctor prints about a finding, in every place that prints it."""
    sighting = Sighting(
        message="Task was killed due to the node running low on memory.",
        causes=(Cause("host-ram-oom", "OSError: No space left on device"),),
        fixes=(Fix("trainer.lr", "lower", "CUDA out of memory", Grade.UNSAFE),),
        subject="right", first_step=3,
    )  # fmt: skip
    finding = shown(BY_CODE["RWD011"], sighting, RunView())
    lines: list[str] = []
    for news in News:
        lines += Message(news, "run", 1_234, finding, ALL["trl"]).lines()
    for state in State:
        said = finding_line(Change(state, 12, finding).as_record())
        lines += [f"2026-11-19 10:42:55,323 INFO    homeostat.progress: step 12/40  {said}"]
        lines += [f"step  2/40  {said}"]
    return lines


def test_what_the_doctor_printed_is_no_text_of_the_run() -> None:
    rows = [str({"loss": 2.0 - step / 50, "learning_rate": 1e-5}) for step in range(1, 9)]
    lines = [*rows, *messages(), "what to do: no message is open", *messages(), "done", *rows]
    data = [line.encode() for line in lines]
    for is_long in (False, True):
        reader = LongLogReader()
        if is_long:
            reader.skip_settings()
        reader.feed_bytes(data)
        kept = [line.text for line in reader.kept.log().lines]
        assert kept == ["what to do: no message is open", "done"], is_long
        assert reader.recorder.num_rows == 16


def test_a_bar_that_an_error_cut_off_says_what_was_being_done() -> None:
    bar = "Map (num_proc=8):  61%|######    | 61/100 [29:58<19:10,  6.77 examples/s]"
    view = read_text(f"{bar}[rank1]: RuntimeError: it timed out\n", config=None)
    assert [line.text for line in view.log.lines] == [bar, "[rank1]: RuntimeError: it timed out"]


def test_a_message_after_a_progress_bar_is_no_text_of_the_run() -> None:
    bar = "  5%|4         | 7/150 [00:12<04:04,  1.71s/it]"
    log = "".join(f"{bar}{line}\n" if n == 0 else f"{line}\n" for n, line in enumerate(messages()))
    assert list(read_text(f"{log}done\n").log.lines)[-1].text == "done"
    assert len(read_text(f"{log}done\n").log.lines) == 1
