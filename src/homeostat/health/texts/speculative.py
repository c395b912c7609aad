"""Error texts of the family speculative: draft models and what they are refused for."""

from __future__ import annotations

from homeostat.health.finding import Family
from homeostat.health.texts.parts import AFTERMATH, advice
from homeostat.health.texts.trouble import Trouble

TROUBLES: tuple[Trouble, ...] = (
    Trouble(
        code="ERR720",
        name="draft-vocabulary-mismatch",
        family=Family.SPECULATIVE,
        texts=(
            "draft && target && same vocab",
            "draft model && vocabulary size",
            "draft && vocab_size && mismatch",
            "draft && must have the same vocabulary",
            "target and draft model should have the same vocab",
        ),
        what="Draft and target model have different vocabularies.",
        why="Speculation compares probabilities token by token: the ids must mean the same.",
        fixes=(
            advice("a draft model of the same family and tokenizer", "Or an MTP or EAGLE head."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR721",
        name="draft-settings-wrong",
        family=Family.SPECULATIVE,
        texts=(
            "num_speculative_tokens && must be divisible by",
            "num_speculative_tokens && must be provided",
            "num_speculative_tokens && greater than zero",
            "draft_tensor_parallel_size && cannot be",
            "speculative_num_draft_tokens && must",
            "speculative_eagle_topk && must",
            "speculative_num_steps && must",
        ),
        what="The settings of speculative decoding do not go together.",
        why="Steps, branching and number of draft tokens depend on each other and on how many "
        "tokens the draft head was trained to predict.",
        fixes=(
            advice(
                "draft tokens = steps + 1 for a chain; a multiple of the head's own length",
                "As the error says.",
                sglang="--speculative-num-steps, --speculative-eagle-topk, "
                "--speculative-num-draft-tokens",
                vllm="--speculative-config",
                slime="--sglang-speculative-num-steps, --sglang-speculative-num-draft-tokens",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR722",
        name="speculation-unsupported",
        family=Family.SPECULATIVE,
        texts=(
            "Speculative decoding is not supported",
            "Speculative decoding * not supported",
            "Speculative decoding does not support",
            "speculative decoding is currently not supported",
            "logprobs && not supported && speculative",
            "not compatible with speculative decoding",
        ),
        unless=("Disabling speculative",),
        what="The engine cannot speculate in this combination.",
        why="Pipeline parallelism, LoRA, some attention backends, returned log-probabilities or "
        "sampling filters exclude it, depending on the engine's version.",
        fixes=(
            advice(
                "leave speculation off, or drop the feature that the error names",
                "For RL the log-probabilities of sampled tokens come first.",
            ),
            advice("a newer engine", "The list of exclusions shrinks with each release."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR725",
        name="draft-weights-not-loaded",
        family=Family.SPECULATIVE,
        texts=(
            "eagle && KeyError",
            "draft model && not found",
            "mtp && weights && not found",
            "speculative_draft_model_path && required",
            "speculative-draft-model-path && required",
            "MTP && num_nextn_predict_layers && None",
        ),
        what="The draft model's or MTP head's weights could not be loaded.",
        why="The path is missing, the checkpoint has no MTP layers (conversions often drop "
        "them), or the head is of another version than the engine expects.",
        fixes=(
            advice(
                "a checkpoint that still has its MTP layers, or a draft path",
                "Conversions drop layers that the training framework does not know.",
                sglang="--speculative-draft-model-path",
                slime="--mtp-num-layers=1",
                miles="--mtp-num-layers=1",
            ),
        ),
        explains=AFTERMATH,
    ),
)
