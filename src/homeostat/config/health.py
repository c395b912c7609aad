"""What the run's own doctor watches for, and what it may do about it."""

from __future__ import annotations

from typing import Any, Literal

from homeostat.config.base import Settings, key


class Allowance(Settings):
    """An illness that is known and meant to be: it is not reported."""

    code: str = key(
        pattern=r"^[A-Z]{3}\d{3}$",
        resume="free",
        share=True,
        help="The rule's code (`homeostat rules`).",
    )
    reason: str = key(min_length=1, resume="free", share=True, help="Why it is all right here.")
    until_step: int | None = key(
        None, ge=1, resume="free", help="Last step at which it is. Default: the whole run."
    )


class HealthConfig(Settings):
    heal: Literal["off", "safe", "all"] = key(
        "safe",
        resume="warn",
        help="What is done about a finding. safe: what changes neither objective, data order nor "
        "sampled distribution (weights sent anew, fewer tokens per micro-batch, room on a full "
        "disk). all: also learning rate, clip, KL coefficient, temperature, sync interval, "
        "off-policy mask, and going back to a healthy checkpoint; what does not help is taken "
        "back. off: findings are told, nothing is done. The trainer's and the engine's own guards "
        "(trainer.on_oom, trainer.on_nonfinite, engine.max_restarts) have keys of their own.",
    )
    on_error: Literal["go_on", "halt"] = key(
        "go_on",
        resume="free",
        help="When a finding of level error opens. halt: save, and end before the next step.",
    )
    clear_after: int = key(
        3, ge=1, resume="free", help="Records in a row without a finding after which it is over."
    )
    levels: dict[str, Literal["off", "info", "warn", "error"]] = key(
        {},
        share=True,
        resume="free",
        help="Rules, by code, whose findings have another level here; off: none.",
    )
    options: dict[str, dict[str, Any]] = key(
        {},
        resume="free",
        share=True,
        help="Rules, by code, with thresholds that differ from their defaults.",
    )
    allow: tuple[Allowance, ...] = key(
        (), resume="free", help="Findings that are meant to be, each with its reason."
    )
