"""ChatLearn's FAQ: its symptoms, and the rules that recognise them.

A row: section, symptom, codes of the rules that recognise it, what homeostat does about it.
"""
# ruff: noqa: E501 (a table)
# fmt: off

from __future__ import annotations

GUIDE = "ChatLearn: FAQ"
ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("Conversion", "Weights must be converted between Megatron's format and HF's, and are wrong afterwards", "ERR200 ERR553 CKP001", "Nothing is converted: a run reads and writes HF's format (`checkpoint.export`), and `sync.verify` proves that the engine has the same weights."),
    ("Speed of FSDP", "Training is slow because rows are padded, or micro-batches are not full", "PRF007", "Rows are always packed; `trainer.max_tokens_per_device` fills the device."),
    ("Speed of FSDP", "Layers with experts are slow without a grouped kernel", "ERR704 ERR708 ERR709 ERR705", "`model.moe.grouped_kernel: auto` computes all experts of a layer in one kernel; one product per expert is the reference."),
    ("Errors", "A step of the engine's Ray graph times out while sampling over several devices", "ERR133", "Seen in logs: eager execution (`engine.enforce_eager`), or a longer limit. Our engines do not use Ray's graph; its limit follows `engine.stall_s`."),
    ("Errors", "Ray ends a worker for lack of host memory while weights are read", "ERR015 ERR016 ERR132", "With `model.meta_init` (the default) each rank loads only its share, so all ranks of a host together need one copy at most. On Ray, workers are separate processes next to their actors; if Ray ends an actor, the run names it and the reason."),
    ("Errors", "Device memory runs out in FSDP training, rows packed", "ERR001 ERR004 MEM005", "Lower `trainer.max_tokens_per_device`; in the local trainer, a step is repeated with half of it (`trainer.on_oom`). `homeostat estimate` shows what fits."),
    ("Errors", "Device memory runs out in FSDP training, rows not packed", "ERR001 ERR004", "`trainer.micro_batch_rows`."),
    ("Errors", "Device memory runs out although a micro-batch is one row: the sequence is too long", "ERR004 ERR023 ERR002", "Logits are computed in chunks (`trainer.logits_chunk_bytes`), and activations are recomputed (`trainer.gradient_checkpointing`). To split a row over several ranks, set `trainer.backend.sequence_parallel_size` or `context_parallel_size`."),
    ("Experts in RL", "A model with experts gets worse or unstable under RL", "MOE001 MOE004 MOE006 MOE007 RWD006", "Routers compute in fp32; `model.moe.router_replay: ids` trains with the engine's experts; every record and the report have the load of each layer."),
    ("Experts in RL", "The load-balancing loss pulls the policy away", "MOE004", "Off by default (`model.moe.balancing: none`); `homeostat check` says so if it is on in RL."),
    ("Experts in RL", "Updates of the router's bias break the policy", "MOE004", "Frozen by default (`model.moe.router_bias_update_rate: 0`); `moe/bias_max` in every record shows whether it moves."),
    ("Experts in RL", "Small changes of routing change the logits much when samples are old", "MOE008 MOE001 OFF005", "`moe/router_drift` measures it in every record; replay keeps tokens on the experts that they were sampled with."),
)
