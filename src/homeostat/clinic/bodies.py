"""The parts of the clinic's runs: one alphabet, tiny models, and games with known answers.

    40312>   sort       01234$        reverse   21304$        copy   40312$
             largest    4$            parity    0$ (is the number of odd digits even?)
             shift      51423$        evens     402$ (the even digits, in their order)
             count      2$ (how many digits are odd)

All games share the tokenizer: a symbol is a token, '$' ends a sequence, '?' stands for anything
else, '~' and '@' begin a user's and an assistant's turn of a chat.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

DIGITS = "0123456789"
PROMPT_END, END, UNKNOWN, USER, ASSISTANT = ">", "$", "?", "~", "@"
SYMBOLS = [*DIGITS, *"abcdefgh", PROMPT_END, END, UNKNOWN, USER, ASSISTANT]
MAX_LENGTH = 64
NUM_HELD_OUT = 64
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ '{USER}' if message['role'] == 'user' else '{ASSISTANT}' }}}}"
    f"{{{{ message['content'] + '{END}' }}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{ASSISTANT}' }}}}{{% endif %}}"
)

# What a model of each family has besides the sizes that all share.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    # Softmax router, no bias.
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    # Sigmoid router with an expert bias, and one shared expert.
    "dots1": {
        "architectures": ["Dots1ForCausalLM"],
        "model_type": "dots1",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "sliding_window": None,
    },
}

GAMES: dict[str, Callable[[str], str]] = {
    "sort": lambda digits: "".join(sorted(digits)),
    "reverse": lambda digits: digits[::-1],
    "copy": lambda digits: digits,
    "largest": max,
    "parity": lambda digits: str(sum(int(digit) % 2 for digit in digits) % 2),
    "shift": lambda digits: "".join(str((int(digit) + 1) % 10) for digit in digits),
    "count": lambda digits: str(sum(int(digit) % 2 for digit in digits)),
    "evens": lambda digits: "".join(digit for digit in digits if int(digit) % 2 == 0),
}


def write_model(
    folder: Path, *, width: int = 64, layers: int = 2, family: str = "llama", **changes: Any
) -> Path:
    """Write a model folder without weights, for model.init: random."""
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer().save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "unk_token": UNKNOWN,
            "model_max_length": MAX_LENGTH,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
        "config.json": {**_model(width, layers), **FAMILIES[family], **changes},
        "generation_config.json": {"eos_token_id": SYMBOLS.index(END)},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return folder


def numbers(count: int, *, seed: int, num_digits: Sequence[int] = (5,)) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(DIGITS, k=rng.choice(num_digits))) for _ in range(count)]


def prompt_rows(game: str, count: int, *, seed: int, **kinds: Any) -> list[dict[str, Any]]:
    """Return prompts with answers, for RL."""
    solve = GAMES[game]
    return [
        {"prompt": digits + PROMPT_END, "answer": solve(digits)}
        for digits in numbers(count, seed=seed, **kinds)
    ]


def worked_rows(game: str, count: int, *, seed: int, **kinds: Any) -> list[dict[str, Any]]:
    """Return worked examples: prompt and completion."""
    rows = prompt_rows(game, count, seed=seed, **kinds)
    return [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]


def text_rows(game: str, count: int, *, seed: int, **kinds: Any) -> list[dict[str, Any]]:
    rows = prompt_rows(game, count, seed=seed, **kinds)
    return [{"text": row["prompt"] + row["answer"]} for row in rows]


def chat_rows(game: str, count: int, *, seed: int, **kinds: Any) -> list[dict[str, Any]]:
    """Return chats of one or two turns."""
    rng = random.Random(seed)
    rows = []
    for row in prompt_rows(game, count, seed=seed, **kinds):
        turns = [("user", row["prompt"]), ("assistant", row["answer"])]
        if rng.random() < 0.3:
            turns += [("user", row["answer"]), ("assistant", GAMES[game](row["answer"]))]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return rows


def pair_rows(game: str, count: int, *, seed: int, **kinds: Any) -> list[dict[str, Any]]:
    """Return pairs of a right answer and one in which up to three digits are others."""
    rng, rows = random.Random(f"pairs/{seed}"), []
    for row in prompt_rows(game, count, seed=seed, **kinds):
        wrong = list(row["answer"])
        for place in rng.sample(range(len(wrong)), k=min(len(wrong), rng.randint(1, 3))):
            wrong[place] = rng.choice([digit for digit in DIGITS if digit != wrong[place]])
        row = {"prompt": row["prompt"], "chosen": row["answer"], "rejected": "".join(wrong)}
        rows.append(row)
    return rows


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _tokenizer() -> Tokenizer:
    vocab = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    return tokenizer


def _model(width: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": width // 4,
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
