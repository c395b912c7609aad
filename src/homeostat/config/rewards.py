"""Settings of the rewards. Rewards run in worker processes with a time limit."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from homeostat.config.base import Settings, key
from homeostat.config.model_rewards import ClassifierReward, JudgeReward
from homeostat.config.plugins import Pluggable
from homeostat.config.reward_base import CALL_KEYWORDS, Pattern, Reward, RewardPlugin


class ExactMatchReward(Reward):
    """1 if the completion's answer equals the expected text, else 0."""

    verifies: ClassVar[bool] = True
    type: Literal["exact_match"]
    column: str = key("answer", share=True, help="Column with the expected answer.")
    extract: Pattern | None = key(
        None,
        help="Regular expression that finds the answer in the completion: the first group (or "
        "the whole match) of its last match. Default: the whole completion.",
    )
    ignore_case: bool = key(False, help="Ignore case when comparing.")

    def default_label(self) -> str:
        return self.type


class RegexFormatReward(Reward):
    """1 if the whole completion matches the pattern, else 0."""

    type: Literal["regex_format"]
    pattern: Pattern = key(
        help="Regular expression for the whole completion; '.' matches newlines."
    )

    def default_label(self) -> str:
        return self.type


class MathVerifyReward(Reward):
    """1 if math-verify finds the completion's answer equal to the expected one, else 0."""

    verifies: ClassVar[bool] = True
    type: Literal["math_verify"]
    column: str = key(
        "answer", share=True, help="Column with the expected answer (LaTeX or plain)."
    )

    def default_label(self) -> str:
        return self.type


class LengthReward(Reward):
    """0 up to `free_tokens`, then falling linearly to -1 at `max_tokens`, and -1 for longer
    completions.
    """

    type: Literal["length"]
    free_tokens: int = key(ge=0, help="Number of tokens up to which the reward is 0.")
    max_tokens: int = key(ge=1, help="Number of tokens at and above which the reward is -1.")

    @model_validator(mode="after")
    def check_order(self) -> LengthReward:
        """Refuse limits between which the reward could not fall."""
        if self.max_tokens <= self.free_tokens:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) must be above free_tokens ({self.free_tokens}): "
                "the reward falls between them"
            )
        return self

    def default_label(self) -> str:
        return self.type


class ReasoningGymReward(Reward):
    """The score that the prompt's own reasoning-gym task gives (rows of a reasoning_gym source)."""

    verifies: ClassVar[bool] = True
    type: Literal["reasoning_gym"]
    extract: Pattern | None = key(
        None,
        help="Regular expression that finds the answer in the completion: the first group (or "
        "the whole match) of its last match. Default: the whole completion.",
    )

    def default_label(self) -> str:
        return self.type


class FunctionReward(Reward):
    """Your function, called as in TRL: f(completions, prompts=, **columns) -> list of floats.

    A function without **kwargs receives only the arguments that it names. It may be async.
    """

    type: Literal["function"]
    path: str = key(
        pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_]*$",
        share="name",
        help="package.module:function or folder/file.py:function.",
    )
    options: dict[str, bool | int | float | str] = key(
        {}, help="Further keyword arguments for the function."
    )

    @model_validator(mode="after")
    def check_options(self) -> FunctionReward:
        """Refuse options that would collide with arguments that every function receives."""
        if taken := sorted(set(self.options) & set(CALL_KEYWORDS)):
            raise ValueError(
                f"options.{taken[0]}: every function already gets an argument {taken[0]}"
            )
        return self

    def default_label(self) -> str:
        return self.path.rpartition(":")[2]


AnyReward = Annotated[
    ExactMatchReward
    | RegexFormatReward
    | MathVerifyReward
    | LengthReward
    | ReasoningGymReward
    | FunctionReward
    | ClassifierReward
    | JudgeReward,
    Field(discriminator="type"),
    Pluggable("reward", (RewardPlugin,)),
]


class RewardsConfig(Settings):
    """The reward functions, their time limit, and how their sum is normalised."""

    functions: tuple[AnyReward, ...] = key(
        (),
        help="The reward functions; a sample's reward is their weighted sum. At least one is "
        "required, except with algorithm.type=ebft, where the energy is a reward.",
    )
    timeout_s: float = key(
        10.0,
        gt=0,
        le=86400,
        resume="free",
        help="Time limit in seconds for one reward on the samples of a group. If it is exceeded, "
        "the reward has failed: its process is ended, and these samples are not trained on.",
    )
    workers: int = key(
        1, ge=1, le=64, resume="free", help="Number of processes that compute rewards."
    )
    normalise: Literal["none", "scale", "standardise"] = key(
        "none",
        help="Normalise rewards with the statistics of all rewards so far in the run. scale: "
        "divide by their standard deviation. standardise: also subtract their mean.",
    )
    clip: float | None = key(
        None, gt=0, help="Clip rewards to plus or minus this value, after normalising."
    )

    @property
    def trained(self) -> tuple[AnyReward, ...]:
        """Return the rewards that are trained on."""
        return tuple(reward for reward in self.functions if reward.role == "train")

    @property
    def gold(self) -> tuple[AnyReward, ...]:
        """Return the rewards that only held-out prompts are measured with."""
        return tuple(reward for reward in self.functions if reward.role == "eval")

    @model_validator(mode="after")
    def check_roles(self) -> RewardsConfig:
        """Refuse rewards of which none is trained on."""
        if self.functions and not self.trained:
            raise ValueError(
                "every reward has role eval, so there is nothing to train on: give one of them "
                "role train"
            )
        return self

    @model_validator(mode="after")
    def check_names(self) -> RewardsConfig:
        """Refuse two rewards of the same name, because metrics could not tell them apart."""
        counts = Counter(reward.label for reward in self.functions)
        if twice := [label for label, count in counts.items() if count > 1]:
            raise ValueError(
                f"two rewards are named {twice[0]!r}, so metrics could not distinguish them: give "
                "one of them another `name`"
            )
        return self
