"""Publishing the weights takes a large share of the step.

## What it sees
sync/seconds above `max_share` of time/step in the median of the newest records; above twice that
it is a warning.

## Why it matters
The engine is idle in the meantime, and so is the trainer.

## Likely causes
- slow-weight-sync: tensor by tensor in place of buckets, over the disk or the network in place of
  shared memory.

## What to do
Take the transport that the message names. On one machine that is memory that both share: CUDA IPC
on a GPU, shared memory otherwise. From machine to machine it is a broadcast, or differences alone
where the network is slow. An adapter can be sent without the weights under it, and an engine that
samples ahead can keep sampling meanwhile (sync.overlap). Publishing less often makes samples
older: only with importance correction.

## Known false alarms
Steps that are very short, in tests: below `min_s` nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    max_share: float = option(0.2, "Largest acceptable share of a step.")
    min_s: float = option(1.0, "Seconds below which it does not matter.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    took, step = needed(view, "sync/seconds").tail(20), needed(view, "time/step").tail(20)
    share = median(took.values) / max(median(step.values), 1e-9)
    if len(took) < 3 or share <= options.max_share or median(took.values) < options.min_s:
        return
    seconds = median(took.values)
    by = _transport(view)
    fixes = tuple(_fixes(view, by))
    yield Sighting(
        message=f"Publishing the weights takes {seconds:.3g} s{_rate(view, seconds)}: {share:.0%} "
        f"of a step (usual: below {options.max_share:.0%}). Faster: {fixes[0].setting}="
        f"{fixes[0].value}, for {fixes[0].why}.",
        evidence=(f"by {by}",) if by else (),
        causes=(Cause("slow-weight-sync", f"{seconds:.3g} s of a step"),),
        fixes=fixes,
        first_step=int(took.steps[0]),
        last_step=int(took.steps[-1]),
        value=share,
        limit=options.max_share,
        level=Level.WARN if share > 2 * options.max_share else None,
    )


def _transport(view: RunView) -> str:
    """Return the transport that the newest publication took; empty if nobody says."""
    named = [event.fields.get("transport") for event in view.events_of("weights_published")]
    return str(
        next((one for one in reversed(named) if one), "")
        or view.setting("sync.transport.type", default="")
    )


def _rate(view: RunView, seconds: float) -> str:
    size = view.series("sync/bytes")
    if size is None or not len(size.finite()):
        return ""
    return f" ({median(size.finite().values) / seconds / 1e6:.3g} MB/s)"


def _fixes(view: RunView, by: str) -> Iterator[Fix]:
    """Yield what would be faster than the transport `by`, the best first."""
    if view.setting("lora.rank") is not None and view.setting("lora.publish") == "merged":
        yield Fix("lora.publish", "adapter", "the adapter is a small part of the weights")
    on_gpu = view.setting("trainer.device") != "cpu"
    if on_gpu and by != "cuda_ipc":
        yield Fix("sync.transport.type", "cuda_ipc", "nothing is copied over the host", Grade.SAFE)
    elif by in ("disk", "delta", "collective"):
        yield Fix("sync.transport.type", "shared_memory", "memory is faster than files", Grade.SAFE)
    if (view.number("rollout.max_staleness") or 0) >= 1:
        yield Fix(
            "sync.overlap",
            "always",
            "the engine keeps sampling while weights are sent",
            Grade.SAFE,
        )
    yield Fix("sync.transport.bucket_bytes", "2GB", "fewer, larger messages", Grade.SAFE)


RULE = Rule(
    code="SYN005",
    name="slow-weight-sync",
    family=Family.SYNC,
    level=Level.INFO,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("sync/seconds", "time/step"),
    kinds=(Kind.RL,),
    options=Options,
)
