"""Error texts of the family offpolicy: tokens and log-probs of engine and trainer differ."""

from __future__ import annotations

from homeostat.health.finding import Cause, Family, Level
from homeostat.health.texts.parts import advice, safe
from homeostat.health.texts.trouble import Trouble

TROUBLES: tuple[Trouble, ...] = (
    Trouble(
        code="ERR685",
        name="multi-turn-token-mismatch",
        family=Family.OFFPOLICY,
        texts=(
            "Inconsistent training and inference tokenization detected",
            "training and inference tokenization",
            "token ids of the rollout differ",
            "re-tokenized * does not match",
            "retokenized * does not match",
            "tokenization drift",
            "re-tokenized && sampled",
            "retokenized && sampled",
            "re-tokenised && sampled",
            "re-tokeniz && not an extension",
            "re-tokeniz && mismatch",
            "retokeniz && mismatch",
            "token ids && not start with the",
            "token ids && is not a prefix",
            "tokens && not a prefix of",
            "prefix mismatch && token",
            "token mismatch && turn",
            "decode && encode && tokens differ",
        ),
        what="The tokens that are trained on are not those that were sampled.",
        why=(
            "Multi-turn rollouts are decoded to text and tokenised again, or the chat "
            "template renders earlier turns differently; the importance ratios are then of "
            "other tokens."
        ),
        causes=(
            Cause("multi-turn-token-mismatch", "rollout and training tokens differ"),
            Cause(
                "chat-template-rewrites-history", "templates with think blocks change earlier turns"
            ),
        ),
        fixes=(
            advice(
                "",
                "Train on the token ids that the engine returned, never on re-tokenised text.",
                verl="actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode",
            ),
            safe(
                "model.chat_template",
                "a template that leaves earlier turns alone",
                "So that each turn keeps its tokens.",
                verl="actor_rollout_ref.model.custom_chat_template",
            ),
        ),
        level=Level.WARN,
    ),
    Trouble(
        code="ERR686",
        name="rollout-logprobs-missing",
        family=Family.OFFPOLICY,
        texts=(
            "rollout_log_probs must be provided",
            "rollout_log_probs * not found",
            "KeyError: 'rollout_log_probs'",
            "rollout_log_probs is None",
            "requires rollout_log_probs",
            "requires rollout log probs",
            "calculate_log_probs must be",
            "sampling_per_token_logps * None",
            "engine did not return logprobs",
        ),
        what=(
            "A correction between engine and trainer needs the engine's log-probs, and they "
            "were not recorded."
        ),
        why=(
            "Truncated importance sampling compares the trainer's log-probs with those of "
            "sampling; the engine returns them only when asked."
        ),
        fixes=(
            advice(
                "",
                "Let the engine return log-probs, or switch the correction off.",
                verl="actor_rollout_ref.rollout.calculate_log_probs",
                slime="--use-rollout-logprobs, --use-tis",
                miles="--use-rollout-logprobs, --use-tis",
                trl="vllm_importance_sampling_correction",
            ),
        ),
    ),
)
