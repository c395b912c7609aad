"""The training reward rises, while the reward on held-out prompts falls.

## What it sees
The training reward rises by more than noise, while the reward (or accuracy) on held-out prompts
falls by more than `min_fall` of its first value and by more than its noise explains, over at least
`evals` evaluations. If the held-out reward rose first, it must fall from its best value as in
RWD006. Where only scores of benchmarks are logged, at least half of them must fall, and none may
rise.

## Why it matters
The policy has found something that the reward pays for but that was not meant. Further training
makes the model worse.

## Likely causes
- reward-hacking: the training reward can be earned without solving the task.
- entropy-collapse: the policy became certain instead of right.
- overfitting: there are few prompts, and the policy has memorised them.

## What to do
Read completions with a high reward. Close the loophole, change the weights of the rewards, add a KL
penalty, and go back to the checkpoint that was best on held-out prompts.

## Known false alarms
Held-out prompts from another task than the training prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import rank_correlation
from homeostat.health.rules.reward.rwd006_reward_collapse import Options as Collapse
from homeostat.health.rules.reward.rwd006_reward_collapse import fall_of
from homeostat.health.rules.signs import newest, trend
from homeostat.health.series.noise import beside_trend
from homeostat.health.view import Kind, RunView, Series

# Words of measures beside a benchmark's score.
_NO_SCORE = re.compile(
    r"(?:^|[/_.-])(?:std|truncated|clip|clipped|len|length|lengths|tokens?|turns|time|runtime|second"
    r"|seconds|count|loss|kl|entropy|format|repetition|worst)(?:$|[/_.@-])",
    re.IGNORECASE,
)


class Options(RuleOptions):
    min_fall: float = option(0.1, "Share of the first held-out reward that must be lost.")
    evals: int = option(4, "Evaluations that there must be.")
    sigmas: float = option(3.0, "How many times the noise of an evaluation the fall must exceed.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    reward = view.series("reward")
    assert reward is not None, "needs says so"
    held_outs = _held_out(view)
    if not held_outs:
        yield Unknown("no reward or score on held-out prompts was logged")
        return
    falling = [one for one in held_outs if len(one) >= options.evals and _falls(one, options)]
    if 2 * len(falling) < len(held_outs) or not falling or any(map(_rises, held_outs)):
        return
    held_out = max(falling, key=lambda one: 1.0 - one.latest / (float(one.values.max()) or 1.0))
    start, best = held_out.first, float(held_out.values.max())
    rise = trend(reward)
    if rise is None or not rise.rises:
        return
    at = int(held_out.steps[int(held_out.values.argmax())])
    yield Sighting(
        message=f"The training reward rose from {rise.start:.4g} to {rise.end:.4g} while the "
        f"held-out reward fell from {best:.4g} (step {at}) to {held_out.latest:.4g}. Read "
        "completions with a high reward.",
        evidence=(
            f"reward {rise.start:.4g} -> {rise.end:.4g}",
            f"held-out {start:.4g} -> {held_out.latest:.4g} in {len(held_out)} evaluations",
        ),
        causes=tuple(_causes(view)),
        fixes=(
            Fix(
                "rewards.functions",
                "a reward without the loophole",
                "the present one rewards something else",
            ),
            Fix(
                "algorithm.kl.coefficient",
                "0.001 or more",
                "holds the policy near the reference",
                Grade.UNSAFE,
            ),
        ),
        first_step=at,
        last_step=int(held_out.steps[-1]),
        value=held_out.latest,
        limit=best,
    )


def _falls(held_out: Series, options: Options) -> bool:
    lost = held_out.first - held_out.latest
    # Few held-out prompts, answered greedily, move by a fifth from one evaluation to the next.
    least = max(
        options.min_fall * abs(held_out.first), options.sigmas * beside_trend(held_out.values)
    )
    if lost > least and rank_correlation(held_out) < -0.7:
        return True
    # Many evaluations may rise first: then the fall is one from their best.
    return fall_of(held_out, Collapse()) is not None


def _rises(held_out: Series) -> bool:
    course = trend(held_out)
    return course is not None and course.rises


def _held_out(view: RunView) -> list[Series]:
    """Return the held-out reward, or the scores of all benchmarks if there is none."""
    found = view.series("eval/reward", "eval/pass@1")
    if found is None:
        found = next(iter(view.matching("eval/rewards/", "/mean").values()), None)
    if found is not None:
        return [found.finite()]
    scores = view.matching("eval/score/").items()
    return [one.finite() for name, one in scores if _NO_SCORE.search(name) is None]


def _causes(view: RunView) -> Iterator[Cause]:
    yield Cause("reward-hacking", "the two rewards part ways")
    entropy, now = trend(view.series("entropy")), newest(view, "entropy")
    if entropy is not None and now is not None and entropy.falls and now < 0.2 * entropy.start:
        yield Cause("entropy-collapse", f"entropy fell from {entropy.start:.3g} to {now:.3g}")
    epochs = view.latest("epoch")
    if epochs is not None and epochs > 5:
        yield Cause("overfitting", f"the prompts were seen {epochs:.0f} times")


RULE = Rule(
    code="RWD007",
    name="reward-hacking",
    family=Family.REWARD,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
)
