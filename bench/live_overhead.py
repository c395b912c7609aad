"""Claim: inside TRL the doctor costs under 1 % of a step, and finds what the clinic finds as soon.

Three GRPO runs of TRL on the tiny workload of grpo_vs_trl, with `HealthCallback`: healthy, one
whose reward is constant from step 6 on, and one whose learning rate is far too high. For each ill
run the steps from the onset to the first finding of that family are compared with those of the
clinic's own run with the same fault (bench/results/clinic_seed29.json): at most five more. The cost
is the time inside the callback over the time of the whole run, both measured in the same run.

    python bench/live_overhead.py      (needs the extra `bench`)
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from trl_grpo_side import Workload, build_workload, digit_share, make_trainer

MAX_SHARE = 0.01
MAX_MORE_STEPS = 5
ONSET = 6
CLINIC = common.RESULTS_DIR / "clinic_seed29.json"
# Name of the run -> the clinic's fault, the step of its onset, and codes that name it.
ILL = {
    "reward_constant": ("reward_constant", ONSET, ("RWD",)),
    "lr_too_high": ("lr_too_high_rl", 1, ("POL", "LRN", "CFG", "NUM", "RWD")),
}


def varied_digits(completions: list[str], **columns: Any) -> list[float]:
    """The reward: digits, as long as they differ. A policy that prints one of them earns little."""
    shares = digit_share(completions)
    kinds = [len(set(text) & set("0123456789")) for text in completions]
    return [share * kind / 10 for share, kind in zip(shares, kinds, strict=True)]


class ConstantFrom:
    """The reward of the workload, and from a step on the same number for every completion."""

    __name__ = "reward"

    def __init__(self, step: int) -> None:
        self._step = step

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        if columns["trainer_state"].global_step + 1 >= self._step:
            return [0.25] * len(completions)
        return varied_digits(completions)


def run(
    folder: Path, scratch: Path, *, steps: int, reward: Callable[..., list[float]], lr: float
) -> dict[str, Any]:
    """One run of TRL with the callback: what it found, and what it cost."""
    from datasets import Dataset

    from homeostat.integrations.transformers import HealthCallback

    callback = HealthCallback()
    text = (folder / "prompts.jsonl").read_text(encoding="utf-8")
    trainer = make_trainer(
        Workload(str(folder), steps, prompts_per_step=4, max_new_tokens=32, learning_rate=lr),
        scratch,
        variant="rows32",
        reward_funcs=reward,
        train_dataset=Dataset.from_list([json.loads(line) for line in text.splitlines()]),
        callbacks=[callback],
    )
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    assert callback.doctor is not None
    assert not callback.failure, callback.failure
    doctor_ms = 1000 * callback.doctor.spent_s / callback.doctor.num_records
    file = scratch / "trl" / "homeostat_findings.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return {
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 2),
        "ms_per_step": round(1000 * seconds / trainer.state.global_step, 1),
        "doctor_ms_per_step": round(doctor_ms, 2),
        "share": round(callback.doctor.spent_s / seconds, 5),
        "found": [
            {"step": one["step"], "level": one["finding"]["level"], "code": one["finding"]["code"],
             "name": one["finding"]["name"]}
            for one in found if one["event"] == "opened"
        ],
    }  # fmt: skip


def compared(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """Return how late the run was found, beside the clinic's own run with the same fault."""
    fault, onset, codes = ILL[name]
    clinic = json.loads(CLINIC.read_text(encoding="utf-8"))["faults"]
    late = next(one["steps_late"] for one in clinic if one["name"] == fault)
    steps = [one["step"] for one in result["found"] if one["code"].startswith(codes)]
    found = min((step for step in steps if step >= onset), default=None)
    return {
        "onset": onset,
        "steps_late": None if found is None else found - onset,
        "clinic_steps_late": late,
        "in_time": found is not None and found - onset <= late + MAX_MORE_STEPS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What the doctor costs inside TRL, and finds.")
    parser.add_argument("--steps", type=int, default=16)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        facts = build_workload(root / "model", num_prompts=4 * chosen.steps)
        runs = {
            "healthy": (varied_digits, 1e-4),
            "reward_constant": (ConstantFrom(ONSET), 1e-4),
            "lr_too_high": (varied_digits, 1.0),
        }
        results = {
            name: run(root / "model", root / name, steps=chosen.steps, reward=reward, lr=lr)
            for name, (reward, lr) in runs.items()
        }
    for name in ILL:
        results[name] |= compared(name, results[name])
    common.write_result(
        "live_overhead",
        {
            "claim": "under 1 % of a step of TRL; found within five steps of the clinic's runs",
            "holds": all(one["share"] < MAX_SHARE for one in results.values())
            and all(results[name]["in_time"] for name in ILL)
            and not [one for one in results["healthy"]["found"] if one["level"] == "error"],
            **common.machine(["torch", "transformers", "trl", "numpy"]),
            "workload": facts,
            **results,
        },
    )


if __name__ == "__main__":
    main()
