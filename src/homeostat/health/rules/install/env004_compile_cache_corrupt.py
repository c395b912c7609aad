"""The folder of compiled kernels holds entries that cannot be trusted.

## What it sees
The fact `compile_cache`: entries of the Triton and Inductor caches that are empty, cut off,
half-written, incomplete, or another user's.

## Why it matters
A broken entry ends a run at its first kernel, with an error about JSON, pickles or a library that
does not mention a cache; an entry of another user is foreign code.

## Likely causes
- compile-cache-corrupt: a process was killed while it wrote, a full disk, or several users or
  nodes that share one folder.

## What to do
In homeostat's own folder nothing: the next run removes such entries and compiles them again. In a
folder that TRITON_CACHE_DIR or TORCHINDUCTOR_CACHE_DIR names, delete the entries, or unset the
variable.

## Known false alarms
Another process may be writing to a shared folder at this moment.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.view import RunView

_SHOWN = 3


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    fact = view.facts["compile_cache"]
    damaged, by_user = fact.get("damaged", ()), fact.get("damaged_by_user", ())
    if not damaged:
        return
    todo = (
        f"Delete {', '.join(by_user[:_SHOWN])}{' and more' * (len(by_user) > _SHOWN)}, or unset "
        "TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR."
        if by_user
        else "The next run removes these entries and compiles them again."
    )
    shown = "; ".join(damaged[:_SHOWN])
    yield Sighting(
        message=f"{len(damaged)} damaged entries in the folders of compiled kernels ({shown}). "
        f"{todo}",
        causes=(Cause("compile-cache-corrupt", shown),),
        fixes=(Fix("", todo, "a broken entry ends a run at its first kernel"),),
        value=float(len(damaged)),
        limit=0.0,
    )


RULE = Rule(
    code="ENV004",
    name="compile-cache-corrupt",
    family=Family.INSTALL,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("fact:compile_cache",),
)
