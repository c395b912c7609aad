"""A log that is read while it is written gives what the whole log gives."""

from __future__ import annotations

import os
import random
from pathlib import Path

from homeostat.health.diagnose import diagnose
from homeostat.health.readers import read_text
from homeostat.health.readers.growing import GrowingFile, GrowingLog
from homeostat.health.registry import RULES
from homeostat.health.view import RunView


def row(step: int) -> str:
    norm = 0.5 if step < 20 else float("nan")
    return str({"loss": 2.0 - step / 50, "grad_norm": norm, "epoch": step / 10}) + "\n"


def json_row(step: int) -> str:
    return f'{{"step": {step}, "loss": {2.0 - step / 50}, "grad_norm": 0.5}}\n'


LOG = "seed=3\n" + "".join(row(step) + f"note {step}\n" for step in range(1, 41)) + "last line"


def same(one: RunView, other: RunView) -> bool:
    return (
        one.log.lines == other.log.lines
        and one.metrics.keys() == other.metrics.keys()
        and all(
            one.metrics[name].steps.tolist() == other.metrics[name].steps.tolist()
            for name in one.metrics
        )
        and diagnose(one, RULES).findings == diagnose(other, RULES).findings
    )


def test_any_pieces_with_looks_between_give_the_same_run() -> None:
    rng = random.Random()
    for text in (LOG, "".join(map(json_row, range(1, 60)))):
        log, data = GrowingLog("-"), text.encode()
        while data:
            size = rng.choice((1, 7, 40, 300))
            log.feed(data[:size])
            data = data[size:]
            if rng.random() < 0.2:
                log.view()
        log.finish()
        assert same(log.view(), read_text(text))


def test_lines_of_two_streams_do_not_mix() -> None:
    log = GrowingLog("-")
    log.feed(b"{'loss': 1.0, 'grad_", stream=0)
    log.feed(b"warning: half a ", stream=1)
    log.feed(b"norm': 0.5, 'epoch': 0.1}\n", stream=0)
    log.feed(b"line\n", stream=1)
    view = log.view()
    assert view.metrics["grad_norm"].values.tolist() == [0.5]
    assert [line.text for line in view.log.lines] == ["warning: half a line"]


def test_a_view_does_not_change_when_more_is_read() -> None:
    log = GrowingLog("-")
    log.feed("".join(row(step) for step in range(1, 6)).encode())
    early = log.view()
    log.feed("".join(row(step) for step in range(6, 30)).encode())
    assert early.last_step == 5
    assert log.view().last_step == 29


def test_a_file_is_followed_as_it_grows_is_rotated_and_truncated(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    file = GrowingFile(path)
    assert not file.poll(), "it does not exist yet"
    with path.open("w") as writer:
        writer.write("".join(map(row, range(1, 6))))
        writer.flush()
        assert file.poll()
        assert not file.poll()
        os.rename(path, tmp_path / "train.log.1")
        writer.write(row(6))
    path.write_text(row(7) + row(8))
    assert file.poll()
    assert file.view().last_step == 8
    # Copied and truncated: the same file starts again from its first byte.
    os.truncate(path, 0)
    assert not file.poll()
    with path.open("a") as writer:
        writer.write(row(9))
    assert file.poll()
    loss = file.view().metrics["train/loss"].values.tolist()
    assert loss == [2.0 - step / 50 for step in range(1, 10)]
    file.close()


def test_a_bar_that_is_redrawn_for_ever_takes_bounded_memory() -> None:
    log = GrowingLog("-")
    for step in range(70):
        log.feed(f"\r {step}%|## | {step}/100 [00:01<00:02]".encode() * 4_000)
    log.feed(b"\n" + row(1).encode())
    assert log.view().metrics["train/loss"].values.tolist() == [2.0 - 1 / 50]
