"""Training of a reward model, from recipe to a sequence classifier.

pairs or scored rows -> tokens -> packed StepPlans, a pair in one piece -> scores of whole rows
     -> accumulate / apply -> metrics -> evaluation -> checkpoint
"""

from __future__ import annotations

from homeostat.config.run import RunConfig
from homeostat.run.evaluation.reward_model_measure import prepare_reward_model
from homeostat.run.row_loop import train_rows
from homeostat.run.session.session import Session
from homeostat.run.session.step import Running
from homeostat.run.wiring.hooks import NO_HOOKS, Hooks


def train_reward_model(config: RunConfig, session: Session, hooks: Hooks = NO_HOOKS) -> Running:
    """Train until the last step, an early stop, or a request to stop. Yields every step."""
    return train_rows(config, session, hooks, prepare=prepare_reward_model)
