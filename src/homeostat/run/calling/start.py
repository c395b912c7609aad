"""Run the training loop of a recipe. The command line, the clinic and the Python API call this.

recipe -> loop of its kind -> Step, Step, ... -> RunResult
"""

from __future__ import annotations

from functools import partial

from homeostat.config.kind import RunKind
from homeostat.config.ranks import RanksCluster
from homeostat.config.run import RunConfig
from homeostat.errors import TrainerLostError
from homeostat.run.healing.healer import RollBackError
from homeostat.run.healing.watch import require_known_rules
from homeostat.run.preference import train_preferences
from homeostat.run.ray.cluster import ray_opened
from homeostat.run.reward_model import train_reward_model
from homeostat.run.rl import train_rl
from homeostat.run.rl_async import train_rl_async
from homeostat.run.session.restarts import TrainerRestarts
from homeostat.run.session.result import RunResult
from homeostat.run.session.session import Session
from homeostat.run.session.step import Running, run_to_end
from homeostat.run.sft import train_sft
from homeostat.run.wiring.compile_cache import own_compile_cache
from homeostat.run.wiring.hooks import NO_HOOKS, Hooks
from homeostat.train.runtime import resolve_device

# One training loop per kind of run.
LOOPS = {
    RunKind.SFT: train_sft,
    RunKind.RL: train_rl,
    RunKind.PREFERENCE: train_preferences,
    RunKind.REWARD_MODEL: train_reward_model,
}


def train_recipe(config: RunConfig, session: Session, hooks: Hooks = NO_HOOKS) -> RunResult:
    """Train until the run is complete, stopped, or failed."""
    return run_to_end(running(config, session, hooks))


def running(config: RunConfig, session: Session, hooks: Hooks = NO_HOOKS) -> Running:
    """Yield every step until the run is complete, stopped, or failed.

    With health.heal=all a remedy may roll the run back; the loop is then set up again, from the
    checkpoint that the run was rolled back to. It is also set up again, from the last checkpoint,
    if ranks of the trainer are lost; if a machine was lost with them, the run may wait for a
    machine or shrink. Steps after that checkpoint are then yielded again.
    """
    require_known_rules(config.health)
    is_async = config.is_rl and config.rollout.max_staleness is not None
    loop = train_rl_async if is_async else LOOPS[config.kind]
    cluster = config.cluster
    most = cluster.max_restarts if isinstance(cluster, RanksCluster) else 0
    restarts = TrainerRestarts(most, session)
    emit = partial(session.event, step=session.start_step)
    device = resolve_device(config)
    with (
        own_compile_cache(device, emit=emit),
        ray_opened(config, device=device.type) as machines,
    ):
        while True:
            try:
                return (yield from loop(config, session, hooks))
            except RollBackError as back:
                session.go_back(back)
            except TrainerLostError as lost:
                restarts.recover(lost)
                if machines is not None:
                    config = machines.refit(partial(session.event, step=session.start_step))
