"""The token that ends a turn of the template is a stop token, for SFT, RL and exported models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support import tiny_rl
from tests.support.chat import CHATML, Style, chat, encode, make_tokenizer, trained_text

from homeostat.config import RunConfig
from homeostat.errors import ModelError
from homeostat.rollout.collect import training_sampling
from homeostat.run.preflight.check import Preflight

# A base model with a chat template on it: its files know of <|endoftext|> alone.
BASE = Style(CHATML, (), eos="<|endoftext|>", end="", stops=("<|endoftext|>",))
# The marker that ends a turn is text like any other to the tokenizer.
SPLIT = Style(CHATML.replace("<|im_end|>", "[END]"), (), eos="<|endoftext|>", end="")
BARE = Style("{% for m in messages %}{{ m.content }}{% endfor %}", (), eos="<|endoftext|>", end="")
NO_ANSWERS = Style(
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('none') }}{% endif %}"
    "{{ m.content }}{% endfor %}", (), eos="<|endoftext|>", end="",
)  # fmt: skip


def test_the_end_of_a_turn_is_a_stop_token_and_told(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, BASE)
    stops = {tokenizer.decode([token]) for token in tokenizer.stop_ids}
    assert stops == {"<|endoftext|>", "<|im_end|>"}
    assert tokenizer.decode([tokenizer.eos_id]) == "<|endoftext|>"
    (note,) = [note for note in tokenizer.notes if "im_end" in note]
    assert "stop token" in note
    encoded = encode(chat(("user", "a"), ("assistant", "b")), tokenizer)
    assert trained_text(encoded, tokenizer) == "b<|im_end|>"


def test_a_stop_token_that_the_files_name_needs_no_note(tmp_path: Path) -> None:
    style = Style(CHATML, (), eos="<|im_end|>", end="", stops=("<|im_end|>",))
    assert not [n for n in make_tokenizer(tmp_path, style).notes if "im_end" in n and "turn" in n]


@pytest.mark.parametrize("style", [SPLIT, BARE], ids=["split", "bare"])
def test_a_turn_that_no_token_ends_adds_none(tmp_path: Path, style: Style) -> None:
    tokenizer = make_tokenizer(tmp_path, style)
    assert tokenizer.stop_ids == {tokenizer.eos_id}
    with pytest.raises(ModelError, match=r"rollout\.stop .*model\.chat_template"):
        tokenizer.require_turn_end(wanted_by="data.train")


def test_a_template_that_does_not_tell_is_given_the_benefit_of_the_doubt(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, NO_ANSWERS)
    tokenizer.require_turn_end(wanted_by="data.train")
    assert tokenizer.stop_ids == {tokenizer.eos_id}


def test_a_saved_tokenizer_tells_others_where_to_stop(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "base", BASE)
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "generation_config.json").write_text('{"eos_token_id": 0, "top_k": 7}')
    tokenizer.save(folder)
    written = json.loads((folder / "generation_config.json").read_text())
    assert written == {"eos_token_id": sorted(tokenizer.stop_ids), "top_k": 7}


def rl_config(folder: Path, style: Style, *overrides: str, chats: bool = True) -> RunConfig:
    make_tokenizer(folder / "model", style)
    (folder / "prompts.jsonl").write_text('{"prompt": "a", "first": "1"}\n' * 8)
    tiny_rl.write_model(folder / "shape")
    shape: dict[str, Any] = json.loads((folder / "shape" / "config.json").read_text())
    shape |= {"vocab_size": 512, "eos_token_id": None, "bos_token_id": None}
    (folder / "model" / "config.json").write_text(json.dumps(shape))
    return tiny_rl.config(
        folder,
        "data.max_length=64",
        *overrides,
        model={
            "path": str(folder / "model"),
            "init": "random",
            "chat_template": str(folder / "model" / "chat.jinja"),
        },
        data={"train": [{"type": "prompts", "path": str(folder / "prompts.jsonl"), "chat": chats}]},
    )


def shown(config: RunConfig, name: str) -> list[str]:
    """Lines of `check` of this name, up to what the data says."""
    preflight = Preflight(config, progress=lambda done, total: None)
    checks = preflight._tokenizer if name == "tokenizer" else preflight._prompts
    list(preflight._tokenizer())
    return [item.text for item in checks()]


def test_rl_samples_to_the_end_of_the_turn(tmp_path: Path) -> None:
    config = rl_config(tmp_path, BASE)
    tokenizer = make_tokenizer(tmp_path / "model", BASE)
    stops = training_sampling(config.rollout, tokenizer).stop_ids
    assert "<|im_end|>" in {tokenizer.decode([token]) for token in stops}
    told = shown(config, "tokenizer")
    assert any("'<|im_end|>'" in text and "stop token" in text for text in told)
    assert shown(config, "data")


def test_rl_refuses_a_chat_whose_turns_nothing_ends(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"run to rollout\.max_new_tokens"):
        shown(rl_config(tmp_path, SPLIT), "data")
    assert shown(rl_config(tmp_path, SPLIT, "rollout.stop=['[END]']"), "data")
    assert shown(rl_config(tmp_path, SPLIT, chats=False), "data")
