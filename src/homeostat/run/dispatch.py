"""Which loop a recipe asks for."""

from __future__ import annotations

from homeostat.config.run import RunConfig
from homeostat.run.result import RunResult
from homeostat.run.rl import train_rl
from homeostat.run.session import Session
from homeostat.run.sft import train_sft


def train(config: RunConfig, session: Session) -> RunResult:
    return train_rl(config, session) if config.is_rl else train_sft(config, session)
