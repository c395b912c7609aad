"""Settings of the health rules: which findings to report, and which remedies are allowed."""

from __future__ import annotations

from typing import Any, Literal

from homeostat.config.base import Settings, key


class Allowance(Settings):
    """A finding that is expected in this run and therefore not reported."""

    code: str = key(
        pattern=r"^[A-Z]{3}\d{3}$",
        resume="free",
        share=True,
        help="Code of the rule (`homeostat rules`).",
    )
    reason: str = key(
        min_length=1, resume="free", share=True, help="Why the finding is acceptable in this run."
    )
    until_step: int | None = key(
        None,
        ge=1,
        resume="free",
        help="Last step at which the finding is allowed. Default: the whole run.",
    )


class HealthConfig(Settings):
    """The findings to report during training, and the remedies to apply automatically."""

    heal: Literal["off", "safe", "all"] = key(
        "safe",
        resume="warn",
        help="Which remedies are applied automatically. safe: those that change neither the "
        "objective, nor the order of the data, nor the sampled distribution: send the weights "
        "again, use fewer tokens per micro-batch, free space on a full disk. all: also change the "
        "learning rate, clipping, KL coefficient, temperature, sync interval or off-policy mask, "
        "or return to a healthy checkpoint; a remedy that does not help is reverted. off: only "
        "report findings. The reactions of trainer and engine to failures have their own keys "
        "(trainer.on_oom, trainer.on_nonfinite, engine.max_restarts).",
    )
    on_error: Literal["go_on", "halt"] = key(
        "go_on",
        resume="free",
        help="Reaction to a new finding of level error. go_on: continue. halt: save a checkpoint "
        "and end the run before the next step.",
    )
    clear_after: int = key(
        3,
        ge=1,
        resume="free",
        help="Number of consecutive records without a finding after which it counts as cleared.",
    )
    rules: tuple[str, ...] = key(
        (),
        resume="free",
        share="name",
        help="Your own rules, in addition to the built-in ones: package.module:RULE, file.py:RULE "
        "(a file in the recipe's folder), or the name of an entry point of the group "
        "homeostat.rules.",
    )
    levels: dict[str, Literal["off", "info", "warn", "error"]] = key(
        {},
        share=True,
        resume="free",
        help="Levels of findings in this run, by the code of their rule, for example {RWD001: "
        "warn}. off disables the rule.",
    )
    options: dict[str, dict[str, Any]] = key(
        {},
        resume="free",
        share=True,
        help="Thresholds of rules in this run, by the code of the rule. The page of a rule lists "
        "its options.",
    )
    allow: tuple[Allowance, ...] = key(
        (),
        resume="free",
        help="Findings that you expect and do not want reported, each with a reason.",
    )
