"""Error texts of the family memory: what ran out, and what it was doing when it did.

"CUDA out of memory" alone is ERR001. The frames before it (places.py) say whether logits, optimizer
state, activations or the engine asked for too much; each of those explains ERR001.
"""

from __future__ import annotations

from homeostat.health.finding import Cause, Confidence, Family, Level
from homeostat.health.texts import counts
from homeostat.health.texts.parts import (
    AFTERMATH,
    CHUNKED_LOGITS,
    ENGINE_SLEEPS,
    FEWER_TOKENS,
    LARGER_ENGINE,
    RECOMPUTE,
    SHARD,
    SHORTER,
    SMALLER_ENGINE,
    SMALLER_MICRO_BATCH,
    SPLIT_ENGINE,
    advice,
    change,
    safe,
)
from homeostat.health.texts.places import (
    OOM,
    is_fragmented,
    is_shared,
    oom_at,
    places,
    tried_at_least,
)
from homeostat.health.texts.trouble import Trouble
from homeostat.health.view import RunView
from homeostat.observe.exits import ALLOCATOR_TEXTS

_SPECIFIC = ("ERR001", "ERR012", *AFTERMATH)
_SAVER_OFF = tuple(f"enable_memory_saver{sep}false" for sep in ("=", ": ", "': ", '": '))
_ENGINE_PLACES = {"wake", "capture", "kv", "profile", "engine", "load"}


def _trainer_is_out_of_memory(view: RunView) -> bool:
    return view.log.has(*OOM) and not places(view.log) & _ENGINE_PLACES


TROUBLES: tuple[Trouble, ...] = (
    Trouble(
        code="ERR001",
        name="cuda-oom-training",
        family=Family.MEMORY,
        texts=(*OOM, "MPS backend out of memory", "HSA_STATUS_ERROR_OUT_OF_RESOURCES"),
        what="The GPU ran out of memory.",
        why="Weights, gradients, optimizer state, activations and logits of one micro-batch, plus "
        "whatever else lives on the card, need more than it has.",
        fixes=(FEWER_TOKENS, SMALLER_MICRO_BATCH, RECOMPUTE, SHARD, SHORTER),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR002",
        name="logits-oom",
        family=Family.MEMORY,
        texts=OOM,
        when=oom_at("logits"),
        what="The GPU ran out of memory while logits, log-probabilities or entropy over the whole "
        "vocabulary were computed.",
        why="One float per token and vocabulary entry, and several copies of it for softmax and "
        "its gradient, outweigh a small model: 16k tokens x 150k entries x 4 bytes are 9 GiB. "
        "Sharding the parameters does not shrink it.",
        fixes=(CHUNKED_LOGITS, FEWER_TOKENS, SMALLER_MICRO_BATCH, SHORTER),
        explains=_SPECIFIC,
    ),
    Trouble(
        code="ERR003",
        name="optimizer-state-oom",
        family=Family.MEMORY,
        texts=OOM,
        when=oom_at("optimizer"),
        what="The GPU ran out of memory in the optimizer, which allocates its state at the first "
        "update.",
        why="Adam keeps two moments and often fp32 master weights: 8 to 12 bytes a parameter, that "
        "are not there in the first forward and backward pass. A smaller batch hardly helps.",
        causes=(
            Cause("optimizer-state-oom", "The allocation that failed is the optimizer's."),
            Cause("cuda-oom-training", "The card was nearly full before."),
        ),
        fixes=(
            SHARD,
            advice(
                "offload or shrink the optimizer state",
                "An 8-bit or offloaded Adam, or LoRA, needs a fraction of it.",
                openrlhf="--ds.adam_offload",
                lightrft="--adam_offload",
                verl="actor_rollout_ref.actor.fsdp_config.optimizer_offload",
                axolotl="optimizer=adamw_bnb_8bit",
                trl="optim=paged_adamw_8bit",
                transformers="optim=paged_adamw_8bit",
                slime="--optimizer-cpu-offload",
                miles="--optimizer-cpu-offload",
            ),
            change("lora.rank", "set it", "Adapters have a hundredth of the optimizer state."),
        ),
        explains=_SPECIFIC,
    ),
    Trouble(
        code="ERR004",
        name="activation-oom",
        family=Family.MEMORY,
        texts=OOM,
        when=lambda view: oom_at("forward")(view) or oom_at("backward")(view),
        what="The GPU ran out of memory in a layer's forward or backward pass.",
        why="Activations grow with the tokens of a micro-batch; in the backward pass gradients and "
        "the logits' gradient come on top.",
        causes=(
            Cause("activation-oom", "The frames are those of the model's layers."),
            Cause("cuda-oom-training", "The card was nearly full before."),
        ),
        fixes=(RECOMPUTE, FEWER_TOKENS, SMALLER_MICRO_BATCH, SHORTER, SHARD),
        explains=_SPECIFIC,
    ),
    Trouble(
        code="ERR005",
        name="logits-oom",
        family=Family.MEMORY,
        texts=OOM,
        when=lambda view: oom_at("backward")(view) and tried_at_least(2.0)(view),
        confidence=Confidence.INFERRED,
        what="The GPU ran out of memory in the backward pass, on a single allocation of gigabytes.",
        why="No layer of a language model asks for gigabytes at once; the gradient of the logits "
        "over the whole vocabulary does.",
        causes=(
            Cause("logits-oom", "The failed allocation is far larger than any layer's."),
            Cause("activation-oom", "It was raised in the backward pass."),
        ),
        fixes=(CHUNKED_LOGITS, FEWER_TOKENS, SMALLER_MICRO_BATCH, SHORTER),
        explains=("ERR004", *_SPECIFIC),
    ),
    Trouble(
        code="ERR006",
        name="colocate-engine-memory-not-released",
        family=Family.MEMORY,
        texts=(
            *_SAVER_OFF,
            "enable_sleep_mode=false",
            "enable_sleep_mode: false",
            "free_cache_engine: false",
            "free_cache_engine=false",
            "vllm_enable_sleep=false",
            "memory saver is not enabled",
        ),
        when=_trainer_is_out_of_memory,
        notes=True,
        what="The trainer ran out of memory while an engine on the same card kept its own: its "
        "memory saver or sleep mode is off.",
        why="A colocated engine holds weights and KV cache for good unless it is told to give them "
        "back, and it can only do so when it was started with that ability.",
        causes=(
            Cause("colocate-engine-memory-not-released", "The engine was started without it."),
            Cause("cuda-oom-training", "The training step found too little left."),
        ),
        fixes=(
            ENGINE_SLEEPS,
            advice(
                "start the engine with its memory saver",
                "SGLang only releases memory that its saver allocated.",
                sglang="--enable-memory-saver",
                verl="actor_rollout_ref.rollout.free_cache_engine=True",
                slime="--colocate",
                miles="--colocate",
            ),
            SMALLER_ENGINE,
        ),
        explains=("ERR002", "ERR003", "ERR004", "ERR005", *_SPECIFIC),
    ),
    Trouble(
        code="ERR007",
        name="colocate-engine-memory-not-released",
        family=Family.MEMORY,
        texts=(
            "before sleep*after sleep",
            "before release*after release",
            "before offload*after offload",
            "sleep mode freed",
        ),
        when=counts.sleep_freed_nothing,
        notes=True,
        what="The engine was put to sleep, and its memory did not come back.",
        why="The call succeeds either way. Without its memory saver (SGLang) or sleep mode (vLLM), "
        "or with live references to its tensors, nothing is freed, and the trainer has to live "
        "beside a full engine.",
        fixes=(
            ENGINE_SLEEPS,
            advice(
                "start the engine with its memory saver",
                "Only memory that the saver allocated can be released; after that the engine may "
                "take a larger share.",
                sglang="--enable-memory-saver",
            ),
        ),
        explains=("ERR001", "ERR013", "ERR014", *AFTERMATH),
    ),
    Trouble(
        code="ERR008",
        name="vllm-sleep-leak",
        family=Family.MEMORY,
        texts=("sleep mode freed", "before sleep*after sleep"),
        when=counts.sleep_leaks,
        notes=True,
        what="What stays in use after the engine went to sleep grows with every step.",
        why="Something keeps references to memory from before: captured graphs, a second copy of "
        "the weights from the last push, cached blocks. In the end the trainer runs out.",
        fixes=(
            safe(
                "trainer.empty_cache_interval",
                "1",
                "Gives cached blocks back before the engine measures and maps its memory.",
            ),
            advice(
                "free the pushed tensors and collect garbage before sleeping",
                "A list or closure that holds the last push keeps a copy of the weights alive.",
            ),
            advice("upgrade the engine", "Several releases leaked graphs or buffers at sleep."),
        ),
        explains=("ERR004", "ERR009", *_SPECIFIC),
    ),
    Trouble(
        code="ERR009",
        name="colocate-wake-oom",
        family=Family.MEMORY,
        texts=(
            "out of memory at*cumem_allocator",
            "cumem_allocator.cpp && out of memory",
            "torch_memory_saver && out of memory",
            "cuMemCreate && out of memory",
            "resume_memory_occupation && out of memory",
            "wake_up && out of memory",
        ),
        what="The engine could not map its memory again when it was woken.",
        why="The trainer still holds what it used: blocks cached by its allocator count as used, "
        "and the engine's share was measured when they were not there.",
        fixes=(
            safe(
                "trainer.empty_cache_interval",
                "1",
                "Cached blocks go back before the engine wakes.",
            ),
            SMALLER_ENGINE,
            advice(
                "offload the trainer's weights and optimizer while the engine works",
                "Two copies of a large model seldom fit on one card.",
                verl="actor_rollout_ref.actor.fsdp_config.param_offload=true, "
                "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
                slime="--offload-train",
                miles="--offload-train",
                openrlhf="--ds.enable_sleep",
            ),
        ),
        explains=_SPECIFIC,
    ),
    Trouble(
        code="ERR010",
        name="colocate-wake-oom",
        family=Family.MEMORY,
        texts=(*OOM, "RuntimeError: CUDA Error: out of memory"),
        when=lambda view: oom_at("wake")(view),
        what="The GPU ran out of memory while the engine was woken.",
        why="The engine maps back its whole share at once; what the trainer has cached or not "
        "offloaded is in its way.",
        fixes=(
            safe(
                "trainer.empty_cache_interval",
                "1",
                "Cached blocks go back before the engine wakes.",
            ),
            SMALLER_ENGINE,
        ),
        explains=("ERR009", *_SPECIFIC),
    ),
    Trouble(
        code="ERR011",
        name="kv-pool-exhausted",
        family=Family.MEMORY,
        texts=(
            "Decode out of memory. Try to lower your batch size",
            "Prefill out of memory. Try to lower your batch size",
            "out of memory. Try to lower your batch size",
            "alloc_token_slots && out of memory",
            "alloc_extend && out of memory",
            "Failed to allocate KV cache slots",
            "token_to_kv_pool_allocator memory leak detected",
            "No free blocks are available",
        ),
        what="The engine's KV pool was full and a running request could not get room for its next "
        "tokens.",
        why="More tokens are in flight than the pool holds. Taking requests back (retraction, "
        "preemption) frees room but failed here, or came too late.",
        fixes=(
            safe(
                "engine.max_concurrency",
                "lower",
                "Fewer requests at once need fewer slots; answers stay the same.",
                sglang="--max-running-requests",
                vllm="--max-num-seqs",
            ),
            LARGER_ENGINE,
            advice(
                "switch overlapped scheduling off, or upgrade",
                "Some SGLang releases hand out slots twice when they retract under overlap.",
                sglang="--disable-overlap-schedule",
            ),
            SHORTER,
        ),
        explains=("ERR001", "ERR026", "ERR027", *AFTERMATH),
    ),
    Trouble(
        code="ERR012",
        name="memory-fragmentation",
        family=Family.MEMORY,
        texts=("reserved by PyTorch but unallocated",),
        when=is_fragmented,
        what="The GPU ran out of memory although more than was asked for lay reserved and unused: "
        "it is in pieces.",
        why="Sequences of ever other lengths leave blocks of ever other sizes in the allocator's "
        "cache, none of them large enough.",
        causes=(
            Cause("memory-fragmentation", "Reserved but unused memory exceeds the request."),
            Cause("cuda-oom-training", "The card is nearly full all the same."),
        ),
        fixes=(
            advice(
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                "Segments that can grow do not fragment. Not with a vLLM engine that sleeps in the "
                "same process: its memory pool refuses it.",
            ),
            safe("trainer.empty_cache_interval", "1", "Gives the pieces back between steps."),
            FEWER_TOKENS,
        ),
        explains=("ERR001", *AFTERMATH),
    ),
    Trouble(
        code="ERR013",
        name="host-ram-oom",
        family=Family.MEMORY,
        texts=(
            "Out of memory: Killed process",
            "Memory cgroup out of memory",
            "oom-kill:constraint",
            "invoked oom-killer",
            "oom_reaper: reaped process",
            "OOMKilled",
            "oom_kill event",
            "oom-kill event",
            "killed by the cgroup out-of-memory handler",
            "Exceeded job memory limit",
            "Exceeded step memory limit",
        ),
        what="The system ran out of host memory and killed a process.",
        why="Optimizer offload (about 12 bytes a parameter), weights loaded once per process, "
        "data workers' copies, sleeping engines and replayed samples all live in RAM.",
        fixes=(
            advice(
                "offload less to the CPU",
                "Offloaded Adam state alone needs about 12 bytes a parameter over all ranks.",
                deepspeed="zero_optimization.offload_optimizer.device=none, "
                "zero_optimization.offload_param.device=none",
                openrlhf="--ds.adam_offload=false",
                verl="actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
            ),
            safe("data.num_processes", "lower", "Each data process holds its own copy."),
            safe(
                "model.meta_init",
                "true",
                "Only one process reads the weights; the others start empty.",
                chatlearn="models.policy_trainer.meta_init",
                trl="fsdp_config.cpu_ram_efficient_loading",
                transformers="fsdp_config.cpu_ram_efficient_loading",
            ),
            advice("more RAM, or fewer processes per node", "It has to fit in the end."),
        ),
        explains=("ERR014", "ERR016", *AFTERMATH),
    ),
    Trouble(
        code="ERR014",
        name="host-ram-oom",
        family=Family.MEMORY,
        confidence=Confidence.INFERRED,
        texts=(
            "return code = -9",
            "exitcode: -9",
            "exitcode : -9",
            "exitcode  : -9",
            "exit code -9",
            "exit code: -9",
            "exit code 137",
            "exit code: 137",
            "exited with code 137",
            "exited with exit code 137",
            "Signal 9 (SIGKILL) received by PID",
            "Signals.SIGKILL: 9",
            "terminated by signal SIGKILL",
            "was killed by signal 9",
            "was terminated by signal 9",
        ),
        unless=("DUE TO TIME LIMIT", "DUE TO PREEMPTION", "scancel"),
        what="A process was killed with signal 9, which nearly always means that the host ran out "
        "of memory.",
        why="The kernel or the container kills without a Python traceback. `dmesg` or the "
        "container's events say so for certain; a scheduler or a person may also have done it.",
        causes=(
            Cause("host-ram-oom", "Exit by signal 9 without a traceback."),
            Cause("worker-died-unknown", "Something else may have sent the signal."),
        ),
        fixes=(
            advice("dmesg -T | grep -i -E 'killed process|oom'", "Shows whom the kernel killed."),
            advice(
                "offload less to the CPU",
                "Parameters and Adam state on the host need up to 16 bytes a parameter.",
                deepspeed="zero_optimization.offload_optimizer.device=none, "
                "zero_optimization.offload_param.device=none",
                openrlhf="--ds.adam_offload=false",
            ),
            safe(
                "data.num_processes",
                "lower",
                "Each data process holds its own copy.",
                axolotl="dataset_num_proc",
                trl="dataset_num_proc",
            ),
            safe("model.meta_init", "true", "Weights are read once, not once per process."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR015",
        name="host-ram-oom",
        family=Family.MEMORY,
        texts=(
            "killed due to memory pressure (OOM)",
            "Task was killed due to the node running low on memory",
            "ray.exceptions.OutOfMemoryError",
            "exceeds the memory usage threshold of",
            "Memory on the node*was*which exceeds",
        ),
        what="Ray killed a worker because the node's memory was nearly full.",
        why="Ray's memory monitor acts at 95 % so that the kernel need not. Raising its threshold "
        "only delays the end: memory that grows from step to step is a leak or too much offload.",
        fixes=(
            advice(
                "fewer or smaller workers on the node",
                "Agent loops, reward workers and data workers each hold samples and images.",
                verl="actor_rollout_ref.rollout.agent.num_workers",
            ),
            safe("rewards.workers", "lower", "Each reward worker is a process of its own."),
            safe("data.prefetch_updates", "lower", "Fewer batches wait in memory."),
            safe(
                "model.meta_init",
                "true",
                "Loading a model on every rank at once is a common peak at the start.",
                chatlearn="models.policy_trainer.meta_init",
            ),
            advice(
                "RAY_memory_usage_threshold, RAY_memory_monitor_refresh_ms",
                "Only shifts the limit; use it to gain time, not as a cure.",
            ),
        ),
        explains=("ERR014", "ERR016", *AFTERMATH),
    ),
    Trouble(
        code="ERR016",
        name="host-ram-oom",
        family=Family.MEMORY,
        texts=(
            "is killed by signal: Killed",
            "One of the subprocesses has abruptly died during map operation",
            "A process in the process pool was terminated abruptly",
            "MemoryError: Unable to allocate",
            "ArrayMemoryError",
            *ALLOCATOR_TEXTS,
            "OSError: [Errno 12] Cannot allocate memory",
            "fork: Cannot allocate memory",
        ),
        what="An allocation of host memory failed, or a data worker was killed for it.",
        why="Every data process holds its own copy of what it works on; with many of them, or with "
        "whole files in memory, the host runs out.",
        fixes=(
            safe(
                "data.num_processes",
                "1, then more",
                "Fewer copies at a time.",
                axolotl="dataset_num_proc",
                trl="dataset_num_proc",
                llama_factory="preprocessing_num_workers",
                transformers="dataloader_num_workers",
            ),
            safe("data.prefetch_updates", "lower", "Fewer batches wait in memory."),
            advice("stream or memory-map the data", "Arrow files need no RAM of their own."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR017",
        name="shared-memory-too-small",
        family=Family.MEMORY,
        texts=(
            "is killed by signal: Bus error",
            "insufficient shared memory (shm)",
            "No space left on device: '/dev/shm",
            "/dev/shm && No space left on device",
            "Error while creating shared memory segment",
            "unable to mmap * bytes from file </torch_",
            "exitcode: -7",
            "exitcode : -7",
            "exitcode  : -7",
            "return code = -7",
            "Signal 7 (SIGBUS)",
            "Bus error (core dumped)",
            "Fatal Python error: Bus error",
        ),
        what="Shared memory (/dev/shm) is full: a process that wrote to it was stopped.",
        why="Data workers, NCCL and Ray pass tensors through /dev/shm; containers give it 64 MB "
        "unless told otherwise. Upgrading a library does not change that.",
        fixes=(
            advice("--shm-size=16g or --ipc=host", "Starts the container with enough of it."),
            advice(
                "an emptyDir volume with medium: Memory at /dev/shm", "The same for Kubernetes."
            ),
            safe("data.num_processes", "lower", "Fewer workers pass fewer tensors."),
            advice("df -h /dev/shm; rm leftovers of dead runs", "Segments may outlive a crash."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR018",
        name="pinned-memory-exhausted",
        family=Family.MEMORY,
        texts=(
            "Pin memory thread exited unexpectedly",
            "cudaHostAlloc && out of memory",
            "CachingHostAllocator && out of memory",
            "cudaHostRegister && out of memory",
            "pin_memory && out of memory",
        ),
        what="Page-locked host memory could not be had.",
        why="Pinned buffers cannot be swapped out, and the system limits them (ulimit -l, the "
        "container's memory). Offloaded optimizers, data workers and sleeping engines ask for it.",
        fixes=(
            safe(
                "trainer.pin_memory",
                "false",
                "Copies become a little slower.",
                transformers="dataloader_pin_memory",
                trl="dataloader_pin_memory",
                deepspeed="zero_optimization.offload_optimizer.pin_memory",
            ),
            advice("--ulimit memlock=-1 for the container", "Lifts the limit."),
        ),
        explains=_SPECIFIC,
    ),
    Trouble(
        code="ERR019",
        name="cuda-graph-capture-oom",
        family=Family.MEMORY,
        texts=(
            "Capture CUDA graph failed && out of memory",
            "Capture cuda graph failed: CUDA out of memory",
            "CUDA out of memory occurred when*captur",
        ),
        what="The engine ran out of memory while it captured CUDA graphs.",
        why="Graphs keep buffers of their own for every captured batch size, outside the share "
        "that was planned for weights and KV cache.",
        fixes=(
            SMALLER_ENGINE,
            safe("engine.enforce_eager", "true", "No graphs: slower decoding, less memory."),
            advice(
                "capture fewer batch sizes",
                "Each captured size has its own buffers.",
                sglang="--cuda-graph-max-bs",
                vllm="--max-num-seqs, --cudagraph-capture-sizes",
                slime="--sglang-cuda-graph-max-bs",
            ),
        ),
        explains=("ERR020", *_SPECIFIC),
    ),
    Trouble(
        code="ERR020",
        name="cuda-graph-capture-oom",
        family=Family.MEMORY,
        texts=OOM,
        when=oom_at("capture"),
        what="The GPU ran out of memory while CUDA graphs were captured.",
        why="Graphs keep buffers of their own for every captured batch size.",
        fixes=(
            SMALLER_ENGINE,
            safe("engine.enforce_eager", "true", "No graphs: slower decoding, less memory."),
        ),
        explains=_SPECIFIC,
    ),
    Trouble(
        code="ERR021",
        name="checkpoint-gather-oom",
        family=Family.MEMORY,
        texts=OOM,
        when=oom_at("save"),
        what="The GPU ran out of memory while the state was gathered for a checkpoint.",
        why="A full state dict brings all shards of all parameters onto one card.",
        fixes=(
            advice(
                "save sharded checkpoints, or gather to the CPU",
                "Each rank writes its own part; export to one file afterwards.",
                transformers="fsdp_config.state_dict_type=SHARDED_STATE_DICT",
                axolotl="fsdp_config.state_dict_type=SHARDED_STATE_DICT",
                trl="fsdp_config.state_dict_type=SHARDED_STATE_DICT",
                deepspeed="zero_optimization.stage3_gather_16bit_weights_on_model_save=false",
            ),
            safe("trainer.empty_cache_interval", "1", "Leaves room for the gathered tensors."),
        ),
        explains=_SPECIFIC,
    ),
    Trouble(
        code="ERR022",
        name="weights-do-not-fit",
        family=Family.MEMORY,
        texts=OOM,
        when=oom_at("load"),
        what="The GPU ran out of memory while weights were loaded.",
        why="The weights alone (2 bytes a parameter in bf16, 4 in fp32) exceed what is free: a "
        "model too large for one card, loaded in fp32, or a card that is already in use.",
        causes=(
            Cause("weights-do-not-fit", "The frames are those of loading."),
            Cause("gpu-already-occupied", "Something else may hold the card."),
        ),
        fixes=(
            SPLIT_ENGINE,
            SHARD,
            safe("model.meta_init", "true", "Loads straight into the shards."),
            advice("nvidia-smi", "Shows who else is on the card."),
        ),
        explains=_SPECIFIC,
    ),
    Trouble(
        code="ERR023",
        name="attention-matrix-oom",
        family=Family.MEMORY,
        texts=OOM,
        when=oom_at("attention"),
        what="The GPU ran out of memory on an attention matrix: it was built whole.",
        why="Plain attention needs memory with the square of the sequence length; flash or "
        "memory-efficient kernels never build the matrix.",
        fixes=(
            safe(
                "model.attention",
                "a fused kernel",
                "Needs memory with the length, not its square.",
                transformers="attn_implementation=flash_attention_2",
                trl="attn_implementation=flash_attention_2",
                axolotl="attn_implementation=flash_attention_2",
                openrlhf="--ds.attn_implementation=flash_attention_2",
                llama_factory="flash_attn=fa2",
            ),
            FEWER_TOKENS,
            SHORTER,
        ),
        explains=_SPECIFIC,
    ),
    Trouble(
        code="ERR024",
        name="kv-cache-no-room",
        family=Family.MEMORY,
        texts=(
            "No available memory for the cache blocks",
            "Available KV cache memory: -",
            "# GPU blocks: 0,",
            "GPU blocks: 0, # CPU",
            "Not enough memory. Please try to increase --mem-fraction-static",
            "Failed to allocate memory for KV cache",
            "not enough memory for the kv cache",
        ),
        what="Nothing is left of the engine's memory share for a KV cache.",
        why="The share holds weights, the activations of the largest batch and graphs first; the "
        "cache gets what remains, and that is nothing. Lowering the share makes it worse.",
        causes=(
            Cause("kv-cache-no-room", "The engine computed zero or negative room."),
            Cause("gpu-already-occupied", "Others on the card shrink what the share can give."),
        ),
        fixes=(
            LARGER_ENGINE,
            SPLIT_ENGINE,
            safe(
                "engine.max_batched_tokens",
                "lower",
                "A smaller largest batch leaves more for the cache.",
            ),
            safe("engine.max_concurrency", "lower", "Fewer graphs and smaller buffers."),
        ),
        explains=("ERR001", "ERR025", *AFTERMATH),
    ),
    Trouble(
        code="ERR025",
        name="kv-cache-no-room",
        family=Family.MEMORY,
        texts=(
            "larger than the maximum number of tokens that can be stored in KV cache",
            "larger than the available KV cache memory",
            "KV cache is needed, which is larger than",
            "the estimated maximum model length is",
        ),
        what="The KV cache is too small for even one sequence of the configured maximal length.",
        why="Room for the cache is what is left of the engine's share; the context length asks for "
        "more than that.",
        fixes=(
            advice(
                "a shorter maximal model length: prompt plus completion, not the model's own",
                "A 128k default context asks for many gigabytes that short answers never use.",
                vllm="--max-model-len",
                sglang="--context-length",
                trl="vllm_max_model_length",
                verl="actor_rollout_ref.rollout.max_model_len",
                lightrft="--max_len",
            ),
            LARGER_ENGINE,
            SPLIT_ENGINE,
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR026",
        name="kv-pool-exhausted",
        family=Family.MEMORY,
        level=Level.WARN,
        texts=(
            "cumulative_preemption",
            "KV cache pool is full. Retract requests",
            "Retract requests. #retracted_reqs",
        ),
        when=counts.is_preempted_often,
        what="The engine takes requests back again and again because its KV pool is full; each "
        "one is computed anew.",
        why="A few at a peak are normal. So many cost throughput: more requests run than the pool "
        "can hold to the end.",
        fixes=(
            safe(
                "engine.max_concurrency",
                "lower",
                "Requests that finish beat requests that start over.",
                sglang="--max-running-requests",
                vllm="--max-num-seqs",
            ),
            LARGER_ENGINE,
            SPLIT_ENGINE,
        ),
    ),
    Trouble(
        code="ERR027",
        name="kv-cache-no-room",
        family=Family.MEMORY,
        texts=OOM,
        when=oom_at("kv"),
        what="The GPU ran out of memory when the engine allocated its KV cache.",
        why="The engine planned its cache for a share of the card that others use too: a trainer's "
        "weights, another engine, a leftover process.",
        causes=(
            Cause("kv-cache-no-room", "The frames are those of the cache's allocation."),
            Cause("gpu-already-occupied", "The planned share was not free."),
        ),
        fixes=(SMALLER_ENGINE, advice("nvidia-smi", "Shows who else is on the card.")),
        explains=_SPECIFIC,
    ),
    Trouble(
        code="ERR028",
        name="engine-oom-at-run-time",
        family=Family.MEMORY,
        texts=(
            "CUDA out of memory occurred when warming up sampler",
            "Please try lowering `max_num_seqs` or `gpu_memory_utilization`",
        ),
        what="The engine ran out of memory in its trial run with the largest batch.",
        why="The trial holds the logits of as many sequences as may run at once; with a large "
        "vocabulary and many sequences that is gigabytes.",
        fixes=(
            safe("engine.max_concurrency", "lower", "Fewer rows of logits at once."),
            SMALLER_ENGINE,
        ),
        explains=("ERR029", *_SPECIFIC),
    ),
    Trouble(
        code="ERR029",
        name="engine-oom-at-run-time",
        family=Family.MEMORY,
        texts=OOM,
        when=lambda view: oom_at("engine")(view) or oom_at("profile")(view),
        what="The GPU ran out of memory inside the inference engine.",
        why="A long prefill, many sequences at once or prompt log-probabilities need activations "
        "beyond what the engine measured at its start.",
        causes=(
            Cause("engine-oom-at-run-time", "The frames are the engine's own."),
            Cause("kv-pool-exhausted", "Too many tokens are in flight."),
        ),
        fixes=(
            SMALLER_ENGINE,
            safe("engine.max_batched_tokens", "lower", "Smaller prefills need less at a time."),
            safe("engine.max_concurrency", "lower", "Fewer sequences at once."),
        ),
        explains=_SPECIFIC,
    ),
    Trouble(
        code="ERR030",
        name="gpu-already-occupied",
        family=Family.MEMORY,
        texts=(
            "on startup is less than desired GPU memory utilization",
            "Some GPUs may be occupied by other processes",
            "Error in memory profiling. Initial free memory",
            "Error in memory profiling. This happens when",
            "Decrease GPU memory utilization or reduce GPU memory used by other processes",
        ),
        what="The card was not free when the engine started: others hold part of it.",
        why="The engine's share is of the whole card. A leftover process, a second engine or the "
        "trainer itself already uses some of that share.",
        causes=(
            Cause("gpu-already-occupied", "Free memory was less than the engine's share."),
            Cause("kv-cache-no-room", "Too little is left for it."),
        ),
        fixes=(
            advice("nvidia-smi; end leftover processes by their ids", "Frees the card."),
            SMALLER_ENGINE,
            advice(
                "start engines one after the other", "Two that measure at once mislead each other."
            ),
        ),
        explains=("ERR024", *_SPECIFIC),
    ),
    Trouble(
        code="ERR031",
        name="gpu-already-occupied",
        family=Family.MEMORY,
        texts=("Process * has * memory in use",),
        when=is_shared,
        what="The GPU ran out of memory while another process held a third of it or more.",
        why="Two processes on one card share its memory, not each other's cache. In colocated RL "
        "the other one is the engine, which should sleep; elsewhere it is a leftover.",
        causes=(
            Cause("gpu-already-occupied", "The error names the other process and its memory."),
            Cause("colocate-engine-memory-not-released", "If that process is the engine."),
        ),
        fixes=(
            advice("nvidia-smi; end what should not be there, by its id", "Frees the card."),
            ENGINE_SLEEPS,
            SMALLER_ENGINE,
        ),
        explains=("ERR003", "ERR004", *_SPECIFIC),
    ),
    Trouble(
        code="ERR032",
        name="sync-gather-oom",
        family=Family.MEMORY,
        texts=OOM,
        when=oom_at("sync"),
        what="The GPU ran out of memory while weights were gathered for the engine.",
        why="Whole parameters, or a bucket of them, are put together on each card before they are "
        "sent; with the engine awake beside the trainer there is no room.",
        fixes=(
            safe(
                "sync.transport.bucket_bytes",
                "smaller",
                "Fewer parameters at a time are whole.",
                verl="actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
                slime="--update-weight-buffer-size",
                miles="--update-weight-buffer-size",
            ),
            SMALLER_ENGINE,
            safe("trainer.empty_cache_interval", "1", "Leaves room for the gathered tensors."),
        ),
        explains=_SPECIFIC,
    ),
    Trouble(
        code="ERR033",
        name="ray-object-store-full",
        family=Family.MEMORY,
        texts=(
            "ObjectStoreFullError",
            "object store is full",
            "Failed to put object * in object store because it is full",
        ),
        what="Ray's object store is full.",
        why="Rollouts or weights that travel between actors stay in shared memory as long as a "
        "reference to them lives. Large batches, or references kept in a list, fill it.",
        causes=(
            Cause("ray-object-store-full", "Ray says so."),
            Cause("shared-memory-too-small", "The store lives in /dev/shm."),
        ),
        fixes=(
            advice("ray start --object-store-memory=<bytes>", "Makes the store larger."),
            advice("--shm-size=32g for the container", "The store lives in /dev/shm."),
            advice("drop references to old rollouts", "Only then may Ray free them."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR034",
        name="swap-space-too-large",
        family=Family.MEMORY,
        texts=("Too large swap space", "Possibly too large swap space"),
        level=Level.WARN,
        what="The engine's CPU swap space takes most of the host's memory.",
        why="vLLM reserves it per GPU; with several GPUs a node it adds up, and the kernel may "
        "kill the run.",
        causes=(
            Cause("swap-space-too-large", "vLLM warns of it."),
            Cause("host-ram-oom", "That is what follows."),
        ),
        fixes=(
            advice(
                "no swap space for the engine",
                "RL never needs it, and newer versions of vLLM do not have it any more.",
            ),
        ),
    ),
    Trouble(
        code="ERR035",
        name="cuda-oom-training",
        family=Family.MEMORY,
        confidence=Confidence.INFERRED,
        texts=(
            "CUBLAS_STATUS_ALLOC_FAILED",
            "CUBLAS_STATUS_NOT_INITIALIZED && cublasCreate",
            "CUDNN_STATUS_ALLOC_FAILED",
            "HIPBLAS_STATUS_ALLOC_FAILED",
            "NCCL WARN Cuda failure*out of memory",
            "Cuda failure 2 'out of memory'",
        ),
        what="A GPU library could not get memory for its own work space: the card is full.",
        why="cuBLAS, cuDNN and NCCL allocate beside PyTorch, whose cache has taken the rest.",
        causes=(
            Cause("cuda-oom-training", "The library's own allocation failed."),
            Cause("colocate-engine-memory-not-released", "If an engine shares the card."),
        ),
        fixes=(
            SMALLER_ENGINE,
            FEWER_TOKENS,
            safe("trainer.empty_cache_interval", "1", "Leaves room outside PyTorch's cache."),
        ),
        explains=("ERR106", "ERR107", *AFTERMATH),
    ),
)
