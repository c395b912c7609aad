"""The words of a diagnosis: every name that a finding or a cause may have, and what it means.

A name is an illness or its cause, never the cure. Names that begin with `benign-` are look-alikes
that need no cure: a finding of that name has level info.
"""
# ruff: noqa: E501 (a table)

from __future__ import annotations

from homeostat.health.finding import Family

WORDS: dict[Family, dict[str, str]] = {
    Family.CONFIG: {
        "micro-batch-exceeds-mini-batch": "Per-GPU micro batch larger than the per-GPU share of the mini batch (zero accumulation, NaN grad norm).",
        "group-size-one": "One sample per prompt, so group advantage is undefined.",
        "generations-not-dividing-batch": "Global batch is not a multiple of generations per prompt.",
        "replay-buffer-never-full": "Rollout/train batch larger than data collected, so no training step runs.",
    },
    Family.DATA: {
        "all-labels-masked": "Every response token has label -100 (or is truncated away).",
        "pad-token-missing": "Tokenizer has no usable pad token.",
        "pad-equals-eos": "Pad token equals EOS, so EOS is masked and never learned.",
        "packing-cross-contamination": "Packed samples attend to each other.",
        "chat-template-mismatch": "Conversation template does not fit model/tokenizer, turns mis-tokenised or dropped.",
        "chat-template-rewrites-history": "Template changes earlier turns when re-tokenised (empty think blocks).",
        "prompt-not-chat-formatted": "Raw string prompt, chat template not applied, end-of-turn never produced.",
    },
    Family.NUMERICS: {
        "nan-update-poisoned-weights": 'One non-finite update left NaN weights; reward 0, "!!!!" output.',
        "fp16-overflow": "Fp16 activations/gradients overflow (NaN grad norm, loss 0).",
        "attention-kernel-nan": "Attention kernel of the build returns NaN.",
        "kl-estimator-overflow": "Exp in the k3 KL estimator overflows on outlier tokens.",
    },
    Family.LEARNING: {
        "benign-grpo-loss-zero": "GRPO loss prints as 0 by construction while grad_norm/reward_std/kl show learning.",
        "benign-loss-tracks-kl": "GRPO loss rises because it equals beta*kl; reward improves.",
        "benign-gradnorm-version-change": "Reported grad_norm changes scale with a library version; losses identical.",
        "lr-too-high": "Learning rate far too large: divergence, NaN or wrecked policy.",
        "lr-too-low": "Learning rate too small to move the policy (for example full-tuning rate with LoRA).",
        "lr-schedule-horizon-wrong": "Schedule length/warm-up/off-by-one wrong, rate reaches 0 too early.",
        "no-gradient-flow": "Gradient and kl exactly 0 although rewards vary.",
        "loss-not-normalised-by-grad-accum": "Loss/grad multiplied by the accumulation steps.",
        "overfitting": "Eval loss rises while training loss falls.",
        "grad-norm-spikes": "Isolated huge pre-clip gradient norms with ordinary loss.",
        "dpo-over-optimisation": "DPO loss 0, accuracy 1, very large margins early.",
    },
    Family.REWARD: {
        "task-too-hard": "The model cannot solve the prompts yet.",
        "benign-unweighted-reward-logged": "Logged reward ignores reward_weights; optimisation uses them.",
        "benign-reward-extra-info-missing": "Non-fatal message that reward_extra_info is absent.",
        "zero-std-groups": "All answers of a group score alike, advantages vanish.",
        "reward-saturated": "Every answer gets the maximum score.",
        "verifier-format-mismatch": "Verifier expects a marker the model never writes, reward always 0.",
        "reward-fn-signature": "Reward function rejects keyword arguments of the trainer.",
        "reward-fn-not-importable": "Reward module cannot be imported/pickled in workers or its import error is swallowed.",
    },
    Family.POLICY: {
        "benign-entropy-token-sum": "Entropy looks huge because it is summed over tokens.",
        "benign-gspo-clipfrac": "High clip fraction that is normal for sequence-level GSPO ratios.",
        "kl-runaway": "KL to the reference grows without bound and reward plateaus or falls.",
        "policy-collapse": "Policy degenerates to a constant/garbage output after an update.",
        "kl-negative-generation-kwargs": "Negative KL estimate because sampling is not from the raw policy.",
        "kl-negative-weak-reward-model": "Negative KL with a poor reward model and tiny batches.",
        "ppo-ratio-exceeds-threshold": "PPO ratio above threshold, batch skipped.",
        "entropy-collapse": "Policy entropy falls to almost zero.",
        "length-bias-shrinking": "Completions shrink through per-completion loss averaging.",
        "length-explosion-gibberish": "Policy slides into very long gibberish.",
    },
    Family.OFFPOLICY: {
        "sequence-level-is-collapse": "Sequence-level importance weight collapses with length while token log-probs agree.",
        "truncated-sampling-logprob-bias": "Top_p/top_k/min_p renormalised log-probs bias the importance ratio.",
        "train-infer-logprob-drift": "Train/rollout log-prob gap grows over steps.",
        "engine-logprob-mismatch": "Inference engine log-probs differ from the training forward from the start.",
        "multi-turn-token-mismatch": "Tokens trained on differ from those sampled in multi-turn/tool rollouts.",
    },
    Family.GENERATION: {
        "truncation-at-cap": "Completions hit the length limit.",
        "no-eos": "No completion ever emits EOS.",
        "vllm-illegal-memory-access": "Illegal GPU access inside vLLM during generation.",
    },
    Family.SYNC: {
        "sleep-wake-weights-lost": "Engine sleep/wake or cache freeing loses or damages weights.",
        "lora-not-synced": "LoRA tensors do not reach the engine intact.",
        "weight-conversion-wrong": "Trainer-to-engine weight conversion is wrong (garbage after first sync).",
        "weight-reload-corrupts-moe": "Reloading into already processed MoE tensors corrupts or rejects weights.",
        "hang-after-weight-update": "Inference stops answering after a weight update.",
    },
    Family.MOE: {
        "moe-routing-mismatch": "Trainer and engine route tokens to different experts.",
        "expert-load-imbalance": "Expert load drifts apart, update time grows.",
    },
    Family.PRECISION: {
        "bf16-numpy-unsupported": "Bf16 tensor converted to NumPy.",
        "value-head-dtype-mismatch": "Value head and backbone dtypes differ.",
        "fp8-unsupported-layer": "Layer that cannot be FP8-quantised in an FP8 recipe.",
        "fp8-rollout-garbage": "FP8 rollout weights loaded/resynced wrongly, garbage output.",
        "merge-gptq-unsupported": "LoRA merge into GPTQ weights is not possible.",
    },
    Family.SPECULATIVE: {
        "benign-spec-acceptance-moderate": "Steady, moderate draft acceptance.",
    },
    Family.MEMORY: {
        "logits-oom": "Full-vocabulary logits/entropy temporary exceeds GPU memory.",
        "colocate-wake-oom": "Engine cannot map memory on wake-up because training memory is held.",
        "colocate-engine-memory-not-released": "Engine keeps its memory during training.",
        "vllm-sleep-leak": "Memory in use after engine sleep grows each step.",
        "kv-cache-no-room": "No memory left for KV cache at start-up.",
        "kv-pool-exhausted": "KV pool full at run time, retraction/allocation fails.",
        "host-ram-oom": "Host memory exhausted, process killed.",
    },
    Family.DISTRIBUTED: {
        "collective-mismatch-uneven-batches": "Ranks issue different collectives (uneven batches), NCCL watchdog.",
        "placement-group-unschedulable": "Ray cannot satisfy the requested bundle.",
        "ray-cgraph-timeout": "Ray compiled-graph read timeout.",
        "zero3-checkpoint-recompute": "ZeRO-3 frozen params have size 0 at activation recompute.",
        "partitioned-embedding-not-gathered": "Embedding used while sharded/flattened.",
        "port-in-use": "Rendezvous/init port already bound.",
        "second-nccl-group-deadlock": "Open collective in the engine blocks a second NCCL group.",
        "vllm-mode-mismatch": "Colocate and server settings mixed.",
    },
    Family.CHECKPOINT: {
        "checkpoint-world-size-change": "Checkpoint loaded with another data-parallel degree.",
        "disk-full-or-quota": "No space/quota when writing a checkpoint.",
        "weights-not-loaded": "Model runs with uninitialised weights (uniform logits, loss ln(vocab)).",
    },
    Family.INSTALL: {
        "vllm-version-incompatible": "VLLM version does not fit the trainer library.",
        "dependency-conflict": "Package requirements cannot be satisfied together.",
        "compile-cache-corrupt": "Corrupt/half-written torch compile cache.",
        "remote-code-cache-race": "Ranks race on the remote-code modules cache.",
    },
    Family.PERFORMANCE: {
        "rollout-underutilised": "Rollout/trainer idle or badly sized, slow steps.",
    },
    Family.AGENTS: {},
}

FAMILY_OF: dict[str, Family] = {name: family for family, names in WORDS.items() for name in names}
