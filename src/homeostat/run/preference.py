"""Preference training (dpo, ipo, kto, orpo, simpo), from recipe to weights.

pairs or labelled rows -> tokens -> log-probs under the reference, once (or in each step)
     -> packed StepPlans, a pair in one piece -> [kto: baseline of the update]
     -> accumulate / apply -> metrics -> evaluation -> checkpoint
"""

from __future__ import annotations

from homeostat.config.run import RunConfig
from homeostat.run.evaluation.preference_measure import prepare_preferences
from homeostat.run.row_loop import train_rows
from homeostat.run.session.session import Session
from homeostat.run.session.step import Running
from homeostat.run.wiring.hooks import NO_HOOKS, Hooks


def train_preferences(config: RunConfig, session: Session, hooks: Hooks = NO_HOOKS) -> Running:
    """Train until the last step, an early stop, or a request to stop. Yields every step."""
    return train_rows(config, session, hooks, prepare=prepare_preferences)
