"""Metrics that only other frameworks log, under the names that rules use for them.

The metrics of our own runs are in observe/names.py. Each name is in one of the two files only.
"""

from __future__ import annotations

FOREIGN: dict[str, str] = {
    "reward/max": "Largest reward of a step.",
    "reward/min": "Smallest reward of a step.",
    "advantages/max": "Largest advantage of a step.",
    "advantages/min": "Smallest advantage of a step.",
    "kl/max": "Largest KL estimate of a token.",
    "kl/sequence": "KL from the reference, summed over a completion (PPO's objective/kl).",
    "entropy/sequence": "Entropy, summed over a completion (PPO's objective/entropy).",
    "sampling/prob_difference/mean": "Mean distance of the engine's probabilities from ours.",
    "sampling/prob_difference/max": "Largest such distance of a token.",
    "sampling/mult_prob_error": "Mean of exp(|trainer - engine log-prob|): 1 where they agree.",
    "sampling/engine_logp/mean": "Mean log-prob that the engine gave what it sampled.",
    "sampling/trainer_logp/mean": "Mean log-prob that the trainer gives the same tokens.",
    "rollout/num_turns/mean": "Mean number of turns of a conversation.",
    "completions/repetition_share": "Share of completions that repeat themselves.",
    "reward/shaped": "Mean reward after penalties, where the plain one is logged beside it.",
    "returns/mean": "Mean return of the tokens.",
    "zero_std_groups/<name>": "Groups whose rewards are all alike, by that reward: a count.",
    "zero_std_groups/all_right": "Share of groups whose answers are all right.",
    "zero_std_groups/all_wrong": "Share of groups whose answers are all wrong.",
    "rollout/aborted_share": "Share of completions that were aborted.",
    "eval/score/<name>": "A score on held-out prompts, by its data and measure.",
    "prompts/mean_length": "Mean length of the prompts.",
    "prompts/max_length": "Longest prompt.",
    "prompts/clipped_ratio": "Share of prompts that are as long as the limit.",
    "completions/median_length": "Median length of the completions.",
    "sequences/mean_length": "Mean length of prompt and completion together.",
    "sequences/tokens_per_rank/min": "Fewest tokens that a rank has in a step.",
    "sequences/tokens_per_rank/max": "Most tokens that a rank has in a step.",
    "sequences/tokens_per_rank/mean": "Mean of the tokens that a rank has in a step.",
    "train/accuracy": "Share of training rows, or of their tokens, that the model gets right.",
    "train/token_accuracy": "Share of trained tokens that the model holds most likely.",
    "train/policy_loss": "The policy's part of the loss.",
    "train/loss_scale": "Factor that fp16 training multiplies the loss by.",
    "train/skipped_since_record": "Updates that were skipped since the record before.",
    "sampling/prob_difference/std": "Deviation of such distances.",
    "sampling/prob_correlation": "Correlation of the engine's probabilities with the trainer's.",
    "sampling/reference_logp/mean": "Mean log-prob that the reference model gives the same tokens.",
    "sampling/log_ppl_difference": "Trainer's log-perplexity less the engine's, mean.",
    "sampling/sequence_ratio/mean": "Mean of whole completions' ratios of trainer over engine.",
    "sampling/sequence_ratio/max": "Largest ratio of a whole completion.",
    "sampling/sequence_ratio/min": "Smallest ratio of a whole completion.",
    "sampling/mixed_version_share": "Share of completions that more than one policy wrote.",
    "preference/logits/chosen": "Mean logit over chosen answers.",
    "preference/logits/rejected": "Mean logit over rejected answers.",
    "throughput/mfu": "Share of the devices' peak arithmetic that is used.",
    "throughput/tokens_per_s_per_device": "Tokens processed per second and device.",
    "throughput/samples_per_s": "Samples processed per second.",
    "time/old_logprobs": "Time for log-probs of the policy that sampled.",
    "time/ref_logprobs": "Time for log-probs of the reference model.",
    "time/update_critic": "Time spent on the value model's update.",
    "time/wait_share": "Share of a step that trainers wait for samples.",
    "time/wait": "Time that trainers wait for samples.",
    "time/tools": "Time spent in tools.",
    "memory/host_used": "Host memory in use, all processes.",
    "engine/kv_usage": "Share of the engine's KV cache in use.",
    "engine/running": "Requests that the engine is sampling.",
    "engine/waiting": "Requests that wait for the engine.",
    "engine/prefix_hit_share": "Share of prompt tokens found in the engine's prefix cache.",
    "engine/prompt_tokens_per_s": "Prompt tokens that the engine reads per second.",
    "engine/longest_tokens_per_s": "Tokens per second of the longest completion.",
    "spec/accept_share": "Share of drafted tokens that the model accepts.",
    "spec/accept_length": "Mean number of tokens that one verification gives.",
    "agents/tool_calls": "Mean number of tool calls of a conversation.",
    "agents/tool_failures": "Share of tool calls that failed.",
    "agents/truncated_share": "Share of conversations that reached the limit of turns.",
    "clip_ratio/high_max": "Largest share of a micro-batch that the upper bound holds.",
    "clip_ratio/low_min": "Smallest share of a micro-batch that the lower bound holds.",
    "completions/terminated_share": "Share of completions that ended by themselves.",
    "engine/effective_tokens_per_s": "Sampled tokens per second that are trained on.",
    "eval/lag_steps": "Steps by which an evaluation is behind the trainer.",
    "kl/weighted": "The KL penalty as it stands in loss or reward, times its weight.",
    "memory/max_active": "Peak of device memory in live blocks.",
    "reward/kl_part": "What the KL penalty takes off the rewards, mean.",
    "reward/normalised": "Mean reward after normalisation over its group: near 0 by design.",
    "reward/pass_at/<name>": "Share of prompts of which one of so many samples is solved.",
    "reward/std": "Deviation of the rewards of a whole batch.",
    "rollout/filter_pass_share": "Share of sampled groups that a filter let pass.",
    "sampling/k1": "Mean of trainer's less engine's log-prob, signed.",
    "spec/draft_loss": "Loss of the draft model.",
    "spec/efficiency": "Tokens that speculation gives, against the most it could.",
    "stale/samples": "Samples of an older policy that were trained on.",
    "time/micro_batch": "Time of one micro-batch.",
    "train/perplexity": "Exponential of the training loss; rules read its logarithm as the loss.",
    "eval/perplexity": "Exponential of the loss of held-out rows, read likewise.",
    "train/final_loss": "Mean training loss of the whole run, printed at its end.",
    "train/rank_loss_max": "Largest loss of a rank.",
}


# Prefixes that trackers and callbacks add to a metric's name. eval/ is none: it is another metric.
_TRACKED = ("train/", "training/", "trainer/")


def unprefixed(name: str) -> str:
    """Return a metric's name without a tracker's prefix: train/completions/clipped_ratio."""
    for prefix in _TRACKED:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name
