"""Plan a recipe on many GPUs: its model's sizes and its step, as the simulator takes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from homeostat.config.run import RunConfig
from homeostat.errors import ModelError, PlanError
from homeostat.json_text import parse_json
from homeostat.models.decoder_shape import DecoderConfig
from homeostat.models.families import decoder_config
from homeostat.simulator.machine import load_machine
from homeostat.simulator.plan import Plan, make_plan
from homeostat.simulator.search import Job
from homeostat.simulator.shape import ModelShape
from homeostat.simulator.workload import Lengths, Workload

SHAPES = Path(__file__).resolve().parents[2] / "simulator" / "shapes"


@dataclass(frozen=True, slots=True)
class Assumed:
    """Facts about a step that a recipe does not state."""

    prompt_tokens: int = 512
    # None: half of rollout.max_new_tokens.
    mean_tokens: int | None = None
    # Standard deviation of the logarithm of a completion's length.
    spread: float = 0.6
    # Seconds of one call of the rewards, which scores a group.
    reward_s: float = 0.0


def shape_names() -> list[str]:
    """Return the names of the shapes that come with homeostat."""
    return sorted(file.stem for file in SHAPES.glob("*.json"))


def read_shape(name: str) -> ModelShape:
    """Return a shape by its name, or from a config.json, which needs no weights beside it."""
    given = Path(name)
    file = given if given.suffix == ".json" else SHAPES / f"{name}.json"
    if given.is_dir():
        file = given / "config.json"
    if not file.is_file():
        raise PlanError(
            f"There is no shape {name!r} and no config.json there. Give --shape: a folder or file "
            f"in Hugging Face format, or one of {', '.join(shape_names())}."
        )
    try:
        raw = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}.") from error
    label = given.name if given.is_dir() else file.stem if given != file else file.parent.name
    return shape_of(decoder_config(raw), name=label or file.stem)


def shape_of(decoder: DecoderConfig, *, name: str) -> ModelShape:
    """Return the sizes of a decoder that a plan needs."""
    moe = decoder.moe
    shape = ModelShape(
        name=name,
        layers=decoder.num_layers,
        hidden=decoder.hidden_size,
        heads=decoder.num_heads,
        kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        intermediate=decoder.intermediate_size,
        vocab=decoder.vocab_size,
        tied=decoder.tie_embeddings,
    )
    if moe is None:
        return shape
    return replace(
        shape,
        experts=moe.num_experts,
        active_experts=moe.top_k,
        expert_width=moe.expert_size,
        shared_width=moe.shared_size,
        moe_layers=len(moe.layers),
    )


def workload_of(config: RunConfig, shape: ModelShape, assumed: Assumed) -> Workload:
    """Return the work of a step of a recipe of RL."""
    if not config.is_rl:
        raise PlanError(
            f"{config.name} is not an RL recipe, and --gpus plans only RL. Without --gpus, the "
            "memory of any recipe is estimated."
        )
    rollout, trainer = config.rollout, config.trainer
    mean = assumed.mean_tokens or max(1, rollout.max_new_tokens // 2)
    if mean > rollout.max_new_tokens:
        raise PlanError(
            f"--mean-tokens is {mean}, but a completion has at most "
            f"rollout.max_new_tokens={rollout.max_new_tokens} tokens."
        )
    reference = config.used_reference is not None
    return Workload(
        prompts=rollout.prompts_per_step,
        samples=rollout.samples_per_prompt,
        prompt_tokens=min(assumed.prompt_tokens, config.data.max_length),
        lengths=Lengths(mean, rollout.max_new_tokens, assumed.spread),
        updates=trainer.updates_per_step,
        epochs=trainer.epochs_per_step,
        max_tokens=trainer.tokens_per_device,
        scored=1 - 1 / trainer.updates_in_step + reference,
        holds_reference=reference and config.lora is None,
        reward_s=assumed.reward_s,
        reward_workers=config.reward_functions.workers,
        adapter_params=_adapter_params(config, shape),
    )


def _adapter_params(config: RunConfig, shape: ModelShape) -> int | None:
    """Count the adapter of all linear maps of attention and of a dense block."""
    if config.lora is None:
        return None
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * (shape.hidden + q_width) + 2 * (shape.hidden + kv_width)
    block = 0 if shape.experts else 3 * (shape.hidden + shape.intermediate)
    return config.lora.rank * shape.layers * (attention + block)


def plan_recipe(
    config: RunConfig,
    *,
    gpus: int,
    nodes: int | None = None,
    machine: str = "h200",
    shape: str | None = None,
    assumed: Assumed | None = None,
) -> Plan:
    """Return the plan of a recipe on `gpus` GPUs of a kind. Raises PlanError if it cannot fit."""
    model = read_shape(shape if shape is not None else config.model.path)
    device = load_machine(machine)
    if nodes is not None:
        if gpus % nodes:
            raise PlanError(f"{gpus} GPUs cannot be spread evenly over {nodes} nodes.")
        device = replace(device, node_gpus=gpus // nodes)
    workload = workload_of(config, model, assumed or Assumed())
    job = Job(model, workload, device, config.engine.max_concurrency)
    return make_plan(job, gpus, max_staleness=config.rollout.max_staleness or 0)
