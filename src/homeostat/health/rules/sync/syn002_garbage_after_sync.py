"""Answers turn to garbage from one step to the next, right after weights were published.

## What it sees
Between two records, most often the first and the second: completions jump to the length limit, or
their log-prob under the trainer falls by `min_drop` nats, or samples turn from text to a mixture of
scripts, while the reward is lost. The policy itself has not moved: its KL from the reference stays
small, or trainer and reference both find the engine's text improbable, or the engine woke up just
before while updates were small.

## Why it matters
What the engine holds after the publication is not the model that is trained. All that follows is
training on garbage.

## Likely causes
- weight-conversion-wrong: names, layouts or shards are converted wrongly on the way.
- sleep-wake-weights-lost: the engine frees its memory between steps and gets damaged weights back.
- fp8-rollout-garbage: the engine quantises, and the scales of the first load are used for the new
  weights.
- lora-not-synced: an adapter is merged or loaded wrongly.
- weight-reload-corrupts-moe: fused expert weights are written again in the wrong layout.

## What to do
Compare a few weights, or a greedy answer, of engine and trainer before and after the first
publication. Switch sleep, quantisation and merging off one at a time.

## Known false alarms
A policy that collapses over several steps is another illness: there the KL grows with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import (
    has_adapter,
    is_moe,
    is_true,
    mean_before,
    mean_since,
    peak_rate,
    raw,
    usual_rates,
)
from homeostat.health.rules.sync.garble import is_garbled
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView

_READ = ("sampling/trainer_logp/mean", "completions/clipped_ratio")


class Options(RuleOptions):
    min_drop: float = option(2.0, "Nats that the tokens' log-prob falls by at once.")
    early: int = option(6, "Number of records from the start among which it must happen.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    if view.series(*_READ) is None and not view.samples:
        yield Unknown("neither log-probs, lengths nor samples were logged")
        return
    step = _jump(view, options)
    if step is None:
        return
    before, after = _readable(view, step)
    signs = tuple(_signs(view, step)) + (after,) * bool(after)
    if not signs or _policy_moved(view, step):
        return
    causes = tuple(_causes(view))
    yield Sighting(
        message=f"Answers are garbage from step {step} on, at once and after good ones: "
        f"{'; '.join(signs)}. The engine does not hold the weights that are trained: compare both "
        "after a publication.",
        evidence=signs + ((before,) if before else ()),
        causes=causes,
        fixes=(
            Fix(
                "sync.verify",
                "true",
                "compares the engine's weights with the trainer's",
                Grade.SAFE,
            ),
            Fix(
                "engine.sleep",
                "false",
                "the engine keeps its weights between steps",
                Grade.SAFE,
                theirs={"verl": "actor_rollout_ref.rollout.free_cache_engine"},
            ),
        ),
        first_step=step,
        last_step=view.last_step,
    )


def _jump(view: RunView, options: Options) -> int | None:
    """The step at which answers changed at once, and for good."""
    for name, least in (
        ("sampling/trainer_logp/mean", options.min_drop),
        ("completions/clipped_ratio", 0.6),
    ):
        series = view.series(name)
        values = series.finite() if series is not None else None
        if values is None or len(values) < 3:
            continue
        change = np.abs(np.diff(values.values))
        at = int(np.argmax(change))
        first, rest = values.values[: at + 1], values.values[at + 1 :]
        apart = abs(median(rest) - median(first))
        steady = np.ptp(rest) < 0.5 * apart and np.ptp(first) < 0.5 * apart
        if change[at] >= least and apart >= least and steady and at < options.early:
            return int(values.steps[at + 1])
    texts = [(sample.step, is_garbled(sample.text)) for sample in view.samples]
    for (_, good), (step, bad) in pairwise(texts):
        if not good and bad and step is not None and any(flag for _, flag in texts[-2:]):
            return step
    return None


def _readable(view: RunView, step: int) -> tuple[str, str]:
    good = [s for s in view.samples if (s.step or 0) < step and not is_garbled(s.text)]
    bad = [s for s in view.samples if (s.step or 0) >= step and is_garbled(s.text)]
    before = f"before: {good[-1].text.strip()[:60]!r}" if good else ""
    return before, f"a sample reads {bad[0].text.strip()[:60]!r}" if bad else ""


def _signs(view: RunView, step: int) -> Iterator[str]:
    for name, what, form in (
        ("sampling/trainer_logp/mean", "the trainer's log-prob of its tokens", ".3g"),
        ("completions/clipped_ratio", "the share that runs to the limit", ".0%"),
        ("reward", "the reward", ".3g"),
    ):
        before, after = mean_before(view, name, step=step), mean_since(view, name, step=step)
        if before is None or after is None or abs(after - before) < 0.3 * max(abs(before), 0.05):
            continue
        yield f"{what} went from {before:{form}} to {after:{form}}"


def _policy_moved(view: RunView, step: int) -> bool:
    """Return whether the policy itself may have changed.

    It may have if engine and trainer agree on what it writes, if its KL from the reference grew
    with it, or if nothing shows that it did not.
    """
    gap = mean_since(view, "sampling/sampling_logp_difference/mean", step=step)
    if gap is not None:
        return gap < 0.2
    trainer = mean_since(view, "sampling/trainer_logp/mean", step=step)
    reference = mean_since(view, "sampling/reference_logp/mean", step=step)
    if trainer is not None and reference is not None:
        return abs(trainer - reference) > 1.0
    far = mean_since(view, "kl", step=step)
    if far is not None and far > 1.0 and _woke_at_rest(view, step):
        return False
    return far > 1.0 if far is not None else not any(is_garbled(s.text) for s in view.samples)


def _woke_at_rest(view: RunView, step: int) -> bool:
    """Return whether the engine woke just before, after updates too small to change a policy.

    It also counts if what the engine writes since then is garbled.
    """
    woke = [event.step for event in view.events_of("engine_woke") if event.step is not None]
    rate, usual = peak_rate(view), usual_rates(view)
    before, pulls = mean_before(view, "kl", step=step), view.series("grad_norm")
    if not {step - 1, step} & set(woke) or before is None or before > 0.05:
        return False
    if rate is None or usual is None or rate > usual.high:
        return False
    pull = pulls.before(step).finite().values if pulls is not None else np.zeros(0)
    is_calm = len(pull) > 0 and pull.max() <= min(3.0, 10.0 * median(pull))
    return is_calm or any(is_garbled(sample.text) for sample in view.samples)


def _causes(view: RunView) -> Iterator[Cause]:
    quantised = str(raw(view, "rollout.quantization", "quantization") or "").lower()
    if "fp8" in quantised:
        yield Cause("fp8-rollout-garbage", "the engine quantises to FP8")
    slept = raw(view, "free_cache_engine", "vllm_enable_sleep_mode", "enable_sleep_mode")
    if is_true(slept) or is_true(view.setting("engine.sleep")) or view.events_of("engine_slept"):
        yield Cause("sleep-wake-weights-lost", "the engine sleeps between steps")
    if has_adapter(view):
        yield Cause("lora-not-synced", "an adapter is trained")
    yield Cause("weight-conversion-wrong", "good before the publication, garbage after it")
    if is_moe(view):
        yield Cause("weight-reload-corrupts-moe", "the model has experts")


RULE = Rule(
    code="SYN002",
    name="garbage-after-weight-sync",
    family=Family.SYNC,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    kinds=(Kind.RL,),
    options=Options,
    explains=(
        "RWD001",
        "QNT001",
        "RWD002",
        "RWD004",
        "RWD006",
        "GEN001",
        "GEN002",
        "GEN004",
        "OFF001",
        "OFF002",
        "POL002",
        "POL011",
        "POL013",
    ),
)
