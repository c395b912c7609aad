"""The whole recipe of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from homeostat.config.algorithm import AnyAlgorithm, SftConfig
from homeostat.config.base import PathText, Settings, key
from homeostat.config.cluster import AnyCluster, InProcessCluster
from homeostat.config.data import DataConfig
from homeostat.config.health import HealthConfig
from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.config.observe import CheckpointConfig, EvalConfig, ObserveConfig
from homeostat.config.rewards import RewardsConfig
from homeostat.config.rollout import AnyEngine, AnyReference, DebugConfig, RolloutConfig
from homeostat.config.sync import SyncConfig
from homeostat.config.trainer import TrainerConfig

SCHEMA_VERSION = 1


class RunConfig(Settings):
    version: Literal[1] = key(SCHEMA_VERSION, resume="free", help="Version of this schema.")
    name: str = key(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        resume="free",
        share=True,
        help="Name of the run: its folder under runs_dir.",
    )
    runs_dir: PathText = key("runs", resume="free", help="Folder that holds the runs.")
    preset: tuple[str, ...] = key(
        (),
        resume="free",
        share=True,
        help="Named sets of defaults, later ones first; your keys win over all.",
    )
    seed: int = key(0, ge=0, lt=2**31, help="Source of all randomness.")
    algorithm: AnyAlgorithm = key(SftConfig(), help="What is trained, and by which loss.")
    model: ModelConfig = key(help="The model.")
    lora: LoraConfig | None = key(None, help="Train an adapter in place of all weights.")
    data: DataConfig = key(help="The rows.")
    rollout: RolloutConfig = key(RolloutConfig(), help="Sampling of completions (RL).")
    engine: AnyEngine = key(NativeEngineConfig(), help="What samples them (RL).")
    sync: SyncConfig = key(SyncConfig(), help="How new weights reach the engine (RL).")
    rewards: RewardsConfig | None = key(None, help="What a completion earns (RL).")
    reference: AnyReference | None = key(
        None,
        help="The model that algorithm.kl compares with. Default: the policy that the run starts "
        "from, an adapter loaded by lora.path included.",
    )
    debug: DebugConfig | None = key(None, help="Half a run, to find out which half is sick (RL).")
    trainer: TrainerConfig = key(TrainerConfig(), help="The updates.")
    cluster: AnyCluster = key(
        InProcessCluster(), resume="free", help="The processes that the trainer is spread over."
    )
    eval: EvalConfig = key(EvalConfig(), help="Evaluation on held-out rows.")
    checkpoint: CheckpointConfig = key(CheckpointConfig(), help="Saving and resuming.")
    observe: ObserveConfig = key(ObserveConfig(), help="Metrics, logs and traces.")
    health: HealthConfig = key(
        HealthConfig(), help="What is watched for while it trains, and what is done about it."
    )

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name

    @property
    def has_validation(self) -> bool:
        return bool(self.data.validation) or self.data.validation_share > 0

    @property
    def longest_row(self) -> int:
        """Tokens that a row to train on may have."""
        return self.data.max_length + (self.rollout.max_new_tokens if self.is_rl else 0)

    @property
    def max_request_tokens(self) -> int:
        """Longest that a request to the engine may become: its prompt and its completion."""
        new_tokens = self.eval.sampling.max_new_tokens or 0
        return self.data.max_length + max(self.rollout.max_new_tokens, new_tokens)

    @property
    def num_ranks(self) -> int:
        """Processes that the trainer is spread over."""
        return self.cluster.processes

    @property
    def num_shards(self) -> int:
        """Parts that every tensor of the model is split into."""
        return self.trainer.backend.num_shards(self.num_ranks)

    @property
    def ranks_line(self) -> str:
        """How the trainer is spread, for people; empty where it is in one process."""
        return self.trainer.backend.describe(self.num_ranks)

    @property
    def steps_between_publications(self) -> int:
        """Weights are published at the end of a step, once sync.interval updates were due."""
        return -(-self.sync.interval // self.trainer.updates_per_step)

    @property
    def is_rl(self) -> bool:
        return not isinstance(self.algorithm, SftConfig)
