"""Choose the method and sizes of a new recipe by the estimate, so that it fits the device.

    all weights -> smaller micro-batches, recomputed activations
    LoRA        -> the same
    QLoRA (nf4) -> the same
    optimizer and weights in host memory, 8-bit moments

The first that fits is taken. Without `gpus` the device of this machine is planned for, as
`homeostat estimate` does. With them, GPUs that are elsewhere: the update is traced in bf16, and
host memory is not planned with, because nothing is known about it. Over several GPUs the weights
are sharded, and in RL the engine shares the first one with a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from homeostat.authoring.draft import Draft, Method
from homeostat.authoring.gpus import Gpus
from homeostat.config.loading.load import build_config
from homeostat.config.loading.yaml_file import parse_yaml
from homeostat.config.run import RunConfig
from homeostat.errors import ConfigError
from homeostat.observe.format import byte_size
from homeostat.run.preflight.check import Preflight
from homeostat.run.sizing.estimate import (
    MemoryPlan,
    cache_bytes,
    harsh_rungs,
    ladder,
    mild_rungs,
)

_SETTINGS: dict[Method, list[str]] = {
    Method.FULL: [],
    Method.LORA: ["lora.rank=16"],
    Method.QLORA: ["lora.rank=16", "model.quantization=nf4"],
}
_TITLES = {Method.FULL: "all weights", Method.LORA: "a LoRA adapter", Method.QLORA: "QLoRA"}
# What is planned with of a device elsewhere: others use some, and estimates err.
_SHARE = 0.9
_BF16_BYTES = 2
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


# Estimates the memory of a config.
PlanOf = Callable[[RunConfig], MemoryPlan]


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


def planner(preflight: Preflight, gpus: Gpus | None) -> PlanOf:
    """Return what estimates a config: on the device here, or on GPUs that are elsewhere."""
    if gpus is None:
        return preflight.memory_plan

    def plan(config: RunConfig) -> MemoryPlan:
        raw = config.model_dump(mode="json", exclude_unset=True)
        there = build_config(raw, _ELSEWHERE, file=None)
        found = preflight.memory_plan(there)
        room = int(_SHARE * gpus.memory_bytes)
        if there.is_rl:
            found = _with_engine(found, there, preflight, free=room)
        return replace(found, device=gpus.describe(), capacity=room, process=0)

    return plan


def _with_engine(
    plan: MemoryPlan, config: RunConfig, preflight: Preflight, *, free: int
) -> MemoryPlan:
    """Return the plan with the engine's part on the GPU: its cache, and weights of its own."""
    preview, prompts = preflight.preview, preflight.prompts
    assert preview is not None, "the inputs were read"
    assert prompts is not None, "the inputs were read"
    longest = int(prompts.train.rows.lengths.max())
    cache = cache_bytes(config, preview, free=free, longest_prompt=longest)
    if config.engine.shares_weights:
        # Copies of the weights are for decoding on a CPU.
        return replace(plan, cache=cache, copies=0)
    weights = _BF16_BYTES * preview.num_params
    return replace(plan, cache=cache, copies=weights, sleeps=False)


def choose_fit(raw: dict[str, Any], plan_of: PlanOf, *, method: Method, may_offload: bool) -> Fit:
    """Return the first settings that fit, or else those that need the least.

    An estimate takes seconds for a large model, so a method is first tried with the leanest
    settings, and in smaller steps only if it fits with them.
    """
    methods = list(_SETTINGS) if method is Method.AUTO else [method]
    tried: list[tuple[str, int, bool]] = []
    found: list[Fit] = []
    for one in methods:
        fit = _try(raw, _SETTINGS[one], plan_of)
        if fit is None:
            continue
        tried.append((_TITLES[one], fit.plan.peak, fit.plan.fits))
        if fit.plan.fits:
            return replace(fit, tried=tried)
        found.append(fit)
    assert found, "training all weights, or the method that was asked for, is valid"
    best = min(found, key=lambda fit: fit.plan.peak)
    if may_offload:
        config = build_config(raw, best.changes, file=None)
        for changes, plan in ladder(config, plan_of, rungs=_offloading(config)):
            best = Fit([*best.changes, *changes], plan, [])
        tried.append(("with the optimizer in host memory", best.plan.peak, best.plan.fits))
    return replace(best, tried=tried)


def _offloading(config: RunConfig) -> list[str]:
    """Return the harsher settings that keep the method and the lengths of rows."""
    return [one for one in harsh_rungs(config) if not one.startswith(("lora.", "data."))]


def _try(raw: dict[str, Any], settings: list[str], plan_of: PlanOf) -> Fit | None:
    """Return the settings, with what they need in addition to fit; None if they are refused."""
    try:
        config = build_config(raw, settings, file=None)
    except ConfigError:
        # This kind of run does not take the method, for example quantised weights.
        return None
    plain = Fit(settings, plan_of(config), [])
    if plain.plan.fits:
        return plain
    lean = _leanest(raw, settings, mild_rungs(config), plan_of)
    if lean is None or not lean.plan.fits:
        return lean or plain
    for changes, plan in ladder(config, plan_of, rungs=mild_rungs(config)):
        if plan.fits:
            return Fit([*settings, *changes], plan, [])
    return lean


def _leanest(
    raw: dict[str, Any], settings: list[str], rungs: Iterable[str], plan_of: PlanOf
) -> Fit | None:
    """Return the settings with all rungs at once; None if there are none, or they are refused."""
    last = {rung.partition("=")[0]: rung for rung in rungs}
    changes = [*settings, *last.values()]
    try:
        config = build_config(raw, changes, file=None)
    except ConfigError:
        return None
    return Fit(changes, plan_of(config), []) if last else None


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
