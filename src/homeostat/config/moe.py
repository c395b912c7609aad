"""Settings of models with experts (mixture of experts)."""

from __future__ import annotations

from typing import Literal

from homeostat.config.base import ByteSize, Settings, key

ReplayMode = Literal["off", "ids", "weights"]
GroupedKernel = Literal["auto", "grouped", "plain"]


class MoeConfig(Settings):
    """Training of a model with experts: replayed routes, the load of experts, limits."""

    router_replay: ReplayMode = key(
        "off",
        help="Rollout routing replay (R3): train with the experts that the engine chose when it "
        "sampled. ids: the engine's experts, weighted by the trainer's router. weights: also the "
        "engine's weights; their gradient is that of the trainer's own. off: every pass chooses "
        "for itself.",
        resume="warn",
    )
    replay_reference: bool = key(
        False, help="The reference model replays the engine's routes, too.", resume="warn"
    )
    replay_buffer_bytes: ByteSize = key(
        2**30,
        ge=0,
        resume="free",
        help="Bytes of recorded routes that a step keeps in memory once its groups are in the "
        "journal. Routes of further groups are read back from there, micro-batch by micro-batch.",
    )
    balancing: Literal["none", "aux", "sequence_aux", "bias"] = key(
        "none",
        help="How the load of experts is kept even. aux: a loss over the whole update's counts, "
        "which costs one more forward pass unless routes are replayed. sequence_aux: the same loss "
        "within each row. bias: the expert bias of models that have one is moved after each "
        "update. none: not at all, as usual in RL.",
    )
    aux_loss_coefficient: float = key(
        0.0,
        ge=0,
        resume="warn",
        help="Weight of the load-balancing loss of aux and sequence_aux. The loss is 1 for an even "
        "load, and not part of train/loss; for one layer transformers' value is "
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
        help="With balancing=bias, by how much the bias of an expert is moved after each update: "
        "up if it had fewer tokens than the mean, down if it had more. At 0 the bias is frozen.",
    )
    capacity_factor: float | None = key(
        None,
        gt=0,
        resume="warn",
        help="An expert takes at most this many times an even share of a micro-batch's tokens; "
        "those that come later in the micro-batch go without it. Default: no limit. SFT only.",
    )
    grouped_kernel: GroupedKernel = key(
        "auto",
        help="How the experts of a layer are multiplied. grouped: all in one kernel. plain: one "
        "after the other, the reference. auto: grouped on a GPU in bf16 or in invariant numerics, "
        "plain elsewhere.",
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
