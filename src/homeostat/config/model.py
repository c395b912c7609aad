"""Settings of the model: which one, how it is built, and its LoRA adapter."""

from __future__ import annotations

import math
from typing import Literal

from homeostat.config.base import PathText, Settings, key
from homeostat.config.moe import MoeConfig

# Initial values of a value head that no checkpoint holds: zeros or small random numbers.
HeadInit = Literal["zero", "random"]


class ModelConfig(Settings):
    """The model that is trained, and how it is built."""

    path: PathText = key(
        help="Folder of an HF checkpoint (config.json, safetensors, tokenizer), a .gguf file, or "
        "a name on the Hugging Face hub, for example Qwen/Qwen2.5-0.5B-Instruct. A path that "
        "exists on disk takes precedence over a name on the hub."
    )
    revision: str | None = key(
        None,
        min_length=1,
        share=True,
        help="Branch, tag or commit, if `path` is a name on the hub. Default: the main branch. "
        "The commit is recorded in the run folder, so that a resumed run uses the same files.",
    )
    init: Literal["pretrained", "random"] = key(
        "pretrained",
        help="pretrained: load the weights at `path`. random: use only its config.json and "
        "tokenizer, and draw the weights from `seed`.",
    )
    implementation: Literal["native", "transformers"] = key(
        "native",
        help="native: homeostat's own packed decoder (Llama, Mistral, Qwen2, Qwen3, Gemma 2 and "
        "3, Phi-3 and Phi-4, Granite, OLMo 2, GLM-4; with experts Qwen3-MoE, Mixtral, dots.llm1). "
        "transformers: any causal language model that transformers can build; slower than native.",
    )
    attention: Literal["auto", "sdpa", "varlen", "eager"] = key(
        "auto",
        help="Attention kernel. auto: varlen on a GPU that supports it (on a Hopper GPU cuDNN "
        "if all rows of a training pass are equally long), sdpa otherwise. eager is the plain "
        "reference.",
        resume="warn",
    )
    numerics: Literal["fast", "invariant"] = key(
        "fast",
        help="fast: the fastest kernels. invariant: a token's log-prob has the same bits in the "
        "engine and in the trainer, and does not depend on the other rows of the batch. invariant "
        "is slower and needs the native decoder; on a CPU it needs fp32, on a GPU bf16 or fp32.",
    )
    meta_init: bool = key(
        True,
        help="Build the model on the meta device and stream the weights in, so the peak memory "
        "is one copy of the model. false allocates and initialises the model first.",
        resume="free",
    )
    tokenizer: PathText | None = key(
        None, help="Folder of another tokenizer. Default: the model's own."
    )
    chat_template: PathText | None = key(
        None, help="Jinja file with a chat template. Default: the tokenizer's own."
    )
    chat_template_options: dict[str, bool | int | float | str] = key(
        {},
        share=True,
        help="Variables that are passed to the chat template, for example {enable_thinking: "
        "false}. Pass the same variables when you use the trained model.",
    )
    pad_token: str | None = key(
        None,
        share=True,
        help="Pad token for a tokenizer that has none. It is also saved with the exported model. "
        "Default: the end-of-sequence token, which is still trained.",
    )
    moe: MoeConfig = key(MoeConfig(), help="How a model with experts is trained.")
    quantization: Literal["nf4", "int8"] | None = key(
        None,
        help="Store the frozen weights of the linear layers under an adapter (lora) in 4 bits "
        "(nf4, as in QLoRA) or in 8 bits with a scale for each row (int8). They are dequantised "
        "for each matrix product. null: store them in the run's precision.",
    )
    double_quantization: bool = key(
        False,
        help="With nf4, also store the scales of its blocks in 8 bits: 4.13 bits per weight "
        "instead of 4.5.",
    )


class LoraConfig(Settings):
    """A LoRA adapter, which is trained instead of all weights."""

    rank: int = key(16, ge=1, le=2**16, help="Rank of the low-rank update.")
    alpha: float = key(
        32.0, gt=0, help="The update is scaled by alpha / rank; by alpha / sqrt(rank) with rslora."
    )
    rslora: bool = key(
        False,
        help="Scale the update by alpha / sqrt(rank), which keeps its size as the rank grows "
        "(rsLoRA; use_rslora in peft).",
    )
    dora: bool = key(
        False,
        help="Train the length of each weight row separately from its direction; the low-rank "
        "update changes the direction (DoRA; use_dora in peft).",
    )
    dropout: float = key(0.0, ge=0, lt=1, help="Dropout on the input of the adapter.")
    targets: tuple[str, ...] = key(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        share=True,
        help="Linear modules that get an adapter, by the last part or parts of their name; "
        "'all-linear' means every linear module except the LM head. In a model with experts, only "
        "attention and shared experts (for example shared_experts.gate_proj) can have an adapter.",
    )
    path: PathText | None = key(None, help="Folder of an adapter in peft's format to start from.")
    export: Literal["adapter", "merged"] = key(
        "adapter",
        help="What the HF export contains: only the adapter, or the base model with the adapter "
        "merged into it.",
        resume="free",
    )
    publish: Literal["merged", "adapter"] = key(
        "merged",
        resume="free",
        help="What is sent to an engine in another process. merged: the weights with the adapter "
        "merged into them; merging rounds the adapter, and the difference is logged. adapter: "
        "only the adapter. The native engine accepts both, vLLM only merged weights.",
    )

    @property
    def is_new(self) -> bool:
        """Return whether the adapter starts from nothing: the model begins as it is without it."""
        return self.path is None

    @property
    def scaling(self) -> float:
        """Return the factor of the update."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
