"""Layers are quantised that should not be, or those that should be are not.

## What it sees
The run's own list of quantised layers (event precision_switched) holds an output head, an embedding
or a router; or the settings of another framework show it: an FP8 recipe of Megatron with
`moe_router_dtype` fp8, or quantised weights whose ignore list does not contain the head.

## Why it matters
A head maps to the whole vocabulary: its rounding error moves every probability. A router decides by
small differences, so with rounding it sends tokens to other experts than the engine does. In a
homeostat run a typo in a skip list cannot cause this: a pattern that covers no layer is refused at
the start.

## Likely causes
- wrong-layers-quantised: a skip list with names of another model or framework.

## What to do
`homeostat inspect --layers RECIPE` lists every layer with its precision and the reason. Names are
those of the Hugging Face checkpoint.

## Known false alarms
A head that is quantised on purpose, because an evaluation has shown that it does no harm: allow the
rule.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.precision.kinds import layer_names, trained_format
from homeostat.health.rules.readings import raw
from homeostat.health.view import RunView

_MANY = 3


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    signs = list(_signs(view))
    if not signs:
        return
    form = trained_format(view) or "fp8"
    yield Sighting(
        message=f"{' '.join(signs)} See `homeostat inspect --layers`, and name what must stay in "
        "bf16 as the checkpoint names it.",
        evidence=tuple(signs),
        causes=(Cause("wrong-layers-quantised", signs[0]),),
        fixes=(
            Fix(
                f"trainer.{form}.skip_layers",
                "lm_head, embed, gate",
                "keeps head, embeddings and routers in bf16",
                Grade.UNSAFE,
            ),
        ),
    )


def _signs(view: RunView) -> Iterator[str]:
    sensitive = layer_names(view, "sensitive")
    if sensitive:
        more = f" and {len(sensitive) - _MANY} more" * (len(sensitive) > _MANY)
        yield f"{', '.join(sensitive[:_MANY])}{more} are quantised: heads, embeddings and routers."
    if str(raw(view, "moe_router_dtype") or "").lower().startswith("fp8"):
        yield "moe_router_dtype is fp8: the router decides by differences that FP8 rounds away."
    ignored = raw(view, "quantization_config.ignore", "quantization_config.modules_to_not_convert")
    if isinstance(ignored, list | tuple) and ignored and not _names_head(ignored):
        yield "The checkpoint's ignore list names no output head."


def _names_head(names: list[object] | tuple[object, ...]) -> bool:
    return any(part in str(name) for name in names for part in ("lm_head", "head", "output"))


RULE = Rule(
    code="QNT009",
    name="wrong-layers-quantised",
    family=Family.PRECISION,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
)
