"""Pieces that several tables share: fixes, and the symptoms that follow a first failure.

A rank that dies takes the others with it: their collectives time out, Ray reports a lost actor, the
launcher a failed child. AFTERMATH names those texts, so that the first failure explains them.
"""

from __future__ import annotations

from homeostat.health.finding import Fix, Grade

# Collective timeout, lost peer, lost actor, launcher's summary, native crash, dead engine, engine
# that did not start, engine that does not answer.
AFTERMATH = (
    "ERR100",
    "ERR104",
    "ERR105",
    "ERR132",
    "ERR139",
    "ERR140",
    "ERR141",
    "ERR254",
    "ERR255",
    "ERR256",
    "ERR271",
)


def advice(value: str, why: str, **theirs: str) -> Fix:
    """Something that no setting of ours does; `theirs`: framework -> its setting."""
    return Fix("", value, why, theirs=theirs)


def change(setting: str, value: str, why: str, **theirs: str) -> Fix:
    """A setting that may change how the run learns, or that a person should weigh."""
    return Fix(setting, value, why, theirs=theirs)


def safe(setting: str, value: str, why: str, **theirs: str) -> Fix:
    """A setting that changes neither objective, data order nor sampled distribution."""
    return Fix(setting, value, why, grade=Grade.SAFE, theirs=theirs)


SMALLER_MICRO_BATCH = safe(
    "trainer.micro_batch_rows",
    "halve it, and double the accumulation",
    "Fewer rows at once need less memory; with more accumulation the update stays the same.",
)
FEWER_TOKENS = safe(
    "trainer.max_tokens_per_device",
    "halve it",
    "A micro-batch of fewer tokens needs less memory; the update stays the same.",
)
RECOMPUTE = safe(
    "trainer.gradient_checkpointing",
    "true",
    "Activations are recomputed in the backward pass: about a fifth slower, far less memory.",
    megatron="--recompute-granularity=full, --recompute-method=uniform, --recompute-num-layers=1",
)
CHUNKED_LOGITS = safe(
    "trainer.logits_chunk_bytes",
    "small enough to fit",
    "The loss is computed over pieces of the logits, which then never exist whole.",
    trl="use_liger_kernel=true",
    axolotl="liger_fused_linear_cross_entropy=true",
    verl="actor_rollout_ref.model.use_fused_kernels=true",
    openrlhf="--ds.use_liger_kernel=true",
    slime="--log-probs-chunk-size",
    miles="--log-probs-chunk-size",
    llama_factory="enable_liger_kernel=true",
    ms_swift="--use_liger_kernel=true",
    transformers="use_liger_kernel=true",
)
SHARD = safe(
    "trainer.backend.shard",
    "full",
    "Weights, gradients and optimizer state are spread over the devices.",
    openrlhf="--ds.zero_stage=3",
    transformers="fsdp=true",
    axolotl="deepspeed=deepspeed_configs/zero3_bf16.json",
)
SHORTER = change(
    "rollout.max_new_tokens",
    "shorter",
    "Memory grows with the longest sequence of a micro-batch.",
)
SMALLER_ENGINE = safe(
    "engine.memory_share",
    "lower, in steps of 0.1",
    "The engine takes its share of the card for good; what trains beside it gets the rest.",
)
LARGER_ENGINE = safe(
    "engine.memory_share",
    "higher, in steps of 0.05",
    "Weights, activations and KV cache must fit into this share of the card.",
)
SPLIT_ENGINE = safe(
    "engine.tensor_parallel_size",
    "double it",
    "Each device then holds half of the engine's weights and cache.",
)
ENGINE_SLEEPS = safe(
    "engine.sleep",
    "true",
    "The engine gives its cache back while the trainer works.",
    verl="actor_rollout_ref.rollout.free_cache_engine",
    trl="vllm_enable_sleep_mode",
    openrlhf="--vllm.enable_sleep",
    ms_swift="--sleep_level",
    lightrft="--enable_engine_sleep",
    slime="--offload",
    miles="--offload",
)
READ_FIRST_ERROR = advice(
    "read the log above the first line of this kind",
    "What failed first stands earlier, often in another rank's or worker's own log file.",
)
