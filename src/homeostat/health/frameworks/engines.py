"""The inference engines and Ray, for logs that show no trainer that uses them."""

from __future__ import annotations

from homeostat.health.frameworks.table import Framework

VLLM = Framework(
    name="vllm",
    title="vLLM",
    metrics={
        "Avg prompt throughput": "engine/prompt_tokens_per_s",
        "Avg generation throughput": "engine/tokens_per_s",
        "Running": "engine/running",
        "Waiting": "engine/waiting",
        "GPU KV cache usage": "engine/kv_usage",
        "GPU cache usage": "engine/kv_usage",
        "Prefix cache hit rate": "engine/prefix_hit_share",
        "Mean acceptance length": "spec/accept_length",
        "Avg Draft acceptance rate": "spec/accept_share",
        "Draft acceptance rate": "spec/accept_share",
        "System efficiency": "spec/efficiency",
    },
    settings={
        "model.path": ("--model", "model"),
        "engine.memory_share": ("--gpu-memory-utilization", "gpu_memory_utilization"),
        "engine.max_model_length": ("--max-model-len", "max_model_len"),
        "engine.tensor_parallel_size": ("--tensor-parallel-size", "tensor_parallel_size"),
        "engine.data_parallel_size": ("--data-parallel-size",),
        "engine.expert_parallel_size": ("--enable-expert-parallel",),
        "engine.max_concurrency": ("--max-num-seqs",),
        "engine.max_batched_tokens": ("--max-num-batched-tokens",),
        "engine.enforce_eager": ("--enforce-eager",),
        "engine.dtype": ("--dtype",),
        "engine.quantization": ("--quantization",),
        "engine.kv_cache_dtype": ("--kv-cache-dtype",),
        "engine.prefix_caching": ("--enable-prefix-caching",),
        "engine.sleep": ("--enable-sleep-mode",),
        "engine.speculative.num_tokens": (
            "--speculative-config.num_speculative_tokens",
            "num_speculative_tokens",
        ),
        "engine.speculative.draft_model": ("--speculative-config.model",),
        "model.chat_template": ("--chat-template",),
        "cluster.nodes": ("nnodes",),
    },
    marks=("(EngineCore", "/vllm/", "vllm serve", "[gpu_model_runner.py", "[gpu_worker.py"),
)
SGLANG = Framework(
    name="sglang",
    title="SGLang",
    metrics={
        "#running-req": "engine/running",
        "#queue-req": "engine/waiting",
        "token usage": "engine/kv_usage",
        "full token usage": "engine/kv_usage",
        "gen throughput (token/s)": "engine/tokens_per_s",
        "input throughput (token/s)": "engine/prompt_tokens_per_s",
        "accept len": "spec/accept_length",
        "accept rate": "spec/accept_share",
    },
    settings={
        "model.path": ("--model-path",),
        "engine.memory_share": ("--mem-fraction-static",),
        "engine.max_model_length": ("--context-length",),
        "engine.tensor_parallel_size": ("--tp-size", "--tp", "--tensor-parallel-size"),
        "engine.data_parallel_size": ("--dp-size", "--dp"),
        "engine.expert_parallel_size": ("--ep-size", "--ep"),
        "engine.max_concurrency": ("--max-running-requests",),
        "engine.prefill_tokens": ("--chunked-prefill-size",),
        "engine.enforce_eager": ("--disable-cuda-graph",),
        "engine.dtype": ("--dtype",),
        "engine.quantization": ("--quantization",),
        "engine.kv_cache_dtype": ("--kv-cache-dtype",),
        "engine.sleep": ("--enable-memory-saver", "enable_memory_saver"),
        "engine.speculative.num_tokens": ("--speculative-num-draft-tokens",),
        "engine.speculative.draft_model": ("--speculative-draft-model-path",),
        "engine.stall_s": ("--watchdog-timeout",),
        "model.chat_template": ("--chat-template",),
    },
    marks=("/sglang/", "[sglang]", "Decode batch", "Prefill batch", "sglang.launch_server"),
)
RAY = Framework(
    name="ray",
    title="Ray",
    settings={
        "cluster.nodes": ("nodes",),
        "cluster.devices_per_node": ("--num-gpus",),
    },
    marks=("Autoscaler status:", "ray start", "placement groups", "raylet"),
)
