"""Settings of models with experts (mixture of experts)."""

from __future__ import annotations

from typing import Literal

from homeostat.config.base import ByteSize, Settings, key

ReplayMode = Literal["off", "ids", "weights"]
GroupedKernel = Literal["auto", "grouped", "plain"]


class MoeConfig(Settings):
    """Settings for models with experts: replay of routes, load balancing and limits."""

    router_replay: ReplayMode = key(
        "off",
        help="Rollout routing replay (R3): train with the experts that the engine chose when it "
        "sampled. ids: use the engine's experts, weighted by the trainer's router. weights: also "
        "use the engine's weights, with the gradient of the trainer's own weights. off: every "
        "forward pass chooses its own experts.",
        resume="warn",
    )
    replay_reference: bool = key(
        False, help="The reference model replays the engine's routes, too.", resume="warn"
    )
    replay_buffer_bytes: ByteSize = key(
        2**30,
        ge=0,
        resume="free",
        help="Memory for recorded routes, in bytes. When a step's groups are in the journal, only "
        "so many bytes of their routes stay in memory; the others are read back from the journal "
        "for each micro-batch.",
    )
    balancing: Literal["none", "aux", "sequence_aux", "bias"] = key(
        "none",
        help="How the load of the experts is balanced. aux: by a loss over the token counts of "
        "the whole update, which costs one more forward pass unless routes are replayed. "
        "sequence_aux: by the same loss within each row. bias: by changing the expert bias after "
        "each update, for models that have one. none: not at all, as is usual in RL.",
    )
    aux_loss_coefficient: float = key(
        0.0,
        ge=0,
        resume="warn",
        help="Weight of the load-balancing loss of aux and sequence_aux. The loss is 1 for an "
        "even load and is not included in train/loss. For one layer, the loss in transformers is "
        "num_experts_per_tok times as large.",
    )
    z_loss_coefficient: float = key(
        0.0,
        ge=0,
        resume="warn",
        help="Weight of the loss on the routers' logits: the mean of logsumexp squared.",
    )
    router_bias_update_rate: float = key(
        0.0,
        ge=0,
        resume="warn",
        help="With balancing=bias, the amount by which an expert's bias changes after each "
        "update: it rises if the expert had fewer tokens than the mean, and falls if it had more. "
        "0 freezes the bias.",
    )
    capacity_factor: float | None = key(
        None,
        gt=0,
        resume="warn",
        help="Capacity of an expert, as a multiple of an even share of a micro-batch's tokens. "
        "Tokens beyond it, in the order of the micro-batch, skip this expert. Default: no limit. "
        "Only in SFT and in the training of reward models.",
    )
    grouped_kernel: GroupedKernel = key(
        "auto",
        help="How the experts of a layer are computed. grouped: all in one kernel. plain: one "
        "after another; this is the reference. auto: grouped on a GPU in bf16 or with invariant "
        "numerics, otherwise plain.",
        resume="warn",
    )

    @property
    def has_loss(self) -> bool:
        """Return whether the routers add something to the loss."""
        return self.balancing in ("aux", "sequence_aux") or self.z_loss_coefficient > 0

    @property
    def acts_on_routers(self) -> bool:
        """Return whether anything but the loss of the tokens moves or limits the routers."""
        return self.has_loss or self.balancing == "bias" or self.capacity_factor is not None
