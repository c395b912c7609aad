"""Error texts of the family sync: weights on their way from the trainer to the engine."""

from __future__ import annotations

from homeostat.health.finding import Cause, Confidence, Family, Level
from homeostat.health.texts import counts
from homeostat.health.texts.parts import AFTERMATH, advice, safe
from homeostat.health.texts.trouble import Trouble
from homeostat.health.view import RunView

_UPDATING = (
    "in load_weights",
    "in update_weight",
    "in update_weights",
    "in update_named_param",
    "update_weights_from_tensor",
    "update_weights_from_distributed",
    "in sync_model_weights",
    "in _move_model_to_vllm",
    "in update_params",
    "in reload_weights",
)
_UPGRADE_PAIR = advice(
    "the engine version that the trainer library was tested with",
    "Weight names and layouts inside engines change from release to release.",
)
_VERIFY = safe(
    "sync.verify",
    "on",
    "Compares what arrived with what was sent, at every push.",
    slime="--check-weight-update-equal",
    miles="--check-weight-update-equal",
)


def _trains_lora(view: RunView) -> bool:
    rank = view.number("lora.rank") or 0.0
    raw = next((view.raw_settings[k] for k in view.raw_settings if k.endswith("lora_rank")), 0)
    return rank > 0 or str(raw) not in ("0", "", "None") or view.log.has("lora_rank", "lora rank")


TROUBLES: tuple[Trouble, ...] = (
    Trouble(
        code="ERR200",
        name="weight-conversion-wrong",
        family=Family.SYNC,
        texts=(
            "KeyError: 'model.layers",
            "KeyError: 'layers.",
            "KeyError: 'model.",
            "KeyError: 'lm_head",
            "KeyError: 'visual.",
            "There is no module or parameter named",
        ),
        context=_UPDATING,
        within=25,
        what="The engine got a weight under a name that it does not know.",
        why="Trainer and engine name parameters differently: a wrapper's prefix, fused or split "
        "projections, or another layout of the model class in this version.",
        fixes=(
            _UPGRADE_PAIR,
            advice(
                "strip wrapper prefixes before the push",
                "_fsdp_wrapped_module., module., _orig_mod., base_model.model. are not the "
                "engine's.",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR201",
        name="lora-not-synced",
        family=Family.SYNC,
        texts=("KeyError: 'base_model.model", "base_layer && KeyError", "lora_A && KeyError"),
        what="Adapter weights were pushed to the engine under PEFT's names, which it does not "
        "know.",
        why="Either the adapter is merged into the base before the push and its names are put "
        "back, or the engine gets it as an adapter. Here neither happened.",
        fixes=(
            advice(
                "merge before the push, or load it as an adapter",
                "Strip `base_model.model.` and `.base_layer`, and leave lora_* tensors out.",
                verl="actor_rollout_ref.model.lora.merge=true",
            ),
        ),
        explains=("ERR200", *AFTERMATH),
    ),
    Trouble(
        code="ERR202",
        name="lora-not-synced",
        family=Family.SYNC,
        texts=(
            "No tensors or no modules found for LoRA",
            "is not a valid LoRA",
            "while loading * expected target modules in",
            "Call to add_lora method failed",
            "Loading lora * failed",
            "No adapter found for",
            "unsupported LoRA weight",
            "is unsupported LoRA weight",
            "does not support LoRA yet",
            "Failed to load LoRA adapter",
        ),
        what="The engine could not load the adapter.",
        why="The adapter's folder is missing or empty on the engine's node, its target modules are "
        "not those the engine can adapt, or its names are not what the engine expects.",
        fixes=(
            advice(
                "target modules that the engine supports",
                "Attention and MLP projections; not embeddings or the router in most engines.",
            ),
            safe("lora.targets", "attention and MLP projections", "Engines can apply those."),
            advice(
                "a folder that all nodes share", "The engine reads what the trainer saved there."
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR203",
        name="lora-rank-above-engine-limit",
        family=Family.SYNC,
        texts=("is greater than max_lora_rank", "LoRA rank * is greater than", "max_lora_rank (*)"),
        what="The adapter's rank exceeds what the engine was started for.",
        why="vLLM reserves adapter slots of a fixed maximal rank, 16 by default.",
        causes=(
            Cause("lora-rank-above-engine-limit", "The engine says so."),
            Cause("lora-not-synced", "The adapter was refused."),
        ),
        fixes=(
            advice(
                "start the engine with max_lora_rank at least as large",
                "8, 16, 32, 64, 128, 256, 320 or 512 are allowed.",
                vllm="--max-lora-rank",
                ms_swift="--vllm_max_lora_rank",
            ),
            safe("engine.options", "max_lora_rank: <rank>", "Passed on to vLLM."),
        ),
        explains=("ERR202", *AFTERMATH),
    ),
    Trouble(
        code="ERR204",
        name="weight-conversion-wrong",
        family=Family.SYNC,
        texts=(
            "Attempted to load weight (",
            "assert param.size() == loaded_weight.size()",
            "assert param_data.shape == loaded_weight.shape",
            "AssertionError: * loaded_weight.shape",
            "Unknown parameter name: module.module",
            "Unknown parameter name:",
            "start (*) + length (*) exceeds dimension size",
        ),
        context=(*_UPDATING, "weight_loader", "convert_to_hf", "convert_"),
        within=30,
        what="A weight arrived with a shape or name that does not fit the engine's parameter.",
        why="The conversion between the trainer's and the engine's layout does not know this "
        "model: padded vocabularies, fused QKV, tensor parallel slices, or a model too new for it.",
        fixes=(
            advice(
                "a conversion that knows this model",
                "Match mbridge or megatron-bridge, the trainer and the engine to the model.",
                miles="--megatron-to-hf-mode=bridge",
            ),
            _UPGRADE_PAIR,
            _VERIFY,
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR205",
        name="cuda-ipc-failed",
        family=Family.SYNC,
        texts=(
            "cudaIpcOpenMemHandle",
            "cudaIpcGetMemHandle",
            "pidfd_getfd: Operation not permitted",
            "pidfd_open",
            "rebuild_cuda_tensor && Error",
            "mapping of buffer object failed",
            "cudaErrorMapBufferObjectFailed",
            "invalid resource handle && ipc",
            "CUDA IPC && failed",
        ),
        what="The engine could not open a weight tensor that the trainer shared by CUDA IPC.",
        why="Both must see the same physical card and live in one PID and IPC namespace; memory "
        "from expandable segments needs the right to open the other process's descriptors.",
        fixes=(
            advice("unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF", "The usual culprit."),
            advice("--ipc=host --pid=host --cap-add=SYS_PTRACE for the containers", "Same space."),
            advice("nvidia-smi topo -m", "Do the cards see each other at all?"),
            safe(
                "sync.transport.type",
                "collective or disk",
                "Ways that need no shared memory.",
                openrlhf="--vllm.sync_with_ray",
            ),
        ),
        explains=("ERR206", *AFTERMATH),
    ),
    Trouble(
        code="ERR206",
        name="cuda-ipc-failed",
        family=Family.SYNC,
        confidence=Confidence.INFERRED,
        texts=("CUDA error: invalid resource handle", "CUDA error: invalid device context"),
        context=("rebuild_cuda_tensor", "reductions.py", "cuda_ipc", "update_weight"),
        within=20,
        what="A shared CUDA handle was not valid in the process that opened it.",
        why="The sender freed or moved the tensor before it was opened, or the two processes "
        "number their cards differently (CUDA_VISIBLE_DEVICES).",
        fixes=(
            advice(
                "keep the sender's tensors until the receiver is done", "Handles are not copies."
            ),
            advice("the same card order in both processes", "Send the card's UUID with it."),
            safe("sync.transport.type", "collective or disk", "Ways that need no handles."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR207",
        name="expandable-segments-with-sleep",
        family=Family.SYNC,
        texts=(
            "Expandable segments are not compatible with memory pool",
            "expandable_segments && torch_memory_saver",
            "memory_saver && expandable_segments",
            "expandable segments && not supported",
        ),
        what="expandable_segments is on, and the engine's sleep mode cannot work with it.",
        why="Sleep mode takes memory from a pool of its own, which must own its segments.",
        fixes=(
            advice(
                "remove expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF",
                "For processes with a sleeping engine; others may keep it.",
            ),
        ),
        explains=("ERR205", *AFTERMATH),
    ),
    Trouble(
        code="ERR208",
        name="engine-slept-twice",
        family=Family.SYNC,
        level=Level.WARN,
        texts=(
            "Engine already sleeping",
            "Executor is already sleeping",
            "engine is already asleep",
            "already released memory occupation",
        ),
        what="The engine was sent to sleep while it slept.",
        why="Two places manage sleep and wake (a trainer's own calls and a helper's automatic "
        "ones), or a step failed between sleep and wake. The next generation may then hang or "
        "use freed memory.",
        causes=(
            Cause("engine-slept-twice", "The engine says so."),
            Cause("sleep-wake-weights-lost", "What follows if the order is lost."),
        ),
        fixes=(
            advice(
                "one owner of sleep and wake",
                "Leave it to the helper, or switch the helper's own off.",
            ),
            safe(
                "engine.sleep",
                "false, to prove it",
                "Needs more memory; the hang goes away if this was it.",
                lightrft="--disable_engine_sleep",
                verl="actor_rollout_ref.rollout.free_cache_engine=False",
            ),
        ),
    ),
    Trouble(
        code="ERR209",
        name="sleep-mode-not-enabled",
        family=Family.SYNC,
        texts=(
            "Sleep mode is not enabled",
            "enable_sleep_mode && must be",
            "Executor is not sleeping",
            "sleep mode is only supported",
        ),
        what="The engine was asked to sleep or wake, and was not started for it.",
        why="Sleep mode must be switched on when the engine is built: its memory then comes from a "
        "pool that can be released.",
        causes=(
            Cause("sleep-mode-not-enabled", "The engine refuses the call."),
            Cause("colocate-engine-memory-not-released", "Its memory stays taken."),
        ),
        fixes=(
            safe(
                "engine.sleep",
                "true, from the start",
                "The engine is then built with it.",
                vllm="--enable-sleep-mode",
                sglang="--enable-memory-saver",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR210",
        name="sleep-wake-weights-lost",
        family=Family.SYNC,
        confidence=Confidence.INFERRED,
        texts=("sleep level: 2", "sleep level 2", "sleep(level=2)", "VLLM_SLEEP_LEVEL=2"),
        context=("layered_summon: false", "layered_summon=false", "layered_summon': false"),
        within=0,
        when=_trains_lora,
        notes=True,
        what="The engine throws its weights away when it sleeps (level 2), and only adapters are "
        "sent back to it.",
        why="Level 2 discards the base weights; a push of LoRA tensors alone does not restore "
        "them. What then samples is a broken policy: low reward, large log-prob differences.",
        causes=(
            Cause("sleep-wake-weights-lost", "Sleep level 2 and no push of the base weights."),
            Cause("lora-not-synced", "The adapter lands on weights that are gone."),
        ),
        fixes=(
            advice(
                "sleep level 1, or a push that restores the base",
                "Level 1 keeps the weights in host memory.",
                verl="actor_rollout_ref.rollout.layered_summon=true",
                ms_swift="--sleep_level=1",
            ),
        ),
        explains=("ERR202",),
    ),
    Trouble(
        code="ERR211",
        name="hang-after-weight-update",
        family=Family.SYNC,
        confidence=Confidence.INFERRED,
        texts=(*counts.WAITING, *counts.SILENT, "| 0/"),
        when=counts.is_stuck_after_update,
        notes=True,
        what="After the newest weight update nothing is generated any more; the trainer waits.",
        why="The engine stopped answering when it loaded the new weights: its workers died, sit in "
        "a collective, or fail every request. The engine's own log says which.",
        fixes=(
            advice(
                "read the inference server's log from the update on",
                "A failed adapter or weight load is printed there, not in the trainer.",
            ),
            safe(
                "engine.stall_s",
                "a limit",
                "A silent engine is then restarted instead of waited for.",
            ),
            _UPGRADE_PAIR,
        ),
        explains=("ERR117", "ERR256", "ERR257"),
    ),
    Trouble(
        code="ERR212",
        name="weight-reload-corrupts-moe",
        family=Family.SYNC,
        texts=(
            "weight loaded into already processed",
            "already processed MoE parameter",
            "w13_weight && KeyError",
            "w2_weight && KeyError",
            "object has no attribute 'weight_loader'",
            "w13_weight && has no attribute",
            "shard_dim=* is not a valid data dimension",
        ),
        what="Weights were loaded into expert tensors that the engine had already re-arranged.",
        why="After the first load, engines fuse, transpose or quantise expert weights in place. A "
        "plain second load writes the old layout into the new one: refused at best, else the "
        "output is subtly wrong or garbage.",
        fixes=(
            advice(
                "the engine's own reload path",
                "It brings the tensors back to their loading layout first, layer by layer.",
            ),
            _VERIFY,
        ),
        explains=("ERR200", *AFTERMATH),
    ),
    Trouble(
        code="ERR219",
        name="weight-reload-corrupts-moe",
        family=Family.SYNC,
        confidence=Confidence.INFERRED,
        texts=("in _load_w13", "in _load_w2", "fused_moe/layer.py* in weight_loader"),
        context=("update_weights", "reload_weights", "in update_weight", "sync_weights"),
        within=30,
        what="The engine's expert layers refused weights that were sent during the run.",
        why="The first load went well; since then the engine has fused, transposed or quantised "
        "its expert tensors. The loader of the checkpoint's layout does not fit them any more.",
        fixes=(
            advice(
                "the engine's own reload path",
                "It brings the tensors back to their loading layout first.",
            ),
            _VERIFY,
        ),
        explains=("ERR200", "ERR201", *AFTERMATH),
    ),
    Trouble(
        code="ERR213",
        name="weights-half-updated",
        family=Family.SYNC,
        texts=(
            "Failed to update parameter online",
            "weights of the ModelRunner are partially updated",
            "Failed to update weights",
            "update_weights_from_tensor failed",
            "update_weights_from_distributed failed",
            "Weight update failed",
        ),
        what="An update of the engine's weights failed half-way.",
        why="Part of the engine's weights are new, part are old: what it samples from now on is "
        "neither policy.",
        causes=(
            Cause("weights-half-updated", "The engine says so."),
            Cause("weight-conversion-wrong", "The usual reason of the refused tensor."),
        ),
        fixes=(
            advice("restart the engine and push all weights", "Do not sample from it before."),
            _VERIFY,
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR214",
        name="weight-group-state",
        family=Family.SYNC,
        texts=(
            "Weight update group already initialized",
            "Call close_communicator first",
            "Communicator not initialized. Call `init_communicator` first",
            "Failed to initialize custom process group",
            "model update group * already",
        ),
        what="The group that carries weights to the engine is in the wrong state.",
        why="A former run left it open on a server that is still up, or the server was restarted "
        "and the trainer was not.",
        fixes=(
            advice("restart the rollout server with every new trainer", "It keeps the old group."),
            advice("close_communicator at the end of a run", "So that the next one can open it."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR215",
        name="sync-bucket-too-small",
        family=Family.SYNC,
        texts=(
            "too large to fit in the bucket",
            "Please increase rollout.update_weights_bucket",
            "exceeds the update weight buffer",
        ),
        what="A single parameter is larger than the bucket that weights travel in.",
        why="Embeddings and fused expert tensors reach gigabytes.",
        fixes=(
            safe(
                "sync.transport.bucket_bytes",
                "larger than the largest parameter",
                "One parameter must fit whole.",
                verl="actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
                slime="--update-weight-buffer-size",
                miles="--update-weight-buffer-size",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR216",
        name="engine-busy-at-update",
        family=Family.SYNC,
        level=Level.WARN,
        texts=(
            "Cache not flushed because there are pending requests",
            "Timeout while flushing cache",
            "flush_cache failed",
        ),
        when=counts.at_least(3, "not flushed because", "flushing cache", "flush_cache failed"),
        what="The engine still works on requests when its weights or cache are to be replaced.",
        why="Requests that were neither finished nor aborted keep it busy; the update waits, or "
        "cache of the old weights is used with the new ones.",
        causes=(
            Cause("engine-busy-at-update", "The engine refuses to flush."),
            Cause("hang-after-weight-update", "If nothing ends those requests."),
        ),
        fixes=(
            advice(
                "abort or drain before the update",
                "Every request must have an answer or an abort first.",
            ),
            safe("rollout.deadline_s", "a limit", "Ends requests that nobody waits for."),
        ),
    ),
    Trouble(
        code="ERR217",
        name="weights-not-loaded",
        family=Family.SYNC,
        texts=(
            "weights were not initialized from checkpoint",
            "weights are not initialized from checkpoint",
        ),
        what="The engine found some of its weights missing from what it was given.",
        why="The checkpoint or push lacks tensors, or has them under other names: an adapter-only "
        "folder, tied embeddings that were left out, a conversion that skips layers.",
        causes=(
            Cause("weights-not-loaded", "The engine lists them."),
            Cause("weight-conversion-wrong", "If they come from a conversion."),
        ),
        fixes=(
            advice("merge the adapter, or export the whole model", "Engines want all tensors."),
            _UPGRADE_PAIR,
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR218",
        name="sync-timeout",
        family=Family.SYNC,
        texts=(
            "update_weights && timed out",
            "update_weight && Timeout",
            "weight update timed out",
            "Timeout waiting for weight",
            "update_weights_from_distributed && timeout",
        ),
        what="Sending weights to the engine took longer than its limit.",
        why="A slow network or disk, an engine that is still busy, or a receiver that has died.",
        causes=(
            Cause("sync-timeout", "The limit passed."),
            Cause("hang-after-weight-update", "The engine may not answer at all."),
        ),
        fixes=(
            safe("sync.timeout_s", "longer, if it does proceed", "For very large models."),
            safe(
                "sync.transport.type",
                "ipc when colocated",
                "Nothing travels at all.",
                miles="--colocate",
                slime="--colocate",
            ),
        ),
        explains=("ERR100", *AFTERMATH),
    ),
)
