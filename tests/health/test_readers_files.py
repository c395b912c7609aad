"""Metric files and run folders: JSON lines, CSV, the trainer's state, TensorBoard, W&B, our own."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.summary.writer.record_writer import masked_crc32c

from homeostat.arrays import FloatArray64
from homeostat.errors import HomeostatError
from homeostat.health.diagnose import diagnose
from homeostat.health.readers import open_run, read_text, view_of_run
from homeostat.health.readers.files import column_batches, one_file
from homeostat.health.readers.rows.recorder import Recorder
from homeostat.health.registry import RULES
from homeostat.health.view import Kind
from homeostat.observe.completions import write_completions
from homeostat.types import (
    Completion,
    Prompt,
    RolloutGroup,
    Sample,
    Segment,
    StopReason,
)


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        out.append(low | (0x80 if value else 0))
        if not value:
            return bytes(out)


def field(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def event(step: int, tag: str, value: bytes) -> bytes:
    """A TensorBoard record; `value` is the encoded field that holds the number."""
    data = varint(2 << 3) + varint(step) + field(5, field(1, field(1, tag.encode()) + value))
    size = struct.pack("<Q", len(data))
    checks = [struct.pack("<I", masked_crc32c(part)) for part in (size, data)]
    return size + checks[0] + data + checks[1]


def simple(value: float) -> bytes:
    return varint(2 << 3 | 5) + struct.pack("<f", value)


def tensor(value: float) -> bytes:
    return field(8, varint(1 << 3) + varint(2) + field(4, struct.pack("<d", value)))


def wandb_file(records: list[bytes]) -> bytes:
    """Records in LevelDB's log format: chunks that never cross a block."""
    out = bytearray(b":W&B\xe1\xbe\x00")
    for record in records:
        left, is_first = record, True
        while True:
            room = 32_768 - len(out) % 32_768
            if room < 7:
                out += bytes(room)
                continue
            chunk, left = left[: room - 7], left[room - 7 :]
            kind = (1 if is_first else 4) if not left else (2 if is_first else 3)
            out += b"crc_" + struct.pack("<HB", len(chunk), kind) + chunk
            is_first = False
            if not left:
                break
    return bytes(out)


def history(step: int, values: dict[str, object]) -> bytes:
    items = b"".join(
        field(1, field(2, name.encode()) + field(16, json.dumps(value).encode()))
        for name, value in values.items()
    )
    return field(2, items + field(2, varint(1 << 3) + varint(step)))


def test_json_lines_are_read_in_columns_and_odd_lines_one_by_one(tmp_path: Path) -> None:
    lines = [
        json.dumps(
            {"step": n, "train/loss": n / 2, "reward": "nan" if n == 3 else 0.5, "note": None}
        )
        for n in range(1, 5001)
    ]
    lines[100] = lines[100][:20]
    lines.insert(2000, "a line of text")
    (tmp_path / "m.jsonl").write_text("\n".join(lines) + "\n")
    view = open_run(tmp_path / "m.jsonl")
    loss = view.metrics["train/loss"]
    assert loss.steps.tolist() == [n for n in range(1, 5001) if n != 101]
    assert loss.values.tolist() == [n / 2 for n in range(1, 5001) if n != 101]
    assert math.isnan(view.metrics["reward"].values[2])
    assert "note" not in view.metrics
    assert [line.number for line in view.log.find("a line of text")] == [2001]


def test_columns_and_rows_give_the_same_series() -> None:
    records = [{"step": n, "loss": n * 0.5, "kl": 0.1} | ({"eval_loss": 1.0} if n % 7 == 0 else {})
               for n in range(1, 60)]  # fmt: skip
    text = "\n".join(map(json.dumps, records))
    whole = read_text(text)
    # A word before each row keeps them from being taken as columns.
    rows = read_text("\n".join(f"row {json.dumps(record)}" for record in records))
    assert whole.metrics.keys() == rows.metrics.keys()
    for name, series in whole.metrics.items():
        assert series.steps.tolist() == rows.metrics[name].steps.tolist()
        assert series.values.tolist() == rows.metrics[name].values.tolist()


def test_json_lines_of_two_runs_and_of_a_resumed_one() -> None:
    def part(steps: range, loss: float) -> list[str]:
        return [json.dumps({"step": n, "loss": loss, "reward": 0.5}) for n in steps]

    restarted = read_text("\n".join(part(range(1, 30), 1.0) + part(range(1, 20), 2.0)))
    assert restarted.metrics["train/loss"].values.tolist() == [2.0] * 19
    assert len(restarted.facts["runs"][0]["metrics"]["train/loss"]) == 29
    resumed = read_text("\n".join(part(range(1, 30), 1.0) + part(range(11, 20), 2.0)))
    assert resumed.metrics["train/loss"].values.tolist() == [1.0] * 10 + [2.0] * 9


def test_csv_with_gaps_and_the_export_of_a_tracker(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(
        "epoch,step,train_loss,val_loss\n0,0,2.5,\n0,1,2.25,3.5\n"
    )
    view = open_run(tmp_path / "metrics.csv")
    assert view.metrics["train/loss"].values.tolist() == [2.5, 2.25]
    assert view.metrics["eval/loss"].steps.tolist() == [1]
    export = (
        'Step,"my run - train/loss","my run - train/loss__MIN"\n1,"2.5","2.5"\n2,"1,250.5",""\n'
    )
    assert read_text(export).metrics["train/loss"].values.tolist() == [2.5, 1250.5]


def test_the_monitor_of_episodes() -> None:
    text = '#{"t_start": 1769605749.2, "env_id": "None"}\nr,l,t\n-1.5,200,2.7\n3.25,180,5.1\n'
    view = read_text(text)
    assert view.kind is Kind.RL
    assert view.metrics["reward"].values.tolist() == [-1.5, 3.25]
    assert view.metrics["episode_length"].values.tolist() == [200.0, 180.0]


def test_steps_of_a_table_that_begin_again_in_every_epoch() -> None:
    rows = [f"{e},{s},{3 - e - s / 1000}" for e in range(3) for s in (299, 599)]
    view = read_text("\n".join(["epoch,step,train_loss", *rows]))
    assert len(view.metrics["train/loss"]) == 6
    assert view.metrics["train/loss"].values[0] == pytest.approx(2.701)


def test_a_training_that_logs_only_evaluations_is_another_run() -> None:
    def lines(losses: Sequence[float], evaluated: float) -> list[str]:
        train = [f"{{'loss': {v}, 'epoch': {n / 10}}}" for n, v in enumerate(losses, start=1)]
        return [
            *train,
            f"{{'eval_loss': {evaluated}, 'eval_runtime': 0.5, 'epoch': 1.0}}",
            "{'train_runtime': 8.4, 'train_loss': 0.2, 'epoch': 1.0}",
        ]

    view = read_text("\n".join(lines([], 0.61) + lines([1.5, 1.0, 0.5], 0.75)))
    assert view.metrics["eval/loss"].values.tolist() == [0.75]


def test_the_trainers_state(tmp_path: Path) -> None:
    state = {
        "max_steps": 40,
        "log_history": [
            {"step": 10, "epoch": 0.25, "loss": 2.5, "learning_rate": 1e-5},
            {"step": 10, "epoch": 0.25, "eval_loss": 2.75},
            {"step": 20, "epoch": 0.5, "loss": 2.25, "learning_rate": 5e-6},
        ],
    }
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / "trainer_state.json").write_text(json.dumps(state, indent=2))
    view = open_run(tmp_path / "checkpoint-20" / "trainer_state.json")
    assert view.metrics["train/loss"].steps.tolist() == [10, 20]
    assert view.metrics["eval/loss"].steps.tolist() == [10]
    assert (view.total_steps, view.kind) == (40, Kind.SFT)
    assert view_of_run(tmp_path).metrics["train/loss"].steps.tolist() == [10, 20]


def test_tensorboard_scalars_old_and_new_up_to_the_torn_end(tmp_path: Path) -> None:
    records = [event(n, "train/loss", simple(n / 4)) for n in range(3)]
    records += [event(n, "train/grad_norm", tensor(n / 8)) for n in range(3)]
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(b"".join(records) + event(3, "train/loss", simple(9.0))[:-9])
    view = open_run(tmp_path)
    assert view.metrics["train/loss"].values.tolist() == [0.0, 0.25, 0.5]
    assert view.metrics["grad_norm"].values.tolist() == [0.0, 0.125, 0.25]
    assert view.facts["sources"] == (str(path),)


def test_damaged_records_of_tensorboard_are_left_out_and_told(tmp_path: Path) -> None:
    records = [event(n, "train/loss", simple(n / 4)) for n in range(6)]
    path = tmp_path / "events.out.tfevents.1.host"

    def read(data: bytes) -> tuple[list[float], str]:
        path.write_bytes(data)
        view = open_run(tmp_path)
        return view.metrics["train/loss"].values.tolist(), " ".join(view.facts["reading"].notes)

    flipped = bytearray(records[2])
    flipped[-6] ^= 0x40
    losses, notes = read(b"".join([*records[:2], bytes(flipped), *records[3:]]))
    assert losses == [0.0, 0.25, 0.75, 1.0, 1.25]
    assert "1 record was left out, because the checksum is wrong" in notes
    losses, notes = read(b"".join(records[:4]) + bytes(100) + records[5])
    assert losses == [0.0, 0.25, 0.5, 0.75]
    assert "the file is damaged after 4 records; the rest was not read" in notes
    assert read(b"".join(records)) == ([n / 4 for n in range(6)], "")


def test_wandb_offline_history_config_and_output(tmp_path: Path) -> None:
    run = tmp_path / "wandb" / "offline-run-20260101_100000-abc"
    (run / "files").mkdir(parents=True)
    config = field(17, field(4, field(1, field(1, b"learning_rate") + field(16, b"1e-05"))))
    rows = [
        history(n, {"loss": n / 2, "reward": 0.5, "table": {"path": "x" * 500}}) for n in range(200)
    ]
    (run / "run-abc.wandb").write_bytes(wandb_file([config, *rows]))
    (run / "files" / "output.log").write_text("RuntimeError: something broke\n")
    (run / "files" / "config.yaml").write_text(
        "num_generations:\n  value: 8\n_wandb:\n  value: {}\n"
    )
    view = open_run(tmp_path)
    assert view.metrics["train/loss"].values.tolist() == [n / 2 for n in range(200)]
    assert view.setting("trainer.lr") == 1e-05
    assert view.setting("rollout.samples_per_prompt") == 8
    assert view.log.has("something broke")


def our_run(path: Path, algorithm: str = "grpo") -> None:
    path.mkdir()
    config = {"runs_dir": "runs", "algorithm": {"type": algorithm}, "trainer": {"lr": 1e-6}}
    (path / "config.json").write_text(json.dumps(config))
    records = [
        {"step": n, "time": 1e9 + n, "train/loss": 0.5, "learning_rate": 1e-6, "time/step": 1.0}
        for n in range(1, 11)
    ]
    records[4]["train/loss"] = "nan"
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + '\n{"step": 11, "tr')
    events = [
        {"kind": "training", "step": 0, "time": 1.0, "total_steps": 50},
        {"kind": "step_skipped", "step": 5, "time": 2.0, "origin": "layers.3"},
    ]
    (path / "events.jsonl").write_text("\n".join(map(json.dumps, events)) + "\n")
    (path / "console.log").write_text("12:00 step 5 loss nan\n")
    (path / "traceback.txt").write_text("Traceback (most recent call last):\nValueError: no\n")


def test_our_own_run_folder(tmp_path: Path) -> None:
    path = tmp_path / "run"
    our_run(path)
    tokens = np.array([1, 2])
    segment = Segment(tokens, np.zeros(2, dtype=np.float32), policy_version=5)
    completion = Completion("r", (segment,), StopReason.LENGTH)
    sample = Sample(completion, "It is 4", rewards={"exact": 1.0}, reward=1.0)
    group = RolloutGroup(Prompt(3, tokens, "2+2?", {}), (sample,))
    for step in range(1, 6):
        write_completions(path / "completions", step, [group], advantages=[[0.0]])
    view = view_of_run(path)
    assert (view.framework.name, view.kind, view.total_steps) == ("homeostat", Kind.RL, 50)
    assert view.setting("trainer.lr") == 1e-6
    assert math.isnan(view.metrics["train/loss"].values[4])
    assert "time" not in view.metrics
    assert view.events_of("step_skipped")[0].fields["origin"] == "layers.3"
    assert view.log.has("ValueError: no")
    assert [sample.step for sample in view.samples] == [1, 4, 5]
    first = view.samples[0]
    assert (first.prompt, first.text, first.stop_reason) == ("2+2?", "It is 4", "length")
    # A file of the folder stands for all of it.
    assert open_run(path / "metrics.jsonl").total_steps == 50


def test_the_traceback_of_a_run_that_was_gone_on_from_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run"
    our_run(path)
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "run_failed", "step": 10, "error": "ValueError"}) + "\n")
    line = view_of_run(path).log.first("ValueError: no")
    assert line is not None
    # It stands after the console, at the step that the run ended at.
    assert (line.number, line.step) == (3, 10)
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "run_resumed", "step": 10}) + "\n")
    assert not view_of_run(path).log.has("ValueError: no")


def test_our_sft_run_is_no_rl(tmp_path: Path) -> None:
    our_run(tmp_path / "run", algorithm="sft")
    assert view_of_run(tmp_path / "run").kind is Kind.SFT


@pytest.mark.parametrize("num_rows", [3, 40, 5_000])
def test_json_lines_tell_how_many_steps_the_run_will_have(tmp_path: Path, num_rows: int) -> None:
    rows = [
        f'{{"current_steps": {n}, "total_steps": 9000, "loss": 0.5, "lr": 1e-5}}'
        for n in range(1, num_rows + 1)
    ]
    (tmp_path / "trainer_log.jsonl").write_text("\n".join(rows))
    assert open_run(tmp_path / "trainer_log.jsonl").total_steps == 9_000


def test_a_folder_of_several_files_becomes_one_view(tmp_path: Path) -> None:
    rows = [
        f'{{"current_steps": {n}, "total_steps": 9, "loss": 0.5, "lr": 1e-5}}' for n in range(1, 4)
    ]
    (tmp_path / "trainer_log.jsonl").write_text("\n".join(rows))
    (tmp_path / "train.log").write_text("{'loss': 0.5, 'epoch': 0.1}\nCUDA out of memory\n")
    (tmp_path / "config.yaml").write_text("learning_rate: 1e-5\nnested:\n  flag: true\n")
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x04not to be unpickled.")
    view = open_run(tmp_path)
    assert view.metrics["train/loss"].steps.tolist() == [1, 2, 3]
    assert view.log.has("out of memory")
    assert (view.total_steps, view.raw_settings["nested.flag"]) == (9, True)
    assert view.number("trainer.lr") == 1e-5
    assert len(view.facts["sources"]) == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"a": {"learning_rate": 1e-06}, "b": [1, {"c": null}]}'),
        ("c.yaml", "a:\n  learning_rate: 1e-06\nb: [1, {c: null}]\n"),
        ("c.toml", "b = 1\n[a]\nlearning_rate = 1e-06\n"),
        ("c.txt", "Namespace(a={'learning_rate': 1e-06}, b=[1])"),
    ],
)
def test_configs_of_every_format(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "log.txt").write_text("{'loss': 1.0}\n")
    view = open_run(tmp_path / "log.txt", config=tmp_path / name)
    assert view.raw_settings["a.learning_rate"] == 1e-06
    assert view.setting("trainer.lr") == 1e-06


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.yaml").write_text("a: &x [1]\nb: *x\n")
    (tmp_path / "log.txt").write_text("hello\n")
    with pytest.raises(HomeostatError, match="no such file"):
        open_run(tmp_path / "nothing.log")
    with pytest.raises(HomeostatError, match="no metrics or logs"):
        open_run(tmp_path / "empty")
    with pytest.raises(HomeostatError, match="no settings"):
        open_run(tmp_path / "log.txt", config=tmp_path / "bad.yaml")


def test_a_log_in_the_encoding_of_another_system(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_bytes("{'loss': 1.5}\r\nein Wort\r\n".encode("utf-16"))
    view = open_run(tmp_path / "log.txt")
    assert view.metrics["train/loss"].values.tolist() == [1.5]
    assert view.log.lines[0].text == "ein Wort"


def taken(lines: list[str], *, alike: bool) -> dict[str, tuple[list[int], list[float]]] | None:
    """What a batch of JSON lines gives: by the fast parser into one array, or value by value."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_batches, "BATCH", 1 if alike else 10**9)
        if not alike:
            patch.setattr(column_batches, "_columns_of_alike", lambda _: None)
        recorder = Recorder()
        block = "\n".join(lines).encode()
        if not column_batches.take_json_block(recorder, block, num_lines=len(lines)):
            return None
    return {
        name: (one.steps.tolist(), [repr(value) for value in one.values.tolist()])
        for name, one in recorder.series().items()
    }


def test_json_lines_that_are_alike_give_the_same_numbers() -> None:
    rng = random.Random()

    def value() -> float:
        kinds = (
            rng.random(), rng.randrange(-99, 99), math.nan, math.inf, -math.inf, -0.0,
            rng.random() * 10.0 ** rng.randrange(-320, 309), 2**53 + 1, 10**30,
        )  # fmt: skip
        return rng.choice(kinds)

    for separators in ((", ", ": "), (",", ":"), (" ,  ", " : ")):
        names = ["loss", "step", "reward/x", "grad_norm", "é"]
        rng.shuffle(names)
        rows = [
            {name: step if name == "step" else value() for name in names} for step in range(1, 40)
        ]
        lines = [json.dumps(row, separators=separators, ensure_ascii=False) for row in rows]
        assert column_batches._columns_of_alike([json.loads(line) for line in lines]) is not None
        assert taken(lines, alike=True) == taken(lines, alike=False) is not None


def columns_by_objects(lines: Sequence[bytes]) -> dict[str, list[str]] | None:
    """The plain way: an object for each line, by the standard library."""
    try:
        records = [json.loads(line) for line in lines]
    except ValueError:
        return None
    if not all(isinstance(record, dict) for record in records):
        return None
    return shown(column_batches._columns_of_alike(records))


def shown(columns: dict[str, FloatArray64] | None) -> dict[str, list[str]] | None:
    if columns is None:
        return None
    return {name: [repr(value) for value in found.tolist()] for name, found in columns.items()}


def columns_by_pieces(lines: Sequence[bytes]) -> dict[str, list[str]] | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_batches, "BATCH", 1)
        return shown(column_batches.columns_of_block(b"\n".join(lines)))


NUMBERS = st.one_of(
    st.floats().map(json.dumps),
    st.integers().map(str),
    st.integers(min_value=2**60, max_value=2**70).map(str),
    st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][-+]?[0-9]{1,3})?", fullmatch=True),
)
NAMES = st.lists(st.text(st.sampled_from('abe_/-.01 :,{}"\\\u00e9'), min_size=1), unique=True)


@given(
    names=NAMES,
    rows=st.lists(st.lists(NUMBERS, min_size=4, max_size=4), min_size=1, max_size=9),
    separators=st.sampled_from([(", ", ": "), (",", ":")]),
    is_ascii=st.booleans(),
)
def test_values_between_equal_pieces_are_those_of_the_objects(
    names: list[str], rows: list[list[str]], separators: tuple[str, str], is_ascii: bool
) -> None:
    names = ["step", "loss", *names][:4]
    between, after = separators
    quoted = [json.dumps(name, ensure_ascii=is_ascii) for name in names]
    lines = []
    for row in rows:
        pairs = [f"{name}{after}{row[place]}" for place, name in enumerate(quoted)]
        lines.append(f"{{{between.join(pairs)}}}".encode())
    found = columns_by_pieces(lines)
    # An escaped name is left to the plain way.
    if all(name.isascii() and not {'"', "\\"} & set(name) for name in names):
        assert found == columns_by_objects(lines)
    else:
        assert found in (None, columns_by_objects(lines))


@given(
    count=st.integers(1, 5),
    edits=st.lists(
        st.tuples(
            st.integers(0, 200),
            st.integers(0, 3),
            st.sampled_from(
                ["", "1", " ", ",", '"', "\n", "}\n{", "{", "}", "[", "]", ":", "e", "-", "true",
                 '"loss": ', ', "loss": 1', "}5", "5{", "\xff", "\r", "null", "NaN", "Infinity"]
            ),
        ),
        max_size=3,
    ),
)  # fmt: skip
def test_lines_that_are_not_alike_are_never_taken_for_such(
    count: int, edits: list[tuple[int, int, str]]
) -> None:
    text = "\n".join(f'{{"step": {n}, "loss": 0.{n}, "kl": {n}e-05}}' for n in range(count))
    for at, length, new in edits:
        text = text[:at] + new + text[at + length :]
    lines = text.encode("latin-1").split(b"\n")
    found = columns_by_pieces(lines)
    assert found is None or found == columns_by_objects(lines)


@pytest.mark.parametrize(
    "odd",
    [
        '{"step": 5, "loss": }', '{"step": 5, "loss": 1 5}', '{"step": 5, "loss": null}',
        '{"step": 5, "loss": true}', '{"step": 5, "loss": "1"}', '{"step": 5, "loss": [1]}',
        '{"step": 5, "loss": {"a": 1}}', '{"step": 5, "loss": 1, "x": 2}', '{"loss": 5, "step": 1}',
        '{"step": 5, "step": 1}', '{"step": 5, "loss" 1}', '{"step": 5 "loss": 1}', '{"step": 5}',
        '{"step": 5, "loss": 1,}', '{"step": , "loss": 5}', '{"step": 5, "lo\\"s": 1}',
    ],
)  # fmt: skip
def test_an_odd_line_is_never_taken_for_one_of_its_neighbours(odd: str) -> None:
    well = [f'{{"step": {step}, "loss": {step / 7}}}' for step in range(6, 16)]
    for lines in ([odd, *well], [well[0].replace("6", "4"), odd, *well], [odd] * 9):
        assert taken(lines, alike=True) == taken(lines, alike=False)
        found = columns_by_pieces([line.encode() for line in lines])
        assert found in (None, columns_by_objects([line.encode() for line in lines]))


def test_the_file_logger_of_verl(tmp_path: Path) -> None:
    rows = [{"step": step, "data": {"actor/pg_loss": 0.1 * step, "critic/score/mean": 0.5}}
            for step in range(1, 30)]  # fmt: skip
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    view = open_run(tmp_path / "run.jsonl")
    assert (view.framework.name, view.last_step) == ("verl", 29)
    assert view.metrics["reward"].values.tolist() == [0.5] * 29


def test_blocks_of_json_lines_give_what_single_lines_give(tmp_path: Path) -> None:
    rng = random.Random()
    odd = (
        "a word", "", '{"step": 3', '{"step": 7, "loss": true}', '{"loss": 1.5}\r', '{"x": "y"}',
        '{"step": 9, "loss": null, "reward": 2}', '{"step": 5, "loss": 1},{"step": 6, "loss": 1}',
    )  # fmt: skip
    for _ in range(20):
        lines = [f'{{"step": {step}, "loss": {rng.random()}}}' for step in range(1, 60)]
        for _ in range(rng.randrange(3)):
            lines.insert(rng.randrange(len(lines)), rng.choice(odd))
        found = []
        for batch in (8, 10**9):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(one_file, "BATCH", batch)
                patch.setattr(column_batches, "BATCH", batch)
                found.append(one_file.found_in_text("\n".join(lines), name="log"))
        assert found[0].log.lines == found[1].log.lines
        assert found[0].reading == found[1].reading
        assert found[0].series.keys() == found[1].series.keys()
        for name, one in found[0].series.items():
            assert one.steps.tolist() == found[1].series[name].steps.tolist()
            assert one.values.tolist() == found[1].series[name].values.tolist()


@pytest.mark.parametrize("name", ["trainer_state.json", "rows.json"])
def test_a_document_that_breaks_off_is_read_as_far_as_it_goes(tmp_path: Path, name: str) -> None:
    rows = [{"step": step, "loss": 2 - step / 50, "grad_norm": 0.9} for step in range(1, 41)]
    document: Any = {"global_step": 40, "log_history": rows} if "state" in name else rows
    (tmp_path / name).write_text(json.dumps(document)[:-400])
    view = open_run(tmp_path / name)
    assert view.last_step is not None
    assert 25 < view.last_step < 40
    assert "breaks off" in " ".join(view.facts["reading"].notes)


def tinker_record(step: int, *, length: float, reward: float = 0.0, **others: float) -> str:
    return json.dumps(
        {
            "step": step,
            "progress/batch": step,
            "optim/lr": 1e-4,
            "env/all/ac_tokens_per_turn": length,
            "env/all/turns_per_episode": 1.0,
            "env/all/reward/total": reward,
            "env/all/by_group/frac_all_bad": 1.0,
            "optim/entropy": 1.5,
            "time/total": 60.0,
            **others,
        }
    )


def test_metrics_of_tinker_are_those_of_rl(tmp_path: Path) -> None:
    rows = [tinker_record(step, length=90.0 + step, reward=0.1 * step) for step in range(6)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    view = open_run(tmp_path / "metrics.jsonl")
    assert (view.framework.name, view.kind) == ("tinker", Kind.RL)
    assert view.metrics["reward"].latest == pytest.approx(0.5)
    assert view.metrics["completions/mean_length"].first == 90.0
    assert view.metrics["learning_rate"].latest == 1e-4


def test_prompts_of_distillation_pay_nothing(tmp_path: Path) -> None:
    rows = [tinker_record(step, length=90.0 + step, teacher_kl=1.0) for step in range(9)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    view = open_run(tmp_path / "metrics.jsonl")
    assert {"reward", "zero_std_groups/all_wrong"}.isdisjoint(view.metrics)
    assert [one.name for one in diagnose(view, RULES).findings] == []


@pytest.mark.parametrize(
    ("lengths", "cut"),
    [
        ([300.0, 700.5, 900.0, 1024.0, 1024.0, 1024.0, 1024.0, 1024.0], 5),
        ([300.0, 700.5, 900.0, 1020.0, 1024.0, 1024.0, 1024.0, 1024.0], 0),
        # Fixed lengths, short answers, and lengths that no limit explains.
        ([1024.0] * 8, 0),
        ([4.1, 4.6, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0], 0),
        ([300.0, 700.5, 900.0, 910.5, 910.5, 910.5, 910.5, 910.5], 0),
    ],
)
def test_lengths_that_have_grown_to_one_number_are_the_limit(
    tmp_path: Path, lengths: list[float], cut: int
) -> None:
    rows = [tinker_record(step, length=length) for step, length in enumerate(lengths)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    share = open_run(tmp_path / "metrics.jsonl").series("completions/clipped_ratio")
    assert (share.values.tolist() if share is not None else []) == [1.0] * cut
