"""Devices sample very few answers at a time, while the trainer waits.

## What it sees
The number of answers that a device writes at a time (tokens per second and device, divided by the
tokens per second of one answer) is below `min_concurrency`, and the trainer waits for `min_wait` of
the step or more.

## Why it matters
A device writes hundreds of answers in nearly the time of one. With a few at a time most of it is
idle, and everything waits for it.

## Likely causes
- rollout-underutilised: an engine spread over too many devices, too low a limit of requests, too
  few prompts.
- long-tail-generation: a few very long answers at the end of each round.

## What to do
One device per engine for small models, a higher limit of concurrent requests, more samples per
round; train by a token budget.

## Known false alarms
Rounds of a few prompts cannot fill a device.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    min_concurrency: float = option(4.0, "Answers at a time below which a device idles.")
    min_wait: float = option(0.3, "Share of the step that trainers wait.")
    min_records: int = option(3, "Number of records that are needed.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    all_of = needed(view, "throughput/tokens_per_s_per_device", "engine/tokens_per_s")
    one = needed(view, "engine/longest_tokens_per_s")
    if len(all_of) < options.min_records or len(one) < options.min_records:
        return
    rate, single = median(all_of.values), median(one.values)
    at_once = rate / max(single, 1e-9)
    wait = _wait(view)
    if at_once >= options.min_concurrency or wait is None or wait < options.min_wait:
        return
    step = view.latest("time/step")
    yield Sighting(
        message=f"A device samples {rate:.4g} tokens/s while a single answer runs at "
        f"{single:.3g}: about {at_once:.1f} answers at a time (usual: more than "
        f"{options.min_concurrency:g}), and trainers wait {wait:.0%} of the step. Use fewer "
        "devices per engine and more concurrent requests.",
        evidence=(
            f"waiting {wait:.0%}",
            f"a step takes {step:.3g} s" if step else "sampling is slow",
        ),
        causes=tuple(_causes(view)),
        fixes=(
            Fix(
                "engine.tensor_parallel_size",
                "1",
                "one device per engine",
                Grade.SAFE,
                theirs={"slime": "--rollout-num-gpus-per-engine"},
            ),
            Fix(
                "engine.max_concurrency",
                "more",
                "more answers at a time",
                Grade.SAFE,
                theirs={"slime": "--sglang-server-concurrency"},
            ),
            Fix(
                "trainer.max_tokens_per_device",
                "what fits",
                "updates by tokens",
                Grade.SAFE,
                theirs={"slime": "--use-dynamic-batch-size, --max-tokens-per-gpu"},
            ),
        ),
        first_step=int(all_of.steps[0]),
        last_step=int(all_of.steps[-1]),
        value=at_once,
        limit=options.min_concurrency,
    )


def _wait(view: RunView) -> float | None:
    """Share of a step that trainers wait for samples."""
    share = view.series("time/wait_share")
    if share is not None:
        return median(share.values)
    wait, step = view.series("time/wait"), view.series("time/step")
    if wait is None or step is None:
        return None
    return median(wait.values) / max(median(step.values), 1e-9)


def _causes(view: RunView) -> Iterator[Cause]:
    yield Cause("rollout-underutilised", "few answers at a time on each device")
    longest, mean = view.latest("completions/max_length"), view.latest("completions/mean_length")
    if longest is not None and mean is not None and longest > 6 * mean:
        yield Cause(
            "long-tail-generation", f"the longest answer is {longest / mean:.0f} times the mean"
        )


RULE = Rule(
    code="PRF001",
    name="rollout-underutilised",
    family=Family.PERFORMANCE,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("throughput/tokens_per_s_per_device|engine/tokens_per_s", "engine/longest_tokens_per_s"),
    kinds=(Kind.RL,),
    options=Options,
    explains=("PRF002",),
)
