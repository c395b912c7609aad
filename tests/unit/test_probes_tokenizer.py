"""A tokenizer that is not the model's is told by the numbers of its pieces."""

from __future__ import annotations

import json
from pathlib import Path

from homeostat.config.model import ModelConfig
from homeostat.run.healing.tokenizer_probe import compare_tokenizers

PIECES = {"a": 0, "b": 1, "c": 2, "d": 3}


def write(folder: Path, vocab: dict[str, int] | list[list[object]], *added: str) -> str:
    folder.mkdir()
    tokens = [{"id": len(vocab) + n, "content": word} for n, word in enumerate(added)]
    content = {"model": {"vocab": vocab}, "added_tokens": tokens}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder)


def compare(model: str, tokenizer: str | None, **more: str) -> dict | None:
    settings = {"path": model, "tokenizer": tokenizer, **more}
    return compare_tokenizers(ModelConfig.model_validate(settings))


def test_the_same_pieces_with_new_ones_behind_have_not_moved(tmp_path: Path) -> None:
    own = write(tmp_path / "own", PIECES)
    extended = write(tmp_path / "extended", PIECES, "<tool>")
    found = compare(own, extended)
    assert found == {"shared": 4, "moved": 0, "known": 4, "examples": []}


def test_pieces_under_other_numbers_are_counted_and_shown(tmp_path: Path) -> None:
    own = write(tmp_path / "own", PIECES)
    other = write(tmp_path / "other", {"b": 0, "a": 1, "c": 2, "e": 3})
    found = compare(own, other)
    assert found is not None
    assert (found["shared"], found["moved"], found["known"]) == (3, 2, 4)
    assert found["examples"] == ["'a': 0, 1", "'b': 1, 0"]


def test_a_list_of_pieces_is_numbered_by_its_order(tmp_path: Path) -> None:
    own = write(tmp_path / "own", PIECES)
    unigram = write(tmp_path / "unigram", [["a", -1.0], ["b", -2.0], ["d", -2.5], ["c", -3.0]])
    found = compare(own, unigram)
    assert found is not None
    assert found["moved"] == 2


def test_without_two_to_compare_nothing_is_said(tmp_path: Path) -> None:
    own = write(tmp_path / "own", PIECES)
    bare, torn = tmp_path / "bare", tmp_path / "torn"
    bare.mkdir()
    torn.mkdir()
    (torn / "tokenizer.json").write_text('{"model": {"vocab"')
    assert compare(own, None) is None
    assert compare(str(bare), own) is None
    assert compare(own, str(torn)) is None
    # Weights that are drawn at random have learned no numbers yet.
    assert compare(own, write(tmp_path / "other", {"z": 0}), init="random") is None
