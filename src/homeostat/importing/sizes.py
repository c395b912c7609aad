"""Work out the sizes of a recipe, which other frameworks spread over several settings.

rows of an update   rows per device x accumulation x devices           (SFT, preferences)
prompts of a step   completions of a step / samples per prompt         (TRL, axolotl)
updates of a step   completions, or prompts, of a step / of an update  (all)
"""

from __future__ import annotations

import math
from typing import Any

from homeostat.importing.algorithms import is_rl
from homeostat.importing.draft import Draft
from homeostat.importing.entries import Given, Status

_PER_DEVICE = "trainer.micro_batch_rows"
_ACCUMULATION = "trainer.gradient_accumulation_steps"
_UPDATE = "trainer.mini_batch_rows"
_PROMPTS = "rollout.prompts_per_step"
_SAMPLES = "rollout.samples_per_prompt"
_BACKENDS = ("trainer.backend.type", "trainer.zero_stage")
_DEVICES = ("cluster.devices_per_node", "cluster.nodes", "cluster.processes")
# Frameworks that count completions per device, as the Trainer of transformers does.
_BY_DEVICE = ("trl", "axolotl", "llama_factory")


# Rows per device of frameworks whose file does not say: that of transformers, and of axolotl.
_ROWS = {"trl": 8, "llama_factory": 8, "axolotl": 1}


# Prompts of a step where the file does not say, and the size of an update in `_updates_of_step`.
_STEP = {"verl": (1024, 256), "openrlhf": (1024, 128)}


def set_sizes(draft: Draft) -> None:
    """Set the batch sizes and the number of processes."""
    devices = _devices(draft)
    if is_rl(draft) and draft.framework.name in _BY_DEVICE:
        _completions_per_device(draft, devices)
    elif is_rl(draft):
        _updates_of_step(draft)
    elif draft.framework.name in _BY_DEVICE:
        _rows_per_device(draft, devices)
    else:
        _rows_of_update(draft)
    why = "micro-batches are filled up to a number of tokens, whatever the number of rows"
    draft.leave_all((_PER_DEVICE, _ACCUMULATION), Status.NOT_NEEDED, why)
    _set_cluster(draft, devices or 1)


def _devices(draft: Draft) -> int | None:
    """Return the number of devices, by the option, the launcher or the file; None if unknown."""
    if draft.devices is not None:
        return draft.devices
    per_node, nodes = draft.value(_DEVICES[0]), draft.value(_DEVICES[1], 1)
    if isinstance(per_node, int) and isinstance(nodes, int):
        return per_node * nodes
    found = draft.value(_DEVICES[2])
    return found if isinstance(found, int) else draft.file.devices


def updates_of_step(draft: Draft) -> int:
    """Return the number of optimizer updates in a step of RL; 1 where nothing is sampled."""
    if not is_rl(draft):
        return 1
    passes = _int(draft.value("trainer.epochs_per_step"))
    return int(draft.get("trainer.updates_per_step", 1)) * passes


def steps_of_updates(value: int, draft: Draft) -> tuple[int, str]:
    """Return how many steps have a number of updates, and in which respect that is only alike.

    A step of TRL's trainers is one optimizer update; here it is one round of sampling.
    """
    updates = updates_of_step(draft) if draft.framework.name in ("trl", "axolotl") else 1
    if updates == 1 or value <= 0:
        return value, ""
    how = f"{value} updates of {updates} in a step" if value % updates else ""
    return -(-value // updates), f"{how}, rounded up" if how else ""


def _int(value: Any, default: int = 1) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and value >= 1 else default


def _rows_per_device(draft: Draft, devices: int | None) -> None:
    rows = _int(draft.value(_PER_DEVICE), _ROWS[draft.framework.name])
    accumulated = _int(draft.value(_ACCUMULATION))
    found = [*draft.all(_PER_DEVICE), *draft.all(_ACCUMULATION)]
    _enter_product(draft, found, "trainer.batch_rows", rows, accumulated, devices)


def _enter_product(
    draft: Draft,
    found: list[Given],
    place: str,
    rows: int,
    accumulated: int,
    devices: int | None,
    *,
    samples: int = 1,
) -> None:
    """Set a size that several settings give together; without the devices it is a guess."""
    completions = rows * accumulated * (devices or 1)
    size = max(1, math.ceil(completions / samples))
    if not found:
        draft.set(place, size)
        title = draft.framework.title
        draft.comments[place] = f"the default of {title}: {rows} rows per device"
        return
    on = "1 device" if (devices or 1) == 1 else f"{devices} devices"
    terms = f"{rows} rows x {accumulated} accumulated x {on}"
    terms += f" / {samples} samples" if samples > 1 else ""
    how = "" if devices else f"{terms}, as if on one device: --devices says how many there are"
    if completions % samples:
        how = f"{terms}, rounded up"
    for given in found:
        draft.take(given, place, size, how=how, why=terms)


def _completions_per_device(draft: Draft, devices: int | None) -> None:
    rows = _int(draft.value(_PER_DEVICE), _ROWS[draft.framework.name])
    accumulated = _int(draft.value(_ACCUMULATION))
    # Eight are the default of TRL's GRPO, and two of its RLOO.
    samples = max(2, _int(draft.value(_SAMPLES), 2 if draft.get("algorithm.type") == "rloo" else 8))
    generations = draft.all("trainer.updates_per_step")
    per_step = _int(draft.value("trainer.updates_per_step"), accumulated)
    for given in generations:
        updates = max(1, per_step // accumulated)
        why = f"{per_step} micro-batches of a generation / {accumulated} of an update"
        draft.take(given, "trainer.updates_per_step", updates, why=why)
    for given in draft.all(_PROMPTS):
        completions, update = _int(given.value), rows * accumulated * (devices or 1)
        if not generations and completions > update:
            draft.set("trainer.updates_per_step", completions // update)
        prompts = max(1, completions // samples)
        why = f"{completions} completions / {samples} samples; {update} completions of an update"
        how = "" if devices else f"{why}, as if on one device: --devices says how many there are"
        draft.take(given, _PROMPTS, prompts, how=how, why=why)
    found = [*draft.all(_PER_DEVICE), *draft.all(_ACCUMULATION)]
    if draft.get(_PROMPTS) is None:
        _enter_product(draft, found, _PROMPTS, rows, per_step, devices, samples=samples)


def _updates_of_step(draft: Draft) -> None:
    """Set the updates of a step: verl counts prompts, the others completions."""
    prompts_of_step, size_of_update = _STEP.get(draft.framework.name, (32, 0))
    prompts = _int(draft.value(_PROMPTS), prompts_of_step)
    samples = max(2, _int(draft.value(_SAMPLES)))
    total = prompts if draft.framework.name == "verl" else prompts * samples
    named = {key for given in draft.file.settings for key in draft.keys(given)}
    why = f"the default of {draft.framework.title}"
    if size_of_update and _PROMPTS not in named:
        draft.set(_PROMPTS, prompts)
        draft.comments[_PROMPTS] = why
    is_open = {_UPDATE, "trainer.updates_per_step"}.isdisjoint(named)
    if size_of_update and is_open and total > size_of_update:
        draft.set("trainer.updates_per_step", total // size_of_update)
        draft.comments["trainer.updates_per_step"] = f"{why}: {size_of_update} of an update"
    for given in draft.all(_UPDATE):
        size = _int(given.value, total)
        updates = max(1, total // size)
        what = "prompts" if draft.framework.name == "verl" else "completions"
        how = "" if total % size == 0 else f"{total} {what} of a step / {size}, rounded down"
        why = f"{total} {what} of a step / {size} of an update"
        draft.take(given, "trainer.updates_per_step", updates, how=how, why=why)


def _rows_of_update(draft: Draft) -> None:
    found = [*draft.all(_UPDATE), *draft.all(_PROMPTS)]
    for given in found[:1]:
        draft.take(given, "trainer.batch_rows", _int(given.value, 32))
    for given in found[1:]:
        draft.leave(given, Status.NOT_NEEDED, "an update has trainer.batch_rows rows")


def is_quantised(draft: Draft) -> bool:
    """Return whether a setting quantises the base; files often have switches that are off, too."""
    settings = (one for one in draft.file.settings if "model.quantization" in draft.keys(one))
    return any(one.value and not one.is_computed for one in settings)


def _set_cluster(draft: Draft, devices: int) -> None:
    quantised = is_quantised(draft)
    spread = devices > 1 and not quantised
    if spread:
        draft.set("cluster.type", "torchrun")
        draft.set("cluster.processes", devices)
        draft.set("trainer.backend.type", "fsdp")
        if is_rl(draft) and draft.get("engine.type", "native") == "native":
            draft.set("engine.own_process", True)
    for key in _DEVICES:
        for given in draft.all(key):
            if spread:
                draft.note(given, "cluster.processes", devices)
            else:
                how = "a quantised base cannot be split over ranks" if quantised else ""
                draft.note(given, "cluster.processes", 1, how=how)
    for key in _BACKENDS:
        for given in draft.all(key):
            if not spread:
                why = "one device holds the whole model; with --devices it is split (fsdp)"
                draft.leave(given, Status.NOT_NEEDED, why)
            elif "fsdp" in str(given.value).lower() or "fsdp" in given.name:
                draft.note(given, "trainer.backend.type", "fsdp")
            else:
                how = "fsdp splits weights, gradients and optimizer state, as ZeRO-3 does"
                draft.note(given, "trainer.backend.type", "fsdp", how=how)
