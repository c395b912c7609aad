"""Claim: a reward model trained here works in RL, and the doctor says when it is over-optimised.

A toy task whose gold score is known (gold_reward.py): strings of twelve letters, in which some `e`
are good and many are bad. A tiny base policy writes random strings. Two reward models are trained
on pairs with the gold order: one on strings of the base policy, which hold few `e` (so that more
are always better), and one on strings of every kind. Then GRPO trains three policies from the same
start, and measures the gold score on held-out prompts without training on it (role: eval):

    long, no KL         the first reward model: its score rises on and on, the gold score falls
    with a KL penalty   the same reward model, held near the base policy
    knows better        the second reward model, without KL

RWD016 reward-over-optimised must be reported for the first and for neither of the others.

    python bench/reward_model.py             # about three minutes on one core
    python bench/reward_model.py --seed 1 --keep runs/reward_model
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common
from gold_reward import BEST, gold_of
from rich.console import Console

from homeostat.clinic import bodies
from homeostat.config.loading.load import build_config
from homeostat.observe.jsonl import iter_jsonl, read_metrics
from homeostat.run.calling.start import train_recipe
from homeostat.run.session.session import open_session

LENGTH, LETTERS = 12, "abcdefgh"
STEPS = 60
# Coefficients of the penalty, and which reward model is used.
RUNS: dict[str, tuple[str, float | None]] = {
    "long, no KL": ("narrow", None),
    "with a KL penalty": ("narrow", 0.6),
    "knows better": ("wide", None),
}
COLOURS = ("#dc2626", "#2563eb", "#059669")
CODE = "RWD016"
Raw = dict[str, Any]


def strings(rng: random.Random, num_good: int | None = None) -> str:
    """Return a string of letters; with `num_good`, one with so many `e`."""
    if num_good is None:
        return "".join(rng.choices(LETTERS, k=LENGTH))
    rest = rng.choices(LETTERS.replace("e", ""), k=LENGTH - num_good)
    found = [*"e" * num_good, *rest]
    rng.shuffle(found)
    return "".join(found)


def prompt(rng: random.Random) -> str:
    return "".join(rng.choices(bodies.DIGITS, k=3)) + bodies.PROMPT_END


def pairs(rng: random.Random, count: int, *, wide: bool) -> Iterator[Raw]:
    """Yield pairs in the order of their gold scores. Narrow ones hold no more `e` than are good."""
    while count:
        if wide:
            both = [strings(rng, rng.randint(0, LENGTH)) for _ in range(2)]
        else:
            both = [strings(rng) for _ in range(2)]
        both.sort(key=gold_of, reverse=True)
        differ = gold_of(both[0]) > gold_of(both[1])
        if differ and (wide or max(text.count("e") for text in both) <= BEST):
            count -= 1
            yield {"prompt": prompt(rng), "chosen": both[0], "rejected": both[1]}


def trainer(steps: int, **more: Any) -> Raw:
    schedule = {"type": "constant", "warmup_steps": 3}
    sizes = {"device": "cpu", "threads": 1, "max_steps": steps, "max_tokens_per_device": 2048}
    return {**sizes, "schedule": schedule, **more}


def shared(place: Path, name: str, seed: int) -> Raw:
    return {
        "name": name,
        "runs_dir": str(place / "runs"),
        "seed": seed,
        "observe": {"console": "quiet", "report": False},
        "checkpoint": {"interval_steps": 1000, "export": "final"},
    }


def base_recipe(place: Path, seed: int) -> Raw:
    rng = random.Random(seed)
    rows = [{"prompt": prompt(rng), "completion": strings(rng)} for _ in range(2048)]
    source = {"type": "prompt_completion", "chat": False}
    file = bodies.write_rows(place / "base.jsonl", rows)
    return {
        **shared(place, "base", seed),
        "model": {"path": str(bodies.write_model(place / "model")), "init": "random"},
        "data": {"train": [{**source, "path": str(file)}], "max_length": 32},
        "trainer": trainer(60, batch_rows=64, lr=3e-3),
    }


def reward_model_recipe(place: Path, kind: str, seed: int) -> Raw:
    rows = list(pairs(random.Random(f"{kind}/{seed}"), 2560, wide=kind == "wide"))
    sources = []
    for part, chosen in (("train", rows[256:]), ("held_out", rows[:256])):
        file = bodies.write_rows(place / f"{kind}_{part}.jsonl", chosen)
        sources.append([{"type": "preference", "path": str(file), "chat": False}])
    return {
        **shared(place, kind, seed),
        "model": {"path": str(exported(place, "base"))},
        "algorithm": {"type": "reward_model", "loss": {"type": "bradley_terry", "centre": 0.01}},
        "data": {"train": sources[0], "validation": sources[1], "max_length": 32},
        "trainer": trainer(80, batch_rows=64, lr=1e-3),
        "eval": {"interval_steps": 40},
    }


def rl_recipe(place: Path, name: str, seed: int) -> Raw:
    kind, penalty = RUNS[name]
    rng = random.Random(seed + 10**6)
    sources = []
    for part, count in (("train", 512), ("held_out", 32)):
        rows = [{"prompt": prompt(rng)} for _ in range(count)]
        file = bodies.write_rows(place / f"prompts_{part}.jsonl", rows)
        sources.append([{"type": "prompts", "path": str(file), "chat": False}])
    gold = {"type": "function", "path": f"{common.BENCH_DIR / 'gold_reward.py'}:gold"}
    return {
        **shared(place, f"rl_{list(RUNS).index(name)}", seed),
        "model": {"path": str(exported(place, "base"))},
        "algorithm": {
            "type": "grpo",
            "kl": None if penalty is None else {"coefficient": penalty},
        },
        "data": {"train": sources[0], "validation": sources[1], "max_length": 16},
        "rollout": {"prompts_per_step": 16, "samples_per_prompt": 8, "max_new_tokens": 16},
        "rewards": {
            "functions": [
                {
                    "type": "reward_model",
                    "path": str(exported(place, kind)),
                    "device": "cpu",
                    "batch_size": 128,
                },
                {**gold, "name": "gold", "role": "eval"},
            ]
        },
        "trainer": trainer(STEPS, lr=2e-4, updates_per_step=1),
        "eval": {
            "interval_steps": 3,
            "at_start": True,
            "sampling": {"samples_per_prompt": 4, "temperature": 1.0},
        },
    }


def exported(place: Path, name: str) -> Path:
    return sorted((place / "runs" / name / "checkpoints").glob("step_*"))[-1] / "hf"


def train(raw: Raw) -> Path:
    """Run a recipe in this process and return its folder."""
    config = build_config(raw, [], file=None)
    console = Console(file=io.StringIO())
    line = ["homeostat", "train"]
    with open_session(
        config, recipe="", command=line, console=console, log_level="error"
    ) as session:
        train_recipe(config, session)
    return config.run_dir


def measured(name: str, folder: Path) -> Raw:
    """Return the curves of an RL run, and whether the doctor found it over-optimised."""
    records = [one for one in read_metrics(folder / "metrics.jsonl") if "eval/gold_reward" in one]
    findings = [one for one in iter_jsonl(folder / "findings.jsonl") if one["code"] == CODE]
    return {
        "name": name,
        "reward_model": RUNS[name][0],
        "kl_coefficient": RUNS[name][1],
        "steps": [one["step"] for one in records],
        "proxy": [round(one["eval/reward"], 4) for one in records],
        "gold": [round(one["eval/gold_reward"], 4) for one in records],
        "fired_at": findings[0]["step"] if findings else None,
        "peak_step": findings[0]["first_step"] if findings else None,
        "message": findings[0]["message"] if findings else None,
    }


WIDTH, HEIGHT, LEFT, RIGHT = 860, 520, 62, 200


def across(step: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / STEPS


def panel(runs: Sequence[Raw], key: str, title: str, *, top: int, bottom: int) -> Iterator[str]:
    """Draw the curves of one score, and where the doctor spoke."""
    values = [value for run in runs for value in run[key]]
    low, high = min(values), max(values)

    def place(step: float, value: float) -> tuple[float, float]:
        return across(step), bottom - (bottom - top) * (value - low) / ((high - low) or 1.0)

    yield f'<text x="{LEFT}" y="{top - 8}" fill="#475569">{title}</text>'
    for tick in (low, (low + high) / 2, high):
        x, y = place(0, tick)
        yield f'<path d="M{x:.1f},{y:.1f}H{WIDTH - RIGHT}" stroke="#e2e8f0"/>'
        yield (
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#475569">'
            f"{tick:.2f}</text>"
        )
    for run, colour in zip(runs, COLOURS, strict=True):
        points = [place(s, v) for s, v in zip(run["steps"], run[key], strict=True)]
        line = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2.2"/>'
        if run["fired_at"] is not None and key == "gold":
            x, y = place(run["fired_at"], _at(run, run["fired_at"]))
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>'
            yield (
                f'<text x="{x - 9:.1f}" y="{y + 20:.1f}" text-anchor="end" fill="{colour}">'
                f"{CODE} at step {run['fired_at']}</text>"
            )


def picture(runs: Sequence[Raw]) -> str:
    """Draw the score of the reward model above, and the gold score below."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="600" fill="#0f172a">GRPO on a '
        "trained reward model: what it scores, and what is true (held-out prompts)</text>",
        *panel(runs, "proxy", "reward model's score", top=62, bottom=250),
        *panel(runs, "gold", "gold score", top=290, bottom=470),
    ]
    for number, (run, colour) in enumerate(zip(runs, COLOURS, strict=True)):
        parts.append(
            f'<text x="{WIDTH - RIGHT + 14}" y="{70 + 22 * number}" fill="{colour}" '
            f'font-weight="600">{run["name"]}</text>'
        )
    for step in range(0, STEPS + 1, 12):
        parts.append(
            f'<text x="{across(step):.1f}" y="490" text-anchor="middle" fill="#475569">{step}'
            "</text>"
        )
    parts.append(f'<text x="{LEFT}" y="512" fill="#475569">step</text>')
    return "\n".join([*parts, "</svg>", ""])


def _at(run: Raw, step: int) -> float:
    """Return the gold score of the last evaluation up to a step."""
    return [g for s, g in zip(run["steps"], run["gold"], strict=True) if s <= step][-1]


def held_out(folder: Path) -> dict[str, float]:
    last = [one for one in read_metrics(folder / "metrics.jsonl") if "eval/loss" in one][-1]
    names = ("eval/loss", "eval/reward_model_accuracy", "eval/reward_model_margin")
    return {name: round(last[name], 4) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the runs; else they are removed")
    arguments = parser.parse_args()
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="homeostat-reward-model-")
        place = arguments.keep or Path(stack.enter_context(temporary))
        train(base_recipe(place, arguments.seed))
        models = {
            kind: held_out(train(reward_model_recipe(place, kind, arguments.seed)))
            for kind in ("narrow", "wide")
        }
        print(json.dumps(models, indent=2), flush=True)
        runs = []
        for name in RUNS:
            runs.append(measured(name, train(rl_recipe(place, name, arguments.seed))))
            gold = runs[-1]["gold"]
            print(
                f"{name}: gold {gold[0]:.3f}, at most {max(gold):.3f}, {gold[-1]:.3f} at the end; "
                f"{CODE} at {runs[-1]['fired_at']}",
                flush=True,
            )
    (common.RESULTS_DIR / "reward_model.svg").write_text(picture(runs), encoding="utf-8")
    machine = common.machine(("torch", "transformers"))
    seconds = round(time.perf_counter() - started, 1)
    result = {"seed": arguments.seed, "seconds": seconds, "reward_models": models, "runs": runs}
    common.write_result("reward_model", {**machine, **result})
    fired = [run["name"] for run in runs if run["fired_at"] is not None]
    assert fired == ["long, no KL"], f"{CODE} was reported for {fired}"


if __name__ == "__main__":
    main()
