"""Settings of the SGLang engine. Names and values of `options` are those of SGLang's ServerArgs."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator

from homeostat.config.base import key
from homeostat.config.options import refuse_options
from homeostat.config.served import ServedEngineConfig

# Server arguments that homeostat sets itself, with the config key that controls each.
OWNED = {
    "model_path": "model.path",
    "tokenizer_path": "model.tokenizer",
    "skip_tokenizer_init": "model.tokenizer",
    "dtype": "engine.dtype",
    "random_seed": "seed",
    "context_length": "data.max_length",
    "max_running_requests": "engine.max_concurrency",
    "chunked_prefill_size": "engine.max_batched_tokens",
    "mem_fraction_static": "engine.memory_share",
    "max_total_tokens": "engine.memory_share",
    "tp_size": "engine.tensor_parallel_size",
    "disable_cuda_graph": "engine.enforce_eager",
    "enable_memory_saver": "engine.sleep",
    "enable_weights_cpu_backup": "engine.sleep",
    "quantization": "engine.quantization",
    "kv_cache_dtype": "engine.kv_cache_dtype",
    "device": "trainer.device",
}
# Server arguments on which guarantees of the engine depend, with the reason for each.
FIXED = {
    "enable_deterministic_inference": "the noise of a sample must depend only on its request",
    "rl_on_policy_target": "log-probs must be computed at the sampling temperature",
    "sampling_backend": "the noise of a sample must depend only on its request",
    "sampling_defaults": "a checkpoint's own sampling defaults would change what is sampled",
    "preferred_sampling_params": "sampling settings come from the recipe",
    "weight_version": "the version of the weights must be known for every token",
    "disable_overlap_schedule": "the version of the weights must be known for every token",
    "stream_interval": "the version of the weights must be known for every token",
    "incremental_streaming_output": "the engine reads tokens as soon as they are sampled",
    "custom_weight_loader": "sync.transport sends the weights",
    "dp_size": "set engine.data_parallel_size: each engine holds one copy of the model",
    "pp_size": "the engine runs on one machine",
    "nnodes": "the engine runs on one machine",
    "node_rank": "the engine runs on one machine",
    "dist_init_addr": "each engine chooses its own free port",
    "nccl_port": "each engine chooses its own free port",
    "host": "each engine chooses its own free port",
    "port": "each engine chooses its own free port",
    "base_gpu_id": "each engine sees only its own devices",
    "tokenizer_worker_num": "one process sends all requests",
    "is_embedding": "the engine samples text",
    "speculative_algorithm": "its log-probs would not be those of the policy",
    "enable_lora": "adapters are merged into the weights that are published",
    "use_ray": "the engine's processes must end with it",
    "custom_sigquit_handler": "the engine's processes must end with it",
}


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    return refuse_options(options, owned=OWNED, fixed=FIXED)


class SglangEngineConfig(ServedEngineConfig):
    """SGLang in its own process, with its own copy of the weights."""

    type: Literal["sglang"]
    memory_share: float = key(
        0.5,
        gt=0,
        le=0.95,
        resume="free",
        help="On a GPU, the share of its memory for weights and KV cache (SGLang's "
        "mem_fraction_static). On a CPU, the share of the free memory that the KV cache may use.",
    )
    max_batched_tokens: int | None = key(
        None,
        ge=1,
        resume="warn",
        help="Largest number of prompt tokens in one forward pass; longer prompts are split. "
        "SGLang chooses by default.",
    )
    sleep: bool = key(
        True,
        resume="free",
        help="On a GPU, free the cache and move the weights to the host while the trainer works. "
        "false keeps them: more memory, no pause. On a CPU SGLang keeps its cache.",
    )
    options: Annotated[dict[str, Any], AfterValidator(_check_options)] = key(
        {},
        resume="warn",
        share=True,
        help="Further arguments of SGLang's ServerArgs, under SGLang's names.",
    )

    score_temperatures: ClassVar[Literal["any", "one"]] = "one"
    returns_kept_ids: ClassVar[bool] = True
    # Its top-p after a top-k is another one than ours, and its min-p has no noise of a request.
    cuts: ClassVar[frozenset[str]] = frozenset({"top_k", "top_p"})
    combines_cuts: ClassVar[bool] = False
