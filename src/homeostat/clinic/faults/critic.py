"""Faults of a critic."""

from __future__ import annotations

from typing import Any

from homeostat.clinic.injector import FROM_START, Injector
from homeostat.clinic.recipes import Body
from homeostat.health.finding import Family
from homeostat.run.session.session import Session
from homeostat.types import Role

# At this rate a critic of the clinic's size learns the mean reward within ten steps.
PPO = {"critic": {"lr": 1e-3}}
SORT_PPO = Body("sort", "ppo", steps=60, changes=PPO)


class CriticWithoutGradient(Injector):
    """The gradient of the value head is lost on the way: the critic learns nothing."""

    name, family = "critic_without_gradient", Family.LEARNING
    expects = ("critic-explains-nothing", "critic-not-learning")
    body, onset = SORT_PPO, FROM_START

    def started(self, parts: Any, session: Session) -> None:
        head = parts.trainer.roles[Role.CRITIC].model.output_weight()
        head.register_hook(lambda gradient: gradient * 0.0)


FAULTS: tuple[type[Injector], ...] = (CriticWithoutGradient,)
