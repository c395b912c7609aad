"""Check an RL recipe before the first step: prompts, sizes, engine, rewards, evaluation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from homeostat.config.combinations.check import count_steps
from homeostat.config.critic import CriticConfig
from homeostat.config.kept_ids import MAX_KEPT_IDS
from homeostat.config.model import ModelConfig
from homeostat.config.observe import EvalSamplingConfig
from homeostat.config.rewards import RewardsConfig
from homeostat.config.rollout import CheckpointReference, RolloutConfig
from homeostat.config.run import RunConfig
from homeostat.config.sync import SharedMemoryConfig
from homeostat.data.inputs import Inputs, Part, require_stop_ids
from homeostat.data.prompts import PromptSet
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import DataError
from homeostat.models.preview import ModelPreview, preview_model
from homeostat.observe import format as fmt
from homeostat.ops.moe_shape import MoeShape
from homeostat.precision.bases import base_rewrite
from homeostat.rewards.solved import deciding_rewards
from homeostat.rewards.trial import try_rewards
from homeostat.rollout.backend import Prospect
from homeostat.rollout.engine import Capabilities
from homeostat.rollout.registry import backend_of
from homeostat.run.preflight.item import Item
from homeostat.run.wiring.replay import require_replay, route_bytes_per_token
from homeostat.run.wiring.rl_setup import saved_journal
from homeostat.train.build import critic_lora, naming, reference_model
from homeostat.train.runtime import resolve_device, resolve_dtype

# Number of prompts on which every reward function is tried.
NUM_TRIED = 4


def prompt_item(part: Part, prompts: PromptSet) -> Item:
    """Return how many prompts were kept, and how long they are."""
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
    """Show the sizes of a step: prompts x samples = rows, which are split into updates."""
    trainer, rollout, prompts = config.trainer, config.rollout, inputs.train.rows
    num_prompts = len(inputs.train)
    sizes = {"rows_per_step": config.rows_per_step}
    total = trainer.total_steps(num_prompts, **sizes)
    longest = int(prompts.lengths.max()) + rollout.max_new_tokens
    samples = round(rollout.samples_per_step * prompts.asked_per_row)
    most = samples * (float(np.mean(prompts.lengths)) + rollout.max_new_tokens)
    facts = {
        "prompts": num_prompts,
        "steps_per_epoch": trainer.steps_per_epoch(num_prompts, **sizes),
        "total_steps": total,
        "samples_per_step": samples,
        "rows_per_update": samples / trainer.updates_per_step,
        "longest_row_tokens": longest,
        "tokens_per_step_at_most": round(most),
    }
    asked = "prompts"
    if config.is_strided:
        asked = f"texts x about {prompts.asked_per_row:.0f} positions"
    text = (
        f"{rollout.prompts_per_step} {asked} x {rollout.samples_per_prompt} samples = "
        f"{samples} rows a step, in {trainer.updates_per_step} updates of about "
        f"{facts['rows_per_update']:.0f}; {facts['steps_per_epoch']} steps an epoch, {total} in "
        f"all; a row has at most {longest} tokens, a step {fmt.count(most)}"
    )
    yield Item("sizes", "ok", text, facts)
    if rollout.prompts_per_step > num_prompts:
        few = (
            f"rollout.prompts_per_step={rollout.prompts_per_step} is more than the {num_prompts} "
            "prompts: some occur twice in a step"
        )
        yield Item("sizes", "warning", few)
    count_steps(config, num_prompts)


def evaluation_items(rewards: RewardsConfig, rules: EvalSamplingConfig) -> Iterator[Item]:
    """Show which reward decides that a sample is solved, because users often expect another one."""
    judges = deciding_rewards(rewards, solved_by=rules.solved_by)
    facts = {"solved_by": [list(labels) for labels in judges.values()], "at": rules.solved_at}
    if "" in judges:
        names = " and ".join(judges[""])
        give = "gives" if len(judges[""]) == 1 else "give"
        text = f"pass@k: a sample is solved where {names} {give} {rules.solved_at:g} or more"
        yield Item("evaluation", "ok", text, facts)
        return
    names = ", ".join(labels[0] for labels in judges.values())
    text = (
        "it is not clear which reward decides what is solved, so pass@k is reported for each of "
        f"{names} (eval/pass@k/<name>): name the one that decides in eval.sampling.solved_by"
    )
    yield Item("evaluation", "warning", text, facts)


def reward_items(
    rewards: RewardsConfig, prompts: PromptSet, tokenizer: ChatTokenizer
) -> Iterator[Item]:
    """Run every reward function on real rows, in its worker, with its time limit."""
    encode = lambda text: tokenizer.encode(text)[0].tolist()  # noqa: E731
    tried = [prompts[index] for index in range(min(NUM_TRIED, len(prompts)))]
    for line in try_rewards(rewards, tried, encode=encode, num_prompts=NUM_TRIED):
        yield Item("rewards", line.level, f"{line.label}: {line.text}", line.facts)


def engine_items(
    config: RunConfig, preview: ModelPreview, prompts: PromptSet, *, lanes: int
) -> Iterator[Item]:
    engine, device = config.engine, resolve_device(config)
    require_stop_ids(config.rollout, vocab_size=preview.vocab_size)
    running = min(engine.max_concurrency, config.requests_per_step)
    prospect = Prospect(
        engine=engine,
        model=config.model,
        preview=preview,
        device=device,
        dtype=resolve_dtype(config.trainer, device),
        lanes=lanes,
        max_tokens=config.max_request_tokens,
        running=running,
        longest=int(prompts.lengths.max()) + config.rollout.max_new_tokens,
        fp8=config.engine_fp8,
        is_int4=config.trainer.int4 is not None or engine.quantization == "int4",
    )
    backend = backend_of(engine)
    foreseen = backend.preflight(prospect)
    text = f"{engine.type} on {device.type}: up to {running} completions at one time"
    facts = {"type": engine.type, "running": running, **foreseen.facts}
    yield Item("engine", "ok", text + foreseen.text, facts)
    capabilities = backend.capabilities(prospect)
    yield _weights_item(config, capabilities)
    if config.rollout.is_cut:
        yield _cut_item(config.rollout, vocabulary=preview.vocab_size)
    moe = None if preview.decoder is None else preview.decoder.moe
    require_replay(config.model.moe, moe, capabilities)
    if moe is not None:
        yield _routes_item(config.model, moe, capabilities)


def _routes_item(model: ModelConfig, moe: MoeShape, engine: Capabilities) -> Item:
    """Report whether routes are replayed, and how much memory recording them needs."""
    settings = model.moe
    mode = settings.router_replay
    size = route_bytes_per_token(moe, weights=mode == "weights")
    facts = {"router_replay": mode, "bytes_per_token": size}
    if mode == "off":
        text = (
            "each pass chooses its experts for itself (model.moe.router_replay=off). Where engine "
            "and trainer round differently, tokens go to other experts in training than when they "
            "were sampled"
        )
        if model.numerics == "invariant":
            # Engine and trainer have the same bits, and so the same routes.
            return Item("routes", "ok", text + "; with model.numerics=invariant they do not", facts)
        if engine.routed_experts:
            text += f": set it to ids, which takes {size} bytes a token in the journal"
        return Item("routes", "warning", text, facts)
    what = "experts" if mode == "ids" else "experts and their weights"
    text = (
        f"the engine's {what} are replayed in training ({mode}); {size} bytes a token in the "
        f"journal, at most {fmt.byte_size(settings.replay_buffer_bytes)} of them in memory"
    )
    if settings.replay_reference:
        text += "; the reference replays them, too"
    return Item("routes", "ok", text, {**facts, "buffer_bytes": settings.replay_buffer_bytes})


def _cut_item(rollout: RolloutConfig, *, vocabulary: int) -> Item:
    """Report from which sets tokens are drawn, and whether a set may be too large to replay."""
    facts = {"top_p": rollout.top_p, "top_k": rollout.top_k, "min_p": rollout.min_p}
    parts = [f"{name}={value:g}" for name, value in facts.items() if value is not None]
    text = (
        f"tokens are drawn from what {', '.join(parts)} leave of the distribution, and log-probs, "
        "ratios, KL and entropy are over the same tokens"
    )
    if rollout.top_k is None and vocabulary > MAX_KEPT_IDS:
        text += (
            f". A token that keeps more than {MAX_KEPT_IDS:,} of the {vocabulary:,} ids would stop "
            f"the run: set rollout.top_k={MAX_KEPT_IDS} or less if the policy may be so uncertain"
        )
        return Item("sampling", "warning", text, facts)
    return Item("sampling", "ok", text, facts)


def _weights_item(config: RunConfig, engine: Capabilities) -> Item:
    """Report how new weights reach the engine, and how old they may be."""
    if engine.shares_weights:
        text = "the engine shares the trainer's weights: nothing is sent"
        return Item("weights", "ok", text, {"transport": "in_process", "interval_steps": 1})
    transport = (config.sync.transport or SharedMemoryConfig()).type
    steps = config.steps_between_publications
    often = "after every step" if steps == 1 else f"every {steps} steps"
    text = f"sent by {transport} {often} to the engine, which runs in its own process"
    if steps > 1:
        text += f"; a step may be sampled with weights that are {steps - 1} steps old"
    return Item("weights", "ok", text, {"transport": transport, "interval_steps": steps})


def _critic_item(config: RunConfig, critic: CriticConfig) -> Item:
    device = resolve_device(config)
    with naming("critic.path" if critic.path else "model.path"):
        preview = preview_model(
            critic.start(config.model),
            critic_lora(critic, config.lora),
            dtype=resolve_dtype(config.trainer, device),
            device=device,
            head=critic.head_init,
            hold=base_rewrite(config.model),
        )
    text = (
        f"{preview.family} with a value head, {fmt.count(preview.num_trainable)} of "
        f"{fmt.count(preview.num_params)} parameters trained"
    )
    if critic.warmup_steps:
        text += f"; it learns alone in the first {critic.warmup_steps} steps"
    facts = {"num_params": preview.num_params, "num_trainable": preview.num_trainable}
    return Item("critic", "ok", text, facts)


def other_run_items(config: RunConfig) -> Iterator[Item]:
    """Check what the run reads from elsewhere: a reference checkpoint, another run's rollouts."""
    if isinstance(config.reference, CheckpointReference):
        device = resolve_device(config)
        with naming("reference.path"):
            preview = preview_model(
                reference_model(config.model, config.reference),
                None,
                dtype=resolve_dtype(config.trainer, device),
                device=device,
                on_host=config.trainer.backend.on_host,
                hold=base_rewrite(config.model),
            )
        text = f"{preview.family}, {fmt.count(preview.num_params)} parameters"
        yield Item("reference", "ok", text, {"num_params": preview.num_params})
    if config.critic is not None:
        yield _critic_item(config, config.critic)
    if (journal := saved_journal(config.debug)) is not None:
        steps = journal.steps()
        if not steps:
            raise DataError(f"debug.rollouts: {journal.folder} holds no steps. Name another run.")
        text = f"{len(steps)} steps of {journal.folder}"
        yield Item("rollouts", "ok", text, {"steps": len(steps)})
