"""Which loop a recipe asks for."""

from __future__ import annotations

from functools import partial

from homeostat.config.run import RunConfig
from homeostat.run.compile_cache import own_compile_cache
from homeostat.run.healing import RollBackError
from homeostat.run.hooks import NO_HOOKS, Hooks
from homeostat.run.result import RunResult
from homeostat.run.rl import train_rl
from homeostat.run.session import Session
from homeostat.run.sft import train_sft
from homeostat.run.watch import require_known_rules
from homeostat.train.runtime import resolve_device


def train(config: RunConfig, session: Session, hooks: Hooks = NO_HOOKS) -> RunResult:
    """Until it is complete; a run that goes back (health.heal=all) is set up again from there."""
    require_known_rules(config)
    loop = train_rl if config.is_rl else train_sft
    emit = partial(session.event, step=session.start_step)
    with own_compile_cache(resolve_device(config), emit=emit):
        while True:
            try:
                return loop(config, session, hooks)
            except RollBackError as back:
                session.go_back(back)
