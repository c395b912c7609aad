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
    policy,
    precision,
    preference,
    reward,
)
from homeostat.clinic.injector import Injector
from homeostat.clinic.recipes import BALANCED, GOLD, Body

MODULES = (
    *(learning, critic, preference, numerics, data, reward, policy),
    *(engine, machine, experts, energy, precision),
)
INJECTORS: dict[str, type[Injector]] = {
    fault.name: fault for module in MODULES for fault in module.FAULTS
}

_LORA = {"lora": {"rank": 8, "targets": ["all-linear"]}, "trainer.lr": 1e-2}
_KL = {"algorithm.kl": {"coefficient": 0.01}}

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
}

# One fault and one healthy run, for `--short`.
SHORT = ("sft_pairs", "frozen_layers")
