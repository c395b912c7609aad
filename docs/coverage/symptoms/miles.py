"""miles' troubleshooting guide: its symptoms, and what recognises them here.

A row: section, symptom, codes of the rules that see it, what is done about it here.
"""
# ruff: noqa: E501 (a table)
# fmt: off

from __future__ import annotations

GUIDE = "miles: troubleshooting"
SPEC = "pending: speculative decoding is a later stage"
AGENTS = "pending: training several agents is a later stage"
ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("FP8 training", "Training in FP8 breaks down: the loss explodes", "QNT007 QNT005 LRN002 LRN010", "A loss that breaks down at the switch is laid to it: the run goes back to before it and switches later, or returns to bf16 (`health.heal: all`). What is cut by its scale is counted every few steps (`fp8/<group>/saturated_share`). More steps in bf16 before the switch: `trainer.fp8.start_step`."),
    ("FP8 training", "Training in FP8 breaks down: NaN", "QNT004 NUM002 NUM001 ERR650", "An update that is not finite is never applied; the module it came from is named. A block of zeros has a scale above 0, and a number that is not finite makes its block NaN instead of hiding in it."),
    ("FP8 training", "Training in FP8 breaks down: the reward collapses", "QNT007 RWD006 POL013", "A reward that breaks down at the switch is laid to it. A run goes back to a checkpoint (`health.heal: all`). `trainer.fp8.start_step` and `skip_layers` keep more of it in bf16."),
    ("FP8 training", "Results in FP8 stay behind those in BF16", "QNT010 QNT011 QNT006 QNT002", "The held-out rows are evaluated twice, in FP8 and with the same weights in bf16: `eval/quantised_gap` is what FP8 costs. The gradient is compared with that of bf16 every few steps, and the engine with the trainer in nats. `trainer.fp8.recipe: blockwise` rounds least; `skip_layers`, `skip_first` and `skip_last` leave out what suffers most."),
    ("FP8 training", "Layers that FP8 cannot or should not hold, or a device without FP8", "QNT009 ERR606 ERR607 ERR608 ERR620", "`homeostat check` names layer and device before the start, `homeostat inspect --layers` shows the precision of every layer; sizes that do not divide are padded with zeros, and the layers that this concerns are counted."),
    ("Train-inference mismatch", "The model answers otherwise in the engine than in the trainer", "OFF001 OFF002 SYN004 POL010", "`sync.verify` after each publication; `observe.verify_logprobs` says which of the two is off; weights are published again."),
    ("Train-inference mismatch", "Other experts are chosen in training than in sampling", "MOE001 MOE006", "`moe/route_agreement` measures it; `model.moe.router_replay: ids` replays the engine's experts in training; `model.numerics: invariant` makes both choose alike."),
    ("Train-inference mismatch", "A bound of importance weights below 1, as the guide itself proposes", "CFG021 OFF006", "`homeostat check` says so before the start."),
    ("INT4 training", "Results in INT4 stay behind those in BF16 or FP8", "QNT010 QNT011 QNT002", "`eval/quantised_gap` is what INT4 costs on the held-out rows, against the same weights in bf16. Smaller groups (`trainer.int4.group_size`), sensitive layers left out (`skip_layers`), a later `start_step`."),
    ("INT4 training", "Memory runs out although INT4 was to save some", "QNT008 ERR001 ERR003 ERR004", "`homeostat estimate` says what holds which memory: in training, rounded copies are added and the master weights stay; the engine's weights and the export are what gets smaller. A variable that rounds no layer is told."),
    ("INT4 training", "The group size does not divide the layers' width", "CFG016 ERR614", "`homeostat check` names every layer that the group does not divide, and the sizes that divide all of them."),
    ("Speculative RL", "Most drafted tokens are rejected", "SPC001", f"Seen in logs of engines. {SPEC}"),
    ("Speculative RL", "The share of accepted tokens falls as the policy moves on", "SPC002", f"Seen in logs of engines. {SPEC}"),
    ("Speculative RL", "Drafting saves less time than it should", "SPC004 SPC001", f"Told by the tokens that one verification gives. {SPEC}"),
    ("Speculative RL", "A draft that is too large, or does not fit the model", "SPC004 ERR720 ERR721 ERR725", f"{SPEC}"),
    ("Weight synchronisation", "CUDA IPC fails", "ERR205 ERR206 ERR207", "`sync.transport.type` takes another way: shared_memory, disk, collective."),
    ("Weight synchronisation", "Weights are damaged on the way", "SYN004 SYN002 ERR213", "A checksum of the engine's weights after each publication (`sync.verify`); published again when it differs."),
    ("Weight synchronisation", "A tensor does not fit the bucket", "ERR215", "A larger tensor travels alone: `sync.transport.bucket_bytes` bounds memory and not tensors."),
    ("Weight synchronisation", "Publishing takes long in spite of zero-copy", "SYN005 ERR218", "`sync/seconds` in every record; in one process nothing is copied at all."),
    ("Experts", "Some experts are overloaded and others idle", "MOE002 MOE007 ERR706", "Loads per expert and layer in every record, and as a heat map in the report; `model.moe.balancing`."),
    ("Experts", "A capacity factor drops tokens", "MOE003", "There is no limit by default. `model.moe.capacity_factor` counts what it drops, and is refused in RL."),
    ("Experts", "Memory runs out with expert parallelism", "ERR700 ERR701 ERR711", "Seen in tracebacks of other frameworks. Here `trainer.backend.expert_parallel_size` gives a rank its share of the experts, which is sharded as all else is; `trainer.backend.offload_params` keeps it in host memory."),
    ("Several agents", "Agents' rewards swing against each other", "AGT001", f"Seen in logs. {AGENTS}"),
    ("Several agents", "One agent wins always", "AGT002", f"Seen in logs. {AGENTS}"),
    ("Debugging tips", "Too little is logged to tell what happened", "not evaluated", "A diagnosis lists the rules that lacked something, and what. Metrics, events and console.log are always kept; `observe.log_level: debug`."),
    ("Debugging tips", "Weights are not in the format that they were meant to have", "QNT003 QNT009", "The format of every tensor is compared after each update; `homeostat inspect --layers` shows that of every layer, of runs and of anyone's checkpoint."),
    ("Debugging tips", "A step takes long, and nobody knows what for", "PRF006 PRF008", "`time/*` in every record; `observe.profiler`."),
    ("Debugging tips", "Routing replay is on, and no experts were recorded", "MOE009 MOE005 ERR860 ERR702", "The step stops before anything is computed, and names the sample and what it lacks; `moe/replayed_share` in every record."),
    ("Debugging tips", "Device memory fills up", "MEM001 MEM003 MEM004", "`memory/*` in every record; smaller micro-batches before it runs out."),
)
