"""What can be known of an RL run before its first step: prompts, sizes, rewards, the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from homeostat.config.rollout import CheckpointReference
from homeostat.config.run import RunConfig
from homeostat.config.sync import SharedMemoryConfig
from homeostat.config.vllm import VllmEngineConfig
from homeostat.data.inputs import Inputs, Part, count_steps, require_stop_ids
from homeostat.data.prompts import PromptSet
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import ConfigError, DataError, Problem
from homeostat.models.preview import ModelPreview, preview_model
from homeostat.observe import format as fmt
from homeostat.observe.processor import this_processor
from homeostat.rewards.trial import try_rewards
from homeostat.rollout.native.fast import decoding_way, obstacle
from homeostat.rollout.native.memory import free_bytes
from homeostat.rollout.vllm.options import (
    check_options,
    require_computable,
    require_installed,
)
from homeostat.run.evaluation.solved import deciding_rewards
from homeostat.run.preflight.item import Item
from homeostat.run.wiring.engines import sampling_processes
from homeostat.run.wiring.rl_setup import saved_journal
from homeostat.train.build import named_reference, reference_model
from homeostat.train.runtime import resolve_device, resolve_dtype

# Prompts that every reward is tried on.
NUM_TRIED = 4


def prompt_item(part: Part, prompts: PromptSet) -> Item:
    report = prompts.report
    lost = report.seen - report.kept
    text = (
        f"{part}: {report.kept} of {report.seen} prompts kept, longest "
        f"{int(prompts.lengths.max())} tokens, mean {prompts.lengths.mean():.0f}"
    )
    if lost:
        text += f"; {report.dropped_overlong} too long, {report.num_bad} unusable"
    facts = {name: v for name, v in report.to_json().items() if "examples" not in name}
    level = "warning" if lost > 0.1 * report.seen else "ok"
    return Item("data", level, text, {"which": part, **facts})


def size_items(config: RunConfig, inputs: Inputs[PromptSet]) -> Iterator[Item]:
    """One arithmetic: prompts x samples = rows, split into updates."""
    trainer, rollout, prompts = config.trainer, config.rollout, inputs.train.rows
    num_prompts = len(inputs.train)
    sizes = {"rows_per_step": config.rows_per_step}
    total = trainer.total_steps(num_prompts, **sizes)
    longest = int(prompts.lengths.max()) + rollout.max_new_tokens
    most = rollout.samples_per_step * (float(np.mean(prompts.lengths)) + rollout.max_new_tokens)
    facts = {
        "prompts": num_prompts,
        "steps_per_epoch": trainer.steps_per_epoch(num_prompts, **sizes),
        "total_steps": total,
        "samples_per_step": rollout.samples_per_step,
        "rows_per_update": rollout.samples_per_step / trainer.updates_per_step,
        "longest_row_tokens": longest,
        "tokens_per_step_at_most": round(most),
    }
    text = (
        f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples = "
        f"{rollout.samples_per_step} rows a step, in {trainer.updates_per_step} updates of about "
        f"{facts['rows_per_update']:.0f}; {facts['steps_per_epoch']} steps an epoch, {total} in "
        f"all; a row has at most {longest} tokens, a step {fmt.count(most)}"
    )
    yield Item("sizes", "ok", text, facts)
    if rollout.prompts_per_step > num_prompts:
        few = (
            f"rollout.prompts_per_step={rollout.prompts_per_step} is more than the {num_prompts} "
            "prompts: some come twice in a step"
        )
        yield Item("sizes", "warning", few)
    count_steps(config, num_prompts)


def evaluation_items(config: RunConfig) -> Iterator[Item]:
    """Say which reward decides what is solved, which is easily taken for another one."""
    if not (config.data.validation or config.data.validation_share > 0):
        return
    assert config.rewards is not None, "combinations asks for rewards"
    rules = config.eval.sampling
    judges = deciding_rewards(config.rewards, solved_by=rules.solved_by)
    facts = {"solved_by": [list(labels) for labels in judges.values()], "at": rules.solved_at}
    if "" in judges:
        names = " and ".join(judges[""])
        give = "gives" if len(judges[""]) == 1 else "give"
        text = f"pass@k: a sample is solved where {names} {give} {rules.solved_at:g} or more"
        yield Item("evaluation", "ok", text, facts)
        return
    names = ", ".join(labels[0] for labels in judges.values())
    text = (
        f"no reward is known to say what is solved, so pass@k is reported for each of {names} "
        "(eval/pass@k/<name>): name the one that decides in eval.sampling.solved_by"
    )
    yield Item("evaluation", "warning", text, facts)


def reward_items(config: RunConfig, prompts: PromptSet, tokenizer: ChatTokenizer) -> Iterator[Item]:
    """Every reward is run on real rows, in its worker, with its time limit."""
    assert config.rewards is not None, "combinations asks for rewards"
    encode = lambda text: tokenizer.encode(text)[0].tolist()  # noqa: E731
    tried = [prompts[index] for index in range(min(NUM_TRIED, len(prompts)))]
    for line in try_rewards(config.rewards, tried, encode=encode, num_prompts=NUM_TRIED):
        yield Item("rewards", line.level, f"{line.label}: {line.text}", line.facts)


_WAYS = {
    "plain": "the model's own forward",
    "compact": "torch over a compact copy of the weights",
    "compiled": "compiled code over a copy of the weights",
    "fused": "fused kernels",
    "graphs": "fused kernels in CUDA graphs",
}


def engine_items(
    config: RunConfig, preview: ModelPreview, prompts: PromptSet, *, lanes: int
) -> Iterator[Item]:
    engine, device = config.engine, resolve_device(config)
    require_stop_ids(config, vocab_size=preview.vocab_size)
    running = min(engine.max_concurrency, config.rollout.samples_per_step)
    text = f"{engine.type} on {device.type}: up to {running} completions at one time"
    facts: dict[str, Any] = {"type": engine.type, "running": running}
    if isinstance(engine, VllmEngineConfig):
        require_installed()
        check_options(engine.options)
        if device.type == "cpu":
            dtype = str(resolve_dtype(config, device)).removeprefix("torch.")
            dtype = dtype if engine.dtype == "auto" else engine.dtype
            require_computable(dtype, processor=this_processor())
    else:
        assert preview.decoder is not None, "combinations asks for the native decoder"
        place = {"numerics": config.model.numerics, "device": device}
        way = decoding_way(preview.decoder, engine, **place)
        processes = sampling_processes(
            config, lanes=lanes, num_params=preview.num_params, has_threads=way == "compiled"
        )
        facts["processes"] = processes
        text += f", in {processes} processes" if processes > 1 else ""
        most = _cache_bytes(config, preview, prompts, running=running)
        text += (
            f", at most {fmt.byte_size(most)} of cached keys and values, decoded by {_WAYS[way]}"
        )
        if way == "compact" and engine.decode == "auto":
            text += f" (not by compiled code: {obstacle('compiled', preview.decoder, **place)})"
        facts |= {"cache_bytes_at_most": most, "decode": way}
    yield Item("engine", "ok", text, facts)
    yield _way_of_weights(config)


def _cache_bytes(
    config: RunConfig, preview: ModelPreview, prompts: PromptSet, *, running: int
) -> int:
    """The most that the cache will take. Raises ConfigError where not even one request fits."""
    per_token = preview.cache_bytes_per_token
    assert per_token is not None, "combinations asks for the native decoder"
    one = per_token * (int(prompts.lengths.max()) + config.rollout.max_new_tokens)
    budget = int(config.engine.memory_share * free_bytes(resolve_device(config)))
    if one > budget:
        raise ConfigError(
            [
                Problem(
                    "engine.memory_share",
                    f"the cache of one completion takes up to {fmt.byte_size(one)}, and the engine "
                    f"may have {fmt.byte_size(budget)}.",
                    "Raise it, or lower rollout.max_new_tokens or data.max_length.",
                )
            ]
        )
    return min(one * running, budget)


def _way_of_weights(config: RunConfig) -> Item:
    """How the engine comes by new weights, and how old they may be."""
    if config.engine.shares_weights:
        text = "the engine shares the trainer's weights: nothing is sent"
        return Item("weights", "ok", text, {"transport": "in_process", "interval_steps": 1})
    transport = (config.sync.transport or SharedMemoryConfig()).type
    steps = config.steps_between_publications
    often = "after every step" if steps == 1 else f"every {steps} steps"
    text = f"sent by {transport} {often} to the engine, which has a process of its own"
    if steps > 1:
        text += f"; a step may be sampled with weights that are {steps - 1} steps old"
    return Item("weights", "ok", text, {"transport": transport, "interval_steps": steps})


def other_run_items(config: RunConfig) -> Iterator[Item]:
    """What an RL run takes from elsewhere: a reference's checkpoint, another run's rollouts."""
    if isinstance(config.reference, CheckpointReference):
        device = resolve_device(config)
        with named_reference():
            preview = preview_model(
                reference_model(config.model, config.reference),
                None,
                dtype=resolve_dtype(config, device),
                device=device,
            )
        text = f"{preview.family}, {fmt.count(preview.num_params)} parameters"
        yield Item("reference", "ok", text, {"num_params": preview.num_params})
    if (journal := saved_journal(config)) is not None:
        steps = journal.steps()
        if not steps:
            raise DataError(f"debug.rollouts: {journal.folder} holds no step. Name another run.")
        text = f"{len(steps)} steps of {journal.folder}"
        yield Item("rollouts", "ok", text, {"steps": len(steps)})
