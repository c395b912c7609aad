"""Most of what the draft proposes is rejected.

## What it sees
The share of accepted draft tokens below `min_share` on average over the newest records.

## Why it matters
Each rejected token was computed for nothing; below about a third, drafting costs more than it
saves.

## Likely causes
- spec-low-acceptance: a draft whose answers are unlike the policy's, or that looks too far ahead.
- draft-drift: acceptance was better before.

## What to do
Look fewer tokens ahead; train the draft on the policy's own answers, and more often.

## Known false alarms
High temperatures lower acceptance by nature.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import ends, needed
from homeostat.health.view import RunView


class Options(RuleOptions):
    min_share: float = option(
        0.3, "Share of accepted tokens below which drafting costs more than it saves."
    )


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    share = needed(view, "spec/accept_share")
    late = share.tail(5)
    mean = float(late.values.mean())
    if len(share) < 3 or mean >= options.min_share:
        return
    before = ends(share)[0]
    causes = [Cause("spec-low-acceptance", f"{mean:.0%} of the draft is accepted")]
    if before > 1.3 * mean:
        causes.insert(0, Cause("draft-drift", f"it was {before:.0%} at the start"))
    yield Sighting(
        message=f"Only {mean:.0%} of the draft's tokens are accepted (limit "
        f"{options.min_share:.0%}): drafting costs more than it saves. Look fewer tokens ahead, or "
        "train the draft on the policy's answers.",
        causes=tuple(causes),
        fixes=(
            Fix(
                "",
                "3",
                "fewer tokens are drafted ahead",
                theirs={
                    "miles": "--sglang-speculative-num-steps",
                    "vllm": "--speculative-config.num_speculative_tokens",
                    "slime": "--sglang-speculative-num-steps",
                },
            ),
            Fix(
                "",
                "5",
                "the draft is trained more often",
                theirs={"miles": "--enable-mtp-training"},
            ),
        ),
        first_step=int(late.steps[0]),
        last_step=int(late.steps[-1]),
        value=mean,
        limit=options.min_share,
    )


RULE = Rule(
    code="SPC001",
    name="spec-low-acceptance",
    family=Family.SPECULATIVE,
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("spec/accept_share",),
    options=Options,
    explains=("SPC004",),
)
