"""Claim: with experts, a perturbed engine makes GRPO diverge; TIS or routing replay lets it learn.

The sorting task of `make demo` with a model of experts, at a high learning rate. The engine's
linear maps are in e4m3 (bench/e4m3.py), its routers' logits are off by noise, as by rounding but
more, and it gets the trainer's weights every other step only: what it samples went to other experts
than the trainer would choose. Three runs from the same start, through the parts of a real run
(sampler, advantages, updates): no correction; truncated importance sampling (TIS); routing replay
(model.moe.router_replay=ids) without any correction. Their curves are drawn into
results/moe_replay.svg. What recording and replaying costs is measured beside them.

    python bench/moe_replay.py                  # about ten minutes on one core
    python bench/moe_replay.py --jobs 3
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import common
import curves
import e4m3
import numpy as np
import torch
from torch import Tensor

from homeostat.config import RunConfig
from homeostat.config.loading.live import LiveConfig
from homeostat.config.loading.load import load_config
from homeostat.config.native import NativeEngineConfig
from homeostat.data.tokenizer import ChatTokenizer, load_tokenizer
from homeostat.models.decoder import Decoder
from homeostat.models.moe import Router
from homeostat.observe.run_dir import RunDir
from homeostat.rollout.collect import training_sampling
from homeostat.rollout.group_arrays import encode
from homeostat.rollout.native.engine import NativeEngine
from homeostat.rollout.route_buffer import route_bytes
from homeostat.rollout.sampler import Draw, Sampler
from homeostat.run.learning.learn import Learned, Learner
from homeostat.run.learning.routes import route_metrics
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.local import LocalTrainer
from homeostat.train.oom import MemoryGuard
from homeostat.train.runtime import resolve_runtime
from homeostat.train.saving.run_state import RlState, RunState
from homeostat.train.step import GuardedStep
from homeostat.types import Prompt, Role, RolloutGroup, Sample

ROOT = common.BENCH_DIR.parent
RECIPES, ASSETS = ROOT / "recipes", ROOT / "recipes" / "assets"
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
}
# Deviation of the noise on the engine's router logits, and steps from one copy to the next.
NOISE, INTERVAL = 1.0, 2
LR, WARMUP = 2e-3, 20
PROMPTS_PER_STEP, SAMPLES = 64, 8
KINDS = {
    "no correction": ("algorithm.correction=null",),
    "TIS": (),
    "routing replay (R3)": ("algorithm.correction=null", "model.moe.router_replay=ids"),
}
COLOURS = ("#dc2626", "#2563eb", "#059669")


class NoisyRouter(Router):
    """A router whose logits are off by noise."""

    def logits(self, x_ND: Tensor) -> Tensor:
        logits_NE = super().logits(x_ND)
        return logits_NE + NOISE * torch.randn(logits_NE.shape)


def perturbed(model: Decoder) -> Decoder:
    found = e4m3.in_e4m3(model)
    for module in found.modules():
        if isinstance(module, Router):
            module.__class__ = NoisyRouter
    return found


def pretrained(folder: Path) -> Path:
    """A model of experts after the demo's SFT stage. Returns its HF folder."""
    model = folder / "tiny-sort-experts"
    model.mkdir()
    for file in (ASSETS / "tiny-sort").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**shape, **EXPERTS}))
    code = "from homeostat.cli.main import main; main()"
    recipe = RECIPES / "tiny_sort_sft_cpu.yaml"
    changes = (f"model.path={model}", f"runs_dir={folder}", "name=sft", "observe.console=plain")
    line = [sys.executable, "-c", code, "train", str(recipe), *changes, "trainer.max_steps=40"]
    subprocess.run(line, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return sorted((folder / "sft" / "checkpoints").glob("step_*"))[-1] / "hf"


def config_of(kind: str, weights: Path, steps: int) -> RunConfig:
    overrides = [
        f"model.path={weights}",
        "algorithm.type=dr_grpo",
        f"trainer.lr={LR}",
        f"trainer.schedule={{type: constant, warmup_steps: {WARMUP}}}",
        f"trainer.max_steps={steps}",
        f"rollout.prompts_per_step={PROMPTS_PER_STEP}",
        f"rollout.samples_per_prompt={SAMPLES}",
        *KINDS[kind],
    ]
    return load_config(RECIPES / "tiny_sort_grpo_cpu.yaml", overrides)


def learner_of(config: RunConfig, trainer: LocalTrainer, run_dir: RunDir) -> Learner:
    state = RunState()
    memory = MemoryGuard(trainer, config.for_trainer, run_dir=run_dir, emit=_silent, state=state)
    guarded = GuardedStep(
        trainer,
        config.trainer,
        moe=config.model.moe,
        memory=memory,
        origin=str,
        run_dir=run_dir,
        emit=_silent,
        decode=str,
        state=state,
    )
    return Learner(
        LiveConfig(config),
        trainer=trainer,
        guarded=guarded,
        memory=memory,
        state=state,
        rl_state=RlState(kl_coefficient=None),
        total_steps=config.trainer.max_steps or 1,
        tell=_silent,
    )


def _silent(*args: Any, **fields: Any) -> None:
    """Nobody watches."""


def prompts_of(tokenizer: ChatTokenizer) -> list[Prompt]:
    lines = (ASSETS / "tiny_sort_prompts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        Prompt(number, tokenizer.encode(row["prompt"])[0], row["prompt"], row)
        for number, row in enumerate(rows)
    ]


def sample(
    model: Decoder,
    config: RunConfig,
    tokenizer: ChatTokenizer,
    prompts: Sequence[Prompt],
    *,
    step: int,
    seed: int,
    replay: str,
) -> list[RolloutGroup]:
    """Sample groups from a model, and reward each sample that is sorted."""
    engine = NativeEngine(
        model,
        NativeEngineConfig(decode="plain", max_concurrency=1024),
        device=torch.device("cpu"),
        max_tokens=config.max_request_tokens,
        decode=None,
        chunk_bytes=config.trainer.logits_bytes("cpu"),
    )
    draws = [Draw(f"train/{step}/0/{place}", prompt) for place, prompt in enumerate(prompts)]
    groups: dict[int, RolloutGroup] = {}
    for place, completions in Sampler(engine, seed=seed, stall_s=600).sample(
        draws,
        sampling=training_sampling(config.rollout, tokenizer),
        num_samples=SAMPLES,
        router_replay=replay,
    ):
        samples = []
        for completion in completions:
            tokens = [t for t in completion.tokens_T.tolist() if t not in tokenizer.stop_ids]
            text = tokenizer.decode(tokens)
            reward = float(text == prompts[place].columns["answer"])
            samples.append(Sample(completion, text, {"sorted": reward}, reward))
        groups[place] = RolloutGroup(prompts[place], tuple(samples))
    engine.close()
    return [groups[place] for place in range(len(prompts))]


def run(kind: str, *, weights: Path, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    config = config_of(kind, weights, steps)
    tokenizer = load_tokenizer(config.model)
    everything = prompts_of(tokenizer)
    order = np.random.default_rng(seed).permutation(len(everything) * 100) % len(everything)
    trainer = local_trainer(config.for_trainer, resolve_runtime(config, kept=PLAIN))
    model = trainer.roles[Role.POLICY].model
    assert isinstance(model, Decoder)
    rewards, agreement, k3, seconds = [], [], [], []
    with RunDir(folder / f"run-{list(KINDS).index(kind)}-{seed}") as run_dir:
        learner = learner_of(config, trainer, run_dir)
        for step in range(1, steps + 1):
            if (step - 1) % INTERVAL == 0:
                engine_model = perturbed(model)
            first = (step - 1) * PROMPTS_PER_STEP
            chosen = [everything[place] for place in order[first : first + PROMPTS_PER_STEP]]
            started = time.perf_counter()
            replay = config.model.moe.router_replay
            where = {"step": step, "seed": seed, "replay": replay}
            groups = sample(engine_model, config, tokenizer, chosen, **where)
            learned: Learned = learner.learn(step, groups, epoch=0)
            seconds.append(time.perf_counter() - started)
            found = [s.reward or 0.0 for group in groups for s in group.samples]
            rewards.append(round(statistics.mean(found), 4))
            k3.append(round(learned.mismatch.get("sampling/k3", float("nan")), 5))
            agreement.append(route_metrics(learned.reports).get("moe/route_agreement"))
            if step % 10 == 0:
                print(f"{kind}, step {step}: reward {rewards[-1]:.3f}, k3 {k3[-1]}", flush=True)
    trainer.close()
    last = statistics.mean(rewards[-10:])
    return {
        "kind": kind,
        "seed": seed,
        "reward_of_last_10_steps": round(last, 4),
        "best_reward": max(rewards),
        "seconds_per_step": round(statistics.median(seconds), 3),
        "reward": rewards,
        "k3": k3,
        "route_agreement": agreement,
    }


def costs(weights: Path, folder: Path) -> dict[str, float]:
    """Seconds of sampling and of training with and without routes, and their bytes."""
    # As many steps as the warm-up has, at least; one is made.
    config = config_of("routing replay (R3)", weights, WARMUP)
    off = config_of("no correction", weights, WARMUP)
    tokenizer = load_tokenizer(config.model)
    prompts = prompts_of(tokenizer)[:PROMPTS_PER_STEP]
    sampling: dict[str, list[float]] = {"off": [], "ids": []}
    training: dict[str, list[float]] = {"off": [], "ids": []}
    groups: list[RolloutGroup] = []
    trainers = {"off": (off, _trainer(off)), "ids": (config, _trainer(config))}
    for number in range(4):
        for mode, (own, trainer) in trainers.items():
            model = trainer.roles[Role.POLICY].model
            assert isinstance(model, Decoder)
            started = time.perf_counter()
            where = {"step": number, "seed": 0, "replay": mode}
            found = sample(model, own, tokenizer, prompts, **where)
            sampling[mode].append(time.perf_counter() - started)
            groups = found if mode == "ids" else groups
            with RunDir(folder / f"cost-{mode}-{number}") as run_dir:
                learner = learner_of(own, trainer, run_dir)
                started = time.perf_counter()
                learner.learn(1, found, epoch=0)
                training[mode].append(time.perf_counter() - started)
    num_tokens = sum(len(g.prompt.tokens_T) + len(s.completion) for g in groups for s in g.samples)
    kept = sum(array.nbytes for name, array in encode(groups)[1].items() if "routed_" in name)
    # The fastest of each: others use the machine, too. The first round warms up.
    fastest = {
        name: {mode: min(values[1:]) for mode, values in by_mode.items()}
        for name, by_mode in (("sampling", sampling), ("training", training))
    }
    step = sum(by_mode["off"] for by_mode in fastest.values())
    return {
        "sampling_s": fastest["sampling"]["off"],
        "training_s": fastest["training"]["off"],
        "recording_share_of_step": (fastest["sampling"]["ids"] - fastest["sampling"]["off"]) / step,
        "replaying_share_of_step": (fastest["training"]["ids"] - fastest["training"]["off"]) / step,
        "route_bytes_per_token_in_memory": sum(map(route_bytes, groups)) / num_tokens,
        "route_bytes_per_token_in_journal": kept / num_tokens,
        "route_bytes_per_run_token": EXPERTS["num_hidden_layers"] * EXPERTS["num_experts_per_tok"],
    }


def _trainer(config: RunConfig) -> LocalTrainer:
    return local_trainer(config.for_trainer, resolve_runtime(config, kept=PLAIN))


def picture(runs: list[dict[str, Any]], steps: int) -> str:
    """Draw the reward over steps, the mean of five: a line for each run."""
    right = 210
    tenths = math.ceil(10 * max(max(run["reward"]) for run in runs))
    highest = tenths / 10
    title = "Sorting digits with experts: an engine in e4m3 whose routers are off by noise"
    parts = curves.head(title)
    for tick in range(tenths + 1):
        parts.append(curves.grid_line(tick / tenths, f"{tick / 10:.1f}", right=right))
    parts += curves.step_labels(range(0, steps + 1, 10), last=steps, right=right)
    parts.append(curves.caption("step (mean of 5 steps of the reward as sampled)"))
    ends = []
    for run, colour in zip(runs, COLOURS, strict=True):
        reward = run["reward"]
        chunks = [reward[start : start + 5] for start in range(0, len(reward), 5)]
        points = [
            curves.place((5 * number + 2.5) / steps, statistics.mean(chunk) / highest, right=right)
            for number, chunk in enumerate(chunks)
        ]
        parts.append(curves.curve(points, colour))
        ends.append((points[-1][1], run["kind"], colour))
    return "\n".join([*parts, *curves.end_labels(ends, right=right), "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at one time; each takes a core")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    common.add_commit(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="homeostat-moe-") as text:
        folder = Path(text)
        weights = pretrained(folder)
        cost = costs(weights, folder)
        print(cost, flush=True)
        size = {"steps": arguments.steps, "seed": arguments.seed}
        each = partial(run, weights=weights, folder=folder, **size)
        with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
            runs = list(pool.map(each, arguments.kinds))
    machine = common.facts_of(arguments, ("torch", "transformers"))
    result = {**machine, "noise": NOISE, "interval": INTERVAL, "cost": cost, "runs": runs}
    common.write_result("moe_replay", result)
    if len(runs) == len(KINDS):
        drawing = picture(runs, arguments.steps)
        (common.RESULTS_DIR / "moe_replay.svg").write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
