"""Write the model card (README.md) of a model that is shared: how it was made, and how it fared.

The card holds only what may be shared: values of the recipe by the allow-list of
config/loading/shareable.py, names of files without their folders, and texts that went through a
scrubber.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from homeostat import __version__
from homeostat.config.loading.shareable import shared_config
from homeostat.generation.choice import saved_recipe
from homeostat.observe.ailments import short
from homeostat.observe.format import duration
from homeostat.observe.redact import mask_text
from homeostat.observe.report.facts import RunFacts, read_facts
from homeostat.observe.report.illnesses import Illness

# The metrics that a reader looks for first, as far as the run has them.
_METRICS = (
    "train/loss",
    "eval/loss",
    "reward",
    "eval/reward",
    "eval/accuracy",
    "rewards/accuracies",
    "rewards/margins",
    "kl",
    "entropy",
    "completions/mean_length",
)
_TASKS = {"sft": "supervised fine-tuning", "reward_model": "reward modelling"}
_MAX_FINDINGS = 20


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a model comes from, as far as it is known."""

    # The path or name of the model that was trained.
    base: str | None
    run: Path | None = None
    step: int | None = None
    # The adapter is shared alone.
    is_adapter: bool = False


def hub_name(path: str) -> str | None:
    """Return the hub's name of a model, if the path is one: OWNER/NAME that is no folder here."""
    is_name = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) is not None
    return path if is_name and not Path(path).exists() else None


def shown_name(path: str) -> str:
    """Return a name for people: the hub's, the run and step of an export, or the last part."""
    parts = PurePath(path).parts
    if len(parts) > 3 and parts[-1] == "hf" and parts[-2].startswith("step_"):
        return f"{parts[-4]}, step {int(parts[-2].removeprefix('step_'))}"
    return hub_name(path) or PurePath(path).name


def model_card(origin: Origin, *, repo: str, license: str | None) -> str:
    """Return the text of README.md: metadata for the hub, then sections for people."""
    facts = None if origin.run is None else read_facts(origin.run)
    parts = [
        f"---\n{_metadata(origin, facts, license)}---",
        f"# {repo.rpartition('/')[2]}",
        _summary(origin, facts),
    ]
    if facts is not None:
        parts += [
            _section("Data", _data(facts)),
            _section("Metrics", _metrics(facts)),
            _section("Health", _health(facts)),
            _section("Recipe", f"```yaml\n{_recipe(facts.paths.path)}```"),
        ]
    parts.append(
        f"Made with homeostat {__version__}. Values of the recipe that might be private are shown "
        "as `<removed>`; paths are shown without their folders."
    )
    return mask_text("\n\n".join(part for part in parts if part) + "\n")


def _metadata(origin: Origin, facts: RunFacts | None, license: str | None) -> str:
    library = "peft" if origin.is_adapter else "transformers"
    raw: dict[str, Any] = {"library_name": library, "tags": ["homeostat"]}
    if facts is not None:
        raw["tags"].append(str(facts.config_value("algorithm", "type") or "sft"))
        if facts.config.get("lora"):
            raw["tags"].append("lora")
    if origin.base is not None and hub_name(origin.base) is not None:
        raw["base_model"] = origin.base
    if license is not None:
        raw["license"] = license
    return yaml.safe_dump(raw, sort_keys=False)


def _summary(origin: Origin, facts: RunFacts | None) -> str:
    lines = [] if origin.base is None else [f"- Base model: `{shown_name(origin.base)}`"]
    if facts is None:
        return "\n".join(lines)
    kind = str(facts.config_value("algorithm", "type") or "sft")
    how = "all weights"
    if facts.config.get("lora"):
        how = "a LoRA adapter" if origin.is_adapter else "a LoRA adapter, merged into the base"
        if (format := facts.config_value("model", "quantization")) is not None:
            how += f" (quantised to {format})"
    lines += [
        f"- Training: {_TASKS.get(kind, kind)} of {how}",
        f"- Checkpoint: step {facts.last_step if origin.step is None else origin.step} of a run "
        f"that is {facts.status[0]} at step {facts.last_step}",
        f"- Time: {duration(facts.duration_s)}",
    ]
    return "\n".join(lines)


def _data(facts: RunFacts) -> str:
    lines = []
    for group in ("train", "validation"):
        for source in facts.config_value("data", group) or ():
            name = source.get("path") or source.get("task") or "?"
            lines.append(f"- {group}: `{name}` ({source.get('type')})")
    return "\n".join(lines)


def _metrics(facts: RunFacts) -> str:
    rows = []
    for name in _METRICS:
        series = facts.columns.get(name)
        if series is None or not series.finite.size:
            continue
        values = [y for y in series.y.tolist() if math.isfinite(y)]
        rows.append(f"| `{name}` | {values[0]:.4g} | {values[-1]:.4g} |")
    if not rows:
        return ""
    best = facts.best_eval
    note = "" if best is None else f"\n\nBest evaluation: {best[1]:.4g} at step {best[0]:.0f}."
    return "\n".join(["| metric | first | last |", "|---|---|---|", *rows]) + note


def _health(facts: RunFacts) -> str:
    found = [one for one in facts.illnesses if one.is_ill]
    if not found:
        return "No findings of level warning or error were recorded during the run."
    lines = [f"- {_finding(one)}" for one in found[:_MAX_FINDINGS]]
    if len(found) > _MAX_FINDINGS:
        lines.append(f"- and {len(found) - _MAX_FINDINGS} more")
    return "\n".join(lines)


def _finding(illness: Illness) -> str:
    one = illness.finding
    over = illness.cleared
    state = "open at the end" if over is None else f"over at step {over}"
    return f"{one['level']}: {one['code']} {one['name']} ({state}): {short(one.get('message', ''))}"


def _recipe(run: Path) -> str:
    """Return the keys of the recipe that are not defaults, overrides included."""
    given = shared_config(_given(saved_recipe(run)))
    given.pop("runs_dir", None)
    return yaml.safe_dump(given, sort_keys=False, allow_unicode=True)


def _given(settings: BaseModel) -> dict[str, Any]:
    """Return the values that differ from the defaults, and the type of each section kept."""
    kept: dict[str, Any] = {}
    for name, info in type(settings).model_fields.items():
        value = getattr(settings, name)
        if name == "type" or value != info.get_default(call_default_factory=True):
            kept[name] = _plain(value)
    return kept


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _given(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return to_jsonable_python(value)


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""
