"""Settings of the health rules: which findings to report, and which remedies are allowed."""

from __future__ import annotations

from typing import Any, Literal

from homeostat.config.base import Settings, key


class Allowance(Settings):
    """A finding that is expected in this run and not reported."""

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
    """The findings that are reported while a run trains, and the remedies that may be applied."""

    heal: Literal["off", "safe", "all"] = key(
        "safe",
        resume="warn",
        help="Which remedies are applied to a finding. safe: those that change neither the "
        "objective, nor the order of the data, nor the sampled distribution (sending weights "
        "again, fewer tokens per micro-batch, freeing space on a full disk). all: also changes "
        "to the learning rate, clipping, KL coefficient, temperature, sync interval or "
        "off-policy mask, and a return to a healthy checkpoint; a remedy that does not help is "
        "reverted. off: findings are reported and nothing is changed. The guards of trainer and "
        "engine (trainer.on_oom, trainer.on_nonfinite, engine.max_restarts) have their own keys.",
    )
    on_error: Literal["go_on", "halt"] = key(
        "go_on",
        resume="free",
        help="What to do when a finding of level error opens. halt: save a checkpoint and end "
        "the run before the next step.",
    )
    clear_after: int = key(
        3,
        ge=1,
        resume="free",
        help="Number of consecutive records without the finding after which it is closed.",
    )
    rules: tuple[str, ...] = key(
        (),
        resume="free",
        share="name",
        help="Your rules, beside the built-in ones: package.module:RULE, file.py:RULE (beside the "
        "recipe), or the name of an entry point of the group homeostat.rules.",
    )
    levels: dict[str, Literal["off", "info", "warn", "error"]] = key(
        {},
        share=True,
        resume="free",
        help="Rules, by code, whose findings get another level in this run; off: the rule is "
        "disabled.",
    )
    options: dict[str, dict[str, Any]] = key(
        {},
        resume="free",
        share=True,
        help="Rules, by code, whose thresholds differ from the defaults.",
    )
    allow: tuple[Allowance, ...] = key(
        (), resume="free", help="Findings that are expected, each with its reason."
    )
