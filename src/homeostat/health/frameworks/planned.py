"""Settings that our recipes do not have, under the keys that rules and tables use for them.

PLANNED   keys that later versions will have. A test fails once a recipe accepts one of them.
FOREIGN   settings that only other frameworks need. No recipe of ours will accept them.
"""

from __future__ import annotations

PLANNED: dict[str, str] = {
    "engine.prefix_caching": "Keep the cache of prompts that requests share.",
    "engine.expert_parallel_size": "Devices that share the experts in the engine.",
    "engine.speculative.draft_model": "The model that drafts tokens.",
    "engine.speculative.num_tokens": "Tokens drafted before each verification.",
    "engine.speculative.update_interval": "Steps between updates of the draft model.",
    "engine.speculative.draft_lr": "Learning rate of the draft model.",
    "engine.speculative.draft_ema": "Share of the old draft that an update keeps.",
    "engine.speculative.reset_interval": "Steps after which the draft starts again.",
    "rollout.repetition_penalty": "Makes tokens that were already generated less likely.",
    "rollout.max_turns": "Turns of a conversation with tools.",
    "agents.update_strategy": "Which agents are updated in a step.",
    "agents.update_interval": "Steps between updates of an agent.",
    "agents.population": "Copies of an agent that are kept.",
}

FOREIGN: dict[str, str] = {
    "algorithm.kl.enabled": "Whether the loss has a KL penalty.",
    "algorithm.loss_type": "The loss that the framework computes.",
    "algorithm.ratio_level": "Ratios of single tokens, or of whole completions.",
    "algorithm.scale_rewards": "How rewards become advantages.",
    "cluster.devices_per_node": "Devices of one machine.",
    "cluster.port": "Port for the rendezvous of the processes.",
    "data.template": "Name of a chat template.",
    "data.train_on_prompt": "Whether prompts are trained on, too.",
    "engine.colocate": "Whether engine and trainer share devices.",
    "engine.max_model_length": "Maximum number of tokens in a prompt and its completion.",
    "engine.name": "Which engine samples.",
    "lora.enabled": "Whether an adapter is trained.",
    "rewards.column": "Column with the expected answer.",
    "rewards.model": "The model that scores completions.",
    "rewards.names": "The reward functions.",
    "rewards.overlong_buffer": "Tokens before the limit at which the length penalty starts.",
    "rewards.weights": "Weights of the reward functions.",
    "rollout.max_prompt_tokens": "Maximum number of tokens in a prompt.",
    "rollout.max_total_tokens": "Maximum number of tokens in a prompt and its completion.",
    "rollout.multi_turn": "Whether samples are conversations with tools.",
    "rollout.micro_batch_rows": "Samples that are generated or scored at once on a device.",
    "trainer.backend.pipeline_parallel_size": "Pipeline stages of the trained model.",
    "trainer.backend.tensor_parallel_size": "Devices that share each layer of the trained model.",
    "trainer.dynamic_batch": "Whether micro-batches are filled up to a number of tokens.",
    "trainer.gradient_accumulation_steps": "Micro-batches of one update on a device.",
    "trainer.logprob_max_tokens": "Tokens of a micro-batch that is only scored.",
    "trainer.logprob_micro_batch_rows": "Rows of a micro-batch that is only scored.",
    "trainer.mini_batch_rows": "Rows, or prompts, of one update where a step has several.",
    "trainer.zero_stage": "What DeepSpeed splits over the ranks: 1, 2 or 3.",
}
