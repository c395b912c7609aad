"""Rows that are packed into one sequence see each other.

## What it sees
Our own runs score a packed row alone, too: `probe/packing_difference`, the largest difference of
its log-probs, is above `max_nats`, while rows that were scored together have the log-probs that the
update had (else POL010). Of other frameworks: settings that pack rows without keeping
them apart in the attention.

## Why it matters
A row's tokens are predicted from other rows before it, which no prompt will have later. In RL the
log-probs of the trainer are then not those of the engine, and every ratio is off.

## Likely causes
- packing-cross-contamination: an attention kernel or mask that does not know where a row ends; most
  often packing together with an attention implementation that cannot take row lengths.

## What to do
Use an attention implementation for packed rows (FlashAttention, flex attention), or switch packing
off. Our own attention takes the rows' lengths in every kernel.

## Known false alarms
Dropout and low precision change log-probs, too: runs with either are not judged by the probe. Rows
of pretraining text that are packed on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting, Unknown
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import is_false, is_true, raw
from homeostat.health.view import RunView

_PROBE = "probe/packing_difference"
# Implementations that take the lengths of packed rows.
_KNOWS_ROWS = ("flash", "flex", "xformers", "kernels-community")
_WHY = {
    "trl": "rows are packed, and {attention} attention does not keep them apart",
    "transformers": "rows are packed, and {attention} attention does not keep them apart",
    "axolotl": "rows are packed, and no attention implementation that keeps them apart is on",
    "llama_factory": "packing without neat_packing lets rows attend to each other",
}


class Options(RuleOptions):
    max_nats: float = option(0.02, "Largest difference that rounding explains.")


def check(view: RunView, options: Options) -> Iterator[Sighting | Unknown]:
    found = view.series(_PROBE)
    if found is not None:
        yield from _measured(view, options)
        return
    why = _by_settings(view)
    if why is None:
        yield Unknown("no packed row was scored alone, and the settings do not tell")
    elif why:
        yield _sighting(view, why, confidence=Confidence.INFERRED)


def _measured(view: RunView, options: Options) -> Iterator[Sighting]:
    inexact = any(view.setting(key) for key in ("trainer.fp8.recipe", "trainer.int4.group_size"))
    off = view.metrics[_PROBE].finite()
    if inexact or (view.number("lora.dropout") or 0.0) > 0 or not len(off):
        return
    if off.latest <= options.max_nats or _is_off_anyway(view, options):
        return
    bad = off.values > options.max_nats
    first = int(off.steps[len(bad) - int((~bad)[::-1].argmax()) if not bad.all() else 0])
    why = f"a packed row's log-probs are up to {off.latest:.2g} nats from those of the row alone"
    yield _sighting(
        view,
        f"{why} (limit {options.max_nats:g}, since step {first})",
        first_step=first,
        value=off.latest,
        limit=options.max_nats,
    )


def _is_off_anyway(view: RunView, options: Options) -> bool:
    """Return whether rows that were scored together, too, are not what the update had (POL010)."""
    ratio = view.series("probe/first_ratio_off")
    return ratio is not None and len(ratio) > 0 and not ratio.latest <= options.max_nats


def _by_settings(view: RunView) -> str | None:
    """Return how the settings let rows leak; "" if they do not, None if they do not tell."""
    name = view.framework.name
    packs = raw(view, "sample_packing", "packing")
    if name not in _WHY or packs is None:
        return None
    if not is_true(packs):
        return ""
    attention = str(raw(view, "attn_implementation") or "")
    if name == "llama_factory":
        return "" if is_true(raw(view, "neat_packing")) else _WHY[name]
    if any(word in attention for word in _KNOWS_ROWS):
        return ""
    if name == "axolotl":
        kinds = ("flash_attention", "flex_attention", "xformers_attention", "sdp_attention")
        asked = [raw(view, kind) for kind in kinds]
        # The default is FlashAttention: only where it is switched off, rows leak.
        return _WHY[name] if is_false(asked[0]) and not any(map(is_true, asked[1:])) else ""
    if attention not in ("eager", "sdpa"):
        return None
    return _WHY[name].format(attention=attention)


def _sighting(
    view: RunView,
    why: str,
    *,
    first_step: int | None = None,
    value: float | None = None,
    limit: float | None = None,
    confidence: Confidence | None = None,
) -> Sighting:
    return Sighting(
        message=f"Packed rows see each other: {why}. Use an attention implementation that knows "
        "where a row ends, or switch packing off.",
        evidence=(why,),
        causes=(Cause("packing-cross-contamination", why),),
        fixes=(
            Fix(
                "trainer.packing",
                "false",
                "each row has its own sequence",
                Grade.UNSAFE,
            ),
        ),
        first_step=first_step,
        last_step=view.last_step,
        value=value,
        limit=limit,
        confidence=confidence,
    )


RULE = Rule(
    code="DAT015",
    name="packing-cross-contamination",
    family=Family.DATA,
    level=Level.ERROR,
    confidence=Confidence.MEASURED,
    check=check,
    options=Options,
    explains=(
        "OFF001", "OFF002", "OFF004", "OFF005", "OFF006", "OFF008", "POL009", "POL010", "LRN001",
        "LRN002", "RWD006", "POL004", "POL007",
    ),
)  # fmt: skip
