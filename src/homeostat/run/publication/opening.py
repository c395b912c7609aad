"""Open the publisher that sends new weights to a run's engine."""

from __future__ import annotations

from homeostat.config.parts import PublicationSettings
from homeostat.rollout.engine import Engine
from homeostat.rollout.remote import RemoteEngine
from homeostat.rollout.router import Router
from homeostat.run.publication.nothing_sent import NoEngine, SharedWeights
from homeostat.run.publication.publish import SentWeights, probe_of
from homeostat.run.publication.several import SentToSeveral
from homeostat.run.session.replacements import Replacements, StartEngine
from homeostat.run.session.restarts import Restarts
from homeostat.run.session.session import Session
from homeostat.train.saving.run_state import RlState
from homeostat.train.trainer import Trainer

Feed = NoEngine | SharedWeights | SentWeights


def open_feed(
    config: PublicationSettings,
    engine: Engine | None,
    trainer: Trainer,
    rl_state: RlState,
    session: Session,
    *,
    version: int,
    restarts: Restarts,
    start: StartEngine | None,
) -> Feed:
    """The engine has its first weights when this returns. `version` is that of the trainer's;
    `start` starts another process in place of one of several engines that died."""
    found = session.resume.found
    checkpoint = found.path if found is not None else None
    if engine is None:
        return NoEngine(checkpoint, rl_state=rl_state)
    if engine.capabilities.shares_weights:
        return SharedWeights(engine, sleeps=config.engine.sleep, rl_state=rl_state)
    parts = {
        "trainer": trainer,
        "probe": probe_of(config, trainer),
        "rl_state": rl_state,
        "session": session,
        "restarts": restarts,
    }
    if isinstance(engine, Router):
        assert start is not None, "several engines are started by it"
        timeout_s = config.engine.start_timeout_s
        replacements = Replacements(start, timeout_s=timeout_s)
        feed = SentToSeveral(engine, config, replacements=replacements, **parts)
    else:
        assert isinstance(engine, RemoteEngine), engine
        feed = SentWeights(engine, config, **parts)
    feed.start(version, checkpoint)
    return feed
