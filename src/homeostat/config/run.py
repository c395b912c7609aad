"""The complete recipe of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from homeostat.config.algorithm import (
    AnyAlgorithm,
    EbftPolicyConfig,
    PolicyGradientConfig,
    SftConfig,
)
from homeostat.config.base import PathText, RowAlgorithm, Settings, key
from homeostat.config.cluster import AnyCluster, InProcessCluster
from homeostat.config.critic import CriticConfig
from homeostat.config.data import DataConfig
from homeostat.config.ebft import EbftConfig
from homeostat.config.fp8 import Fp8Config
from homeostat.config.health import HealthConfig
from homeostat.config.kind import RunKind
from homeostat.config.mesh import Mesh
from homeostat.config.model import HeadInit, LoraConfig, ModelConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.config.observe import CheckpointConfig, EvalConfig, ObserveConfig
from homeostat.config.parts import (
    ExportSettings,
    InputSettings,
    LearningSettings,
    PlacementSettings,
    PublicationSettings,
    RowLearningSettings,
    SavingSettings,
    TrainerSetup,
)
from homeostat.config.plugins import Plugged
from homeostat.config.preference import PreferenceAlgorithm, PreferenceConfig
from homeostat.config.rewards import RewardsConfig
from homeostat.config.rollout import (
    AdapterOffReference,
    AnyEngine,
    AnyReference,
    DebugConfig,
    InitialReference,
    RolloutConfig,
)
from homeostat.config.sync import SyncConfig
from homeostat.config.trainer import TrainerConfig

SCHEMA_VERSION = 1


class RunConfig(Settings):
    """All settings of a run, one section per part."""

    version: Literal[1] = key(SCHEMA_VERSION, resume="free", help="Version of this schema.")
    name: str = key(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        resume="free",
        share=True,
        help="Name of the run and of its folder in runs_dir.",
    )
    runs_dir: PathText = key("runs", resume="free", help="Folder that contains the run folders.")
    preset: tuple[str, ...] = key(
        (),
        resume="free",
        share=True,
        help="Named sets of defaults. If two presets set the same key, the later one wins; keys "
        "that you set yourself always win.",
    )
    seed: int = key(0, ge=0, lt=2**31, help="Seed of all random numbers.")
    algorithm: AnyAlgorithm = key(SftConfig(), help="The training method and its loss.")
    model: ModelConfig = key(help="The model to train.")
    lora: LoraConfig | None = key(
        None, help="Train a LoRA adapter instead of all weights. null: train all weights."
    )
    data: DataConfig = key(help="The training and held-out rows.")
    rollout: RolloutConfig = key(RolloutConfig(), help="Sampling of completions (RL).")
    engine: AnyEngine = key(NativeEngineConfig(), help="The engine that samples completions (RL).")
    sync: SyncConfig = key(SyncConfig(), help="How new weights reach the engine (RL).")
    rewards: RewardsConfig | None = key(None, help="Functions that score completions (RL).")
    ebft: EbftConfig = key(
        EbftConfig(), help="Features and energy of energy-based fine-tuning (algorithm.type=ebft)."
    )
    preference: PreferenceConfig = key(
        PreferenceConfig(), help="Settings that the preference algorithms share."
    )
    reference: AnyReference | None = key(
        None,
        help="The model with which algorithm.kl or a preference algorithm compares the policy. "
        "Default: the policy as it is at the start of the run, including an adapter loaded by "
        "lora.path.",
    )
    critic: CriticConfig | None = key(
        None,
        help="The value model (algorithm.type=ppo). Default: with ppo, a critic with "
        "default settings; null for other algorithms.",
    )
    debug: DebugConfig | None = key(
        None,
        help="Run only sampling or only training, to find out which of them causes a problem (RL).",
    )
    trainer: TrainerConfig = key(TrainerConfig(), help="How the weights are updated.")
    cluster: AnyCluster = key(
        InProcessCluster(),
        resume="free",
        help="The processes over which the trainer is distributed.",
    )
    eval: EvalConfig = key(EvalConfig(), help="Evaluation on held-out rows.")
    checkpoint: CheckpointConfig = key(CheckpointConfig(), help="Saving and resuming.")
    observe: ObserveConfig = key(ObserveConfig(), help="Metrics, logs and traces.")
    health: HealthConfig = key(
        HealthConfig(),
        help="Which findings are reported during training, and which remedies may be applied "
        "automatically.",
    )

    @property
    def run_dir(self) -> Path:
        """Return the folder of the run."""
        return Path(self.runs_dir) / self.name

    @property
    def has_validation(self) -> bool:
        """Return whether the recipe has held-out rows."""
        return bool(self.data.validation) or self.data.validation_share > 0

    @property
    def longest_row(self) -> int:
        """Return the largest number of tokens that a row of an update may have."""
        return self.data.max_length + (self.rollout.max_new_tokens if self.is_rl else 0)

    @property
    def rows_per_example(self) -> int:
        """Return the number of training rows that are one example: 2 for pairs, else 1."""
        return self.algorithm.rows_per_example if isinstance(self.algorithm, RowAlgorithm) else 1

    @property
    def longest_example(self) -> int:
        """Return the largest number of tokens that must fit into one micro-batch."""
        return self.rows_per_example * self.longest_row

    @property
    def rows_per_step(self) -> int:
        """Examples of the data that a step takes: those of an update or, in RL, prompts."""
        return self.rollout.prompts_per_step if self.is_rl else self.trainer.batch_rows

    @property
    def max_request_tokens(self) -> int:
        """Longest that a request to the engine may become: its prompt and its completion."""
        new_tokens = self.eval.sampling.max_new_tokens or 0
        return self.data.max_length + max(self.rollout.max_new_tokens, new_tokens)

    @property
    def mesh(self) -> Mesh:
        """Return how the ranks of the trainer are arranged."""
        return self.trainer.backend.mesh(self.cluster.processes)

    @property
    def ranks_line(self) -> str:
        """Describe for people how the trainer is distributed; empty if it is one process."""
        return self.trainer.backend.describe(self.mesh)

    @property
    def steps_between_publications(self) -> int:
        """Return the number of steps between publications of the weights.

        Weights are published at the end of a step, as soon as sync.interval updates were due.
        """
        return -(-self.sync.interval // self.trainer.updates_in_step)

    @property
    def samples_ahead(self) -> bool:
        """Return whether the engine samples for later steps while the trainer trains."""
        return (self.rollout.max_staleness or 0) > 0

    @property
    def critic_steps(self) -> int:
        """Return the number of steps at the beginning in which only the critic learns."""
        return 0 if self.critic is None else self.critic.warmup_steps

    def policy_version(self, step: int) -> int:
        """Return the version of the policy after a step.

        Each step makes one, except those in which only the critic learns. 0 are the weights that
        the run starts from.
        """
        return max(0, step - self.critic_steps)

    @property
    def engine_fp8(self) -> Fp8Config | None:
        """Return the FP8 settings of the engine; None if it is not in FP8.

        Its `start_step` counts versions of the policy: the version before it is the first to be
        sampled from in FP8.
        """
        trained = self.trainer.fp8
        if self.engine.quantization == "fp8":
            return (trained or Fp8Config()).model_copy(update={"start_step": 1})
        if trained is None:
            return None
        start = self.policy_version(trained.start_step - 1) + 1
        return trained.model_copy(update={"start_step": start})

    @property
    def kind(self) -> RunKind:
        """Return the kind of training, which decides the loop, the data and the rules."""
        return self.algorithm.kind

    @property
    def is_rl(self) -> bool:
        """Return whether the run samples completions and learns from their rewards."""
        return self.kind is RunKind.RL

    @property
    def precomputes_reference(self) -> bool:
        """Return whether the reference scores all rows before the first step, and then is gone."""
        is_preference = self.kind is RunKind.PREFERENCE
        return is_preference and self.preference.reference_logps == "precomputed"

    @property
    def used_reference(self) -> AnyReference | None:
        """Return the reference that a KL term or preference algorithm needs; None if none does.

        By default it is the policy that the run starts from. Under a fresh adapter, which adds
        nothing at first, that is the model without it: no copy is needed. An adapter that was
        loaded (lora.path) is part of the starting policy.
        """
        algorithm = self.algorithm
        if isinstance(algorithm, PreferenceAlgorithm):
            is_needed = algorithm.needs_reference
        else:
            is_needed = isinstance(algorithm, PolicyGradientConfig) and algorithm.kl is not None
        if not is_needed:
            return None
        if self.reference is not None:
            return self.reference
        if self.lora is not None and self.lora.is_new:
            return AdapterOffReference(type="adapter_off")
        return InitialReference()

    @property
    def head(self) -> HeadInit | None:
        """Return where the value head of the trained model starts; None if it predicts tokens."""
        return "random" if self.kind is RunKind.REWARD_MODEL else None

    @property
    def energy(self) -> EbftConfig | None:
        """Return the settings of the energy; None if the run has none."""
        return self.ebft if isinstance(self.algorithm, EbftPolicyConfig) else None

    @property
    def published_adapter(self) -> LoraConfig | None:
        """Return the adapter that engines in other processes are sent alone; None if merged."""
        is_alone = self.lora is not None and self.lora.publish == "adapter"
        return self.lora if is_alone else None

    @property
    def is_strided(self) -> bool:
        """Return whether the run continues raw text at regular positions."""
        return self.energy is not None and self.energy.is_strided

    @property
    def requests_per_step(self) -> int:
        """Return the largest number of completions in a step."""
        positions = len(self.ebft.anchors(self.data.max_length)) if self.is_strided else 1
        return self.rollout.samples_per_step * positions

    @property
    def reward_functions(self) -> RewardsConfig:
        """Return the rewards; without any function where the energy is the only reward."""
        return self.rewards or RewardsConfig()

    @property
    def for_inputs(self) -> InputSettings:
        """Return the settings that decide which rows or prompts the run uses."""
        return InputSettings(
            seed=self.seed,
            data=self.data,
            eval=self.eval,
            rollout=self.rollout,
            trainer=self.trainer,
            energy=self.energy,
            is_strided=self.is_strided,
            rows_per_example=self.rows_per_example,
            rows_per_step=self.rows_per_step,
        )

    @property
    def for_rows(self) -> RowLearningSettings:
        """Return the settings of what is learnt from given rows."""
        return RowLearningSettings(
            algorithm=self.algorithm,
            preference=self.preference,
            data=self.data,
            trainer=self.trainer,
            used_reference=self.used_reference,
            precomputes_reference=self.precomputes_reference,
        )

    @property
    def for_learning(self) -> LearningSettings:
        """Return the settings of what is learnt from sampled groups."""
        return LearningSettings(
            seed=self.seed,
            algorithm=self.algorithm,
            model=self.model,
            rollout=self.rollout,
            trainer=self.trainer,
            mesh=self.mesh,
            energy=self.energy,
            is_strided=self.is_strided,
            critic=self.critic,
            critic_steps=self.critic_steps,
        )

    @property
    def for_publication(self) -> PublicationSettings:
        """Return the settings of how new weights reach an engine."""
        return PublicationSettings(
            model=self.model,
            lora=self.lora,
            head=self.head,
            engine=self.engine,
            engine_fp8=self.engine_fp8,
            sync=self.sync,
            cluster=self.cluster,
            health=self.health,
            steps_between_publications=self.steps_between_publications,
            samples_ahead=self.samples_ahead,
            max_request_tokens=self.max_request_tokens,
        )

    @property
    def num_engines(self) -> int:
        """Return the number of engines in separate processes."""
        is_asked = self.debug is None or self.debug.mode != "train_only"
        samples = self.is_rl and is_asked and not self.engine.shares_weights
        return self.engine.data_parallel_size if samples else 0

    @property
    def plugins(self) -> tuple[tuple[str, str], ...]:
        """Return what ranks and engines load of the user's own: kind and import path of each."""
        chosen = (self.algorithm, self.engine, self.sync.transport)
        return tuple((one.noun(), one.type) for one in chosen if isinstance(one, Plugged))

    @property
    def for_placement(self) -> PlacementSettings:
        """Return the settings of where processes are placed, and of what they need there."""
        return PlacementSettings(
            cluster=self.cluster,
            engine=self.engine,
            num_engines=self.num_engines,
            sync=self.sync,
            mesh=self.mesh,
            model=self.model,
            used_reference=self.used_reference,
            data=self.data,
            run_dir=self.run_dir,
            plugins=self.plugins,
        )

    @property
    def for_export(self) -> ExportSettings:
        """Return the settings of the weights that are written in the Hugging Face format."""
        return ExportSettings(model=self.model, lora=self.lora, checkpoint=self.checkpoint)

    @property
    def for_saving(self) -> SavingSettings:
        """Return the settings of when a run is saved, and with what."""
        return SavingSettings(
            kind=self.kind,
            critic=self.critic,
            eval=self.eval,
            checkpoint=self.checkpoint,
            health=self.health,
            for_export=self.for_export,
        )

    @property
    def for_trainer(self) -> TrainerSetup:
        """Return the settings that a trainer is built from."""
        return TrainerSetup(
            seed=self.seed,
            model=self.model,
            lora=self.lora,
            trainer=self.trainer,
            cluster=self.cluster,
            mesh=self.mesh,
            head=self.head,
            used_reference=self.used_reference,
            precomputes_reference=self.precomputes_reference,
            critic=self.critic,
            energy=self.energy,
            rows_per_example=self.rows_per_example,
            longest_example=self.longest_example,
        )
