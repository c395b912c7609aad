"""The policy's entropy has fallen to almost nothing before the task was solved.

## What it sees
Entropy per token below `floor` in `fire` of the newest `window` records, after a fall to less than
a fifth of its first value. If the held-out reward falls at the same time, five times that floor is
enough.

## Why it matters
A policy that is certain of every token samples the same answer again and again: the answers of a
group do not differ, nothing new is tried, and mistakes are never corrected.

## Likely causes
- lr-too-high: a few large updates made the policy certain too early.
- reward-hacking: the reward pays for certainty, or one text earns all of it.
- mode-collapse: samples of a prompt are copies of each other.
- entropy-collapse: nothing keeps the entropy up: no entropy bonus, no KL penalty, or a tight upper
  clip range.

## What to do
Go back to a checkpoint with more entropy. Raise the temperature or the upper clip range, add a KL
penalty or a small entropy bonus, lower the learning rate, take more prompts per step.

## Known false alarms
Entropy falls in every run that learns. The finding is only information while the reward is near its
maximum, and nothing is reported above the floor. Tasks with one right answer have a low entropy
from the start.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import rank_correlation
from homeostat.health.rules.signs import newest, solved_share, trend
from homeostat.health.series.windows import newest_spell
from homeostat.health.view import Kind, RunView, Series


class Options(RuleOptions):
    floor: float = option(0.02, "Entropy per token, in nats, that is almost nothing.")
    fall: float = option(0.2, "Share of the first entropy that it must have fallen below.")
    fire: int = option(3, "Number of records that must show it ...")
    window: int = option(6, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    entropy = view.series("entropy")
    assert entropy is not None, "needs says so"
    worse = _held_out_falls(view)
    limit = options.floor * (5.0 if worse else 1.0)
    start = float(entropy.finite().head(3).values.mean()) if len(entropy.finite()) else 0.0
    low = (entropy.values < limit) & (entropy.values >= 0.0)
    spell = newest_spell(
        low & (entropy.values < options.fall * start),
        fire=options.fire,
        window=options.window,
        clear=4,
    )
    if spell is None or not spell.is_open:
        return
    now, first = float(entropy.values[spell.end]), int(entropy.steps[spell.start])
    reached = solved_share(view)
    solved = reached is not None and reached >= 0.9 and not worse
    yield Sighting(
        message=f"Entropy fell from {start:.3g} to {now:.3g} nats per token (below {limit:.3g} "
        f"since step {first})"
        + (": the task is solved." if solved else ": the policy cannot try anything new."),
        evidence=tuple(_evidence(view, entropy, start)),
        causes=tuple(_causes(view, worse=worse, solved=solved)),
        fixes=_fixes(solved=solved),
        first_step=first,
        last_step=int(entropy.steps[spell.end]),
        value=now,
        limit=limit,
        level=Level.INFO if solved else None,
        confidence=Confidence.INFERRED if worse else None,
    )


def _held_out_falls(view: RunView) -> bool:
    found = view.series("eval/reward", "eval/pass@1")
    found = found.finite() if found is not None else None
    if found is None or len(found) < 3:
        return False
    return found.latest < 0.9 * found.first and rank_correlation(found) < -0.7


def _evidence(view: RunView, entropy: Series, start: float) -> Iterator[str]:
    yield f"entropy {start:.3g} -> {entropy.latest:.3g}"
    reward = trend(view.series("reward"))
    if reward is not None:
        yield f"reward {reward.start:.3g} -> {reward.end:.3g}"
    distinct = newest(view, "completions/distinct_share")
    if distinct is not None:
        yield f"distinct texts {distinct:.0%}"


def _causes(view: RunView, *, worse: bool, solved: bool) -> Iterator[Cause]:
    if solved:
        yield Cause("reward-saturated", "the reward is near its maximum")
    reward = trend(view.series("reward"))
    if worse and reward is not None and reward.rises:
        yield Cause("reward-hacking", "reward rises while the held-out one falls")
    distinct, samples = (
        newest(view, "completions/distinct_share"),
        view.number("rollout.samples_per_prompt"),
    )
    if not solved and distinct is not None and samples and distinct * samples < 1.5:
        yield Cause("mode-collapse", f"{distinct:.0%} of the texts are distinct")
    grads = trend(view.series("grad_norm"))
    if grads is not None and grads.rises and grads.end > 5 * grads.start:
        yield Cause("lr-too-high", "gradients have grown")
    yield Cause("entropy-collapse", "the policy is sure of almost every token")


def _fixes(*, solved: bool) -> tuple[Fix, ...]:
    if solved:
        return (Fix("data.train", "harder prompts", "these are solved"),)
    return (
        Fix("trainer.lr", "a half to a fifth", "smaller steps", Grade.UNSAFE),
        Fix(
            "algorithm.kl.coefficient",
            "0.001 or more",
            "holds the policy near the reference",
            Grade.UNSAFE,
        ),
        Fix("algorithm.clip_high", "0.28", "lets unlikely tokens grow", Grade.UNSAFE),
        Fix("algorithm.entropy_bonus", "0.001", "rewards variety", Grade.UNSAFE),
        Fix("rollout.temperature", "1.0", "samples vary more", Grade.UNSAFE),
        Fix("rollout.prompts_per_step", "more", "steadier updates", Grade.UNSAFE),
    )


RULE = Rule(
    code="POL001",
    name="entropy-collapse",
    family=Family.POLICY,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("entropy",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("POL015", "RWD001", "RWD007"),
)
