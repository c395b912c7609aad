"""The reward for the form of an answer rises, but the reward for a right answer does not.

## What it sees
Among several reward functions, one about form (by its type or its name: format, tags, style) rises
to `near` of its maximum, from well below. One about the content stays below `low` of its maximum
over `fire` records, `after` of them since the form is learned, and has certainly not risen: even
with its noise counted in favour of a rise (two standard errors), it gained less than `gain` of its
maximum.

## Why it matters
The total rises, so the run seems to learn. But the policy has only learned to write tags: on the
task itself it is no better than before, or worse.

## Likely causes
- reward-learns-format-only: the form earns as much as a right answer and is far easier to learn, or
  the check of the content never accepts the new form.

## What to do
Look at completions of the newest steps: are answers wrong, or are right ones not recognised? Lower
the weight of the form to a tenth or less of the content's, or reward the form only if the answer is
right. Check that the verifier finds the answer inside the form.

## Known false alarms
The first steps of many runs look like this, because the form is learned first. The rule judges only
after `fire` records, and gives the content `after` records from the form on. If steps have few
prompts, the noise of the content's reward is larger than the gain to be expected so far; the rule
then waits for more records.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.signs import Trend, reward_functions, trend
from homeostat.health.view import Kind, RunView, Series

_FORM = re.compile(r"form|tag|xml|style|markup|think|structure|length|language", re.I)


class Options(RuleOptions):
    fire: int = option(20, "Number of records that are needed.")
    after: int = option(10, "Records since the form was learned that the content has to rise.")
    near: float = option(0.85, "Share of its maximum at which the form is learned.")
    low: float = option(0.4, "Share of its maximum below which the content is not.")
    gain: float = option(0.1, "Share of its maximum that the content must not have gained.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    functions = {n: s for n, s in reward_functions(view).items() if len(s) >= options.fire}
    forms = {name for name in functions if _is_form(view, name)}
    courses = {name: course for name, s in functions.items() if (course := trend(s)) is not None}
    if not forms & courses.keys() or not courses.keys() - forms:
        yield Unknown("there are no rewards of form and of content over enough records")
        return
    for name in sorted(forms & courses.keys()):
        top = _top(functions[name])
        course = courses[name]
        if not course.rises or course.end < options.near * top or course.start > 0.8 * top:
            continue
        if len(functions[name]) - _learned_at(functions[name], options) < options.after:
            continue
        content = {n: c for n, c in courses.items() if n not in forms}
        stuck = {n: c for n, c in content.items() if _is_stuck(functions[n], c, options)}
        if stuck and len(stuck) == len(content):
            yield _sighting(functions, name, course, stuck, options)
            return


def _is_form(view: RunView, name: str) -> bool:
    """Return whether a reward is about the form of an answer, by its type or its name."""
    for one in view.setting("rewards.functions", default=()) or ():
        if isinstance(one, dict) and str(one.get("name") or one.get("type")) == name:
            if one.get("type") == "regex_format":
                return True
    return _FORM.search(name) is not None


def _learned_at(form: Series, options: Options) -> int:
    """Return the place of the first record in which the form is learned."""
    return int((form.finite().values >= options.near * _top(form)).argmax())


def _top(series: Series) -> float:
    """Return the most that a function gives: 1, or the most that was seen if that is more."""
    return max(1.0, float(series.finite().values.max()))


def _is_stuck(series: Series, course: Trend, options: Options) -> bool:
    """Return whether the content has not been learned, and is known not to be rising.

    A rise that the noise hides is no standstill, so the noise is counted in favour of a rise.
    """
    top = _top(series)
    if course.end >= options.low * top or (course.rises and course.change > 0.05 * top):
        return False
    return course.change + 2.0 * course.chance < options.gain * top


def _sighting(
    functions: dict[str, Series],
    name: str,
    course: Trend,
    stuck: dict[str, Trend],
    options: Options,
) -> Sighting:
    form, others = functions[name], ", ".join(stuck)
    worst = max(stuck.values(), key=lambda one: one.end)
    learned, at = form.finite(), _learned_at(form, options)
    return Sighting(
        message=f"The reward {name} rose from {course.start:.2g} to {course.end:.2g}, and {others} "
        f"went from {worst.start:.2g} to {worst.end:.2g}: the form is learned, and not the task. "
        "Pay less for the form, or only where the answer is right.",
        evidence=(
            f"rewards/{name}/mean {course.start:.3g} -> {course.end:.3g}",
            *(f"rewards/{n}/mean {c.start:.3g} -> {c.end:.3g}" for n, c in stuck.items()),
        ),
        causes=(
            Cause("reward-learns-format-only", f"{name} rises alone"),
            Cause("verifier-format-mismatch", "the check may not find the answer in its new form"),
        ),
        fixes=(
            Fix(
                "rewards.functions",
                f"{name}: a tenth of the others' weight",
                "being right must earn more",
                Grade.UNSAFE,
                theirs={"trl": "reward_weights"},
            ),
        ),
        first_step=int(learned.steps[at]),
        last_step=int(learned.steps[-1]),
        value=worst.end,
        limit=options.low,
    )


RULE = Rule(
    code="RWD017",
    name="reward-learns-format-only",
    family=Family.REWARD,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("reward",),
    kinds=(Kind.RL,),
    options=Options,
    explains=("RWD001", "RWD003", "RWD005", "RWD006", "RWD015"),
)
