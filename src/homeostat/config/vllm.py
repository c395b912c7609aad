"""Settings of the vLLM engine. Names and values of `options` are those of vLLM's EngineArgs."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator

from homeostat.config.base import key
from homeostat.config.options import refuse_options
from homeostat.config.served import ServedEngineConfig

# Engine arguments that homeostat sets itself, with the config key that controls each.
OWNED = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "skip_tokenizer_init": "model.tokenizer",
    "dtype": "engine.dtype",
    "seed": "seed",
    "max_model_len": "data.max_length",
    "max_num_seqs": "engine.max_concurrency",
    "max_num_batched_tokens": "engine.max_batched_tokens",
    "gpu_memory_utilization": "engine.memory_share",
    "kv_cache_memory_bytes": "engine.memory_share",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "enforce_eager": "engine.enforce_eager",
    "enable_sleep_mode": "engine.sleep",
    "quantization": "engine.quantization",
    "kv_cache_dtype": "engine.kv_cache_dtype",
}
# Engine arguments on which guarantees of the engine depend, with the reason for each.
FIXED = {
    "logprobs_mode": "log-probs must be computed at the sampling temperature",
    "max_logprobs": "log-probs must be computed at the sampling temperature",
    "generation_config": "a checkpoint's own sampling defaults would change what is sampled",
    "worker_extension_cls": "homeostat's own class receives the weights",
    "worker_cls": "homeostat's own class receives the weights",
    "weight_transfer_config": "sync.transport sends the weights",
    "async_scheduling": "the version of the weights must be known for every token",
    "stream_interval": "the version of the weights must be known for every token",
    "runner": "the engine samples text",
    "convert": "the engine samples text",
    "data_parallel_size": "set engine.data_parallel_size: each engine holds one copy of the model",
    "pipeline_parallel_size": "the engine runs on one machine",
    "nnodes": "the engine runs on one machine",
    "distributed_executor_backend": "the engine's processes must end with it",
    "disable_log_stats": "the engine/* metrics are computed from these statistics",
    "enable_chunked_prefill": (
        "it cannot be used with seeded requests on a CPU; elsewhere it is always on"
    ),
    "speculative_config": "its log-probs would not be those of the policy",
    "enable_lora": "adapters are merged into the weights that are published",
}


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    return refuse_options(options, owned=OWNED, fixed=FIXED)


class VllmEngineConfig(ServedEngineConfig):
    """vLLM in its own process, with its own copy of the weights."""

    type: Literal["vllm"]
    memory_share: float = key(
        0.5,
        gt=0,
        le=0.95,
        resume="free",
        help="On a GPU, the share of its memory that vLLM may use in total. On a CPU, the share "
        "of the free memory that the KV cache may use.",
    )
    max_batched_tokens: int | None = key(
        None,
        ge=1,
        resume="warn",
        help="Largest number of tokens in one forward pass; vLLM chooses by default. On a CPU "
        "it must be at least the longest request, because prompts are not split there.",
    )
    sleep: bool = key(
        True,
        resume="free",
        help="Free the cache while the trainer works; on a GPU the weights are also moved to "
        "the host. false keeps them: more memory, no pause.",
    )
    options: Annotated[dict[str, Any], AfterValidator(_check_options)] = key(
        {},
        resume="warn",
        share=True,
        help="Further arguments of vLLM's EngineArgs, under vLLM's names.",
    )

    score_temperatures: ClassVar[Literal["any", "one"]] = "one"
