"""Error texts of the family moe: experts, their dispatch and their routing."""

from __future__ import annotations

from homeostat.health.finding import Cause, Family, Level
from homeostat.health.texts.parts import AFTERMATH, FEWER_TOKENS, SMALLER_MICRO_BATCH, advice
from homeostat.health.texts.places import OOM, oom_at
from homeostat.health.texts.trouble import Trouble

TROUBLES: tuple[Trouble, ...] = (
    Trouble(
        code="ERR700",
        name="expert-parallel-oom",
        family=Family.MOE,
        texts=OOM,
        when=oom_at("moe"),
        what="The GPU ran out of memory in an expert layer.",
        why="Each card holds whole experts, and a card whose experts are popular receives far more "
        "tokens than the average: the largest share decides, not the mean.",
        causes=(
            Cause("expert-parallel-oom", "The frames are those of an expert layer."),
            Cause("cuda-oom-training", "The card was nearly full before."),
        ),
        fixes=(
            advice(
                "spread the experts over more cards",
                "Fewer experts and fewer tokens per card.",
                slime="--expert-model-parallel-size",
                miles="--expert-model-parallel-size",
                megatron="--expert-model-parallel-size",
                verl="actor_rollout_ref.actor.megatron.expert_model_parallel_size",
            ),
            FEWER_TOKENS,
            SMALLER_MICRO_BATCH,
            advice(
                "recompute the expert layers",
                "Their activations are most of what is kept.",
                slime="--recompute-granularity=full, --recompute-method=uniform",
                miles="--recompute-granularity=full, --recompute-method=uniform",
            ),
        ),
        explains=("ERR001", "ERR012", *AFTERMATH),
    ),
    Trouble(
        code="ERR701",
        name="expert-parallel-not-dividing",
        family=Family.MOE,
        texts=(
            "Number of experts should be divisible by expert",
            "num_experts && divisible by && expert",
            "number of experts && divisible by && parallel",
            "num_moe_experts && divisible",
        ),
        what="The number of experts cannot be split evenly over the expert parallel ranks.",
        why="Every rank holds the same number of whole experts.",
        fixes=(
            advice(
                "an expert parallel size that divides the number of experts",
                "For 128 experts: 2, 4, 8, 16, ...",
                slime="--expert-model-parallel-size",
                miles="--expert-model-parallel-size",
                megatron="--expert-model-parallel-size",
                verl="actor_rollout_ref.actor.megatron.expert_model_parallel_size",
            ),
        ),
        explains=("ERR128", *AFTERMATH),
    ),
    Trouble(
        code="ERR702",
        name="routing-replay-data-missing",
        family=Family.MOE,
        texts=(
            "rollout_routed_experts is not None",
            "rollout_routed_experts is None",
            "routed_experts && shape && AssertionError",
            "routed_experts && mismatch",
            "KeyError: 'rollout_routed_experts'",
            "KeyError: 'routed_experts'",
            "no routed_experts in",
        ),
        what="Routing replay is on, and the engine did not send the experts that it chose.",
        why="The engine must be started to return routed experts, in a version that can, and for "
        "every token of prompt and answer; tool turns and cached prefixes easily lack them.",
        causes=(
            Cause("routing-replay-data-missing", "The recorded routing is absent or cut."),
            Cause("moe-routing-mismatch", "Without replay, trainer and engine route apart."),
        ),
        fixes=(
            advice(
                "let the engine return routed experts",
                "Check that each sample has one row per token and layer.",
                sglang="--enable-return-routed-experts",
                slime="--use-rollout-routing-replay",
                miles="--use-rollout-routing-replay",
                verl="actor_rollout_ref.actor.router_replay.mode=R3",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR703",
        name="expert-dispatch-failed",
        family=Family.MOE,
        texts=(
            "DeepEP error",
            "DeepEP timeout",
            "deep_ep && timeout",
            "deep_ep && CPU recv timeout",
            "DeepEP error: CPU recv timeout",
            "nvshmem && failed",
            "nvshmem && abort",
            "NVSHMEM && error",
        ),
        what="The exchange of tokens between expert parallel ranks failed.",
        why="DeepEP and NVSHMEM need InfiniBand with GPUDirect across nodes and enough registered "
        "memory; a rank that is late or dead shows as a timeout.",
        causes=(
            Cause("expert-dispatch-failed", "The dispatch library says so."),
            Cause("infiniband-failure", "It drives the fabric itself."),
        ),
        fixes=(
            advice(
                "plain all-to-all dispatch, to prove it",
                "Slower, and without DeepEP.",
                megatron="--moe-token-dispatcher-type=alltoall",
                slime="--moe-token-dispatcher-type=alltoall",
                miles="--moe-token-dispatcher-type=alltoall",
                sglang="--moe-a2a-backend=none",
            ),
            advice("nvidia_peermem or dma-buf, NVSHMEM_IB_ENABLE_IBGDA", "What it needs to run."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR704",
        name="grouped-gemm-missing",
        family=Family.MOE,
        texts=(
            "Grouped GEMM is not available",
            "No module named 'grouped_gemm'",
            "grouped_gemm is not installed",
            "nv_grouped_gemm && not",
        ),
        what="The kernel library for grouped expert products is missing.",
        why="It is a compiled extra that neither torch nor Megatron brings along.",
        fixes=(
            advice(
                "pip install nv-grouped-gemm, or torch's own grouped_mm",
                "Built against this torch.",
                chatlearn="models.policy_trainer.groupgemm=False",
                megatron="--moe-grouped-gemm=false",
                axolotl="experts_implementation=grouped_mm",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR705",
        name="untuned-expert-kernel",
        family=Family.MOE,
        level=Level.INFO,
        texts=(
            "Using default MoE config. Performance might be sub-optimal",
            "Using default MoE kernel config. Performance might be sub-optimal",
        ),
        what="The engine has no tuned kernel settings for these expert shapes on this card.",
        why="The result is the same, a little slower.",
        fixes=(
            advice("the engine's tuning script, once per card and shape", "Only if it matters."),
        ),
    ),
    Trouble(
        code="ERR706",
        name="expert-load-imbalance",
        family=Family.MOE,
        level=Level.WARN,
        texts=(
            "tokens dropped because && capacity",
            "expert capacity exceeded",
            "dropped tokens exceed",
            "expert * received no tokens",
        ),
        what="Experts get more tokens than their capacity, and tokens are dropped.",
        why="The router prefers few experts. In RL a dropped token changes the policy's answer "
        "between engine and trainer, as engines drop none.",
        fixes=(
            advice(
                "no capacity limit in RL",
                "Drop nothing; balance by a small auxiliary loss in pre-training and SFT only.",
                megatron="--moe-expert-capacity-factor",
                slime="--moe-expert-capacity-factor",
                miles="--moe-expert-capacity-factor",
            ),
            advice(
                "freeze the router's bias update",
                "Its drift moves the policy between steps.",
                chatlearn="models.policy_trainer.megatron_model_cfg.moe_router_bias_update_rate=0",
                slime="--moe-router-bias-update-rate=0",
                miles="--moe-router-bias-update-rate=0",
            ),
        ),
    ),
)
