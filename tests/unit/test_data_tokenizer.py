"""The tokenizer: the same tokens as transformers, errors that name the setting, exact copies."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer

from homeostat.config.data import MessagesSource
from homeostat.config.model import ModelConfig
from homeostat.data.overlong import OverlongTextError
from homeostat.data.rows import encode_row, truncate
from homeostat.data.sources import BadRowError
from homeostat.data.tokenizer import ChatTokenizer, load_tokenizer
from homeostat.data.tokenizer_class import tokenizer_class
from homeostat.errors import ModelError
from homeostat.observe.redact import Scrubber

ASSETS = Path(__file__).parents[2] / "recipes" / "assets"
TINY = ASSETS / "tiny-chat"


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return load_tokenizer(ModelConfig(path=str(TINY)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def change(file: Path, **values: object) -> None:
    content = json.loads(file.read_text())
    content.update(values)
    file.write_text(json.dumps({name: value for name, value in content.items() if value}))


@given(text=st.text(max_size=60) | st.text(alphabet="the \n<|im_end>", max_size=30))
def test_tokens_cover_the_text_and_decode_to_it(tokenizer, text):
    ids, offsets = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert (
        "".join(text[start:end] for start, end in sorted({tuple(pair) for pair in offsets})) == text
    )
    assert len(ids) == len(offsets)


def test_the_asset_is_what_its_script_writes(tmp_path):
    script = ASSETS / "make_tiny_chat.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=60)
    for file in TINY.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_plain_class_is_what_transformers_would_choose(folder):
    from transformers import AutoTokenizer

    chosen = tokenizer_class(folder, is_gguf=False)
    assert chosen is not AutoTokenizer
    plain, auto = (kind.from_pretrained(str(folder)) for kind in (chosen, AutoTokenizer))
    assert type(plain) is type(auto)
    assert plain("turn around abc").input_ids == auto("turn around abc").input_ids
    assert plain.special_tokens_map == auto.special_tokens_map
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    assert tokenizer_class(folder, is_gguf=False) is AutoTokenizer
    assert tokenizer_class(folder / "none", is_gguf=False) is AutoTokenizer


def test_the_asset_loads_in_transformers(tokenizer):
    config = AutoConfig.from_pretrained(str(TINY))
    reference = AutoTokenizer.from_pretrained(str(TINY))
    assert config.vocab_size == len(reference) == tokenizer.vocab_size
    assert config.eos_token_id == reference.eos_token_id == tokenizer.eos_id


def test_a_copy_for_a_worker_is_the_same_tokenizer(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint == tokenizer.fingerprint
    messages = [{"role": "user", "content": "the wörld"}]
    text = copy.render(messages, add_generation_prompt=True)
    assert text == tokenizer.render(messages, add_generation_prompt=True)
    assert copy.encode(text)[0].tolist() == tokenizer.encode(text)[0].tolist()


def test_the_pad_token_is_the_tokenizers_or_the_one_named_or_eos(folder):
    by_default = load_tokenizer(ModelConfig(path=str(folder)))
    assert by_default.pad_id == by_default.eos_id
    assert "no pad token" in by_default.notes[0]
    named = load_tokenizer(ModelConfig(path=str(folder), pad_token="<|endoftext|>"))
    assert named.pad_id == 0
    # `check` shows notes through the scrubber, which takes what follows "token:" for a secret.
    for note in (*by_default.notes, *named.notes):
        assert Scrubber.of({}, environ={}).text(note) == note
    with pytest.raises(ModelError, match=r"model\.pad_token.*not in the vocabulary"):
        load_tokenizer(ModelConfig(path=str(folder), pad_token="<pad>"))
    change(folder / "tokenizer_config.json", pad_token="<|im_start|>")
    assert load_tokenizer(ModelConfig(path=str(folder))).notes == ()
    with pytest.raises(ModelError, match=r"model\.pad_token.*already has a pad token"):
        load_tokenizer(ModelConfig(path=str(folder), pad_token="<|endoftext|>"))


def test_what_is_saved_has_the_pad_token_and_template_of_the_run(folder, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    model = ModelConfig(
        path=str(folder), pad_token="<|endoftext|>", chat_template=str(tmp_path / "t.jinja")
    )
    load_tokenizer(model).save(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    assert saved.pad_token == "<|endoftext|>"
    chat = [{"role": "user", "content": "x"}]
    assert saved.apply_chat_template(chat, tokenize=False) == "x<|im_end|>"
    text = "the wörld<|im_end|>"
    assert saved(text)["input_ids"] == AutoTokenizer.from_pretrained(str(TINY))(text)["input_ids"]


def test_stop_ids_come_from_all_files_that_name_them(folder):
    change(folder / "generation_config.json", eos_token_id=[1, 2])
    change(folder / "config.json", eos_token_id=7)
    assert load_tokenizer(ModelConfig(path=str(folder))).stop_ids == {1, 2, 7}


def test_the_fingerprint_follows_what_changes_tokens(folder, tokenizer, tmp_path):
    same = load_tokenizer(ModelConfig(path=str(folder)))
    assert same.fingerprint == tokenizer.fingerprint
    (tmp_path / "t.jinja").write_text("x")
    model = ModelConfig(path=str(folder), chat_template=str(tmp_path / "t.jinja"))
    assert load_tokenizer(model).fingerprint != tokenizer.fingerprint
    change(folder / "generation_config.json", eos_token_id=[1, 2])
    assert load_tokenizer(ModelConfig(path=str(folder))).fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize("damage", ["{", "{}", '{"model": {"type": "BPE"}}', "\xff"])
def test_a_damaged_tokenizer_is_refused_by_setting(folder, damage):
    (folder / "tokenizer.json").write_text(damage, encoding="latin-1")
    with pytest.raises(ModelError, match=r"^model\.path"):
        load_tokenizer(ModelConfig(path=str(folder)))
    with pytest.raises(ModelError, match=r"^model\.tokenizer"):
        load_tokenizer(ModelConfig(path=str(TINY), tokenizer=str(folder)))


@pytest.mark.parametrize("damage", ["{", "[1]", "\xff"])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_file_that_is_no_json_object_is_named(folder, name, damage):
    if name == "generation_config.json" and damage == "[1]":
        damage = '{"eos_token_id": "end"}'
    (folder / name).write_text(damage, encoding="latin-1")
    with pytest.raises(ModelError) as caught:
        load_tokenizer(ModelConfig(path=str(folder)))
    assert str(folder / name) in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=rf"^model\.path.*{name} is not a plain file"):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_a_panic_in_the_tokenizers_library_is_a_message(folder):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["u"] = 0
    file.write_text(json.dumps(content))
    errors = []
    # Whether two pieces with one number are found out depends on the order of Rust's hash map.
    for _ in range(30):
        try:
            load_tokenizer(ModelConfig(path=str(folder)))
        except ModelError as error:
            errors.append(str(error))
    assert errors
    assert all(error.startswith("model.path") for error in errors)


def test_a_bad_place_or_template_is_refused_by_setting(folder, tmp_path):
    for path in ("nowhere", str(tmp_path), str(folder / "config.json")):
        with pytest.raises(ModelError, match=r"^model\.path"):
            load_tokenizer(ModelConfig(path=path))
    for content in (b"{% for %}", b"\xff"):
        (tmp_path / "t.jinja").write_bytes(content)
        with pytest.raises(ModelError, match=r"^model\.chat_template"):
            load_tokenizer(ModelConfig(path=str(folder), chat_template=str(tmp_path / "t.jinja")))
    with pytest.raises(ModelError, match=r"^model\.chat_template"):
        load_tokenizer(ModelConfig(path=str(folder), chat_template="nowhere"))
    change(folder / "tokenizer_config.json", chat_template="{% if %}")
    named = r"^model\.path: .*tokenizer_config\.json: the chat template is not valid Jinja"
    with pytest.raises(ModelError, match=named):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_no_end_of_sequence_token_anywhere_is_refused(folder):
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        change(folder / name, eos_token=None, eos_token_id=None)
    with pytest.raises(ModelError, match="end-of-sequence"):
        load_tokenizer(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("value", [-1, 10**30, "2", 1.5, True, [2, None, 10**12]])
def test_a_stop_that_is_no_token_number_is_named_by_its_file(folder, value):
    change(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_a_config_that_transformers_refuses_is_a_message(folder):
    change(folder / "config.json", hidden_size="wide", model_type="qwen2")
    with pytest.raises(ModelError, match=r"model\.path.*hidden_size"):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_the_lower_bound_of_a_text_s_tokens_never_exceeds_their_number():
    tokenizer = load_tokenizer(ModelConfig(path=str(ASSETS / "tiny-chat")))
    rng = random.Random(5)
    for _ in range(200):
        text = "".join(rng.choices("ab \n\u00e9\u4e2d<|im_end|>", k=rng.randrange(200)))
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text)[0])
    with pytest.raises(OverlongTextError):
        tokenizer.bounded(32).encode("a" * 1_000_000)
    assert len(tokenizer.bounded(32).encode("a" * 40)[0]) > 0


PARTS = ["ab", " ", "\n", "\n\n", "!", "!<|", "<|im_end|>", "<|im_start|>", "the", " the", "7",
         "'s", "\u00e9", "\u4e2d", "<|im_end", "|>"]  # fmt: skip


def long_text(rng: random.Random, num_parts: int) -> str:
    return "".join(rng.choices(PARTS, k=num_parts))


def test_the_head_of_a_text_has_the_tokens_of_the_whole(tokenizer):
    rng, num_cut = random.Random(6), 0
    for _ in range(300):
        text, cut = long_text(rng, rng.randrange(600)), rng.randrange(1, 9)
        tokens, offsets = tokenizer.encode(text)
        head, head_offsets, known = tokenizer.cutting(cut).encode_head(text)
        assert head.tolist() == tokens[: len(head)].tolist()
        assert head_offsets.tolist() == offsets[: len(head)].tolist()
        if known < len(text):
            num_cut += 1
            assert len(head) > cut
            assert known == head_offsets[-1, 1]
        else:
            assert len(head) == len(tokens)
    assert num_cut > 100


def test_a_chat_of_which_only_the_head_is_tokenised_is_cut_to_the_same_row(tokenizer):
    rng, num_same = random.Random(7), 0
    for _ in range(100):
        cut = rng.randrange(8, 40)
        messages = [
            {"role": role, "content": "".join(rng.choices(["ab", " the", "\n", "7"], k=size))}
            for size in (rng.randrange(1, 30), rng.randrange(1, 900))
            for role in ("user", "assistant")
        ]
        row, source = {"messages": messages}, MessagesSource(type="messages", path="x")
        made = []
        for one in (tokenizer, tokenizer.cutting(cut)):
            try:
                [encoded] = encode_row(row, source=source, tokenizer=one)
                tokens, weights = truncate(encoded, cut)
                made.append((tokens.tolist(), weights.tolist()))
            except BadRowError as error:
                made.append((error.reason, str(error)))
        assert made[0] == made[1]
        num_same += isinstance(made[0][0], list)
    assert num_same > 20
