"""Error texts of the family performance: the run works, and is slower than it need be."""

from __future__ import annotations

from homeostat.health.finding import Cause, Confidence, Family, Level
from homeostat.health.texts import counts
from homeostat.health.texts.parts import CHUNKED_LOGITS, FEWER_TOKENS, advice, safe
from homeostat.health.texts.trouble import Trouble

TROUBLES: tuple[Trouble, ...] = (
    Trouble(
        code="ERR740",
        name="recompilation-limit",
        family=Family.PERFORMANCE,
        level=Level.WARN,
        texts=(
            "torch._dynamo hit config.recompile_limit",
            "torch._dynamo hit config.cache_size_limit",
            "hit config.accumulated_cache_size_limit",
            "hit config.accumulated_recompile_limit",
        ),
        what="torch.compile recompiled so often that it gave up and runs eagerly.",
        why="Something changes with every call: sequence lengths, a Python number, a flag. Each "
        "value gets its own compilation until the limit.",
        fixes=(
            advice(
                "pad lengths to a few sizes, or mark them dynamic", "Then one graph serves all."
            ),
            advice("TORCH_LOGS=recompiles", "Prints what changed."),
            safe("trainer.packing", "on", "Rows of one size: nothing to recompile."),
        ),
    ),
    Trouble(
        code="ERR741",
        name="slow-fallback-kernel",
        family=Family.PERFORMANCE,
        level=Level.WARN,
        texts=(
            "The fast path is not available because",
            "Falling back to torch implementation",
            "falling back to a slow",
            "will fall back to the slower",
            "falling back to the naive implementation",
        ),
        what="A fast kernel is missing and a plain implementation runs in its place.",
        why="Linear attention, Mamba and expert layers without their kernels are many times "
        "slower; they also differ in the last digits from what the engine computes.",
        fixes=(
            advice(
                "install the library that the line names",
                "flash-linear-attention, "
                "causal-conv1d, mamba-ssm, grouped-gemm: built against this torch.",
            ),
        ),
    ),
    Trouble(
        code="ERR742",
        name="slow-tokenizer",
        family=Family.PERFORMANCE,
        level=Level.INFO,
        texts=("Using a slow tokenizer", "use_fast=False && tokenizer"),
        what="A slow (pure Python) tokenizer is in use.",
        why="Tokenising takes ten times as long; it seldom matters beside generation.",
        fixes=(advice("a tokenizer.json for the model", "`AutoTokenizer(..., use_fast=True)`."),),
    ),
    Trouble(
        code="ERR743",
        name="data-loading-slow",
        family=Family.PERFORMANCE,
        level=Level.INFO,
        texts=(
            "does not have many workers which may be a bottleneck",
            "worker processes in total. Our suggested max number of worker",
        ),
        what="The number of data workers does not suit the machine.",
        why="Too few starve the GPU, more than there are cores fight each other.",
        fixes=(
            safe("data.num_processes", "about the number of free cores", "Neither few nor many."),
        ),
    ),
    Trouble(
        code="ERR744",
        name="attention-fallback",
        family=Family.PERFORMANCE,
        level=Level.INFO,
        texts=(
            "Falling back to eager attention",
            "falling back to eager",
            "falling back to sdpa",
            "You are not running the flash-attention implementation",
            "flash-attention package not found",
            "`flash-attention` package not found",
            "Flash Attention is not available, using",
        ),
        what="Flash attention is not used; a slower kernel takes its place.",
        why="The package is missing or the model, dtype or mask does not allow it. Memory and time "
        "grow faster with length.",
        fixes=(
            safe(
                "model.attention",
                "a fused kernel",
                "SDPA in bf16 is nearly as good on recent cards.",
                transformers="attn_implementation",
            ),
        ),
    ),
    Trouble(
        code="ERR745",
        name="allocator-cache-flushes",
        family=Family.PERFORMANCE,
        level=Level.WARN,
        texts=("pytorch allocator cache flushes since last step",),
        when=counts.at_least(3, "pytorch allocator cache flushes since last step"),
        what="The GPU is so full that PyTorch empties its cache within steps.",
        why="Every flush stalls the card; a little less memory per step would make it faster.",
        causes=(
            Cause("allocator-cache-flushes", "DeepSpeed counts them."),
            Cause("memory-fragmentation", "Varying lengths leave pieces behind."),
        ),
        fixes=(
            FEWER_TOKENS,
            CHUNKED_LOGITS,
            advice("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "Fewer pieces."),
            safe("trainer.empty_cache_interval", "1", "All ranks flush at the same moment."),
        ),
    ),
    Trouble(
        code="ERR746",
        name="object-store-spilling",
        family=Family.PERFORMANCE,
        level=Level.INFO,
        texts=("raylet*Spilled * objects, write throughput", "Spilled * MiB, * objects"),
        what="Ray moves objects to disk because its object store is full.",
        why="Rollouts or weights that travel between actors exceed shared memory.",
        fixes=(
            advice("ray start --object-store-memory=<bytes>", "Makes the store larger."),
            advice("drop references to old rollouts", "Only then may Ray free them."),
        ),
    ),
    Trouble(
        code="ERR747",
        name="gpu-throttled",
        family=Family.PERFORMANCE,
        level=Level.WARN,
        texts=(
            "HW Slowdown*: Active",
            "HW Thermal Slowdown*: Active",
            "SW Thermal Slowdown*: Active",
            "HW Power Brake Slowdown*: Active",
        ),
        what="A GPU runs below its clock: too hot, or short of power.",
        why="One slow card slows all ranks, which wait for it in every collective.",
        fixes=(
            advice("nvidia-smi -q -d PERFORMANCE,TEMPERATURE on every node", "Which card it is."),
            advice("cooling, power limits, or leave that node out", "Nothing in the run helps."),
        ),
    ),
    Trouble(
        code="ERR748",
        name="rollout-underutilised",
        family=Family.PERFORMANCE,
        level=Level.WARN,
        confidence=Confidence.INFERRED,
        texts=("#running-req:", "reqs, waiting:"),
        when=counts.is_concurrency_bound,
        what="Requests queue at the engine while most of its KV cache is empty.",
        why="A limit on concurrent requests, not memory, holds them back.",
        fixes=(
            safe(
                "engine.max_concurrency",
                "higher, until the cache is well used",
                "More sequences per step cost the engine little.",
                sglang="--max-running-requests",
                vllm="--max-num-seqs",
                slime="--sglang-max-running-requests, --sglang-server-concurrency",
                miles="--sglang-max-running-requests, --sglang-server-concurrency",
                verl="actor_rollout_ref.rollout.max_num_seqs",
            ),
            safe(
                "engine.tensor_parallel_size",
                "1 for small models",
                "More engines of one card beat one engine over many.",
                slime="--rollout-num-gpus-per-engine=1",
                miles="--rollout-num-gpus-per-engine=1",
            ),
        ),
    ),
    Trouble(
        code="ERR749",
        name="nccl-over-tcp",
        family=Family.PERFORMANCE,
        level=Level.INFO,
        texts=("NCCL INFO NET/IB : No device found", "NCCL INFO Using network Socket"),
        what="NCCL talks over TCP sockets, not InfiniBand or RoCE.",
        why="Fine on one node; between nodes it is ten times slower than the fabric.",
        fixes=(
            advice("ibv_devinfo inside the container", "The devices must be passed into it."),
            advice("NCCL_IB_DISABLE unset, NCCL_NET set by your cloud's plugin", "As it asks."),
        ),
    ),
    Trouble(
        code="ERR750",
        name="disk-nearly-full",
        family=Family.PERFORMANCE,
        level=Level.WARN,
        texts=("file_system_monitor && is over 95% full", "Object creation will fail if spilling"),
        what="The disk with Ray's session folder is more than 95 % full.",
        why="Ray can no longer spill objects there, and logs and checkpoints may fail next.",
        causes=(
            Cause("disk-nearly-full", "Ray's monitor says so."),
            Cause("disk-full-or-quota", "What follows."),
        ),
        fixes=(advice("ray start --temp-dir on a larger disk", "Or clear old session folders."),),
    ),
)
