"""Claim: with slow rewards and ragged lengths, sampling ahead reaches 85 % of the ideal schedule.

    python bench/async_rl.py --reward-s 1.0 --steps 40

GRPO on digits whose smallest one is to be named, from random weights, with completions of very
different lengths and a reward that sleeps, for between half and one and a half times --reward-s, in
as many processes as there are groups. Runs from the same start, on two cores:

    sync         the plain loop: the engine shares the trainer's process and both cores; rewards are
                 computed beside sampling, as always
    turns        the plain loop with the engine in its own process, one core each: it gives the
                 seconds of the stages
    async 0..2   rollout.max_staleness, one core each; `partial` with rollout.partial

The ideal schedule is work-conserving: with g, r, u and p seconds to sample a batch, to wait for its
last reward, to train on it and to publish, and with s + 1 batches under way, no step can be shorter
than max(g + p, u + p, c / (s + 1)): engine and trainer are never idle, or all batches that may be
under way are waiting for something. c is the time of one batch by itself: g + r + u + p, or a step
of async 0 where that is shorter, because its rewards begin earlier. What the runs earn is drawn
into results/async_rl.svg.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import common
import curves
from rich.console import Console

from homeostat.config.loading.load import build_config
from homeostat.observe.jsonl import read_metrics
from homeostat.run.calling.start import train_recipe
from homeostat.run.session.session import open_session

ASSETS = common.BENCH_DIR.parent / "recipes" / "assets"
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
GROUPS, SAMPLES, NEW_TOKENS = 12, 8, 64
# The mean is what a run's curve shows.
WINDOW = 5
OWN = ("engine.own_process=true", "trainer.threads=1")
KINDS: dict[str, tuple[str, ...]] = {
    "sync": ("trainer.threads=2",),
    "turns": OWN,
    "async 0": (*OWN, "rollout.max_staleness=0"),
    "async 1": (*OWN, "rollout.max_staleness=1"),
    "async 2": (*OWN, "rollout.max_staleness=2"),
    "async 2, partial": (*OWN, "rollout.max_staleness=2", "rollout.partial=true"),
}
COLOURS = ("#0f172a", "#64748b", "#a855f7", "#2563eb", "#059669", "#dc2626")
REWARD = """
import time, zlib

def slow(completions, first, **columns):
    share = zlib.crc32(completions[0].encode()) % 1000 / 1000
    time.sleep({seconds} * (0.5 + share))
    return [float(text[:1] == wanted) for text, wanted in zip(completions, first)]
"""


def write_inputs(place: Path, *, reward_s: float) -> None:
    """The demo's tokenizer and family at another size, prompts, and the reward."""
    (place / "model").mkdir()
    for file in (ASSETS / "tiny-sort").iterdir():
        (place / "model" / file.name).write_bytes(file.read_bytes())
    config = json.loads((place / "model" / "config.json").read_text())
    (place / "model" / "config.json").write_text(json.dumps({**config, **SHAPE}))
    rng = random.Random(0)
    rows = []
    for _ in range(512):
        digits = "".join(rng.choices("0123456789", k=rng.randint(2, 5)))
        rows.append(json.dumps({"prompt": f"{digits}>", "first": min(digits)}))
    (place / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    (place / "reward.py").write_text(REWARD.format(seconds=reward_s))


def train(place: Path, kind: str, *, steps: int) -> list[dict[str, float]]:
    """The records of a run."""
    raw: dict[str, Any] = {
        "name": kind.replace(" ", "_").replace(",", ""),
        "runs_dir": str(place),
        "algorithm": {"type": "grpo"},
        "model": {"path": str(place / "model"), "init": "random"},
        "data": {
            "train": [{"type": "prompts", "path": str(place / "prompts.jsonl"), "chat": False}],
            "max_length": 16,
        },
        "rollout": {
            "prompts_per_step": GROUPS,
            "samples_per_prompt": SAMPLES,
            "max_new_tokens": NEW_TOKENS,
        },
        "rewards": {
            "functions": [{"type": "function", "path": f"{place / 'reward.py'}:slow"}],
            "workers": GROUPS,
        },
        "trainer": {"max_steps": steps, "lr": 3e-4, "device": "cpu"},
        "checkpoint": {"interval_steps": 10_000, "export": "off"},
        "observe": {"console": "quiet", "report": False},
    }
    config = build_config(raw, list(KINDS[kind]), file=None)
    console = Console(file=io.StringIO())
    with open_session(
        config, recipe="", command=["bench"], console=console, log_level="warning"
    ) as session:
        train_recipe(config, session)
    return list(read_metrics(config.run_dir / "metrics.jsonl"))


def ideal_s(stages: dict[str, float], staleness: int, *, one_batch_s: float) -> float:
    """Return the seconds of a step in a work-conserving schedule."""
    sample, update, publish = (stages[name] for name in ("g", "u", "p"))
    return max(sample + publish, update + publish, one_batch_s / (staleness + 1))


def stages_of(records: list[dict[str, float]]) -> dict[str, float]:
    def median(*names: str) -> float:
        return statistics.median(sum(record[name] for name in names) for record in records)

    return {
        "g": median("time/generate"),
        "r": median("time/reward"),
        "u": median("time/score", "time/train"),
        "p": median("sync/seconds"),
    }


def picture(rewards: dict[str, list[float]], seconds: dict[str, float], steps: int) -> str:
    """Reward over time: as far as the run came that took longest."""
    right = 190
    longest = max(seconds[kind] * steps for kind in rewards)
    top = max(max(values) for values in rewards.values())
    parts = curves.head("Reward over seconds, with a slow reward and ragged lengths, on two cores")
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(curves.grid_line(tick, f"{tick * top:.2f}", right=right))
    last = max(1, round(longest))
    parts += curves.step_labels(range(0, last + 1, max(1, last // 6)), last=last, right=right)
    parts.append(curves.caption(f"seconds (mean reward of {WINDOW} steps)"))
    ends = []
    for (kind, values), colour in zip(rewards.items(), COLOURS, strict=True):
        chunks = [values[start : start + WINDOW] for start in range(0, len(values), WINDOW)]
        points = [
            curves.place(
                seconds[kind] * WINDOW * (index + 0.5) / last,
                statistics.mean(chunk) / top,
                right=right,
            )
            for index, chunk in enumerate(chunks)
        ]
        parts.append(curves.curve(points, colour))
        ends.append((points[-1][1], kind, colour))
    return "\n".join([*parts, *curves.end_labels(ends, right=right), "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reward-s", type=float, default=1.0, help="mean seconds per group")
    parser.add_argument("--steps", type=int, default=40)
    common.add_commit(parser)
    arguments = parser.parse_args()
    records: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="homeostat-async-") as scratch:
        write_inputs(Path(scratch), reward_s=arguments.reward_s)
        for kind in KINDS:
            records[kind] = train(Path(scratch), kind, steps=arguments.steps)
    # The first steps warm up, and fill the buffer.
    later = {kind: found[4:] for kind, found in records.items()}
    stages = stages_of(later["turns"])
    seconds = {k: statistics.mean(r["time/step"] for r in found) for k, found in later.items()}
    one_batch_s = min(sum(stages.values()), seconds["async 0"])
    result: dict[str, Any] = {"stages_s": {name: round(s, 4) for name, s in stages.items()}}
    for kind, found in later.items():
        result[kind] = {
            "step_s": round(seconds[kind], 4),
            "faster_than_sync": round(seconds["sync"] / seconds[kind], 3),
            "mean_length": statistics.mean(r["completions/mean_length"] for r in found),
            "max_length": max(r["completions/max_length"] for r in found),
            "reward_last_10": statistics.mean(r["reward"] for r in records[kind][-10:]),
        }
        if kind.startswith("async"):
            ideal = ideal_s(stages, int(kind[6]), one_batch_s=one_batch_s)
            result[kind] |= {
                "ideal_step_s": round(ideal, 4),
                "share_of_ideal": round(ideal / seconds[kind], 3),
                "stale_steps_max": max(r["stale/steps/max"] for r in found),
                "mixed_share": statistics.mean(r["stale/mixed_share"] for r in found),
                "engine_idle_s": statistics.mean(r["time/engine_idle"] for r in found),
                "wait_groups_s": statistics.mean(r["time/wait_groups"] for r in found),
            }
    rewards = {kind: [r["reward"] for r in found] for kind, found in records.items()}
    drawn = picture(rewards, seconds, arguments.steps)
    (common.RESULTS_DIR / "async_rl.svg").write_text(drawn, encoding="utf-8")
    machine = common.facts_of(arguments, ("torch", "numpy"))
    options = {"reward_s": arguments.reward_s, "steps": arguments.steps}
    common.write_result("async_rl", {**machine, **options, **result})


if __name__ == "__main__":
    main()
