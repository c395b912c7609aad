"""Read from any framework's settings how a run quantises, and what was measured of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from homeostat.health.finding import Cause, Fix, Sighting
from homeostat.health.rules.readings import is_false, is_true, raw
from homeostat.health.series.windows import held_mean, newest_spell
from homeostat.health.view import RunView, Series

FORMATS = ("fp8", "int4")
GROUPS = ("attention", "mlp", "experts", "head")
# Switches of other frameworks that live in the environment: variable -> the format it is about.
FLAGS = {
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "fp8",
    "OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "int4",
}
_KINDS = ("fp8", "int4", "int8", "awq", "gptq", "nf4", "mxfp4", "nvfp4")
_OFF = ("", "none", "null", "false", "0")


class ShareOptions(Protocol):
    """Limits of a share of values, and how often it must be above them."""

    max_share: float
    max_share_int4: float
    fire: int
    window: int


@dataclass(frozen=True, slots=True)
class HeldShare:
    """A share of a group's values that has been above its limit, and still is."""

    of: Measured
    share: float
    limit: float
    first_step: int

    def as_sighting(self, message: str, *, measure: str, cause: Cause, fix: Fix) -> Sighting:
        """Return the finding; besides `fix` it names the setting that leaves the layers out."""
        one = self.of
        return Sighting(
            message=message,
            evidence=(f"{one.format}/{one.group}/{measure} {one.series.latest:.4g}",),
            causes=(cause,),
            fixes=(fix, Fix(f"trainer.{one.format}.skip_layers", "their names", "stay in bf16")),
            first_step=self.first_step,
            last_step=int(one.series.steps[-1]),
            value=self.share,
            limit=self.limit,
            subject=one.subject,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """One measure of one group of layers over the steps at which it was taken."""

    format: str
    group: str
    series: Series

    @property
    def subject(self) -> str:
        return f"{self.format} {self.group}"


def names_of(measure: str) -> str:
    """Return the metrics of a measure of quantised layers, as `needs` of a rule."""
    return "|".join(f"{form}/{group}/{measure}" for form in FORMATS for group in GROUPS)


def measured(view: RunView, measure: str) -> Iterator[Measured]:
    """Yield a measure of every group of layers that has it."""
    for form in FORMATS:
        for group, series in view.matching(f"{form}/", f"/{measure}").items():
            yield Measured(form, group, series)


def held_shares(view: RunView, measure: str, options: ShareOptions) -> Iterator[HeldShare]:
    """Yield every group of layers whose share is above the limit of its format now."""
    for one in measured(view, measure):
        limit = options.max_share if one.format == "fp8" else options.max_share_int4
        values = one.series.values
        held = values > limit
        spell = newest_spell(held, fire=options.fire, window=options.window, clear=2)
        if spell is not None and spell.is_open:
            first_step = int(one.series.steps[spell.start])
            yield HeldShare(one, held_mean(values, held, spell), limit, first_step)


def quantisation(view: RunView) -> str:
    """fp8, int4 ...; "" where the engine is not quantised, or nothing says so."""
    said = str(
        view.setting("engine.quantization")
        or raw(view, "rollout.quantization", "quantization", "sglang_quantization")
        or ""
    ).lower()
    if is_true(raw(view, "fp8", "rollout_fp8", "fp8_rollout")):
        return "fp8"
    found = next((kind for kind in _KINDS if kind in said), "")
    # Our own engines compute as the trainer does, unless the recipe says otherwise.
    return found or (trained_format(view) if view.framework.name == "homeostat" else "")


def trained_format(view: RunView) -> str:
    """fp8 or int4 where training itself is quantised; "" where not, or nothing says so."""
    for form in FORMATS:
        own = view.settings.get(f"trainer.{form}")
        if own is not None or any(key.startswith(f"trainer.{form}.") for key in view.settings):
            return form
    if is_true(raw(view, "fp8")) or str(raw(view, "mixed_precision")).lower() == "fp8":
        return "fp8"
    if str(raw(view, "fp8_format", "fp8") or "").lower() not in _OFF:
        return "fp8"
    return "int4" if is_true(raw(view, "fake_int4_qat.enabled")) else ""


def start_of(view: RunView) -> int | None:
    """Return the first step in low precision, if the run began without it."""
    for event in view.events_of("precision_switched"):
        if event.step is not None and event.step > 1:
            return int(event.step)
    steps = [view.number(f"trainer.{form}.start_step") for form in FORMATS]
    known = [int(step) for step in steps if step is not None and step > 1]
    return known[0] if known else None


def flag_of(view: RunView, name: str) -> str:
    """Return the value of a switch in the environment; "" if it is unset, 0, or not known.

    It is read from our own probe, from the settings (env_vars of a launcher), or from a line of the
    log that sets it: NAME=1, "NAME": "1".
    """
    probed = view.facts.get("precision_flags")
    if isinstance(probed, dict):
        return _on(probed.get(name))
    said = raw(view, name.lower(), f"env_vars.{name.lower()}")
    if said is None:
        said = _in_log(view, name)
    return _on(said)


def _on(value: Any) -> str:
    text = "" if value is None else str(value).strip("\"' ")
    return "" if text in ("", "0") or is_false(text) else text


def _in_log(view: RunView, name: str) -> str | None:
    line = view.log.first(name)
    if line is None:
        return None
    found = re.search(rf"{name}[\"']?\s*[:=]\s*[\"']?(\w+)", line.text)
    return found[1] if found else None


def is_dense(view: RunView) -> bool:
    """Return whether the settings say that the model has no experts."""
    said = str(raw(view, "num_experts") or "").lower()
    if said in ("none", "null", "0", "1"):
        return True
    line = view.log.first("num_experts")
    return line is not None and re.search(r"num_experts\W+(None|0)\b", line.text) is not None


def layer_names(view: RunView, field: str) -> list[str]:
    """Return names of layers from the run's own account of what it quantised."""
    events = view.events_of("precision_switched")
    found = events[-1].fields.get(field) if events else None
    return [str(name) for name in found] if isinstance(found, list | tuple) else []
