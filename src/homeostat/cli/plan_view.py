"""Show a plan for many GPUs as text."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from homeostat.simulator.layout import Layout
from homeostat.simulator.plan import Gain, Plan
from homeostat.simulator.published import Compared


def show_plan(console: Console, plan: Plan, published: list[Compared]) -> None:
    """Print the split, its memory, the seconds by stage, what binds, and what would help."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in _lines(plan):
        table.add_row(f"[bold]{name}[/bold]", text)
    for name, text in _published(published):
        table.add_row(f"[bold]{name}[/bold]", text)
    console.print(table, highlight=False)


def _lines(plan: Plan) -> list[tuple[str, str]]:
    job, best = plan.job, plan.best
    shape, work, memory, step = job.shape, job.workload, best.memory, best.step
    sizes = f"{shape.num_params / 1e9:,.1f} B parameters"
    if shape.experts:
        sizes += f", {shape.active_params / 1e9:,.1f} B active"
    lengths = work.lengths
    capacity = job.machine.memory_bytes / 1e9
    held = f"training {memory.training / 1e9:,.0f} GB, sampling {memory.sampling / 1e9:,.0f} GB"
    if memory.host:
        held += f"; {memory.host / 1e9:,.0f} GB of host memory per GPU"
    return [
        ("model", f"{shape.name}: {sizes}"),
        (
            "step",
            f"{work.prompts:,} prompts x {work.samples} samples; {work.prompt_tokens:,} prompt and "
            f"{lengths.mean:,.0f} new tokens in the mean, {lengths.maximum:,} at most",
        ),
        ("split", split_text(best.layout)),
        ("memory", f"{held}, of {capacity:,.0f} GB on each {job.machine.name}"),
        ("seconds", stage_text(plan)),
        (
            "speed",
            f"{step.tokens_per_s:,.0f} tokens/s, {step.tokens_per_s / plan.gpus:,.0f} per GPU; "
            f"busy: trainer {step.trainer_busy:.0%}, engines {step.engines_busy:.0%}",
        ),
        ("binds first", binds_text(plan)),
        ("would help", "; ".join(map(_gain_text, plan.helps)) or "nothing that was tried"),
        ("rates", "; ".join(f"{name}: {text}" for name, text in job.machine.sources)),
    ]


def split_text(layout: Layout) -> str:
    """Return a split in words."""
    mesh = layout.mesh
    parts = [f"{mesh.replicate} x {mesh.num_shards} shards"]
    named = {
        "ep": layout.expert_parallel_size,
        "cp": layout.context_parallel_size,
        "sp": layout.sequence_parallel_size,
    }
    parts += [f"{name} {size}" for name, size in named.items() if size > 1]
    parts += ["recomputing activations"] * layout.gradient_checkpointing
    if layout.offload_optimizer:
        parts.append(f"{'all state' if layout.offload_params else 'moments'} in host memory")
    place = "colocated" if layout.colocated else f"on {layout.trainer_gpus} of {layout.gpus} GPUs"
    count = layout.data_parallel_size
    engines = f"{count} engine{'s' * (count > 1)} of TP {layout.tensor_parallel_size}"
    mode = f"async, staleness {layout.max_staleness}" if layout.max_staleness else "synchronous"
    return f"{mode}; trainer {place} ({', '.join(parts)}); {engines}"


def stage_text(plan: Plan) -> str:
    """Return the seconds of a step by stage."""
    step = plan.best.step
    stages = {
        "generate": step.generate_s,
        "rewards": step.reward_s,
        "score": step.score_s,
        "train": step.train_s,
        "publish": step.publish_s,
        "other": step.other_s,
    }
    shown = ", ".join(f"{name} {value:,.1f}" for name, value in stages.items() if value >= 0.05)
    waits = f" ({step.exposed_s:,.1f} of training waits for transfers)" * (step.exposed_s >= 0.05)
    return f"{step.step_s:,.1f} a step: {shown}{waits}"


def binds_text(plan: Plan) -> str:
    """Return which limit is reached first, and which ones come next."""
    tried = "; ".join(f"{gain.name} (-{gain.saved:.0%})" for gain in plan.binds)
    if plan.best.layout.offload_optimizer:
        return (
            f"memory: it fits only with the optimizer in host memory. With twice as much: {tried}"
        )
    return f"{plan.first}. A step with twice as much: {tried}" if tried else "nothing in particular"


def _gain_text(gain: Gain) -> str:
    return f"{gain.name}: {gain.step_s:,.1f} s (-{gain.saved:.0%})"


def _published(rows: list[Compared]) -> list[tuple[str, str]]:
    return [
        (
            "published" if index == 0 else "",
            f"{row.source}: {row.what}, {row.gpus} GPUs: {row.theirs_s:,.1f} s; simulated "
            f"{row.ours_s:,.1f} s (ratio {row.ratio:.2f})",
        )
        for index, row in enumerate(rows)
    ]
