"""The trained reward rises on held-out prompts, while a gold reward falls from its peak.

## What it sees
The run measures a gold reward, which is not trained on (`role: eval`). After its peak, the gold
reward falls by more than `min_fall` of the peak and more than its noise explains, while the trained
reward rises over the same evaluations. Both either change at every evaluation, or have reached
their final values and stay there: a policy that no longer solves the task earns all that the proxy
gives, and stays there. The rule does not fire on a gold reward that stays near its peak (a plateau)
or that fluctuates.

## Why it matters
A reward model, or a judge, is only a proxy: it is right about completions like those that it was
trained on. The policy now writes completions about which the proxy is wrong, and every further step
makes the model worse (Gao et al. 2022, arXiv:2210.10760).

## Likely causes
- reward-over-optimised: the policy is past the point up to which the proxy can be trusted.
- kl-penalty-missing: nothing holds the policy near the completions that the reward model knows.
- reward-tracks-length: completions also become longer, which reward models and judges tend to
  prefer.
- entropy-collapse: the policy only writes the few texts that the proxy scores highest.

## What to do
Keep the checkpoint at the peak of the gold reward: if a run has a gold reward, it decides which
checkpoint is the best, and `eval.patience` stops the run after the peak. Then hold the policy with
`algorithm.kl`, or train the reward model on completions of the current policy.

## Known false alarms
A gold reward that does not measure the task but, for example, brevity.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed, rank_correlation
from homeostat.health.rules.signs import newest, smooth, trend
from homeostat.health.series.medians import median
from homeostat.health.series.noise import beside_trend
from homeostat.health.view import Kind, RunView, Series

# Rank correlation with time from which on a reward goes one way.
STEADY = 0.6


class Options(RuleOptions):
    min_fall: float = option(0.1, "Share of the gold reward's peak that must be lost.")
    evals: int = option(4, "Evaluations since the peak that there must be, with the peak itself.")
    sigmas: float = option(3.0, "How many times the noise of an evaluation the fall must exceed.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    gold = needed(view, "eval/gold_reward").finite()
    proxy = needed(view, "eval/reward", "reward").finite()
    peak = _peak(gold)
    if peak is None:
        return
    since = gold.since(peak)
    best, now = _level_at(gold, peak), median(since.values[-2:])
    if len(since) < options.evals or not _has_moved(since, best, now, options):
        return
    fall = best - now
    if fall <= options.min_fall * abs(best) or fall <= options.sigmas * beside_trend(gold.values):
        return
    before, after = _proxy_levels(proxy, peak)
    if before is None or after is None:
        return
    if after <= before or not _has_moved(proxy.since(peak), before, after, options):
        return
    if after - before <= options.sigmas * beside_trend(proxy.values):
        return
    yield Sighting(
        message=f"The gold reward fell from {best:.4g} (step {peak}) to {now:.4g} on held-out "
        f"prompts, while the trained reward rose from {before:.4g} to {after:.4g}. The policy is "
        f"past the point up to which this reward can be trusted: use the checkpoint of about step "
        f"{peak}.",
        evidence=(
            f"eval/gold_reward {best:.4g} -> {now:.4g} in {len(since)} evaluations",
            f"{_name(view)} {before:.4g} -> {after:.4g}",
        ),
        causes=tuple(_causes(view, peak)),
        fixes=tuple(_fixes(view)),
        first_step=peak,
        last_step=int(gold.steps[-1]),
        value=now,
        limit=best,
    )


def _peak(gold: Series) -> int | None:
    """Return the step of the highest evaluation of those around which the medians are highest."""
    medians, window = smooth(gold)
    if not len(medians):
        return None
    at = int(medians.values.argmax())
    inside = gold.values[at : at + window]
    return int(gold.steps[at + int(inside.argmax())])


def _has_moved(since: Series, before: float, now: float, options: Options) -> bool:
    """Return whether a series moves from one level to the other, or has arrived and stays there.

    The longer it stays, the less its ranks say of the way that it went, so the newest values count:
    all of them lie beyond the middle.
    """
    way = 1.0 if now > before else -1.0
    newest_values = since.values[-max(1, options.evals - 1) :]
    has_arrived = bool((way * (newest_values - 0.5 * (before + now)) > 0.0).all())
    return has_arrived or way * rank_correlation(since) >= STEADY


def _level_at(series: Series, step: int) -> float:
    """Return the median of an evaluation and its neighbours: a single one is high by luck."""
    at = int(np.searchsorted(series.steps, step))
    return median(series.values[max(0, at - 1) : at + 2])


def _proxy_levels(proxy: Series, peak: int) -> tuple[float | None, float | None]:
    since = proxy.since(peak)
    if len(since) < 2:
        return None, None
    count = max(1, len(since) // 4)
    # The level at the peak is that of a few evaluations, however long the run lasted after it.
    return median(since.values[: min(count, 3)]), median(since.values[-count:])


def _name(view: RunView) -> str:
    return "eval/reward" if view.series("eval/reward") is not None else "reward"


def _causes(view: RunView, peak: int) -> Iterator[Cause]:
    yield Cause("reward-over-optimised", "gold and trained reward part ways at the peak")
    if view.setting("algorithm.kl", default=None) is None and view.series("kl") is None:
        yield Cause("kl-penalty-missing", "algorithm.kl is not set")
    length = view.series("completions/mean_length")
    grown = trend(length.since(peak)) if length is not None else None
    if grown is not None and grown.rises and grown.end > 1.2 * grown.start:
        what = f"completions grew from {grown.start:.0f} to {grown.end:.0f} tokens"
        yield Cause("reward-tracks-length", what)
    entropy, now = trend(view.series("entropy")), newest(view, "entropy")
    if entropy is not None and now is not None and entropy.falls and now < 0.2 * entropy.start:
        yield Cause("entropy-collapse", f"entropy fell from {entropy.start:.3g} to {now:.3g}")


def _fixes(view: RunView) -> Iterator[Fix]:
    if view.setting("eval.patience", default=None) is None:
        yield Fix("eval.patience", "3", "stops where the gold reward stops improving")
    yield Fix(
        "algorithm.kl.coefficient", "0.01 or more", "holds the policy near the start", Grade.UNSAFE
    )
    newer = "a reward model trained on newer completions"
    yield Fix("rewards.functions", newer, "the present one is wrong here")


RULE = Rule(
    code="RWD016",
    name="reward-over-optimised",
    family=Family.REWARD,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("eval/gold_reward", "eval/reward|reward"),
    kinds=(Kind.RL,),
    options=Options,
    # What the proxy pays for is all that the policy still writes: one text, up to the limit.
    explains=("GEN001", "POL001", "POL015"),
)
