"""All faults by name, and the healthy runs."""

from __future__ import annotations

from homeostat.clinic.faults import (
    critic,
    data,
    energy,
    engine,
    experts,
    learning,
    machine,
    numerics,
    partial_sync,
    policy,
    precision,
    preference,
    resuming,
    reward,
    rows,
    schedules,
    signal,
)
from homeostat.clinic.injector import Injector
from homeostat.clinic.recipes import BALANCED, GOLD, Body

MODULES = (
    *(learning, schedules, critic, preference, numerics, data, rows, reward, signal, policy),
    *(engine, partial_sync, machine, resuming, experts, energy, precision),
)
INJECTORS: dict[str, type[Injector]] = {
    fault.name: fault for module in MODULES for fault in module.FAULTS
}

_LORA = {"lora": {"rank": 8, "targets": ["all-linear"]}, "trainer.lr": 1e-2}
# At 1e-2 the reward falls for good in a third of the seeds.
_LORA_RL = {**_LORA, "trainer.lr": 1e-3}
_KL = {"algorithm.kl": {"coefficient": 0.01}}
_COSINE = {"trainer.schedule": {"type": "cosine", "warmup_share": 0.1}}
_LINEAR = {"trainer.schedule": {"type": "linear", "warmup_steps": 3}}
_WSD = {"trainer.schedule": {"type": "wsd", "warmup_steps": 3, "decay_share": 0.3}}
# Many micro-batches in an update.
_SMALL_BATCHES = {"trainer.max_tokens_per_device": 64}
_SMALL_GROUPS = {"rollout.prompts_per_step": 64, "rollout.samples_per_prompt": 2}
_MISTAKEN = {
    "type": "function",
    "name": "judge",
    "path": "homeostat.clinic.rewards:mistaken",
    "options": {"share": 0.08},
}
_TWO_REWARDS = [
    {"type": "exact_match", "name": "right"},
    {"type": "regex_format", "name": "form", "pattern": "[0-9]{5}", "weight": 0.2},
]
_OWN_PROCESS = {"type": "native", "own_process": True}

HEALTHY: dict[str, Body] = {
    "sft_pairs": Body("sort", "sft", steps=60),
    "sft_text": Body("copy", "sft", rows="text", steps=60, num_digits=(3, 4, 5)),
    "sft_chat": Body("reverse", "sft", rows="messages", steps=60, width=96),
    "sft_lora": Body("copy", "sft", steps=60, pretrained=True, changes=_LORA),
    "sft_deep": Body("shift", "sft", steps=60, layers=4, num_digits=(4, 5, 6)),
    "grpo_sort": Body("sort", "grpo", steps=60),
    "grpo_kl": Body("copy", "grpo", steps=60, changes=_KL),
    "dr_grpo_shift": Body("shift", "dr_grpo", steps=60),
    "dapo_evens": Body("evens", "dapo", steps=40),
    "gspo_sort": Body("sort", "gspo", steps=60, num_digits=(4,)),
    "cispo_reverse": Body("reverse", "cispo", steps=60, num_digits=(4,)),
    "rloo_largest": Body("largest", "rloo", steps=60),
    "reinforce_pp_copy": Body("copy", "reinforce_pp", steps=60, num_digits=(6,)),
    "ppo_sort": critic.SORT_PPO,
    "cpgd_copy": Body("copy", "cpgd", steps=40, num_digits=(6,)),
    "sapo_reverse": Body("reverse", "sapo", steps=40, num_digits=(4,)),
    "gmpo_shift": Body("shift", "gmpo", steps=40),
    "ebft_sort": Body("sort", "ebft", steps=60, changes=energy.ENERGY),
    "ebft_copy": Body("copy", "ebft", steps=60, changes=energy.ENERGY),
    "grpo_parity": Body("parity", "grpo", steps=60, num_digits=(2,)),
    "grpo_count": Body("count", "grpo", steps=60, width=96),
    "grpo_gold": Body("reverse", "grpo", steps=60, num_digits=(4,), changes=GOLD),
    "dpo_sort": Body("sort", "dpo", steps=60),
    "ipo_shift": Body("shift", "ipo", steps=40),
    "kto_copy": Body("copy", "kto", steps=40, changes={"trainer.lr": 1e-4}),
    "orpo_reverse": Body("reverse", "orpo", steps=40),
    "simpo_sort": Body("sort", "simpo", steps=40, num_digits=(4,)),
    "sft_moe": Body("sort", "sft", family="qwen3_moe", steps=60, changes=BALANCED),
    "grpo_moe": Body("sort", family="qwen3_moe", steps=60),
    "grpo_moe_replayed": Body("copy", family="qwen3_moe", steps=60, changes=experts.REPLAY),
    "grpo_moe_sigmoid": Body("sort", family="dots1", steps=40, changes=experts.REPLAY),
    "sft_fp8": Body("sort", "sft", steps=60, changes=precision.FP8),
    "sft_fp8_delayed": Body("copy", "sft", steps=60, changes=precision.LATE_DELAYED),
    "sft_int4": Body("reverse", "sft", steps=60, changes=precision.INT4),
    "sft_int4_late": Body("sort", "sft", steps=60, changes=precision.LATE_INT4),
    "grpo_fp8": Body("sort", "grpo", steps=40, changes=precision.FP8),
    "grpo_int4": Body("copy", "grpo", steps=40, changes=precision.INT4),
    "grpo_own_process": Body(
        "sort", "grpo", steps=40, changes={"engine": {"type": "native", "own_process": True}}
    ),
    "sft_cosine": Body("sort", "sft", steps=50, changes=_COSINE),
    "sft_linear": Body("reverse", "sft", steps=50, changes=_LINEAR),
    "sft_wsd": Body("shift", "sft", steps=50, changes=_WSD),
    "sft_short": Body("sort", "sft", steps=8),
    "sft_epochs": Body("copy", "sft", steps=48, changes={"trainer.batch_rows": 128}),
    "sft_muon": Body("sort", "sft", steps=40, changes={"trainer.optimizer": {"type": "muon"}}),
    "sft_small_batches": Body("sort", "sft", steps=40, changes=_SMALL_BATCHES),
    "sft_resumed": Body("sort", "sft", steps=44, stops_at=17),
    "sft_ranks": machine.OVER_RANKS,
    "grpo_chat": Body("sort", "grpo", rows="messages", steps=30),
    "grpo_lora": Body("sort", "grpo", steps=30, changes=_LORA_RL),
    "grpo_resumed": Body("sort", "grpo", steps=30, stops_at=14),
    "grpo_small_groups": Body("sort", "grpo", steps=40, changes=_SMALL_GROUPS),
    "grpo_noisy_judge": Body("sort", "grpo", steps=40, changes={"rewards.functions": [_MISTAKEN]}),
    "grpo_two_rewards": Body("sort", "grpo", steps=40, changes={"rewards.functions": _TWO_REWARDS}),
    "grpo_linear": Body("copy", "grpo", steps=30, changes=_LINEAR),
    "grpo_four_updates": Body("sort", "grpo", steps=30, changes={"trainer.updates_per_step": 4}),
    "grpo_ahead": Body(
        "sort", steps=30, changes={"engine": _OWN_PROCESS, "rollout.max_staleness": 1}
    ),
    "grpo_sleeping": partial_sync.SLEEPS,
    "dpo_lora": Body("sort", "dpo", steps=40, changes=_LORA | {"trainer.lr": 2e-3}),
}

# One fault and one healthy run, for `--short`.
SHORT = ("sft_pairs", "frozen_layers")
