"""Which model is trained, how it is built, and which adapter is put on it."""

from __future__ import annotations

from typing import Literal

from homeostat.config.base import PathText, Settings, key


class ModelConfig(Settings):
    path: PathText = key(
        help="Folder of an HF checkpoint (config.json, safetensors, tokenizer), or a .gguf file."
    )
    init: Literal["pretrained", "random"] = key(
        "pretrained",
        help="pretrained: load the weights at `path`. random: only its config.json and "
        "tokenizer are used, the weights are drawn from `seed`.",
    )
    implementation: Literal["native", "transformers"] = key(
        "native",
        help="native: our packed decoder (Llama, Mistral, Qwen2, Qwen3). transformers: any causal "
        "model that transformers can build.",
    )
    attention: Literal["auto", "sdpa", "varlen", "eager"] = key(
        "auto",
        help="Attention kernel. auto: varlen on a GPU that has it (on a Hopper GPU cuDNN where all "
        "rows of a training pass are equally long), sdpa elsewhere. eager is the plain reference.",
        resume="warn",
    )
    numerics: Literal["fast", "invariant"] = key(
        "fast",
        help="invariant: a token's log-prob has the same bits whatever it was computed together "
        "with, in the engine and in the trainer. Slower; native decoder, fp32 on the CPU, bf16 or "
        "fp32 on a GPU.",
    )
    meta_init: bool = key(
        True,
        help="Build the model without memory and stream the weights in: the peak is one copy of "
        "the model. false allocates and initialises first.",
        resume="free",
    )
    tokenizer: PathText | None = key(
        None, help="Folder of the tokenizer, where it is not the model's own."
    )
    chat_template: PathText | None = key(
        None, help="A Jinja file used in place of the tokenizer's chat template."
    )
    chat_template_options: dict[str, bool | int | float | str] = key(
        {},
        share=True,
        help="What the chat template can be told ({enable_thinking: false}, say). Tell it the same "
        "when the model is used.",
    )
    pad_token: str | None = key(
        None,
        help="Pad token for a tokenizer that has none (it is also saved with the export). "
        "Default: the end-of-sequence token, which stays trained all the same.",
    )


class LoraConfig(Settings):
    rank: int = key(16, ge=1, le=2**16, help="Rank of the update.")
    alpha: float = key(32.0, gt=0, help="The update is scaled by alpha / rank.")
    dropout: float = key(0.0, ge=0, lt=1, help="Dropout on the adapter's input.")
    targets: tuple[str, ...] = key(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        share=True,
        help="Linear modules that get an adapter, by the last part of their name; "
        "'all-linear' for every one but the LM head.",
    )
    path: PathText | None = key(None, help="Adapter folder in peft's format to start from.")
    export: Literal["adapter", "merged"] = key(
        "adapter",
        help="What the HF export holds: the adapter alone, or the base with it merged in.",
        resume="free",
    )
