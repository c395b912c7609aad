"""The file of described symptoms: every stanza can match, and names illnesses that exist."""

from __future__ import annotations

import pytest

from homeostat.health.guesses.described import Symptom, described, symptoms
from homeostat.health.log import LogLine
from homeostat.health.vocabulary import FAMILY_OF


@pytest.mark.parametrize("symptom", symptoms(), ids=lambda one: one.says)
def test_a_symptom_is_found_by_its_words_and_names_illnesses(symptom: Symptom) -> None:
    causes = [*symptom.causes, *(name for name, _ in symptom.if_said)]
    assert [name for name in causes if name not in FAMILY_OF] == []
    assert all(word == word.lower() and word for words in symptom.words for word in words)
    sentence = " ".join(words[0].strip() for words in symptom.words)
    found = described([LogLine(1, sentence)])
    assert symptom.says in {one.symptom.says for one in found}


def test_the_most_specific_symptom_comes_first() -> None:
    text = "The engine hangs after a weight update, GPU memory is fine"
    found = described([LogLine(1, text)])
    assert found[0].symptom.says == "it hangs after the weights were sent"
    sizes = [len(one.symptom.words) for one in found]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    "notice",
    [
        "Setting `pad_token_id` to `eos_token_id`:2 for open-end generation.",
        "INFO 11-01 10:00:00 [gpu_worker.py] Sleep mode freed 4.1 GiB memory, 4 GiB is in use.",
        "[rank0]: This can potentially cause a hang if this rank to GPU mapping is incorrect.",
        "Gradient checkpointing enabled, training may be slower",
        "The speedups for torchdynamo mostly come with GPU Ampere or higher",
        "MoE: 128 experts, top 8, router aux loss 0.001",
        "FlashAttention2 is not installed, using sdpa; training may be slower.",
        "Packing enabled: samples are packed to 4096 tokens, attention does not cross documents",
        "The tokenizer has new EOS tokens that differ from the model config and generation config.",
    ],
)
def test_a_notice_of_a_library_is_no_symptom(notice: str) -> None:
    assert described([LogLine(1, notice)]) == ()


def test_a_word_counts_only_where_it_begins() -> None:
    assert described([LogLine(1, "The xhang of the trainingset")]) == ()
