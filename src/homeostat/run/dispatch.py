"""Which loop a recipe asks for."""

from __future__ import annotations

from homeostat.config.run import RunConfig
from homeostat.run.hooks import NO_HOOKS, Hooks
from homeostat.run.result import RunResult
from homeostat.run.rl import train_rl
from homeostat.run.session import Session
from homeostat.run.sft import train_sft


def train(config: RunConfig, session: Session, hooks: Hooks = NO_HOOKS) -> RunResult:
    loop = train_rl if config.is_rl else train_sft
    return loop(config, session, hooks)
