"""miles' troubleshooting guide: its symptoms, and the rules that recognise them.

A row: section, symptom, codes of the rules that recognise it, what homeostat does about it.
"""
# ruff: noqa: E501 (a table)
# fmt: off

from __future__ import annotations

GUIDE = "miles: troubleshooting"
SPEC = "pending: speculative decoding is a later stage"
AGENTS = "pending: training several agents is a later stage"
ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("FP8 training", "Training in FP8 breaks down: the loss explodes", "QNT007 QNT005 LRN002 LRN010", "If the loss breaks down at the switch to FP8, the run goes back to a step before it and switches later, or returns to bf16 (`health.heal: all`). `fp8/<group>/saturated_share` is the share of values that are cut by their scale. For more steps in bf16, raise `trainer.fp8.start_step`."),
    ("FP8 training", "Training in FP8 breaks down: NaN", "QNT004 NUM002 NUM001 ERR650", "An update that is not finite is never applied, and its module is named. A block of zeros has a scale above 0. A number that is not finite makes its whole block NaN, so it cannot stay hidden."),
    ("FP8 training", "Training in FP8 breaks down: the reward collapses", "QNT007 RWD006 POL013", "If the reward breaks down at the switch to FP8, the run goes back to a checkpoint (`health.heal: all`). `trainer.fp8.start_step` and `skip_layers` keep more of the run in bf16."),
    ("FP8 training", "Results in FP8 are worse than in BF16", "QNT010 QNT011 QNT006 QNT002", "The held-out rows are evaluated in FP8 and with the same weights in bf16: `eval/quantised_gap` is the difference. Every few steps the gradient is compared with that of bf16. Log-probs of engine and trainer are compared, too. `trainer.fp8.recipe: blockwise` rounds least; `skip_layers`, `skip_first` and `skip_last` exclude the most sensitive layers."),
    ("FP8 training", "Layers that cannot or should not be in FP8, or a device without FP8", "QNT009 ERR606 ERR607 ERR608 ERR620", "`homeostat check` names layer and device before the start, `homeostat inspect --layers` shows the precision of every layer; sizes that do not divide are padded with zeros, and the affected layers are counted."),
    ("Train-inference mismatch", "The model gives other answers in the engine than in the trainer", "OFF001 OFF002 SYN004 POL010", "`sync.verify` checks each publication; `observe.verify_logprobs` shows whether engine or trainer is wrong; the weights are published again."),
    ("Train-inference mismatch", "Other experts are chosen in training than in sampling", "MOE001 MOE006", "`moe/route_agreement` measures it; `model.moe.router_replay: ids` replays the engine's experts in training; with `model.numerics: invariant` both choose the same experts."),
    ("Train-inference mismatch", "An upper limit of importance weights below 1, which the guide itself proposes", "CFG021 OFF006", "`homeostat check` says so before the start."),
    ("INT4 training", "Results in INT4 are worse than in BF16 or FP8", "QNT010 QNT011 QNT002", "`eval/quantised_gap` compares INT4 with the same weights in bf16 on the held-out rows. Use smaller groups (`trainer.int4.group_size`), exclude sensitive layers (`skip_layers`), or start later (`start_step`)."),
    ("INT4 training", "Memory runs out although INT4 should save memory", "QNT008 ERR001 ERR003 ERR004", "`homeostat estimate` lists the memory of each part. In training, rounded copies are added and the master weights remain; only the engine's weights and the export get smaller. If the variable for INT4 rounds no layer, this is reported."),
    ("INT4 training", "The group size does not divide the layers' width", "CFG016 ERR614", "`homeostat check` names every layer that the group does not divide, and the sizes that divide all of them."),
    ("Speculative RL", "Most drafted tokens are rejected", "SPC001", f"Seen in logs of engines. {SPEC}"),
    ("Speculative RL", "The share of accepted tokens falls as the policy changes", "SPC002", f"Seen in logs of engines. {SPEC}"),
    ("Speculative RL", "Drafting saves less time than it should", "SPC004 SPC001", f"Recognised by the number of tokens that one verification yields. {SPEC}"),
    ("Speculative RL", "A draft that is too large, or does not fit the model", "SPC004 ERR720 ERR721 ERR725", f"{SPEC}"),
    ("Weight synchronisation", "CUDA IPC fails", "ERR205 ERR206 ERR207", "Use another `sync.transport.type`: shared_memory, disk, collective."),
    ("Weight synchronisation", "Weights are damaged while they are sent", "SYN004 SYN002 ERR213", "After each publication, the checksum of the engine's weights is verified (`sync.verify`); if it differs, the weights are published again."),
    ("Weight synchronisation", "A tensor does not fit the bucket", "ERR215", "A larger tensor is sent alone: `sync.transport.bucket_bytes` limits memory, not the size of tensors."),
    ("Weight synchronisation", "Publishing takes long in spite of zero-copy", "SYN005 ERR218", "See `sync/seconds` in every record. With engine and trainer in one process, nothing is copied."),
    ("Experts", "Some experts are overloaded and others idle", "MOE002 MOE007 ERR706", "Every record has the load of each expert and layer, and the report shows it as a heat map. See `model.moe.balancing`."),
    ("Experts", "A capacity factor drops tokens", "MOE003", "There is no limit by default. With `model.moe.capacity_factor`, dropped tokens are counted; in RL it is refused."),
    ("Experts", "Memory runs out with expert parallelism", "ERR700 ERR701 ERR711", "Seen in tracebacks of other frameworks. `trainer.backend.expert_parallel_size` gives each rank a share of the experts, which is sharded like all other weights; `trainer.backend.offload_params` keeps it in host memory."),
    ("Several agents", "Agents' rewards oscillate against each other", "AGT001", f"Seen in logs. {AGENTS}"),
    ("Several agents", "One agent always wins", "AGT002", f"Seen in logs. {AGENTS}"),
    ("Debugging tips", "Too little is logged to find out what happened", "not evaluated", "A diagnosis lists the rules that lacked data, and which data. Metrics, events and console.log are always kept; `observe.log_level: debug` logs more."),
    ("Debugging tips", "Weights are not in the intended format", "QNT003 QNT009", "The format of every tensor is compared after each update; `homeostat inspect --layers` shows the format of every layer, for runs and for any checkpoint."),
    ("Debugging tips", "A step takes long, and the reason is unknown", "PRF006 PRF008", "Every record has `time/*`; use `observe.profiler` for details."),
    ("Debugging tips", "Routing replay is on, and no experts were recorded", "MOE009 MOE005 ERR860 ERR702", "The step stops before anything is computed, and the error names the sample and its missing data. Every record has `moe/replayed_share`."),
    ("Debugging tips", "Device memory fills up", "MEM001 MEM003 MEM004", "Every record has `memory/*`; micro-batches get smaller before memory runs out."),
)
