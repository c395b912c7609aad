"""Convert values of the trainer's settings: precision, optimizer, schedule and length."""

from __future__ import annotations

import math
from typing import Any

from homeostat.importing.draft import Draft
from homeostat.importing.entries import Given, Status
from homeostat.importing.outcome import (
    Converted,
    Converter,
    Left,
    Outcome,
    plain,
    positive,
)
from homeostat.importing.sizes import steps_of_updates, updates_of_step

_PRECISIONS = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp32": "fp32",
    "float32": "fp32",
    "auto": "auto",
}
_SCHEDULES = {
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "wsd": "wsd",
    "warmup_stable_decay": "wsd",
}
_MIN_LR = "trainer.schedule.min_lr_share"


def _precision(given: Given, _: Draft) -> Outcome:
    name = str(given.value).lower()
    if name in _PRECISIONS:
        return Converted(_PRECISIONS[name])
    if name in ("fp16", "float16", "half"):
        return Converted("bf16", how="fp16 is not here: bf16 has its size and needs no loss scale")
    return Left(f"no precision here is {given.value!r}", Status.UNKNOWN)


def _optimizer(given: Given, _: Draft) -> Outcome:
    name = str(given.value).lower()
    more: dict[str, Any] = {}
    if "8bit" in name:
        more["trainer.optimizer.moments"] = "8bit"
    if "muon" in name:
        return Converted("muon", more=more)
    if name.startswith("adafactor"):
        return Converted("adafactor")
    if name.startswith(("adamw", "adam", "paged_adamw")) and "mini" not in name:
        how = "moments are not paged to the host" if name.startswith("paged") else ""
        return Converted("adamw", how=how, more=more)
    return Converted("adamw", how=f"{given.value} is not here", more=more)


def _schedule(given: Given, draft: Draft) -> Outcome:
    name = str(given.value).lower().removeprefix("schedulertype.")
    if name in _SCHEDULES:
        return Converted(_SCHEDULES[name])
    if name.startswith("cosine"):
        # Elsewhere the cosine ends at 0 unless a setting says otherwise.
        ends = {} if draft.has(_MIN_LR) or draft.get(_MIN_LR) is not None else {_MIN_LR: 0.0}
        how = "" if name in ("cosine", "cosine_with_min_lr") else "one cosine, without restarts"
        if name == "cosine_with_min_lr" and not draft.has(_MIN_LR):
            return Converted("cosine", how="it ends at a tenth of the peak")
        return Converted("cosine", how=how, more=ends)
    if name == "polynomial":
        return Converted("linear", how="a polynomial of degree 1")
    return Converted("cosine", how=f"{given.value} is not here")


def _min_lr(given: Given, draft: Draft) -> Outcome:
    if str(draft.value("trainer.schedule.type", "cosine")).lower().startswith("constant"):
        return Left("a constant learning rate has no end")
    return plain(given, draft)


def _epochs(given: Given, draft: Draft) -> Outcome:
    steps = draft.value("trainer.max_steps")
    if isinstance(steps, int) and steps > 0:
        return Left("the number of steps is given, and decides")
    if not isinstance(given.value, int | float):
        return Left("it is no number", Status.UNKNOWN)
    whole = max(1, math.ceil(given.value))
    how = "" if whole == given.value else "whole passes over the data: trainer.max_steps cuts one"
    return Converted(whole, how=how)


def _max_steps(given: Given, draft: Draft) -> Outcome:
    if not isinstance(given.value, int) or given.value <= 0:
        return positive(given, draft)
    steps, how = steps_of_updates(given.value, draft)
    return Converted(steps, how=how)


def _warmup_steps(given: Given, draft: Draft) -> Outcome:
    if isinstance(given.value, float) and 0 < given.value < 1:
        return Converted(None, more={"trainer.schedule.warmup_share": given.value})
    if isinstance(given.value, int | float) and given.value < 0:
        return Left("a negative number means: none is given")
    updates = updates_of_step(draft)
    if draft.framework.name == "verl" and isinstance(given.value, int) and updates > 1:
        # verl's schedule advances once in a step; here, at every update.
        return Converted(given.value * updates, how=f"{given.value} steps x {updates} updates")
    return plain(given, draft)


def _warmup_share(given: Given, draft: Draft) -> Outcome:
    steps = draft.value("trainer.schedule.warmup_steps")
    if isinstance(steps, int) and steps > 0:
        return Left("the warm-up in steps is given, and decides")
    return plain(given, draft)


def _checkpointing(given: Given, _: Draft) -> Outcome:
    if str(given.value).lower() in ("false", "none"):
        return Left("off is the default here")
    return Converted("selective" if given.value == "selective" else True)


def _packing(given: Given, _: Draft) -> Outcome:
    if given.value is False:
        return Left("rows in a micro-batch never see each other, so packing changes no result")
    return Converted(True)


def _chunked(given: Given, _: Draft) -> Outcome:
    return Left("logits are always computed in chunks")


TRAINING: dict[str, Converter] = {
    "trainer.precision": _precision,
    "trainer.optimizer.type": _optimizer,
    "trainer.schedule.type": _schedule,
    "trainer.schedule.min_lr_share": _min_lr,
    "trainer.schedule.warmup_steps": _warmup_steps,
    "trainer.schedule.warmup_share": _warmup_share,
    "trainer.epochs": _epochs,
    "trainer.max_steps": _max_steps,
    "trainer.max_grad_norm": positive,
    "trainer.gradient_checkpointing": _checkpointing,
    "trainer.packing": _packing,
    "trainer.logits_chunk_bytes": _chunked,
    "trainer.empty_cache_interval": positive,
}
