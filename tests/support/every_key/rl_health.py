"""Cases of the keys that say what is watched for, and what is done about it."""

from __future__ import annotations

from pathlib import Path

from tests.support.every_key.workshop import (
    Case,
    Run,
    Workshop,
    all_of,
    alters,
    assert_same,
    metric,
    refuses,
    shows,
)

from homeostat.observe.jsonl import iter_jsonl

# A rule whose limit every run breaks, at every record; and one that is broken now and then.
ALWAYS = (
    "health.options={RWD001: {max_share: -1.0, fire: 1, window: 1}}",
    "health.levels={RWD001: warn}",
)
NOW_AND_THEN = (
    "trainer.max_steps=14",
    "health.options={RWD001: {max_share: 0.3, fire: 1, window: 1}}",
)
# The same for one of level error, in a run that updates at every step.
ERROR = (
    "trainer.max_steps=5",
    "algorithm.entropy_bonus=1e-3",
    "health.options={POL009: {limit: 0.5}}",
)


def found(state: str, code: str, field: str):
    """A field of the lines about one code."""

    def see(run: Run) -> list:
        lines = iter_jsonl(run.dir / "findings.jsonl")
        return [line[field] for line in lines if (line["state"], line["code"]) == (state, code)]

    return see


def unused(run: Run) -> list[tuple[str, str]]:
    return [(event["code"], event["reason"]) for event in run.events("allowance_unused")]


opened = found("open", "RWD001", "step")


def keeps_finding(workshop: Workshop) -> None:
    """Without remedies an illness is found all the same, and nothing is done about it."""
    found_then, found_now = (
        found("open", "POL009", "step")(workshop.run(*ERROR, *more))
        for more in ((), ("health.heal=off",))
    )
    assert found_then == found_now == [3]
    assert_same(workshop.run(*ERROR), workshop.run(*ERROR, "health.heal=off"))


RULE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "plugins" / "rule.py"
# Completions are shorter than this in every run.
LONG = f"health={{rules: ['{RULE}:RULE'], options: {{OWN001: {{min_tokens: 100.0}}}}}}"

CASES: dict[str, Case] = {
    "health.rules": shows(
        LONG, found("open", "OWN001", "level"), was=[], now=["warn"], same="bits"
    ),
    "health.heal": all_of(
        alters("health.heal=all", metric("learning_rate"), base=ERROR),
        keeps_finding,
    ),
    "health.on_error": refuses("health.on_error=halt", "POL009", base=ERROR),
    "health.clear_after": alters(
        "health.clear_after=1", found("cleared", "RWD001", "step"), base=NOW_AND_THEN, same="bits"
    ),
    "health.levels": all_of(
        shows("health.levels={RWD001: error}", found("open", "RWD001", "level"),
              was=["warn"], now=["error"], base=ALWAYS, same="bits"),
        shows("health.levels={RWD001: off}", opened, was=[1], now=[], base=ALWAYS, same="bits"),
    ),
    "health.options": shows(
        ALWAYS[0], opened, was=[], now=[1], base=ALWAYS[1:], same="bits"
    ),
    "health.allow[].code": shows(
        "health.allow=[{code: RWD001, reason: known}]", opened, was=[1], now=[], base=ALWAYS,
        same="bits",
    ),
    "health.allow[].reason": all_of(
        shows("health.allow=[{code: RWD001, reason: known}]", unused, was=[],
              now=[("RWD001", "known")], same="bits"),
        refuses("health.allow=[{code: RWD001}]", "reason"),
    ),
    "health.allow[].until_step": shows(
        "health.allow=[{code: RWD001, reason: known, until_step: 2}]", opened, was=[1], now=[3],
        base=("trainer.max_steps=4", *ALWAYS), same="bits",
    ),
}  # fmt: skip
