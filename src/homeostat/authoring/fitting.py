"""Choose the method and sizes of a new recipe by the estimate, so that it fits the device.

    all weights -> smaller micro-batches, recomputed activations
    LoRA        -> the same
    QLoRA (nf4) -> the same
    optimizer and weights in host memory, 8-bit moments

The first that fits is taken. Without `memory_bytes` the device of this machine is planned for, as
`homeostat estimate` does. With it, a device that is elsewhere: the update is traced in bf16, and
host memory is not planned with, because nothing is known about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from homeostat.authoring.draft import Draft, Method
from homeostat.config.load import build_config
from homeostat.config.run import RunConfig
from homeostat.config.yaml_file import parse_yaml
from homeostat.errors import ConfigError
from homeostat.observe.format import byte_size
from homeostat.run.preflight.check import Preflight
from homeostat.run.sizing.estimate import MemoryPlan, harsh_rungs, ladder, mild_rungs

_SETTINGS: dict[Method, list[str]] = {
    Method.FULL: [],
    Method.LORA: ["lora.rank=16"],
    Method.QLORA: ["lora.rank=16", "model.quantization=nf4"],
}
_TITLES = {Method.FULL: "all weights", Method.LORA: "a LoRA adapter", Method.QLORA: "QLoRA"}
# What is planned with of a device elsewhere: others use some, and estimates err.
_SHARE = 0.9
# On the CPU that traces for a device elsewhere.
_ELSEWHERE = [
    "trainer.device=cpu",
    "trainer.precision=bf16",
    "trainer.lanes=1",
    "trainer.threads=1",
]
_WHY = {
    "trainer.max_tokens_per_device": "smaller micro-batches, of the same gradient",
    "trainer.micro_batch_rows": "smaller micro-batches, of the same gradient",
    "trainer.logits_chunk_bytes": "less memory for logits",
    "trainer.gradient_checkpointing": "activations are computed again in place of being kept",
    "engine.memory_share": "less memory for the cache of the engine",
    "trainer.optimizer.moments": "the optimizer's state in 8 bits",
    "model.quantization": "the frozen weights in 4 bits",
}


@dataclass(frozen=True, slots=True)
class Fit:
    """The chosen settings, and the plans of what was tried: (title, peak in bytes, fits)."""

    changes: list[str]
    plan: MemoryPlan
    tried: list[tuple[str, int, bool]]


def read_inputs(config: RunConfig, *, progress: Callable[[int, int], None]) -> Preflight:
    """Read tokenizer, shape of the model and rows, as `check` does. Raises on the first problem."""
    preflight = Preflight(config, progress=progress)
    preflight.read_inputs()
    return preflight


def choose_fit(
    raw: dict[str, Any], preflight: Preflight, *, method: Method, memory_bytes: int | None
) -> Fit:
    """Return the first settings that fit, or else those that need the least."""
    plan_of = _planner(preflight, memory_bytes)
    methods = list(_SETTINGS) if method is Method.AUTO else [method]
    tried: list[tuple[str, int, bool]] = []
    best: Fit | None = None
    for one in methods:
        found = _try(raw, _SETTINGS[one], plan_of, rungs=mild_rungs)
        if found is None:
            continue
        tried.append((_TITLES[one], found.plan.peak, found.plan.fits))
        best = found if best is None or found.plan.peak < best.plan.peak else best
        if found.plan.fits:
            return replace(found, tried=tried)
    assert best is not None, "training all weights, or the method that was asked for, is valid"
    if memory_bytes is None:
        last = _try(raw, best.changes, plan_of, rungs=_offloading)
        if last is not None and last.plan.peak < best.plan.peak:
            best = last
            tried.append(("the same with offloading", best.plan.peak, best.plan.fits))
    return replace(best, tried=tried)


def _planner(preflight: Preflight, memory_bytes: int | None) -> Callable[[RunConfig], MemoryPlan]:
    if memory_bytes is None:
        return preflight.memory_plan

    def plan(config: RunConfig) -> MemoryPlan:
        raw = config.model_dump(mode="json", exclude_unset=True)
        found = preflight.memory_plan(build_config(raw, _ELSEWHERE, file=None))
        room = int(_SHARE * memory_bytes)
        return replace(found, device="the device", capacity=room, process=0)

    return plan


def _offloading(config: RunConfig) -> Iterable[str]:
    """Return the harsher settings that keep the method and the lengths of rows."""
    return [one for one in harsh_rungs(config) if not one.startswith(("lora.", "data."))]


def _try(
    raw: dict[str, Any],
    settings: list[str],
    plan_of: Callable[[RunConfig], MemoryPlan],
    *,
    rungs: Callable[[RunConfig], Iterable[str]],
) -> Fit | None:
    """Return the settings with as many of the rungs as they need; None if they are refused."""
    try:
        config = build_config(raw, settings, file=None)
    except ConfigError:
        # This kind of run does not take the method, for example quantised weights.
        return None
    fit = Fit(settings, plan_of(config), [])
    if fit.plan.fits:
        return fit
    for changes, plan in ladder(config, plan_of, rungs=rungs(config)):
        fit = Fit([*settings, *changes], plan, [])
    return fit


def apply_fit(draft: Draft, fit: Fit) -> None:
    """Put the chosen settings into the recipe, with the reasons as comments."""
    for change in fit.changes:
        key, _, text = change.partition("=")
        value, _ = parse_yaml(text, name=key)
        draft.set(key, value, _WHY.get(key, ""))
    if "lora" in draft.raw:
        title, peak, _ = fit.tried[0]
        needs = f"{title} would need {byte_size(peak)}, " if title != _TITLES[Method.LORA] else ""
        draft.comments["lora"] = f"{needs}an adapter needs less and learns with 10 times the lr"


def fit_lines(fit: Fit) -> list[str]:
    """Return what was estimated, as lines for people."""
    plan = fit.plan
    lines = [
        f"{title}: about {byte_size(peak)}{'' if fits else ' (too much)'}"
        for title, peak, fits in fit.tried
    ]
    lines.append(f"{plan.device} has {byte_size(plan.capacity)} to give")
    if not plan.fits:
        lines.append("LOOK: nothing that was tried fits: take a smaller model or shorter rows")
    return lines
