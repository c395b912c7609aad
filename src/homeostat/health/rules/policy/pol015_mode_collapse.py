"""All samples of a prompt, or all prompts, get one and the same answer.

## What it sees
The share of distinct texts is no more than one per prompt in `fire` of the newest `window` records,
solved answers left out; or printed completions of different prompts are the same text.

## Why it matters
Groups of copies have no difference to learn from, and a policy with one answer for everything has
stopped reading its prompt.

## Likely causes
- mode-collapse: one answer collects the reward.
- entropy-collapse: every token is certain.
- group-size-one: one sample per prompt cannot differ from itself.

## What to do
Go back to a checkpoint with variety, raise temperature or the KL penalty, lower the learning rate.
Check that the engine samples (temperature above 0, a new seed for each sample).

## Known false alarms
A game with two or three possible answers: the rule recognises it by groups whose rewards differ,
now or at the start. Solved tasks with short answers: the finding is at most information. Batches
that contain the same prompt many times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import highest_reward, newest, trend
from homeostat.health.series.medians import median
from homeostat.health.series.windows import Spell, newest_spell
from homeostat.health.view import Kind, RunView, Series
from homeostat.health.words import shortened


class Options(RuleOptions):
    max_solved: float = option(0.85, "Share of solved answers above which there is nothing to see.")
    slack: float = option(1.1, "Distinct texts per prompt that still count as copies.")
    fire: int = option(4, "Number of records that must show it ...")
    window: int = option(6, "... within a window of this many.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    same = _one_text(view)
    if same is not None:
        text, num, step = same
        yield _sighting(
            view, f"{num} prompts got the same answer, {shortened(text, 60)!r}", step, None
        )
        return
    distinct, samples = (
        view.series("completions/distinct_share"),
        view.number("rollout.samples_per_prompt"),
    )
    if distinct is None or not samples or samples < 2:
        return
    limit = options.slack / samples
    if _few_answers(view, distinct, limit):
        return
    # A solved group of a task with one right answer holds one text by right: only the texts of the
    # other groups are counted, where there are some.
    solved = _solved(view, distinct)
    unsolved = np.maximum(1.0 - solved, 1e-9)
    copied = (distinct.values * samples - solved) / unsolved <= options.slack
    copied &= solved <= options.max_solved
    spell = newest_spell(copied, fire=options.fire, window=options.window, clear=3)
    if spell is not None and spell.is_open and not _differ(view, int(distinct.steps[spell.start])):
        share = float(np.mean(distinct.values[spell.start : spell.end + 1]))
        said = f"{share:.1%} of the texts are distinct with {samples:.0f} samples per prompt"
        yield _sighting(view, said, _began(distinct, spell), share)


def _solved(view: RunView, distinct: Series) -> FloatArray64:
    """At each record the share of answers that earn all there is; 0 where that is not known."""
    reward, top = view.series("reward"), highest_reward(view)
    shares = np.zeros(len(distinct))
    if reward is None or not top or top <= 0.0:
        return shares
    mine, theirs = distinct.on(reward)
    shares[np.isin(distinct.steps, mine.steps)] = np.clip(theirs.values / top, 0.0, 1.0)
    return np.nan_to_num(shares)


def _began(distinct: Series, spell: Spell) -> int:
    """The step from which on texts were less than half as varied as at the start."""
    varied = np.flatnonzero(distinct.values[: spell.start] > 0.5 * median(distinct.values[:5]))
    return int(distinct.steps[varied[-1] + 1 if len(varied) else spell.start])


def _few_answers(view: RunView, distinct: Series, limit: float) -> bool:
    """Texts were as few at the start, when samples of a group earned differently: the task has only
    so many answers, and their number says nothing of copies."""
    alike = view.series("frac_reward_zero_std")
    if alike is None or median(distinct.values[:5]) > limit:
        return False
    return median(alike.values[:5]) < 0.5


def _differ(view: RunView, step: int) -> bool:
    """Samples of a group earn differently, so they are no copies: there are few answers at all."""
    alike = view.series("frac_reward_zero_std")
    later = alike.since(step).finite() if alike is not None else None
    return later is not None and len(later) > 0 and median(later.values) < 0.7


def _one_text(view: RunView) -> tuple[str, int, int | None] | None:
    """A text that stands for most of the newest samples of several prompts."""
    newest_step = max((s.step for s in view.samples if s.step is not None), default=None)
    samples = [s for s in view.samples if s.step == newest_step and s.prompt and s.text.strip()]
    prompts = {sample.prompt for sample in samples}
    texts = Counter(sample.text.strip() for sample in samples)
    if len(prompts) < 2 or not texts:
        return None
    text, num = texts.most_common(1)[0]
    shared = {sample.prompt for sample in samples if sample.text.strip() == text}
    # A short answer ("4", "yes") may be right for several prompts.
    if len(shared) < 2 or num < 0.8 * len(samples) or len(text.split()) < 4:
        return None
    return text, len(shared), newest_step


def _sighting(view: RunView, said: str, first: int | None, share: float | None) -> Sighting:
    entropy, now = trend(view.series("entropy")), newest(view, "entropy")
    causes = [Cause("mode-collapse", said)]
    if entropy is not None and now is not None and now < max(0.02, 0.2 * entropy.start):
        causes.append(Cause("entropy-collapse", f"entropy is {now:.3g}"))
    return Sighting(
        message=f"{said[0].upper()}{said[1:]}: the policy gives copies. Check temperature and KL.",
        evidence=(said,),
        causes=tuple(causes),
        fixes=(
            Fix("rollout.temperature", "1.0", "samples vary", Grade.UNSAFE),
            Fix("algorithm.kl.coefficient", "0.001 or more", "holds the policy", Grade.UNSAFE),
            Fix("trainer.lr", "a half to a fifth", "smaller steps", Grade.UNSAFE),
        ),
        first_step=first,
        last_step=view.last_step,
        value=share,
    )


RULE = Rule(
    code="POL015",
    name="mode-collapse",
    family=Family.POLICY,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    kinds=(Kind.RL,),
    options=Options,
    explains=("RWD001",),
)
