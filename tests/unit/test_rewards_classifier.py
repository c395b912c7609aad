"""A sequence classifier as a reward, against transformers row by row."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.classifiers import write_classifier, write_encoder
from tests.support.tiny import write_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
)

from homeostat.config.model_rewards import ClassifierReward
from homeostat.config.rewards import RewardsConfig
from homeostat.errors import RewardError
from homeostat.rewards.functions import load_reward
from homeostat.rewards.groups import UnscoredGroup
from homeostat.rewards.pool import RewardPool
from homeostat.types import Prompt

WORDS = ["a", "turn around abc", "b" * 30, "", "cde fgh", "two\nlines"]


@pytest.fixture(scope="module")
def one_label(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("classifier") / "one")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def reward(path: Path, **settings: Any) -> Any:
    raw = {"type": "reward_model", "path": str(path), "device": "cpu", **settings}
    keys = {"name", "weight", "type", "role", "normalise", "timeout_s", "load_timeout_s"}
    given = ClassifierReward.model_validate(raw).model_dump(exclude=keys)
    return load_reward("reward_model", given)


def scored_alone(path: Path, rows: list[list[int]]) -> torch.Tensor:
    """Return the logits that transformers gives to each row by itself, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([row])).logits for row in rows])


def chats(words: list[str]) -> tuple[list[Any], list[Any]]:
    prompts = [[{"role": "user", "content": f"ask {word}"}] for word in words]
    return prompts, [[{"role": "assistant", "content": word}] for word in words]


def test_chats_are_scored_by_the_models_own_template_whatever_the_batch(one_label: Path) -> None:
    prompts, completions = chats(WORDS)
    tokenizer = AutoTokenizer.from_pretrained(one_label)
    rows = [
        tokenizer.apply_chat_template([*p, *c], tokenize=True, return_dict=False)
        for p, c in zip(prompts, completions, strict=True)
    ]
    expected = scored_alone(one_label, rows)[:, 0].tolist()
    assert len({round(value, 4) for value in expected}) == len(expected)
    for batch_size in (1, 4):
        found = reward(one_label, batch_size=batch_size)(prompts=prompts, completions=completions)
        assert found == pytest.approx(expected, abs=1e-5)


def test_the_order_of_completions_does_not_change_a_bit(one_label: Path) -> None:
    prompts, completions = chats(WORDS)
    score = reward(one_label, batch_size=4)
    found = score(prompts=prompts, completions=completions)
    turned = score(prompts=prompts[::-1], completions=completions[::-1])
    assert turned[::-1] == found


def test_plain_texts_are_one_document_with_an_end(one_label: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(one_label)
    rows = [[*tokenizer(f"q: {word}")["input_ids"], tokenizer.eos_token_id] for word in WORDS]
    found = reward(one_label)(prompts=["q: "] * len(WORDS), completions=WORDS)
    assert found == pytest.approx(scored_alone(one_label, rows)[:, 0].tolist(), abs=1e-5)


def test_a_label_of_several_is_chosen_and_may_be_a_probability(encoder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    rows = [tokenizer("q", word)["input_ids"] for word in WORDS]
    logits = scored_alone(encoder, rows)
    asked = {"prompts": ["q"] * len(WORDS), "completions": WORDS}
    given = {"format": "pair", "max_length": 64}
    found = reward(encoder, output="good", **given)(**asked)
    assert found == pytest.approx(logits[:, 2].tolist(), abs=1e-5)
    found = reward(encoder, output=1, score="probability", **given)(**asked)
    assert found == pytest.approx(logits.softmax(1)[:, 1].tolist(), abs=1e-5)


def test_a_model_with_one_output_has_a_probability_too(one_label: Path) -> None:
    prompts, completions = chats(WORDS)
    plain = reward(one_label)(prompts=prompts, completions=completions)
    found = reward(one_label, score="probability", dtype="float32")(
        prompts=prompts, completions=completions
    )
    assert found == pytest.approx((1 / (1 + np.exp(-np.array(plain)))).tolist(), abs=1e-6)


def test_overlong_texts_fail_or_lose_their_beginning(encoder: Path, one_label: Path) -> None:
    asked = {"prompts": ["x" * 200, "q: "], "completions": ["a", "b"]}
    values = reward(one_label, max_length=20)(**asked)
    assert isinstance(values[0], RewardError)
    assert "max_length" in str(values[0])
    tokenizer = AutoTokenizer.from_pretrained(one_label)
    row = [*tokenizer("x" * 200 + "a")["input_ids"], tokenizer.eos_token_id][-20:]
    cut = reward(one_label, max_length=20, overlong="truncate")(**asked)
    assert cut[0] == pytest.approx(scored_alone(one_label, [row]).item(), abs=1e-5)
    assert cut[1] == pytest.approx(values[1], abs=1e-5)
    # A model of 64 positions has its own limit.
    (value,) = reward(encoder, output=0)(prompts=["x" * 200], completions=["a"])
    assert "takes 64" in str(value)


def test_two_texts_are_told_apart_and_keep_their_first_token(encoder: Path, tmp_path: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {word: number for number, word in enumerate([*special, *"abcde"])}
    tokenizer = BertTokenizer(vocab=vocab)
    shutil.copytree(encoder, tmp_path / "bert", ignore=shutil.ignore_patterns("token*"))
    tokenizer.save_pretrained(tmp_path / "bert")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert").eval()
    model.bert.embeddings.token_type_embeddings.weight.data.normal_()
    model.save_pretrained(tmp_path / "bert")
    tokenizer.truncation_side = "left"
    for settings in ({}, {"max_length": 10, "overlong": "truncate"}):
        score = reward(tmp_path / "bert", format="pair", output=0, **settings)
        found = score(prompts=["a b c d e a b"] * 2, completions=["c d e", "a b"])
        how = {"truncation": "only_first", "max_length": settings.get("max_length", 64)}
        for value, text in zip(found, ["c d e", "a b"], strict=True):
            row = tokenizer("a b c d e a b", text, return_tensors="pt", **how)
            assert value == pytest.approx(model(**row).logits[0, 0].item(), abs=1e-5)


def test_what_is_no_classifier_is_refused(tmp_path: Path, encoder: Path) -> None:
    with pytest.raises(RewardError, match=r"no config\.json there"):
        reward(tmp_path / "nowhere")
    with pytest.raises(RewardError, match=r"several outputs, 0 \(bad\), 1 \(fair\)"):
        reward(encoder)
    with pytest.raises(RewardError, match="has no 'best', only 0"):
        reward(encoder, output="best")
    folder = write_model(tmp_path / "causal")
    config = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with pytest.raises(RewardError, match=r"no weights for score\.weight"):
        reward(folder)


def test_a_round_is_scored_together_in_a_process_of_its_own(one_label: Path) -> None:
    functions = (
        {"type": "reward_model", "path": str(one_label), "device": "cpu", "batch_size": 4},
        {"type": "regex_format", "pattern": "a"},
        {"type": "regex_format", "pattern": "b", "name": "gold", "role": "eval"},
    )
    config = RewardsConfig.model_validate({"functions": functions})
    prompts, completions = chats(WORDS)
    expected = reward(one_label, batch_size=4)(prompts=prompts * 2, completions=completions * 2)
    groups = [
        UnscoredGroup(Prompt(n, np.array([1]), prompt, {}), [word, word], [[1], [2]])
        for n, (prompt, word) in enumerate(zip(prompts, WORDS, strict=True))
    ]
    with RewardPool(config, on_problem=print) as pool:
        # Whichever group was sampled first, the batches are the same.
        for order in (1, -1):
            found = pool.score(groups[::order], step=1, total_steps=1)[::order]
            values = [group.values["reward_model"] for group in found]
            assert [pair[0] for pair in values] == expected[: len(WORDS)]
            assert [pair[1] for pair in values] == expected[len(WORDS) :]
            assert [group.values["regex_format"][0] for group in found] == [1, 0, 0, 0, 0, 0]
            assert list(found[0].values) == ["reward_model", "regex_format"]
        found = pool.score(groups, step=1, total_steps=1, evaluates=True)
        assert list(found[0].values) == ["reward_model", "regex_format", "gold"]
