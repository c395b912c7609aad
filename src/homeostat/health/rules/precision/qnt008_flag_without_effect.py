"""Low precision is asked for, and no layer is computed in it.

## What it sees
One of three things. A homeostat run reports that it quantised no layer although `trainer.fp8` or
`trainer.int4` is set. `NVTE_FP8_BLOCK_SCALING_FP32_SCALES` is set in the environment although FP8
is off or its scales are not blockwise. `OPEN_TRAINING_INT4_FAKE_QAT_FLAG` is set although the model
has no experts: slime and miles round nothing else.

## Why it matters
The run is in bf16: it saves no time and no memory, and the model is not prepared for the precision
that it will be served in. Nothing fails, so the mistake is noticed only much later.

## Likely causes
- precision-flag-without-effect: the variable belongs to another recipe, framework or version, or no
  layer passes the filter.

## What to do
Set the recipe, not only the variable; `homeostat inspect --layers` shows what is quantised.

## Known false alarms
A variable that a launch script exports for all its jobs: unset it in jobs that should not use it.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.precision.kinds import flag_of, is_dense, trained_format
from homeostat.health.rules.readings import raw
from homeostat.health.view import RunView

SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
ROUNDING = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG"


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    why = _no_layer(view) or _scales_unused(view) or _rounding_unused(view)
    if not why:
        return
    yield Sighting(
        message=f"{why} The run is in bf16. Set the recipe itself, or unset the variable.",
        evidence=(why,),
        causes=(Cause("precision-flag-without-effect", why),),
        fixes=(
            Fix(
                "trainer.fp8.recipe",
                "blockwise",
                "FP8 is a setting of the recipe",
                theirs={"miles": "--fp8-recipe", "slime": "--fp8-recipe"},
            ),
            Fix("trainer.int4.group_size", "128", "INT4 is a setting of the recipe"),
        ),
    )


def _no_layer(view: RunView) -> str:
    for event in view.events_of("precision_switched"):
        if event.fields.get("layers") == 0:
            form = event.fields.get("format", "low precision")
            return f"{form} began at step {event.step} but no layer uses it."
    return ""


def _scales_unused(view: RunView) -> str:
    if not flag_of(view, SCALES) or not _is_known(view):
        return ""
    if trained_format(view) != "fp8":
        return f"{SCALES} is set, and FP8 training is off."
    own = view.setting("trainer.fp8.recipe")
    recipe = str(own or raw(view, "fp8_recipe") or "")
    if recipe and recipe != "blockwise":
        return f"{SCALES} is set, and the FP8 recipe is {recipe}: only blockwise scales read it."
    return ""


def _rounding_unused(view: RunView) -> str:
    # Our own recipes follow it for all layers.
    if flag_of(view, ROUNDING) and view.framework.name != "homeostat" and is_dense(view):
        return f"{ROUNDING} is set, and the model has no experts, the only layers that it rounds."
    return ""


def _is_known(view: RunView) -> bool:
    """Return whether the settings are there at all: a missing one is not an absent one."""
    return len(view.settings) + len(view.raw_settings) >= 3


RULE = Rule(
    code="QNT008",
    name="precision-flag-without-effect",
    family=Family.PRECISION,
    level=Level.WARN,
    confidence=Confidence.INFERRED,
    check=check,
    explains=("ERR626",),
)
