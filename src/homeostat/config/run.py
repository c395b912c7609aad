"""The whole recipe of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from homeostat.config.base import PathText, Settings, key
from homeostat.config.data import DataConfig
from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.config.observe import CheckpointConfig, EvalConfig, ObserveConfig
from homeostat.config.trainer import TrainerConfig

SCHEMA_VERSION = 1


class SftConfig(Settings):
    """Supervised fine-tuning: cross-entropy on the trained tokens."""

    type: Literal["sft"] = "sft"
    normalise: Literal["token", "row"] = key(
        "token",
        help="token: every trained token of an update counts the same. row: every row does.",
    )


class RunConfig(Settings):
    version: Literal[1] = key(SCHEMA_VERSION, resume="free", help="Version of this schema.")
    name: str = key(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        resume="free",
        help="Name of the run: its folder under runs_dir.",
    )
    runs_dir: PathText = key("runs", resume="free", help="Folder that holds the runs.")
    preset: tuple[str, ...] = key(
        (), resume="free", help="Named sets of defaults, later ones first; your keys win over all."
    )
    seed: int = key(0, ge=0, lt=2**31, help="Source of all randomness.")
    algorithm: SftConfig = key(SftConfig(), help="What is trained, and by which loss.")
    model: ModelConfig = key(help="The model.")
    lora: LoraConfig | None = key(None, help="Train an adapter in place of all weights.")
    data: DataConfig = key(help="The rows.")
    trainer: TrainerConfig = key(TrainerConfig(), help="The updates.")
    eval: EvalConfig = key(EvalConfig(), help="Evaluation on held-out rows.")
    checkpoint: CheckpointConfig = key(CheckpointConfig(), help="Saving and resuming.")
    observe: ObserveConfig = key(ObserveConfig(), help="Metrics, logs and traces.")

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name

    @property
    def has_validation(self) -> bool:
        return bool(self.data.validation) or self.data.validation_share > 0
