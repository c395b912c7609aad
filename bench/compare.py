"""Compare bench/results with the baseline of the same hardware, and report what got worse.

    python bench/compare.py                       # every hardware that results are from
    python bench/compare.py --hardware nvidia-h200 --tolerance 0.05
    python bench/compare.py --update              # the results become the baseline

A baseline is bench/baselines/<hardware>.json: a metric's place in the results, its value, whether
higher or lower is better, and how far it may move the wrong way. `WATCHED` says which metrics
`--update` takes. Exit code 1 where a metric got worse, or cannot be compared: its result is missing
or the hardware has no baseline. 0 means that every metric was looked at and held.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import common

from homeostat.observe.processor import this_processor

BASELINES_DIR = common.BENCH_DIR / "baselines"
DEFAULT_TOLERANCE = 0.1

Better = Literal["higher", "lower"]
Verdict = Literal["worse", "missing", "better", "held", "new"]

# What is watched, as patterns of <result>/<path>. Times on a shared CPU are too noisy to be held
# to: there it is ratios of two sides that were measured in turns.
WATCHED: dict[str, Better] = {
    "grpo_step_gpu/ratio": "higher",
    "grpo_step_gpu/homeostat/step_s": "lower",
    "grpo_step_gpu/homeostat/stages_s/generate": "lower",
    "grpo_step_gpu/homeostat/stages_s/train": "lower",
    "grpo_step_gpu/homeostat/max_alloc_gb": "lower",
    "engine_decode/*/batch_*/tokens_per_s": "higher",
    "engine_decode/*/batch_*/share_of_floor": "higher",
    "engine_decode/*/ratio": "higher",
    "train_mfu/cases/*/mfu": "higher",
    "train_mfu/cases/*/peak_gib": "lower",
    "grpo_vs_trl*/cpu_ratio": "higher",
    "sft_vs_trl*/cpu_ratio": "higher",
    "engine_cpu/*ratio*": "higher",
}


@dataclass(frozen=True, slots=True)
class Mark:
    """One line of a baseline."""

    value: float
    better: Better
    tolerance: float


@dataclass(frozen=True, slots=True)
class Line:
    """One metric against its mark. `loss` is the share by which it moved the wrong way."""

    metric: str
    verdict: Verdict
    before: float | None
    now: float | None
    loss: float | None

    @property
    def fails(self) -> bool:
        return self.verdict in ("worse", "missing")


class UnreadableError(ValueError):
    """A baseline or a result that cannot be read as one."""


def hardware_of(result: Mapping[str, Any]) -> str:
    """The GPU where one was used, else the processor and its cores, as a file name."""
    gpu = result.get("gpu")
    text = gpu if gpu and gpu != "none" else f"{result['processor']} {result['cores']} cores"
    plain = re.sub(r"\((r|tm)\)", " ", str(text).lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """Every number inside, with its place."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from numbers(inner, f"{path}/{name}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def read_results(folder: Path) -> dict[str, dict[str, float]]:
    """By hardware, the watched metrics of all results."""
    found: dict[str, dict[str, float]] = {}
    for file in sorted(folder.glob("*.json")):
        result = _json_of(file)
        if not isinstance(result, Mapping) or "processor" not in result:
            continue
        watched = {name: value for name, value in numbers(result, file.stem) if direction(name)}
        if watched:
            found.setdefault(hardware_of(result), {}).update(watched)
    return found


def direction(metric: str) -> Better | None:
    matching = (better for pattern, better in WATCHED.items() if fnmatchcase(metric, pattern))
    return next(matching, None)


def _json_of(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnreadableError(
            f"{file.name} is not JSON ({error}): run its benchmark again."
        ) from None


def read_baseline(file: Path) -> dict[str, Mark]:
    raw = _json_of(file)
    if not isinstance(raw, dict) or not isinstance(raw.get("metrics"), dict):
        raise UnreadableError(f"{file.name} has no `metrics`: write it by --update.")
    return {name: _mark(name, mark, file) for name, mark in raw["metrics"].items()}


def _mark(name: str, raw: Any, file: Path) -> Mark:
    fields = raw if isinstance(raw, dict) else {}
    value, better, tolerance = (fields.get(key) for key in ("value", "better", "tolerance"))
    is_number = all(isinstance(one, int | float) for one in (value, tolerance))
    if not is_number or better not in ("higher", "lower") or value <= 0 or tolerance < 0:
        raise UnreadableError(
            f"{file.name}: {name} needs a value above 0, better: higher or lower, and a tolerance "
            f"of 0 or more; it has {raw}."
        )
    return Mark(float(value), better, float(tolerance))


def judge(metric: str, mark: Mark | None, now: float | None, tolerance: float | None) -> Line:
    if mark is None:
        return Line(metric, "new", None, now, None)
    if now is None or not math.isfinite(now):
        return Line(metric, "missing", mark.value, None, None)
    change = now / mark.value - 1
    loss = change if mark.better == "lower" else -change
    allowed = mark.tolerance if tolerance is None else tolerance
    verdict: Verdict = "worse" if loss > allowed else "better" if loss < -allowed else "held"
    return Line(metric, verdict, mark.value, now, loss)


def compare(
    marks: Mapping[str, Mark], now: Mapping[str, float], *, tolerance: float | None = None
) -> list[Line]:
    """Every metric of the baseline and of the results, failures first."""
    names = sorted(marks.keys() | now.keys())
    lines = [judge(name, marks.get(name), now.get(name), tolerance) for name in names]
    return sorted(lines, key=lambda line: not line.fails)


def table(lines: list[Line]) -> str:
    width = max(len(line.metric) for line in lines)
    shown = [f"{'metric':{width}}  {'baseline':>12}  {'now':>12}  verdict"]
    for line in lines:
        before, now = ("-" if v is None else f"{v:.5g}" for v in (line.before, line.now))
        shown.append(f"{line.metric:{width}}  {before:>12}  {now:>12}  {_verdict(line)}")
    return "\n".join(shown)


def _verdict(line: Line) -> str:
    if line.verdict == "missing":
        return "MISSING: no such number in bench/results; run its benchmark"
    if line.verdict == "new":
        return "not in the baseline: add it by --update"
    assert line.loss is not None, line
    if line.verdict == "worse":
        return f"WORSE by {line.loss:.1%}"
    return f"{line.verdict} ({-line.loss:+.1%})"


def write_baseline(file: Path, now: Mapping[str, float], old: Mapping[str, Mark]) -> None:
    """Tolerances stay."""
    metrics = {}
    for name, value in sorted(now.items()):
        better = direction(name)
        assert better is not None, name
        tolerance = old[name].tolerance if name in old else DEFAULT_TOLERANCE
        metrics[name] = {"value": value, "better": better, "tolerance": tolerance}
    file.parent.mkdir(exist_ok=True)
    text = json.dumps({"hardware": file.stem, "metrics": metrics}, indent=2)
    file.write_text(text + "\n", encoding="utf-8")


def check_one(
    name: str, now: Mapping[str, float], baselines: Path, tolerance: float | None
) -> bool:
    """Return whether all metrics held on this hardware; print those that did not."""
    file = baselines / f"{name}.json"
    print(f"\n{name}")
    if not file.is_file():
        known = ", ".join(sorted(other.stem for other in baselines.glob("*.json"))) or "none"
        print(f"NO BASELINE for this hardware (known: {known}): write one by --update")
        return False
    lines = compare(read_baseline(file), now, tolerance=tolerance)
    if not lines:
        print("NOTHING TO COMPARE: neither the baseline nor the results hold a watched metric")
        return False
    print(table(lines))
    return not any(line.fails for line in lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", help="this one alone, as its file is named")
    parser.add_argument(
        "--tolerance", type=float, help="in place of each metric's own: 0.1 is 10 %%"
    )
    parser.add_argument("--update", action="store_true", help="make the results the baseline")
    parser.add_argument("--results", type=Path, default=common.RESULTS_DIR)
    parser.add_argument("--baselines", type=Path, default=BASELINES_DIR)
    given = parser.parse_args(arguments)
    try:
        found = read_results(given.results)
        if given.update:
            return update(found, given.baselines, given.hardware)
        return check(found, given.baselines, given.hardware, tolerance=given.tolerance)
    except UnreadableError as error:
        print(error)
        return 2


def check(
    found: Mapping[str, Mapping[str, float]],
    baselines: Path,
    hardware: str | None,
    *,
    tolerance: float | None,
) -> int:
    # Hardware with a baseline and no result any more must not be forgotten.
    known = {file.stem for file in baselines.glob("*.json")}
    names = [hardware] if hardware else sorted(found.keys() | known)
    if not names:
        print("NOTHING TO COMPARE: there are neither results nor baselines")
        return 1
    held = [check_one(name, found.get(name, {}), baselines, tolerance) for name in names]
    if hardware is None:
        say_of_this_machine(known)
    return 0 if all(held) else 1


def say_of_this_machine(known: set[str]) -> None:
    """Say so if this processor was never measured: results from others do not apply to it."""
    own = hardware_of({"processor": this_processor().name, "cores": os.cpu_count()})
    if own not in known:
        what = this_processor().describe()
        print(f"\nNO BASELINE for the CPU of this machine ({what}: {own}). Nothing above was")
        print("measured on it: run the benchmarks here, then bench/compare.py --update")


def update(found: Mapping[str, Mapping[str, float]], baselines: Path, hardware: str | None) -> int:
    names = [hardware] if hardware else sorted(found)
    unknown = [name for name in names if name not in found]
    if unknown or not names:
        print(f"no result is from {hardware or 'any hardware'}; there are: {', '.join(found)}")
        return 1
    for name in names:
        file = baselines / f"{name}.json"
        old = read_baseline(file) if file.is_file() else {}
        write_baseline(file, found[name], old)
        gone = sorted(old.keys() - found[name].keys())
        dropped = f"; dropped, for no result has them: {', '.join(gone)}" if gone else ""
        print(f"{file.name}: {len(found[name])} metrics{dropped}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
