"""The model predicts a uniform distribution: its weights were not loaded.

## What it sees
The loss stays at the logarithm of the vocabulary size from the first record on, over `fire`
records, with a gradient of 0 or without any change, in a run that should start from a checkpoint.

## Why it matters
Uniform logits are what empty or freshly initialised weights give. Training from there is
pretraining, with the settings of fine-tuning.

## Likely causes
- weights-not-loaded: no path was given to the code that fills a model built on the meta device;
  names in the checkpoint do not match; the folder has no checkpoint marker.
- no-gradient-flow: the gradient is 0 as well.
- lr-too-low: the model is trained from scratch on purpose, and the rate moves nothing.

## What to do
Check that the checkpoint is found, and which names are missing. For Megatron: the folder given to
--load or --ref-load must hold latest_checkpointed_iteration.txt.

## Known false alarms
A model that is trained from scratch on purpose starts at this loss, but it falls at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed, raw_number
from homeostat.health.series.medians import median
from homeostat.health.view import Kind, RunView


class Options(RuleOptions):
    fire: int = option(4, "Number of records that must show it.")


# Vocabularies in use lie between these.
_SMALLEST, _LARGEST = 30_000, 270_000


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    loss = needed(view, "train/loss").finite()
    if view.setting("model.init") == "random" or len(loss) < options.fire:
        return
    size = raw_number(view, "vocab_size") or view.facts.get("vocab_size")
    start = median(loss.values[: options.fire])
    low, high = math.log(size or _SMALLEST) - 0.15, math.log(size or _LARGEST) + 0.15
    late = median(loss.values[-options.fire :])
    if not (low <= start <= high and low <= late <= high) or abs(late - start) > 0.02 * start:
        return
    norm = view.series("grad_norm")
    still = norm is not None and float(np.nanmax(np.abs(norm.values))) < 0.01
    if not still and len(loss) < 3 * options.fire:
        return
    causes = [Cause("weights-not-loaded", f"a loss of {start:.4g} is that of guessing")]
    if still:
        causes.append(Cause("no-gradient-flow", "the gradient is 0 as well"))
    causes.append(Cause("lr-too-low", "if the model is trained from scratch: nothing moves it"))
    yield Sighting(
        message=f"The loss is {start:.4g} from the first record on and does not move: that is "
        f"guessing among {math.exp(start):,.0f} tokens. The weights were not loaded; see the path "
        "and the names in the checkpoint.",
        evidence=(f"train/loss {start:.4g} -> {late:.4g} over {len(loss)} records",),
        causes=tuple(causes),
        fixes=(
            Fix(
                "model.path",
                "a folder with weights",
                "the folder that the model is loaded from",
                theirs={"slime": "--load", "miles": "--load"},
            ),
            Fix("model.init", "pretrained", "loads the checkpoint"),
        ),
        first_step=int(loss.steps[0]),
        last_step=int(loss.steps[-1]),
        value=start,
        limit=low,
    )


RULE = Rule(
    code="CKP001",
    name="weights-not-loaded",
    family=Family.CHECKPOINT,
    level=Level.ERROR,
    confidence=Confidence.INFERRED,
    check=check,
    needs=("train/loss",),
    kinds=(Kind.SFT,),
    options=Options,
    explains=("LRN004", "LRN006", "LRN008", "LRN013", "LRN011"),
)
