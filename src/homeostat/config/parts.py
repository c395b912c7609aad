"""The settings that each part of the library is given: a few sections of a recipe, not all of it.

A part that reads one or two sections takes these themselves. One that reads more takes one of the
bundles below, which names what the sections are for. `RunConfig` makes each bundle in one place
(`config.for_inputs`, ...). Their fields have the names that they have there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from homeostat.config.algorithm import AnyAlgorithm, SftConfig
from homeostat.config.cluster import AnyCluster
from homeostat.config.critic import CriticConfig
from homeostat.config.data import DataConfig
from homeostat.config.ebft import EbftConfig
from homeostat.config.fp8 import Fp8Config
from homeostat.config.health import HealthConfig
from homeostat.config.kind import RunKind
from homeostat.config.mesh import Mesh
from homeostat.config.model import HeadInit, LoraConfig, ModelConfig
from homeostat.config.observe import CheckpointConfig, EvalConfig
from homeostat.config.preference import AnyPreference, PreferenceAlgorithm, PreferenceConfig
from homeostat.config.reward_model import RewardModelConfig
from homeostat.config.rollout import AnyEngine, AnyReference, RolloutConfig
from homeostat.config.sync import SyncConfig
from homeostat.config.trainer import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSettings:
    """The settings that decide which rows or prompts a run uses, and how many in a step."""

    seed: int
    data: DataConfig
    eval: EvalConfig
    rollout: RolloutConfig
    trainer: TrainerConfig
    energy: EbftConfig | None
    is_strided: bool
    rows_per_example: int
    rows_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLearningSettings:
    """The settings of what is learnt from given rows, and of the model it is compared with."""

    algorithm: AnyAlgorithm
    preference: PreferenceConfig
    data: DataConfig
    trainer: TrainerConfig
    used_reference: AnyReference | None
    precomputes_reference: bool

    @property
    def sft(self) -> SftConfig:
        """Return the algorithm of a run that is known to be SFT."""
        assert isinstance(self.algorithm, SftConfig), self.algorithm.type
        return self.algorithm

    @property
    def rewarding(self) -> RewardModelConfig:
        """Return the algorithm of a run that is known to train a reward model."""
        assert isinstance(self.algorithm, RewardModelConfig), self.algorithm.type
        return self.algorithm

    @property
    def preferring(self) -> AnyPreference:
        """Return the algorithm of a run that is known to learn from preferences."""
        assert isinstance(self.algorithm, PreferenceAlgorithm), self.algorithm.type
        return self.algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningSettings:
    """The settings of what is learnt from sampled groups: advantages, loss and updates."""

    seed: int
    algorithm: AnyAlgorithm
    model: ModelConfig
    rollout: RolloutConfig
    trainer: TrainerConfig
    mesh: Mesh
    energy: EbftConfig | None
    is_strided: bool
    critic: CriticConfig | None
    critic_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationSettings:
    """The settings of how and how often new weights reach an engine."""

    model: ModelConfig
    lora: LoraConfig | None
    head: HeadInit | None
    engine: AnyEngine
    engine_fp8: Fp8Config | None
    sync: SyncConfig
    cluster: AnyCluster
    health: HealthConfig
    steps_between_publications: int
    # The engine samples while the trainer trains.
    samples_ahead: bool
    max_request_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """The settings of the weights that are written in the Hugging Face format."""

    model: ModelConfig
    lora: LoraConfig | None
    checkpoint: CheckpointConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingSettings:
    """The settings of when a run is saved, with what, and how many of its checkpoints are kept."""

    kind: RunKind
    critic: CriticConfig | None
    eval: EvalConfig
    checkpoint: CheckpointConfig
    health: HealthConfig
    for_export: ExportSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """The settings that a trainer is built from: its models by role, its optimizer, its ranks.

    `head`: where the value head of the trained model starts; None if the model predicts tokens. An
    example of `rows_per_example` rows has at most `longest_example` tokens, which have to fit into
    one micro-batch.
    """

    seed: int
    model: ModelConfig
    lora: LoraConfig | None
    trainer: TrainerConfig
    cluster: AnyCluster
    mesh: Mesh
    head: HeadInit | None
    used_reference: AnyReference | None
    precomputes_reference: bool
    critic: CriticConfig | None
    energy: EbftConfig | None
    rows_per_example: int
    longest_example: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSettings:
    """The settings of where the processes of a run are placed, and of what they need there.

    `num_engines` are in separate processes; `mesh` is the trainer's. `plugins` are those that ranks
    and engines import: the kind and the type of each.
    """

    cluster: AnyCluster
    engine: AnyEngine
    num_engines: int
    sync: SyncConfig
    mesh: Mesh
    model: ModelConfig
    used_reference: AnyReference | None
    data: DataConfig
    run_dir: Path
    plugins: tuple[tuple[str, str], ...] = ()
