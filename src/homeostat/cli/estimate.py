"""`homeostat estimate`: the memory of a recipe on this machine, or a plan of it on many GPUs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from homeostat.cli.options import Format, OutputFormat, Overrides, Recipe, refuse_given
from homeostat.cli.plan_options import (
    GpuKind,
    Gpus,
    MeanTokens,
    Nodes,
    PromptTokens,
    RewardSeconds,
    Shape,
    Spread,
)
from homeostat.errors import DoesNotFitError, ModelError
from homeostat.importing.hints import load_recipe
from homeostat.observe.terminal import SafeConsole

if TYPE_CHECKING:
    from homeostat.config.run import RunConfig
    from homeostat.run.sizing.estimate import MemoryPlan
    from homeostat.simulator.plan import Plan


def estimate(
    recipe: Recipe,
    overrides: Overrides = None,
    format: OutputFormat = Format.TEXT,
    gpus: Gpus = None,
    nodes: Nodes = None,
    gpu: GpuKind = "h200",
    shape: Shape = None,
    prompt_tokens: PromptTokens = 512,
    mean_tokens: MeanTokens = None,
    spread: Spread = 0.6,
    reward_s: RewardSeconds = 0.0,
) -> None:
    """Estimate the memory of a recipe without loading weights, or plan a run on many GPUs.

    One update is traced on tensors without data, so the estimate counts what the run would keep in
    memory. If the run does not fit, the settings that would help are listed, the least disruptive
    first. With --gpus the RL loop is simulated instead. You get the fastest split that fits, its
    memory, the seconds of each stage, the bottleneck and what would help. Exit code 0: it fits; 1:
    it does not; 2: the recipe or its files have errors.
    """
    if gpus is None:
        of_many = {
            "--nodes": (nodes, None),
            "--gpu": (gpu, "h200"),
            "--shape": (shape, None),
            "--prompt-tokens": (prompt_tokens, 512),
            "--mean-tokens": (mean_tokens, None),
            "--spread": (spread, 0.6),
            "--reward-s": (reward_s, 0.0),
        }
        refuse_given(of_many, "only a plan on many GPUs (--gpus) uses it.")
    config = load_recipe(recipe, overrides)
    from homeostat.hub.resolve import resolve_names

    console = SafeConsole(stderr=True)
    if gpus is None:
        _estimate_memory(resolve_names(config, console=console), format)
    if shape is None:
        config = resolve_names(config, console=console, need="config", rows=False)
    from homeostat.run.sizing.scale import Assumed, plan_recipe

    assumed = Assumed(prompt_tokens, mean_tokens, spread, reward_s)
    try:
        where = {"gpus": gpus, "nodes": nodes, "machine": gpu, "shape": shape}
        plan = plan_recipe(config, **where, assumed=assumed)
    except DoesNotFitError as error:
        typer.echo(
            json.dumps({"fits": False, "why": str(error)}) if format is Format.JSON else error
        )
        raise typer.Exit(1) from None
    _show_many(plan, format)


def _estimate_memory(config: RunConfig, format: Format) -> NoReturn:
    """Trace an update, show what it holds, and exit with 0 if it fits, otherwise with 1."""
    from homeostat.run.preflight.check import Preflight
    from homeostat.run.session.waiting import progress_of
    from homeostat.run.sizing.estimate import ladder

    if config.model.implementation != "native":
        raise ModelError(
            "model.implementation is transformers, whose memory cannot be planned: only the native "
            "decoder can be computed without data. Set it to native, or try the run."
        )
    console = SafeConsole(stderr=format is Format.JSON)
    with progress_of("tokenising rows", console) as progress:
        preflight = Preflight(config, progress=progress)
        preflight.read_inputs()
    plan = preflight.memory_plan(config)
    rungs = [] if plan.fits else list(ladder(config, preflight.memory_plan))
    if format is Format.JSON:
        found = [{"settings": changes, **other.as_json()} for changes, other in rungs]
        typer.echo(json.dumps({**plan.as_json(), "ladder": found}, indent=2))
    else:
        _show(console, plan, rungs)
    raise typer.Exit(0 if plan.fits else 1)


def _show_many(plan: Plan, format: Format) -> None:
    """Print a plan beside published figures of the same model."""
    from homeostat.cli.plan_view import show_plan
    from homeostat.run.sizing.scale import read_shape
    from homeostat.simulator.published import compare

    published = compare(read_shape, only=plan.job.shape.name)
    if format is Format.JSON:
        beside = [{**asdict(row), "ratio": row.ratio} for row in published]
        typer.echo(json.dumps({"fits": True, **plan.as_json(), "published": beside}, indent=2))
    else:
        show_plan(SafeConsole(), plan, published)


def _show(console: Console, plan: MemoryPlan, rungs: list[tuple[list[str], MemoryPlan]]) -> None:
    from homeostat.observe.format import byte_size

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    held = plan.update
    rows = [
        (plan.process, "the process itself"),
        (held.weights, "weights"),
        (
            held.optimizer,
            "state of the optimizer and its masters, or the buffers of offloaded ones",
        ),
        (held.gradients, "summed gradients"),
        (held.reference, "reference model"),
        (held.critic, "critic: weights, optimizer and gradients of its own"),
        (held.work, "work of the largest micro-batch: activations, logits, gradients on the way"),
        (held.lanes, "gradients of each lane"),
        (plan.cache, "cached keys and values" + (", freed while training" * plan.sleeps)),
        (plan.copies, "copies of the weights to decode by" + (", freed likewise" * plan.sleeps)),
        (plan.sampling, "work of sampling"),
    ]
    for size, what in rows:
        if size:
            table.add_row(byte_size(size), what)
    console.print(table)
    phase = "training" if plan.training_peak >= plan.sampling_peak else "sampling"
    verdict = "[green]fits[/green]" if plan.fits else "[red]does not fit[/red]"
    console.print(
        f"\npeak about [bold]{byte_size(plan.peak)}[/bold] while {phase}; {plan.device} has "
        f"{byte_size(plan.capacity)} to give: {verdict}",
        highlight=False,
    )
    if held.host:
        console.print(
            f"{byte_size(held.host)} of weights and optimizer state are in host memory, which has "
            f"{byte_size(plan.host_capacity)} to give",
            highlight=False,
        )
    for changes, other in rungs:
        mark = "[green]fits[/green]" if other.fits else "not yet"
        console.print(
            f"  {byte_size(other.peak):>10}  {mark}  {' '.join(changes)}", highlight=False
        )
    if rungs and not rungs[-1][1].fits:
        console.print("No setting alone makes it fit: take a smaller model, or a larger device.")
