"""The engine's log-probs differ from the trainer's from the start, by more than rounding.

## What it sees
The distance of log-probs (or probabilities, or a KL estimate) on sampled tokens is above its limit
(`nats` for log-probs) in the first records and the newest ones alike, without growing, though the
samples are of the current weights.

## Why it matters
The gradient treats the engine's samples as the policy's own. If the two models differ, every update
is off-policy by an amount that no learning rate cures, and runs that look fine collapse later.

## Likely causes
- moe-routing-mismatch: other experts are chosen in the engine.
- fp8-rollout-garbage, lora-not-synced, sleep-wake-weights-lost: the engine serves other weights:
  differences of a nat and more, and a reward near 0.
- truncated-sampling-logprob-bias: the engine's log-probs are those after top-k or top-p.
- engine-logprob-mismatch: other kernels, precision, temperature or logits processing.

## What to do
Score the same tokens in both and compare. Use log-probs at the sampling temperature before any
truncation, the same precision, an engine build that fits the device; switch importance weights on
(`algorithm.correction`).

## Known false alarms
Large models in bf16 differ by about 0.01 to 0.05 nats: below the limit.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.offpolicy.gap import Gap, gap_of, staleness
from homeostat.health.rules.readings import is_moe, raw_number
from homeostat.health.rules.signs import has_lora, newest, text_of_settings
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    nats: float = option(0.1, "Mean distance of log-probs that rounding does not explain.")
    fire: int = option(3, "Number of records at the start, and at the end, that must show it.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    gap = gap_of(view)
    if gap is None:
        yield Unknown("no distance of log-probs is a number")
        return
    values, limit = gap.series.finite().values, gap.limit * options.nats / 0.1
    if len(values) < options.fire or staleness(view) > 0.0:
        return
    early, late = values[: options.fire], values[-options.fire :]
    if early.min() <= limit or late.min() <= limit or median(late) > 4.0 * median(early):
        return
    causes = tuple(_causes(view, gap))
    yield Sighting(
        message=f"Trainer and engine disagree on sampled tokens from the first record on: "
        f"{gap.name} is {gap.level:.3g} off (limit {limit:.3g}). Score the same tokens in both.",
        evidence=(f"{gap.name} off by {gap.level:.3g} over {len(values)} records",),
        causes=causes,
        fixes=_fixes(view),
        first_step=int(gap.series.steps[0]),
        last_step=int(gap.series.steps[-1]),
        value=gap.level,
        limit=limit,
    )


def _causes(view: RunView, gap: Gap) -> Iterator[Cause]:
    """Those that something speaks for, the surest first."""
    plain = Cause("engine-logprob-mismatch", "the two forward passes differ from the start")
    reward, cut = newest(view, "reward"), newest(view, "completions/clipped_ratio")
    useless = (reward is not None and reward < 0.05) or (cut is not None and cut > 0.5)
    if gap.level > gap.broken and useless:
        yield from _other_weights(view)
    top_k, top_p = raw_number(view, "top_k"), raw_number(view, "top_p")
    is_replayed = view.series("sampling/kept_share") is not None
    if ((top_k or 0.0) > 0.0 or (top_p is not None and top_p < 1.0)) and not is_replayed:
        yield Cause("truncated-sampling-logprob-bias", "samples are drawn by top-k or top-p")
    if is_moe(view):
        yield Cause("moe-routing-mismatch", "a mixture of experts may route tokens otherwise")
    yield plain


def _other_weights(view: RunView) -> Iterator[Cause]:
    quantised = text_of_settings(view, "quant", "dtype").lower()
    sleeps = text_of_settings(view, "sleep", "free_cache").lower()
    if "fp8" in quantised or "int4" in quantised:
        yield Cause("fp8-rollout-garbage", "the engine's weights are quantised, its text useless")
    if any(word in sleeps for word in ("2", "true")):
        yield Cause("sleep-wake-weights-lost", "the engine sleeps between steps")
    if has_lora(view):
        yield Cause("lora-not-synced", "the adapter may not reach the engine")


def _fixes(view: RunView) -> tuple[Fix, ...]:
    corrected = Fix(
        "algorithm.correction.weight.type",
        "token",
        "importance weights take the difference into account",
        Grade.UNSAFE,
    )
    same = Fix("engine.dtype", "as the trainer's", "less difference from rounding", Grade.UNSAFE)
    verify = Fix("sync.verify", "true", "proves that the engine has these weights", Grade.SAFE)
    return corrected, same, verify


RULE = Rule(
    code="OFF001",
    name="engine-logprob-mismatch",
    family=Family.OFFPOLICY,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    needs=(
        "sampling/sampling_logp_difference/mean|sampling/mult_prob_error"
        "|sampling/prob_difference/mean|sampling/k3|sampling/k1",
    ),
    kinds=(Kind.RL,),
    options=Options,
)
