"""Writes tiny-chat/: a model folder without weights, for demos and tests.

The tokenizer is byte-level BPE with a ChatML-like template, so it can spell any text with few
tokens; the model is a Llama of about one million parameters. Use it with model.init: random.

    python recipes/assets/make_tiny_chat.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Common pairs of English, each made of parts that stand before it. "Ġ" is a space.
MERGES = [
    *("h e", "Ġ t", "Ġ a", "i n", "r e", "Ġt he", "e r", "o n", "Ġ s", "Ġ w"),
    *("o u", "e n", "Ġ o", "a t", "Ġ c", "i s", "Ġ b", "Ġ m", "e s", "Ġ p"),
    *("a n", "o r", "i t", "Ġ f", "in g", "e d", "a l", "Ġa n", "Ġan d", "Ġt o"),
    *("Ġo f", "Ġ in", "Ġ is", "l l", "Ġ y", "Ġy ou", "Ġ h", "Ġ d", "Ġ l", "Ġ n"),
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MAX_LENGTH = 2048


def build_tokenizer() -> Tokenizer:
    pairs = [tuple(merge.split()) for merge in MERGES]
    words = (
        SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in pairs]
    )
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in SPECIAL])
    return tokenizer


def describe_model(vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "vocab_size": vocab_size,
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index("<|im_end|>"),
    }


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    eos_id = SPECIAL.index("<|im_end|>")
    files = {
        "tokenizer_config.json": settings,
        "config.json": describe_model(tokenizer.get_vocab_size()),
        "generation_config.json": {"eos_token_id": eos_id, "do_sample": False},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "tiny-chat")
