"""Faults of the reward: wrong values, and rewards that do not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from homeostat.clinic import bodies
from homeostat.clinic.injector import FROM_START, Cure, Injector
from homeostat.clinic.recipes import GOLD, GOLD_REWARD, Body, Raw
from homeostat.health.finding import Family

# Few prompts and steps, for slow rewards.
FEW = Body("sort", steps=24, changes={"rollout.prompts_per_step": 8})


class _Reward(Injector):
    """Replace the run's reward by a function of clinic/rewards.py."""

    family = Family.REWARD
    function: ClassVar[str]

    def options(self) -> dict[str, Any]:
        return {"onset": self.dose.onset}

    def prepare(self, raw: Raw, folder: Path) -> None:
        reward = {
            "type": "function",
            "name": "right",
            "path": f"homeostat.clinic.rewards:{self.function}",
            "options": self.options(),
        }
        raw["rewards"]["functions"] = [reward]


class SignFlipped(_Reward):
    """A right answer costs what it should earn."""

    name, function = "reward_flipped", "flipped"
    expects = ("reward-collapse",)


class Constant(_Reward):
    """Every answer earns the same."""

    name, function, strength = "reward_constant", "constant", (0.1, 0.9)
    expects = ("zero-std-groups", "reward-constant", "reward-function-constant")

    def options(self) -> dict[str, Any]:
        return {"onset": self.dose.onset, "value": self.dose.strength}


class AlwaysFull(_Reward):
    """Every answer earns 1 from the first step on: a constant, not a task that is solved."""

    name, function, onset = "reward_always_full", "constant", FROM_START
    expects = ("reward-constant", "reward-function-constant")
    body = FEW

    def options(self) -> dict[str, Any]:
        return {"onset": self.dose.onset, "value": 1.0}


class Silent(_Reward):
    """The reward returns None for every sample."""

    name, function = "reward_none", "silent"
    expects = ("reward-fn-returns-none",)


class Raises(_Reward):
    """The reward function raises."""

    name, function = "reward_raises", "raising"
    expects = ("reward-fn-failing",)


class FailsOnSome(_Reward):
    """The function raises on some answers, because a table that it uses lacks them."""

    name, function, strength = "reward_fails_on_some", "stumbling", (0.3, 0.8)
    expects = ("reward-fn-failing", "user-code-failed")
    body, onset = FEW, (4, 8)

    def options(self) -> dict[str, Any]:
        return {"onset": self.dose.onset, "share": self.dose.strength}


class NotANumber(_Reward):
    """The reward is NaN."""

    name, function = "reward_nan", "not_a_number"
    expects = ("reward-fn-failing",)


class WrongLength(_Reward):
    """The function returns one value for a whole group."""

    name, function = "reward_wrong_length", "wrong_length"
    expects = ("reward-fn-failing", "reward-count-mismatch")


class MissingColumn(Injector):
    """The reward compares with a column that the rows do not have."""

    name, family = "reward_column", Family.REWARD
    expects = ("dataset-column-missing", "reward-fn-failing")
    onset = FROM_START

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["rewards"]["functions"] = [{"type": "exact_match", "column": "solution"}]


class Hangs(_Reward):
    """The reward never answers."""

    name, function, strength = "reward_hangs", "hanging", (0.4, 0.6)
    expects = ("reward-timeout", "reward-fn-failing")
    body = FEW

    def prepare(self, raw: Raw, folder: Path) -> None:
        super().prepare(raw, folder)
        raw["rewards"]["timeout_s"] = self.dose.strength
        raw["rollout"]["prompts_per_step"] = 4


class WorkerKilled(_Reward):
    """The reward's process is killed now and then."""

    name, function, strength = "reward_killed", "deadly", (0.1, 0.4)
    expects = ("reward-fn-failing",)
    cure, vital, stays = Cure.SAFE, "reward", True
    body = FEW

    def options(self) -> dict[str, Any]:
        return {"onset": self.dose.onset, "share": self.dose.strength}


class _Beside(_Reward):
    """A reward fails on a share of the prompts, next to a format reward that never does."""

    expects = ("reward-fn-failing", "reward-timeout")
    strength = (0.25, 0.6)

    def options(self) -> dict[str, Any]:
        return {"onset": self.dose.onset, "share": self.dose.strength}

    def prepare(self, raw: Raw, folder: Path) -> None:
        super().prepare(raw, folder)
        form = {"type": "regex_format", "name": "form", "pattern": "[0-9]+", "weight": 0.2}
        raw["rewards"]["functions"].append(form)


class RaisesBeside(_Beside):
    """The check of the answer raises for a share of the prompts; the format reward is fine."""

    name, function = "reward_raises_beside", "flaky"


class HangsBeside(_Beside):
    """The check of the answer hangs for a share of the prompts; the format reward is fine."""

    name, function = "reward_hangs_beside", "stuck"
    body = FEW

    def prepare(self, raw: Raw, folder: Path) -> None:
        super().prepare(raw, folder)
        raw["rewards"]["timeout_s"] = 0.5
        raw["rollout"]["prompts_per_step"] = 4


class Slow(_Reward):
    """The reward takes most of a step."""

    name, family, function, strength = "reward_slow", Family.PERFORMANCE, "sleepy", (0.03, 0.06)
    expects = ("reward-slow",)
    body = FEW

    def options(self) -> dict[str, Any]:
        return {"onset": self.dose.onset, "seconds": self.dose.strength}


class TooFewSamples(Injector):
    """A step has so few samples that chance moves the reward more than learning does."""

    name, family, onset = "too_few_samples", Family.REWARD, FROM_START
    expects = ("reward-too-noisy",)

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["rollout"] |= {"prompts_per_step": 1, "samples_per_prompt": 2}


class LengthHacking(_Reward):
    """Length earns more than being right."""

    name, function, strength = "reward_length", "by_length", (0.1, 0.3)
    expects = ("reward-tracks-length", "reward-hacking", "length-growth")
    body = Body("sort", steps=60, changes={"rollout.max_new_tokens": 24})

    def options(self) -> dict[str, Any]:
        return {"onset": self.dose.onset, "per_token": self.dose.strength}


class ProxyExploited(_Reward):
    """The trained reward, as a reward model may, pays for something that the task does not ask."""

    name, function, strength = "reward_over_optimised", "by_digit", (0.3, 1.0)
    expects = ("reward-over-optimised",)
    body, onset = Body("sort", steps=60, changes=GOLD), (8, 14)

    def options(self) -> dict[str, Any]:
        return {"onset": self.dose.onset, "bonus": self.dose.strength}

    def prepare(self, raw: Raw, folder: Path) -> None:
        super().prepare(raw, folder)
        raw["rewards"]["functions"].append(GOLD_REWARD)


class ShortAnswers(_Reward):
    """Every token costs something, and nothing earns anything."""

    name, family, function, strength = "reward_shortness", Family.POLICY, "by_shortness", (0.1, 0.3)
    expects = ("length-bias-shrinking", "length-penalty-too-strong", "empty-completions")
    body, onset = Body("sort", steps=60, changes={"trainer.lr": 2e-3}), FROM_START

    def options(self) -> dict[str, Any]:
        return {"onset": self.dose.onset, "per_token": self.dose.strength}


class FormatNeverMet(_Reward):
    """Right answers count only inside a mark that the model never writes."""

    name, function, onset = "reward_format", "marked", FROM_START
    expects = ("verifier-format-mismatch", "format-reward-never-matches")

    def options(self) -> dict[str, Any]:
        return {}


class Saturated(Injector):
    """Every answer is right."""

    name, family, onset = "reward_saturated", Family.REWARD, FROM_START
    expects = ("reward-saturated",)

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["rewards"]["functions"] = [{"type": "regex_format", "pattern": ".*"}]


class TooHard(Injector):
    """The answers are those of a game that the policy has never seen."""

    name, family, onset = "task_too_hard", Family.REWARD, FROM_START
    expects = ("task-too-hard", "reward-always-zero")

    def prepare(self, raw: Raw, folder: Path) -> None:
        rows = bodies.read_rows(folder / "train.jsonl")
        for row in rows:
            row["answer"] = bodies.GAMES["shift"](row["answer"][::-1])
        bodies.write_rows(folder / "train.jsonl", rows)


FAULTS: tuple[type[Injector], ...] = (
    SignFlipped,
    Constant,
    AlwaysFull,
    Silent,
    Raises,
    FailsOnSome,
    NotANumber,
    WrongLength,
    MissingColumn,
    Hangs,
    WorkerKilled,
    RaisesBeside,
    HangsBeside,
    Slow,
    TooFewSamples,
    LengthHacking,
    ProxyExploited,
    ShortAnswers,
    FormatNeverMet,
    Saturated,
    TooHard,
)
