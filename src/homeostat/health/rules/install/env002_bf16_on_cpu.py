"""The run computes in bf16 on a CPU that has no bf16 arithmetic.

## What it sees
Precision bf16 on the CPU where the fact `environment` lists its features without bf16 arithmetic:
AMX or AVX512-BF16 on x86-64, FEAT_BF16 on aarch64.

## Why it matters
Each product is then emulated: several times slower than fp32 if a library emulates it with vector
instructions, hundreds of times slower if it does so number by number.

## Likely causes
- bf16-slow-on-cpu: a recipe for a GPU.

## What to do
Use fp32 on such a CPU.

## Known false alarms
None: the features are those of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.view import RunView
from homeostat.observe.processor import BF16_FEATURES


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    features = view.facts["environment"].get("cpu_features")
    if not features or view.setting("trainer.device") != "cpu":
        return
    if view.setting("trainer.precision") != "bf16" or BF16_FEATURES & set(features):
        return
    yield Sighting(
        message="The run computes in bf16 on a CPU without bf16 arithmetic: it is emulated, and "
        "many times slower than fp32. Set trainer.precision to fp32.",
        causes=(Cause("bf16-slow-on-cpu", "no AMX, AVX512-BF16 or FEAT_BF16"),),
        fixes=(Fix("trainer.precision", "fp32", "what this CPU computes fastest", Grade.UNSAFE),),
    )


RULE = Rule(
    code="ENV002",
    name="bf16-slow-on-cpu",
    family=Family.INSTALL,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("fact:environment", "setting:trainer.precision"),
)
