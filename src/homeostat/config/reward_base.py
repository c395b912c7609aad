"""The settings that all rewards share."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from homeostat.config.base import Settings, key


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
        help="train: trained on. eval: a gold reward. It is computed on held-out prompts only, "
        "reported as eval/gold_reward and never trained on.",
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
