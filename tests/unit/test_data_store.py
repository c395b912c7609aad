"""Rows are tokenised once, kept whole, found again, and refused or dropped as the settings say."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.forks import Forked
from tests.support.patience import eventually

from homeostat.config.data import DataConfig, MessagesSource, TextSource
from homeostat.config.model import ModelConfig
from homeostat.data.prepare import prepare_rows, split_rows
from homeostat.data.rows import encode_row
from homeostat.data.store import RowStore
from homeostat.data.tokenizer import ChatTokenizer, load_tokenizer
from homeostat.errors import DataError, ModelError

TINY = Path(__file__).parents[2] / "recipes" / "assets" / "tiny-chat"
WORDS = ["the", "other", "one", "and", "you", "is", "in", "of", "to"]


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return load_tokenizer(ModelConfig(path=str(TINY)))


def write_texts(folder: Path, num_rows: int, seed: int = 0) -> TextSource:
    noise = np.random.default_rng(seed)
    lines = []
    for _ in range(num_rows):
        words = noise.choice(WORDS, noise.integers(1, 30))
        lines.append(json.dumps({"text": " ".join(words)}))
    file = folder / f"texts{seed}.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return TextSource(type="text", path=str(file))


def settings(*sources: TextSource, **values: object) -> DataConfig:
    return DataConfig(train=tuple(sources), **values)  # type: ignore[arg-type]


def rows_of(store: RowStore) -> list[tuple[list[int], list[float], str]]:
    rows = [store[index] for index in range(len(store))]
    return [
        (row.tokens_T.tolist(), row.weights_T.tolist(), store.origin(row.row_id)) for row in rows
    ]


def only_folder(cache: Path) -> Path:
    (folder,) = cache.iterdir()
    return folder


def test_the_store_holds_each_row_as_it_was_encoded(tmp_path, tokenizer):
    source = write_texts(tmp_path, 40)
    store = prepare_rows([source], tokenizer, settings(source), cache_dir=tmp_path / "c")
    lines = Path(source.path).read_text().splitlines()
    for index, line in enumerate(lines):
        ((tokens_T, weights_T),) = encode_row(json.loads(line), source=source, tokenizer=tokenizer)
        row = store[index]
        assert row.row_id == index
        assert row.tokens_T.tolist() == tokens_T.tolist()
        assert row.weights_T.tolist() == weights_T.tolist()
        assert store.lengths[index] == len(row)
        assert store.origin(index) == f"{source.path}:{index + 1}"
    report = store.report
    assert (report.seen, report.kept, report.num_bad) == (40, 40, 0)
    assert report.tokens == store.lengths.sum() == report.trained_tokens + 40


def test_limit_uses_the_first_rows(tmp_path, tokenizer):
    source = write_texts(tmp_path, 40)
    few = source.model_copy(update={"limit": 7})
    store = prepare_rows([few, source], tokenizer, settings(source), cache_dir=tmp_path / "c")
    assert len(store) == 47
    assert store.origin(7) == store.origin(0)


def test_many_processes_give_what_one_gives(tmp_path, tokenizer):
    sources = [write_texts(tmp_path, 150, 1), write_texts(tmp_path, 33, 2)]
    with open(sources[1].path, "a") as file:
        file.write("bad\n" * 9 + json.dumps({"text": "the " * 500}) + "\n")
    data = settings(*sources, bad_rows="drop", max_length=200)
    seen: list[tuple[int, int]] = []
    one = prepare_rows(sources, tokenizer, data, cache_dir=tmp_path / "1")
    two = prepare_rows(
        sources,
        tokenizer,
        data,
        cache_dir=tmp_path / "2",
        num_processes=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert rows_of(one) == rows_of(two)
    assert one.report == two.report
    assert one.fingerprint == two.fingerprint
    assert one.report.dropped_overlong == 1
    assert one.report.bad == {"not JSON": 9}
    assert seen[0] == (0, 193)
    assert seen[-1] == (193, 193)
    assert seen == sorted(seen)


def test_a_second_run_reuses_the_rows_and_a_change_builds_anew(tmp_path, tokenizer):
    source, cache = write_texts(tmp_path, 10), tmp_path / "c"
    data = settings(source)
    first = prepare_rows([source], tokenizer, data, cache_dir=cache)
    made = only_folder(cache).stat().st_mtime_ns
    calls: list[int] = []
    again = prepare_rows(
        [source], tokenizer, data, cache_dir=cache, progress=lambda done, _: calls.append(done)
    )
    assert calls == []
    assert only_folder(cache).stat().st_mtime_ns == made
    assert rows_of(again) == rows_of(first)
    assert again.report == first.report
    for changed in ({"max_length": 9}, {"overlong": "truncate"}):
        prepare_rows([source], tokenizer, settings(source, **changed), cache_dir=cache)
    with open(source.path, "a") as file:
        file.write('{"text": "new"}\n')
    assert len(prepare_rows([source], tokenizer, data, cache_dir=cache)) == 11
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize(
    "damage",
    ["tokens.bin", "weights.bin", "offsets.bin", "origins.bin", "meta.json", "gone", "file"],
)
def test_a_damaged_store_is_built_again(tmp_path, tokenizer, damage):
    source, cache = write_texts(tmp_path, 10), tmp_path / "c"
    first = prepare_rows([source], tokenizer, settings(source), cache_dir=cache)
    expected, folder = rows_of(first), only_folder(cache)
    if damage == "file":
        shutil.rmtree(folder)
        folder.write_text("in the way")
    elif damage == "gone":
        (folder / "tokens.bin").unlink()
    else:
        content = bytearray((folder / damage).read_bytes())
        content[len(content) // 2] ^= 255
        (folder / damage).write_bytes(content)
    again = prepare_rows([source], tokenizer, settings(source), cache_dir=cache)
    assert rows_of(again) == expected
    assert only_folder(cache) == folder
    calls: list[int] = []
    prepare_rows(
        [source],
        tokenizer,
        settings(source),
        cache_dir=cache,
        progress=lambda done, _: calls.append(done),
    )
    assert calls == [], "the rebuilt store was not found again"


def test_two_builders_of_one_store_do_not_disturb_each_other(tmp_path, tokenizer):
    source, cache = write_texts(tmp_path, 60), tmp_path / "c"
    stores: list[RowStore] = []
    start = threading.Barrier(4)

    def build() -> None:
        # The first to arrive wait for the rest inside the build, so that all of them commit.
        waited = [False]

        def progress(done: int, total: int) -> None:
            if not waited[0]:
                waited[0] = True
                start.wait(timeout=60)

        stores.append(
            prepare_rows([source], tokenizer, settings(source), cache_dir=cache, progress=progress)
        )

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(stores) == 4
    assert all(rows_of(store) == rows_of(stores[0]) for store in stores)
    assert len(list(cache.iterdir())) == 1, "a hidden folder was left behind"


def test_what_a_killed_builder_left_is_removed(tmp_path, tokenizer):
    source, cache = write_texts(tmp_path, 10), tmp_path / "c"
    prepare_rows([source], tokenizer, settings(source), cache_dir=cache)
    folder = only_folder(cache)
    old, new = cache / f".{folder.name}.old", cache / f".{folder.name}.new"
    shutil.copytree(folder, old)
    shutil.copytree(folder, new)
    shutil.rmtree(folder)
    long_ago = time.time() - 86400
    for path in (*old.iterdir(), old):
        os.utime(path, (long_ago, long_ago))
    prepare_rows([source], tokenizer, settings(source), cache_dir=cache)
    assert sorted(cache.iterdir()) == sorted([folder, new])


def test_bad_rows_are_refused_with_places_or_dropped_and_counted(tmp_path, tokenizer):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good one"}\n' + '{"txet": "x"}\n{\n' * 4)
    source = TextSource(type="text", path=str(file))
    cache = tmp_path / "c"
    with pytest.raises(DataError) as caught:
        prepare_rows([source], tokenizer, settings(source), cache_dir=cache)
    message = str(caught.value)
    assert "8 of 9 rows cannot be used" in message
    assert f"{file}:2: missing column: no column is named 'text'" in message
    assert f"{file}:3: not JSON" in message
    assert "... and 3 more" in message
    assert "data.bad_rows=drop" in message
    data = settings(source, bad_rows="drop")
    store = prepare_rows([source], tokenizer, data, cache_dir=cache)
    assert len(store) == 1
    assert store.report.bad == {"missing column": 4, "not JSON": 4}
    # What was kept for `drop` must not slip past `refuse`.
    with pytest.raises(DataError, match="8 of 9 rows"):
        prepare_rows([source], tokenizer, settings(source), cache_dir=cache)


def test_overlong_rows_are_dropped_truncated_or_refused(tmp_path, tokenizer):
    file = tmp_path / "a.jsonl"
    rows = [{"text": "xyz"}, {"text": "q" * 50}]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    source, cache = TextSource(type="text", path=str(file)), tmp_path / "c"
    data = settings(source, max_length=10)
    store = prepare_rows([source], tokenizer, data, cache_dir=cache)
    assert (len(store), store.report.dropped_overlong) == (1, 1)
    data = settings(source, max_length=10, overlong="truncate")
    store = prepare_rows([source], tokenizer, data, cache_dir=cache)
    assert (len(store), store.report.truncated) == (2, 1)
    assert tokenizer.decode(store[1].tokens_T) == "q" * 10
    data = settings(source, max_length=10, overlong="refuse")
    with pytest.raises(DataError, match=f"1 of 2 rows are longer.*\n.*{file}:2: 51 tokens"):
        prepare_rows([source], tokenizer, data, cache_dir=cache)


def test_no_rows_left_is_an_error(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "some more words"}')
    source = TextSource(type="text", path=str(tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match=r"no rows are left.*\n.*a\.jsonl:1"):
        prepare_rows([source], tokenizer, settings(source, max_length=2), cache_dir=tmp_path / "c")


def test_messages_need_a_chat_template(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    source = MessagesSource(type="messages", path=str(tmp_path / "a.jsonl"))
    with pytest.raises(ModelError, match=r"no chat template.*model\.chat_template"):
        prepare_rows(
            [source],
            load_tokenizer(ModelConfig(path=str(folder))),
            DataConfig(train=(source,)),
            cache_dir=tmp_path / "c",
        )


def test_a_cache_that_cannot_be_written_is_named(tmp_path, tokenizer):
    source = write_texts(tmp_path, 5)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written.*data\.cache_dir"):
        prepare_rows([source], tokenizer, settings(source), cache_dir=tmp_path / "file")


def test_a_killed_worker_is_an_error_and_not_a_hang(tmp_path, tokenizer):
    source = write_texts(tmp_path, 4000)
    killed: list[int] = []

    def kill_one(done: int, total: int) -> None:
        if done and not killed:
            import multiprocessing

            victim = multiprocessing.active_children()[0]
            assert victim.pid is not None
            killed.append(victim.pid)
            os.kill(victim.pid, signal.SIGKILL)

    with pytest.raises(DataError, match=r"memory.*data\.num_processes"):
        prepare_rows(
            [source],
            tokenizer,
            settings(source),
            cache_dir=tmp_path / "c",
            num_processes=2,
            progress=kill_one,
        )
    assert killed
    assert list((tmp_path / "c").iterdir()) == []


KILLED_PARENT = """
import multiprocessing, os, signal, sys
from pathlib import Path
from homeostat.config.data import DataConfig, TextSource
from homeostat.config.model import ModelConfig
from homeostat.data.prepare import prepare_rows
from homeostat.data.tokenizer import load_tokenizer

def die(done, total):
    if done:
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

source = TextSource(type="text", path=sys.argv[1])
prepare_rows([source], load_tokenizer(ModelConfig(path=sys.argv[2])),
             DataConfig(train=(source,)), cache_dir=Path(sys.argv[3]),
             num_processes=2, progress=die)
"""


def test_workers_end_with_a_killed_parent(tmp_path):
    source = write_texts(tmp_path, 4000)
    parent = Forked(KILLED_PARENT, [source.path, str(TINY), str(tmp_path / "c")], env=os.environ)
    output, _ = parent.communicate()
    assert parent.returncode == -signal.SIGKILL, output
    workers = [int(pid) for pid in output.split()]
    assert workers
    assert eventually(lambda: not any(map(_alive, workers))), "a worker outlived its parent"


def _alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_the_split_is_fixed_by_the_seed_and_never_empty():
    rows = np.arange(100)
    train, held_out = split_rows(rows, 0.1, 5)
    assert sorted([*train, *held_out]) == list(range(100))
    assert len(held_out) == 10
    assert np.array_equal(split_rows(rows, 0.1, 5)[1], held_out)
    assert not np.array_equal(split_rows(rows, 0.1, 6)[1], held_out)
    assert [len(part) for part in split_rows(rows[:2], 0.5, 0)] == [1, 1]
    assert [len(part) for part in split_rows(np.arange(1000), 1e-9, 0)] == [999, 1]
    with pytest.raises(DataError, match=r"data\.validation_share"):
        split_rows(rows[:1], 0.5, 0)


def test_a_row_for_each_turn_which_the_split_keeps_together(tmp_path):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": text} for role, text in turns]
    rows = [json.dumps({"messages": messages[: 2 + 2 * (number % 2)]}) for number in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    source = MessagesSource(type="messages", path=str(tmp_path / "a.jsonl"), turns="each")
    tokenizer, data = load_tokenizer(ModelConfig(path=str(TINY))), DataConfig(train=(source,))
    reads: list[int] = []
    store = prepare_rows(
        (source,), tokenizer, data, cache_dir=tmp_path / "cache",
        progress=lambda done, total: reads.append(done),
    )  # fmt: skip
    assert (store.report.seen, store.report.kept, reads[-1]) == (30, 30, 20)
    texts = [tokenizer.decode(store[row].tokens_T[store[row].weights_T > 0]) for row in (0, 1, 2)]
    assert texts == ["b<|im_end|>", "b<|im_end|>", "d<|im_end|>"]
    assert store.origin(1) == store.origin(2) != store.origin(3)
    assert store.made_from_B[:6].tolist() == [0, 1, 1, 2, 3, 3]
    train, held_out = (set(store.made_from_B[ids]) for ids in split_rows(store.made_from_B, 0.3, 1))
    assert not train & held_out
    assert (len(train), len(held_out)) == (14, 6)
