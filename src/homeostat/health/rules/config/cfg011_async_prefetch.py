"""Rollouts are generated ahead in a thread while sharded weights are gathered in another.

## What it sees
`async_prefetch` together with FSDP.

## Why it matters
Both threads issue collectives, in an order that differs between ranks: the run hangs without a
message.

## Likely causes
- async-prefetch-with-sharding: each setting works alone, but not both together.

## What to do
Switch the prefetch off with FSDP.

## Known false alarms
None known.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import is_true, raw
from homeostat.health.view import Kind, RunView, flat_settings


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    sharded = raw(view, "fsdp", "fsdp_config", "fsdp_version", "fsdp_sharding_strategy")
    sharded = sharded or any("fsdp" in name.lower() for name, _ in flat_settings(view.raw_settings))
    if not is_true(raw(view, "async_prefetch")) or not sharded:
        return
    yield Sighting(
        message="async_prefetch with FSDP can deadlock: two threads issue collectives in different "
        "orders. Switch it off.",
        causes=(Cause("async-prefetch-with-sharding", "collectives of two threads cross"),),
        fixes=(
            Fix(
                "",
                "false",
                "then only one thread issues collectives",
                theirs={"axolotl": "trl.async_prefetch"},
            ),
        ),
    )


RULE = Rule(
    code="CFG011",
    name="async-prefetch-with-sharding",
    family=Family.CONFIG,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    kinds=(Kind.RL,),
)
