"""Writes the game of sorting five digits: a model folder without weights, and its rows.

    40312>   is answered by   01234$

tiny-sort/ holds a Llama of 133 thousand parameters and a tokenizer with one token per symbol ('$'
ends a sequence, '?' stands for anything else); use it with model.init: random. tiny-sort-moe/ holds
a Qwen3-MoE of the same width, with 8 experts of which a token uses 2. tiny_sort_sft.jsonl has
worked examples for the first steps, tiny_sort_prompts.jsonl has prompts with answers to learn
from by trial, tiny_sort_eval.jsonl has prompts that are in neither. tiny_sort_pairs.jsonl has a
right answer and one with two neighbours swapped, for preference training.

    python recipes/assets/make_tiny_sort.py [FOLDER]
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

DIGITS = "0123456789"
END, UNKNOWN = "$", "?"
SYMBOLS = [*DIGITS, ">", END, UNKNOWN]
NUM_DIGITS = 5
NUM_SFT, NUM_TRAIN, NUM_EVAL, NUM_PAIRS = 1600, 8192, 256, 1024
MAX_LENGTH = 32


def build_tokenizer() -> Tokenizer:
    vocab = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    return tokenizer


def describe_model() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 100.0,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.07,
        "vocab_size": len(SYMBOLS),
        "bos_token_id": None,
        "eos_token_id": SYMBOLS.index(END),
    }


def describe_experts() -> dict[str, Any]:
    return {
        **describe_model(),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    }


def write_model(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "unk_token": UNKNOWN,
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    end_id = SYMBOLS.index(END)
    files = {
        "tokenizer_config.json": settings,
        "config.json": config,
        "generation_config.json": {"eos_token_id": end_id},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_rows(file: Path, numbers: Iterable[str], *, answer: str) -> None:
    rows = [{"prompt": digits + ">", answer: "".join(sorted(digits))} for digits in numbers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_pairs(file: Path, numbers: Iterable[str], *, seed: int) -> None:
    rng, rows = random.Random(seed), []
    for digits in numbers:
        answer = sorted(digits)
        places = [i for i in range(NUM_DIGITS - 1) if answer[i] != answer[i + 1]]
        if not places:
            continue
        at = rng.choice(places)
        wrong = [*answer[:at], answer[at + 1], answer[at], *answer[at + 2 :]]
        rows.append({"prompt": digits + ">", "chosen": "".join(answer), "rejected": "".join(wrong)})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path) -> None:
    write_model(folder / "tiny-sort", describe_model())
    write_model(folder / "tiny-sort-moe", describe_experts())
    numbers = [f"{number:0{NUM_DIGITS}d}" for number in range(10**NUM_DIGITS)]
    random.Random(0).shuffle(numbers)
    drawn = iter(numbers)
    for name, count, answer in (
        ("sft", NUM_SFT, "completion"),
        ("prompts", NUM_TRAIN, "answer"),
        ("eval", NUM_EVAL, "answer"),
    ):
        file = folder / f"tiny_sort_{name}.jsonl"
        write_rows(file, (next(drawn) for _ in range(count)), answer=answer)
    pairs = (next(drawn) for _ in range(NUM_PAIRS))
    write_pairs(folder / "tiny_sort_pairs.jsonl", pairs, seed=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
