"""Error texts of the family policy: what PPO trainers say about KL and ratios."""

from __future__ import annotations

from homeostat.health.finding import Cause, Family, Level
from homeostat.health.texts.parts import advice, change
from homeostat.health.texts.trouble import Trouble

TROUBLES: tuple[Trouble, ...] = (
    Trouble(
        code="ERR675",
        name="kl-negative-generation-kwargs",
        family=Family.POLICY,
        texts=(
            "KL divergence is starting to become negative",
            "KL divergence * negative * precursor for failed training",
            "negative KL",
        ),
        what=(
            "The estimated KL to the reference is negative: the samples do not come from the "
            "plain policy."
        ),
        why=(
            "Mean log-ratio over samples is positive on average only for samples of the "
            "policy itself; top_k, top_p, a minimum length, a suppressed EOS or another "
            "padding change what is sampled. Tiny batches and a weak reward model make it "
            "worse."
        ),
        causes=(
            Cause(
                "kl-negative-generation-kwargs",
                "sampling differs from the distribution whose log-probs are taken",
            ),
            Cause(
                "kl-negative-weak-reward-model",
                "small batches and a poor reward push the policy to odd texts",
            ),
        ),
        fixes=(
            change("rollout.temperature", "1.0", "Sample from the plain policy."),
            advice(
                "",
                (
                    "Set top_k to 0, top_p to 1, no min_length, do_sample on, and the "
                    "tokenizer's own pad and EOS tokens."
                ),
                trl="generation_kwargs",
                llama_factory="top_k, top_p",
            ),
            change("trainer.lr", "lower", "With larger batches, when the sampling is right."),
        ),
        level=Level.WARN,
    ),
    Trouble(
        code="ERR676",
        name="ppo-ratio-exceeds-threshold",
        family=Family.POLICY,
        texts=("average ratio of batch * exceeds threshold", "exceeds threshold * Skipping batch"),
        what=(
            "New and old policy differ so much within one update that the trainer skips batches."
        ),
        why=(
            "Too many epochs over the same samples, too high a learning rate, or log-probs "
            "of old and new policy that were computed differently."
        ),
        causes=(
            Cause("ppo-ratio-exceeds-threshold", "the mean ratio is beyond the limit"),
            Cause("lr-too-high", "the policy moves too far in one update"),
        ),
        fixes=(
            change("trainer.lr", "a half to a fifth of it", "Smaller steps."),
            change(
                "trainer.updates_per_step",
                "fewer",
                "Fewer passes over the same samples.",
                trl="num_ppo_epochs",
            ),
            advice(
                "",
                "Check the generation settings; a higher ratio_threshold only hides it.",
                trl="generation_kwargs",
            ),
        ),
        explains=("ERR675",),
    ),
)
