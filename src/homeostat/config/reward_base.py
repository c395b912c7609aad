"""The settings that all rewards share."""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator

from homeostat.config.base import Settings, key
from homeostat.config.plugins import Plugged


def check_pattern(text: str) -> str:
    """Refuse a text that is not a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error
    return text


Pattern = Annotated[str, AfterValidator(check_pattern)]


class Reward(Settings):
    """Settings that all rewards share."""

    name: str | None = key(
        None,
        pattern=r"^[A-Za-z0-9_.-]{1,60}$",
        share=True,
        help="Name in metrics (rewards/<name>/mean). Default: the type, or the function's name.",
    )
    weight: float = key(1.0, help="Weight of this reward in the sum.")
    role: Literal["train", "eval"] = key(
        "train",
        help="train: the reward is trained on. eval: a gold reward. It is computed only on "
        "held-out prompts, reported as eval/gold_reward and never trained on.",
    )
    # True if the reward compares with an expected answer, so that it can decide what is solved.
    verifies: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """Return the name of the reward in metrics."""
        return self.name or self.default_label()

    @property
    def standardises(self) -> bool:
        """Return whether its values are standardised before they are weighted."""
        return False

    def default_label(self) -> str:
        """Return the name that is used if the recipe gives none."""
        raise NotImplementedError


# Keyword arguments that every reward function receives.
CALL_KEYWORDS = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)


class RewardPlugin(Plugged, Reward):
    """Base of your rewards (homeostat.plugins.Reward).

    `score` is called in a worker process as any reward function is: by keyword, with a list entry
    for each sample. It receives the arguments that it names: completions, prompts, completion_ids,
    and columns of the rows. A value of None counts for nothing.
    """

    @classmethod
    def noun(cls) -> str:
        return "reward"

    @abstractmethod
    def score(self, completions: list[Any], **columns: Any) -> list[float | None]:
        """Return the reward of every completion."""

    @classmethod
    def needed_columns(cls) -> list[str]:
        """Return the columns without which `score` cannot be called."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = list(inspect.signature(cls.score).parameters.values())[1:]
        return [
            one.name
            for one in named
            if one.kind in kinds
            and one.default is inspect.Parameter.empty
            and one.name not in CALL_KEYWORDS
        ]

    @classmethod
    def needs(cls) -> str:
        columns = cls.needed_columns()
        return f"rows with {', '.join(columns)}" if columns else ""

    def default_label(self) -> str:
        return self.type.rpartition(":")[2]
