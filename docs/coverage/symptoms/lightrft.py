"""LightRFT's troubleshooting guide: its symptoms, and the rules that recognise them.

A row: section, symptom, codes of the rules that recognise it, what homeostat does about it.
"""
# ruff: noqa: E501 (a table)
# fmt: off

from __future__ import annotations

GUIDE = "LightRFT: troubleshooting"
ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("Installation", "The framework's own package cannot be imported", "ERR301", "`homeostat env` shows what is installed."),
    ("Installation", "No kernel for this device: PyTorch was built for another CUDA or GPU", "ERR310 ERR311 ERR314 ENV001", "`homeostat check` compares driver, build and device."),
    ("Installation", "vLLM's wheel cannot be built", "ERR335 ERR336 ERR337", "vLLM is pinned in a separate environment (`make setup-vllm`)."),
    ("Memory", "CUDA runs out of memory", "ERR001 ERR002 ERR003 ERR004 ERR006", "The rule distinguishes logits, activations, optimizer and engine. The step is repeated with half the tokens (`trainer.on_oom`). `homeostat estimate` lists the settings that save memory, the least disruptive first."),
    ("Memory", "The engine cannot get memory for its KV cache", "ERR024 ERR025 ERR027", "The rule reports whether the share is too small or too large."),
    ("Memory", "Device memory grows until it is full", "MEM001 ERR008", "The rules distinguish this from fragmentation. Use `observe.profiler.memory` and `trainer.empty_cache_interval`."),
    ("Training", "The reward does not rise", "RWD015 RWD002 RWD001 LRN006", "The run's metrics decide the order of causes."),
    ("Training", "The loss oscillates", "LRN003 LRN002 LRN015", "In RL the size of the loss means little, which LRN015 explains."),
    ("Training", "The model does not get better", "RWD015 LRN004 LRN019 SYN001", "After each update, a check verifies that all trained weights have changed."),
    ("Training", "The learning rate is too high: the loss spikes", "LRN005 LRN003 CFG005", "The rate is lowered, after going back to a checkpoint (`health.heal: all`)."),
    ("Training", "The learning rate is too low: nothing happens", "LRN006 NUM007 CFG005", "`homeostat check` compares the rate with the rates that such runs use."),
    ("Training", "Rewards of very different sizes", "RWD009 RWD010", "`rewards.normalise`, `rewards.clip`, `algorithm.whiten`."),
    ("Training", "The KL penalty holds the policy at its reference", "POL016", "`algorithm.kl.coefficient`, or `algorithm.kl.target`."),
    ("Training", "KL is too weak, and the policy runs away", "POL004 POL013", "The coefficient is doubled (`health.heal: all`), or adapts (`algorithm.kl.target`)."),
    ("Training", "Everything is extremely slow", "PRF002 PRF003 PRF005 PRF006 PRF008", "`time/*` measures the parts of every step."),
    ("Training", "Loading data delays training", "PRF003 ERR743", "Rows are tokenised once, memory-mapped, and packed ahead (`data.prefetch_updates`)."),
    ("Training", "No step is ever trained: the number of rollouts per episode comes out as 0", "ERR407 ERR430", "Sizes are counted in prompts and cannot become 0; `homeostat check` shows the number of steps."),
    ("Distributed", "A collective times out", "ERR100 ERR101 ERR103 ERR845 DST004", "Each call of a rank has a time limit (`cluster.timeout_s`). The error names the rank that lags and each rank's last collective; `hangs/` has their stacks; the ranks are restarted (`cluster.max_restarts`)."),
    ("Distributed", "A faulty InfiniBand or the wrong network interface", "ERR110 ERR111 ERR749", "NCCL's own variables are passed on to the ranks, and `cluster.env` sets them everywhere. On Ray the interface is that of the node's address."),
    ("Distributed", "Start-up hangs silently while the processes connect", "ERR154 ERR116 ERR118", "The start has a limit (`cluster.start_timeout_s`), and the error says in which call each rank waits."),
    ("Distributed", "The address or port of rank 0 cannot be reached", "ERR116 ERR115", "A free port is chosen automatically. On Ray every node proves that it reaches the controller before anything is started."),
    ("Distributed", "Some devices are busy and others idle", "DST003 DST001 DST005 PRF001", "Rows are distributed by their tokens, not by their number. At each step every rank measures the time of the same short task; a rank that stays slower is named."),
    ("Distributed", "The batch size is not divisible by the number of processes", "ERR404 CFG003", "Any number of rows is packed over any number of ranks."),
    ("Distributed", "Bubbles in the pipeline: too few rows for its stages", "PRF008 DST003", "homeostat has no pipeline parallelism, because its stages wait for each other; FSDP splits every layer over all ranks instead. Use `trainer.backend.type: fsdp` for models that do not fit, `expert_parallel_size` for experts, `context_parallel_size` and `sequence_parallel_size` for long rows. DST003 reports uneven ranks."),
    ("Distributed", "A run that works on one node fails on several", "ERR110 ERR116 ERR105 ERR351 DST006", "On Ray, the versions, paths, shared run folder, ports and connection of every node are checked before the start, and each problem is reported; under torchrun and srun the ranks must check in. If a machine is lost, the run waits for it or continues with fewer ranks (`cluster.on_lost_node`). This was tested with several simulated machines on one. In logs, the rules distinguish problems of network, ports and files."),
    ("Performance", "Sampling takes most of the time", "PRF002 PRF001 ERR748", "`time/generate` and `engine/tokens_per_s` in every record."),
    ("Performance", "Few tokens per second, because little of the KV cache is used or it is too small", "ERR748 GEN005 ERR026", "`engine.memory_share`, `engine.max_concurrency`."),
    ("Engine", "The policy is trained, but the engine continues with old weights", "SYN001 SYN004", "After each publication, a checksum and the log-probs of fixed rows are compared (`sync.verify`); if they differ, the weights are published again."),
    ("Engine", "Rewards stay the same because samples do", "RWD004 SYN001", "See above."),
    ("Engine", "Training hangs after generation", "SYN006 ERR211 ERR208", "Every wait has a time limit (`engine.stall_s`, `sync.timeout_s`); an engine that hangs is reported and restarted (`engine.max_restarts`)."),
    ("Engine", "The engine is sent to sleep twice", "ERR208 ERR209", "Sleep and wake have one owner (`engine.sleep`)."),
    ("Engine", "vLLM does not start", "ERR255 ERR024 ERR030 ERR320", "The rule looks for the first error above the summary."),
    ("Checkpoints", "Saving fails: the disk or quota is full", "ERR550 CKP002 CKP004", "`homeostat check` compares the free space with the size of the run's files; old checkpoints are removed first (`checkpoint.keep_last`, `checkpoint.max_bytes`)."),
    ("Checkpoints", "Saving fails for any other reason", "ERR550 ERR566 CKP002 CKP003", "A checkpoint is written next to the old one and renamed when it is complete."),
    ("Debugging tips", "A CUDA error is reported far from its origin", "ERR251 ERR467", "The rule advises to run with CUDA_LAUNCH_BLOCKING=1."),
    ("Debugging tips", "It is unknown what uses the memory", "ERR001 MEM001", "`trace/oom_step_N.json` when it runs out; `observe.profiler.memory` before."),
    ("Debugging tips", "A report lacks hardware, versions, command or traceback", "not evaluated", "`homeostat env --run DIR` prints a sheet with all of them."),
    ("Error reference", "The loss is NaN", "NUM002 NUM001 ERR650", "The update is never applied: the step is skipped and reported."),
)
