"""Set the critic of a recipe: what it has apart from the policy, and what both share here."""

from __future__ import annotations

from homeostat.importing.draft import Draft
from homeostat.importing.entries import Given, Status
from homeostat.importing.recognise import fold

# Settings of verl's critic -> our key, which holds for the policy and the critic alike.
_SHARED = {
    "critic.model.enable_gradient_checkpointing": "trainer.gradient_checkpointing",
    "critic.model.use_remove_padding": "trainer.packing",
    "critic.model.fsdp_config.param_offload": "trainer.backend.offload_params",
    "critic.model.fsdp_config.optimizer_offload": "trainer.backend.offload_optimizer",
    "critic.fsdp.param_offload": "trainer.backend.offload_params",
    "critic.fsdp.optimizer_offload": "trainer.backend.offload_optimizer",
    "critic.megatron.param_offload": "trainer.backend.offload_params",
    "critic.megatron.optimizer_offload": "trainer.backend.offload_optimizer",
    "critic.model.lora_rank": "lora.rank",
    "critic.model.lora_alpha": "lora.alpha",
    "critic.model.target_modules": "lora.targets",
    "critic.ulysses_sequence_parallel_size": "trainer.backend.sequence_parallel_size",
    "critic.ppo_mini_batch_size": "trainer.mini_batch_rows",
    "critic.ppo_max_token_len_per_gpu": "trainer.max_tokens_per_device",
    "critic.use_dynamic_bsz": "trainer.dynamic_batch",
    "critic.strategy": "trainer.backend.type",
}


def set_critic(draft: Draft) -> None:
    """Enter the settings of a critic that no key of the section `critic` takes."""
    for given in draft:
        if not fold(given.name).startswith("critic."):
            continue
        if draft.get("algorithm.type") != "ppo":
            draft.leave(given, Status.NOT_NEEDED, "of the algorithms here, only ppo has a critic")
        elif fold(given.name) == "critic.model.path":
            _set_start(draft, given)
        elif key := _SHARED.get(fold(given.name)):
            _enter_shared(draft, given, key)


def _set_start(draft: Draft, given: Given) -> None:
    # Not draft.value, which passes over variables of the shell: both may have the same one.
    policy = [one.value for one in draft.file.settings if "model.path" in draft.keys(one)]
    if given.value in policy:
        draft.leave(given, Status.NOT_NEEDED, "the critic starts from the policy's model anyway")
        return
    draft.take(given, "critic.path", given.value)
    if "$" in str(given.value):
        draft.need("critic.path", "insert the value of the variable")


def _enter_shared(draft: Draft, given: Given, key: str) -> None:
    policy = draft.value(key)
    if given.value == policy or (policy is None and not given.value):
        why = f"the critic is trained as the policy is, by {key}"
        draft.leave(given, Status.NOT_NEEDED, why)
    else:
        how = f"{key} holds for policy and critic alike, and the file has {policy!r} for the policy"
        draft.leave(given, Status.APPROXIMATED, how, key=key)
