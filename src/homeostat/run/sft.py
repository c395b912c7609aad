"""Supervised fine-tuning, from recipe to weights.

rows -> tokens with loss weights -> packed StepPlans -> accumulate / apply
     -> metrics -> evaluation -> checkpoint
"""

from __future__ import annotations

from homeostat.config.run import RunConfig
from homeostat.run.evaluation.sft_measure import prepare_sft
from homeostat.run.row_loop import train_rows
from homeostat.run.session.session import Session
from homeostat.run.session.step import Running
from homeostat.run.wiring.hooks import NO_HOOKS, Hooks


def train_sft(config: RunConfig, session: Session, hooks: Hooks = NO_HOOKS) -> Running:
    """Train until the last step, an early stop, or a request to stop. Yields every step."""
    return train_rows(config, session, hooks, prepare=prepare_sft)
