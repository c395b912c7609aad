"""The models that a trainer holds, by their roles.

    RoleModel   a loaded model, and whether and how it is trained: what a trainer is built from
    RoleState   the same with its optimizer and the update that is pending

The policy and its reference are entries like any other: a frozen model is one without an
optimizer, and a policy without its adapter is a role that borrows the policy's module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from homeostat.config.trainer import TrainerConfig
from homeostat.models.build import LoadedModel, Model, ModelSheet
from homeostat.models.lora import adapters_off
from homeostat.precision.rewrite import Rewrite
from homeostat.train.forward import Forward
from homeostat.train.optimizers.optimizer import MasterOptimizer
from homeostat.train.probes import Unmeasured, UpdateProbe
from homeostat.train.update import Accumulated
from homeostat.types import Role


@dataclass(frozen=True, slots=True)
class RoleModel:
    """A model for a role.

    `config` says how it is trained (optimizer, clipping, schedule); None where it is frozen.
    `changes`: its weights change during the run although it is not trained (a reference that is
    refreshed), so a checkpoint must contain them. `without_adapter`: the module is another role's,
    and plays this one with its adapter switched off. `bias_rate`: by how much expert biases are
    moved after each update (train/expert_bias.py). `rewrites`: layers of its module in another
    precision (train/precision.py). `sends_adapter`: engines in other processes get its adapter
    alone.
    """

    loaded: LoadedModel
    config: TrainerConfig | None = None
    changes: bool = False
    without_adapter: bool = False
    bias_rate: float = 0.0
    rewrites: tuple[Rewrite, ...] = ()
    sends_adapter: bool = False


@dataclass(slots=True)
class Training:
    """The trained side of a role: its optimizer, its schedule (`config`) and the pending update.

    `params` are its trained parameters; the optimizer owns this rank's part of each. `biases` are
    expert biases that are moved by `bias_rate` after each update.
    """

    config: TrainerConfig
    params: dict[str, nn.Parameter]
    optimizer: MasterOptimizer
    probe: UpdateProbe
    biases: dict[str, nn.Parameter] = field(default_factory=dict)
    bias_rate: float = 0.0
    pending: list[Accumulated] = field(default_factory=list)
    # Measurements of quantised layers in the pending update, or why there are none.
    observed: Mapping[str, float] | Unmeasured = field(default_factory=dict)


@dataclass(slots=True)
class RoleState:
    """A model in its role. `training` is None where it is frozen."""

    role: Role
    model: Model
    sheet: ModelSheet
    forward: Forward
    training: Training | None = None
    changes: bool = False
    without_adapter: bool = False
    rewrites: tuple[Rewrite, ...] = ()
    sends_adapter: bool = False

    @contextmanager
    def acting(self) -> Iterator[Model]:
        """Yield the module that has the role, for the duration of the block."""
        if not self.without_adapter:
            yield self.model
            return
        with adapters_off(self.model):
            yield self.model

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """All parameters under their Hugging Face names."""
        return self.model.causal_lm.named_parameters()

    def unsaved_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Parameters that no checkpoint holds, because they stay as they were loaded."""
        if self.without_adapter or self.changes:
            return ()
        if self.training is None:
            return self.named_parameters()
        saved = self.training.params.keys() | self.training.biases.keys()
        return ((name, p) for name, p in self.named_parameters() if name not in saved)

    def weights_changed(self) -> None:
        """Mark copies that were derived from the weights as outdated."""
        for rewrite in self.rewrites:
            rewrite.weights_changed()

    @property
    def stems(self) -> tuple[str, str]:
        """File stems of its weights and its optimizer state in a checkpoint."""
        if self.role is Role.POLICY:
            return "model", "optimizer"
        return str(self.role), f"{self.role}_optimizer"
