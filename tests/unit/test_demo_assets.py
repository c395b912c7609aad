"""The demo's game: its rows are right and disjoint, its tokenizer exact, all of it regenerable."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from homeostat.config.model import ModelConfig
from homeostat.data.tokenizer import load_tokenizer

ASSETS = Path(__file__).parents[2] / "recipes" / "assets"
ROWS = {"sft": "completion", "prompts": "answer", "eval": "answer"}


def rows_of(name: str) -> list[dict[str, str]]:
    lines = (ASSETS / f"tiny_sort_{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("name", "answer"), ROWS.items())
def test_every_answer_is_the_prompt_sorted(name: str, answer: str) -> None:
    for row in rows_of(name):
        assert len(row["prompt"]) == 6
        assert row["prompt"][-1] == ">"
        assert row[answer] == "".join(sorted(row["prompt"][:-1]))


def test_no_prompt_is_in_two_sets_or_twice_in_one() -> None:
    prompts = [row["prompt"] for name in ROWS for row in rows_of(name)]
    assert len(prompts) > 10_000
    assert len(set(prompts)) == len(prompts)


def test_the_tokenizer_has_one_token_per_symbol_and_gives_the_text_back() -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(ASSETS / "tiny-sort"), init="random"))
    for row in rows_of("sft")[:50]:
        text = row["prompt"] + row["completion"] + "$"
        tokens_T, _ = tokenizer.encode(text)
        assert len(tokens_T) == len(text)
        assert tokenizer.decode(tokens_T.tolist()) == text
        assert tokens_T[-1] == tokenizer.eos_id
    tokens_T, _ = tokenizer.encode("a b\n")
    assert tokenizer.decode(tokens_T.tolist()) == "????"


def test_the_script_writes_what_is_committed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ASSETS / "make_tiny_sort.py"), str(tmp_path)], check=True)
    written = sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file())
    assert len(written) == 12
    for name in written:
        ours, theirs = (tmp_path / name).read_text(), (ASSETS / name).read_text()
        if name.suffix == ".json":
            assert json.loads(ours) == json.loads(theirs), name
        else:
            assert ours == theirs, name
