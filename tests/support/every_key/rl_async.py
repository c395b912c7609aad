"""Cases of the keys of sampling ahead of the trainer."""

from __future__ import annotations

from tests.support.every_key.rl_sampling import HELD_OUT
from tests.support.every_key.rl_sync import OWN, warm
from tests.support.every_key.workshop import Case, Run, Workshop, all_of, refuses, shows

STEPS = "trainer.max_steps=3"
AHEAD = (*OWN, STEPS, "rollout.max_staleness=1")
EVALUATED = ("trainer.max_steps=4", "eval={interval_steps: 2, keep_best: false}")
# Completions that take longer than an update: many, a few at a time by the slowest decode path.
LONG = (
    "rollout.samples_per_prompt=8", "rollout.max_new_tokens=40", "engine.max_concurrency=4",
    "engine.decode=plain",
)  # fmt: skip


def stale(run: Run) -> list[float]:
    return run.metric("stale/steps/max")


def evaluated_versions(run: Run) -> dict[int, float]:
    steps = run.steps_with("eval/policy_version")
    return dict(zip(steps, run.metric("eval/policy_version"), strict=True))


def unfinished_completions_continue(workshop: Workshop) -> None:
    """A publication cuts off what is being sampled, which then has tokens of two versions."""
    whole, partial = (
        workshop.run(*AHEAD, *LONG, *more) for more in ((), ("rollout.partial=true",))
    )
    assert set(whole.metric("stale/mixed_share")) == {0.0}
    assert max(partial.metric("stale/mixed_share")) > 0.0


def staged(run: Run) -> list[bool]:
    """For each step, whether weights were sent while the engine sampled."""
    steps = run.steps_with("sync/staged_seconds")
    return [step in steps for step in (1, 2, 3)]


CASES: dict[str, Case] = {
    "sync.overlap": all_of(
        warm(
            shows(
                "sync.overlap=always", staged, was=[False] * 3, now=[True] * 3, base=AHEAD,
                same="bits",
            )
        ),
        warm(refuses("sync.overlap=always", "the engine and the trainer take turns", base=OWN)),
        refuses("sync.overlap=always", "nothing is sent"),
    ),
    "rollout.max_staleness": all_of(
        warm(
            shows("rollout.max_staleness=1", stale, was=[0] * 3, now=[0, 1, 1], base=(*OWN, STEPS))
        ),
        warm(refuses("engine.own_process=false", "take turns", base=AHEAD)),
    ),
    "rollout.partial": warm(unfinished_completions_continue),
    "eval.sampling.blocking": warm(
        shows(
            "eval.sampling.blocking=false", evaluated_versions, was={2: 2, 4: 4}, now={3: 2, 4: 4},
            base=(*AHEAD, *EVALUATED, *HELD_OUT), same="bits",
        )
    ),
}  # fmt: skip
