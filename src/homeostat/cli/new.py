"""`homeostat new`: a recipe from a few questions or options, sized by the estimate."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from homeostat.authoring.draft import (
    BUILT_IN_REWARDS,
    Answers,
    DataFacts,
    Draft,
    Method,
    ModelFacts,
    Task,
    make_draft,
)
from homeostat.authoring.gpus import KNOWN, MAX_COUNT, Gpus, find_gpus, parse_answer
from homeostat.cli.options import refuse_given
from homeostat.cli.output_file import write_output
from homeostat.cli.packages import missing_for_training
from homeostat.config.loading.load import build_config
from homeostat.errors import ConfigError, HomeostatError, Problem
from homeostat.observe.safe_text import safe_text
from homeostat.observe.terminal import SafeConsole
from homeostat.shipped import shipped_folder


class DeviceName(StrEnum):
    """The device to train on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


Out = Annotated[
    Path | None,
    typer.Argument(metavar="[RECIPE]", help="New file to write. Default: recipe.yaml."),
]
TaskOption = Annotated[
    Task | None,
    typer.Option(
        "--task",
        help="sft: learn from example answers. rl: sample answers and learn from their scores. "
        "preferences: learn from pairs of a better and a worse answer. reward_model: train a "
        "model that scores answers.",
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="PATH", help="The model to train: a folder or .gguf file."),
]
DataOption = Annotated[
    str | None, typer.Option("--data", metavar="PATH", help="Rows: .jsonl, .json or .parquet.")
]
RewardOption = Annotated[
    str | None,
    typer.Option(
        "--reward",
        metavar="NAME",
        help=f"With --task rl: {', '.join(BUILT_IN_REWARDS)}, or your own as file.py:function.",
    ),
]
MethodOption = Annotated[
    Method,
    typer.Option(
        "--method",
        help="What to train. auto: all weights if they fit in memory, else LoRA, else QLoRA (nf4).",
    ),
]
DeviceOption = Annotated[
    DeviceName,
    typer.Option(
        "--device", help="Device to train on. auto: a GPU if there is one when the run starts."
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Plan for a GPU with this much memory in another machine, for example 24GiB. "
        "Default: the device of this machine.",
    ),
]
GpuOption = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help=f"Plan for a GPU of this name that is elsewhere: {', '.join(KNOWN)}.",
    ),
]
GpusOption = Annotated[
    int,
    typer.Option(
        "--gpus",
        min=1,
        max=MAX_COUNT,
        help="With --gpu or --memory: number of GPUs in the machine, over which the model is "
        "sharded.",
    ),
]
NameOption = Annotated[str | None, typer.Option("--name", help="Name of the run.")]
DemoOption = Annotated[
    bool,
    typer.Option(
        "--demo", help="Write the demo instead: a tiny model with random weights, and its data."
    ),
]
ExampleOption = Annotated[
    str | None,
    typer.Option(
        "--example",
        metavar="NAME",
        help="Write one of the example recipes that come with homeostat.",
    ),
]


def new(
    recipe: Out = None,
    task: TaskOption = None,
    model: ModelOption = None,
    data: DataOption = None,
    reward: RewardOption = None,
    method: MethodOption = Method.AUTO,
    device: DeviceOption = DeviceName.AUTO,
    memory: MemoryOption = None,
    gpu: GpuOption = None,
    gpus: GpusOption = 1,
    name: NameOption = None,
    demo: DemoOption = False,
    example: ExampleOption = None,
) -> None:
    """Write a recipe that fits this machine, from a few questions or from options.

    The command reads some rows to find their columns, and estimates the memory of an update. If
    training all weights does not fit, it chooses a LoRA adapter, then an adapter over 4-bit
    weights, and smaller micro-batches. Comments in the recipe explain each choice. In a terminal it
    asks for everything that you did not give as an option.
    """
    if demo or example is not None:
        for_drafts: dict[str, object] = {
            **{"RECIPE": recipe, "--task": task, "--model": model, "--data": data},
            **{"--reward": reward, "--memory": memory, "--gpu": gpu, "--name": name},
            "--example": example if demo else None,
        }
        defaults = (("--method", method, Method.AUTO), ("--device", device, DeviceName.AUTO))
        _require_no_answers(for_drafts, (*defaults, ("--gpus", gpus, 1)), demo=demo)
        from homeostat.authoring.examples import DEMO

        _copy(DEMO if demo else (str(example),))
        return
    target = recipe or Path("recipe.yaml")
    if target.exists():
        raise HomeostatError(f"{target} exists already. Name another file.")
    answers = _ask(task, model, data, reward, name)
    if not (task and model and data) and gpu is None and memory is None:
        gpu, memory = _ask_gpu()
    machine = _Machine(method, device, find_gpus(gpu, memory, gpus))
    if machine.gpus is not None and device is DeviceName.CPU:
        raise ConfigError([Problem("--device", "cpu and a GPU exclude each other.")])
    _make_folder(target.parent)
    draft, notes = _make(answers, machine, folder=target.parent)
    header = ["Made by `homeostat new`. Every key: homeostat docs config", *notes]
    text = draft.render(header=header)
    build_config(draft.raw, [], file=str(target))
    write_output(target, text)
    for note in notes:
        typer.echo(safe_text(note), err=True)
    shown = safe_text(str(target))
    typer.echo(f"{shown} written. Next: homeostat check {shown}")


@dataclass(frozen=True, slots=True)
class _Machine:
    """The method, and the device to plan for: the one in this machine, or GPUs of another one."""

    method: Method
    device: DeviceName
    gpus: Gpus | None


def _make_folder(folder: Path) -> None:
    """Make the folder of the recipe: its relative paths start there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HomeostatError(f"{folder}: cannot make it: {error.strerror}.") from None


def _require_no_answers(
    answers: dict[str, object], others: tuple[tuple[str, object, object], ...], *, demo: bool
) -> None:
    """Refuse what a finished recipe cannot follow. `others`: options, values and defaults."""
    given = {word: (value, None) for word, value in answers.items()}
    given |= {word: (value, default) for word, value, default in others}
    own = "--demo" if demo else "--example"
    refuse_given(given, f"{own} copies finished recipes into the folder recipes.")


def _copy(names: tuple[str, ...]) -> None:
    from homeostat.authoring.examples import copy_examples

    written = copy_examples(shipped_folder("recipes"), names, Path("recipes"))
    for file in written:
        typer.echo(safe_text(str(file)))
    typer.echo(f"Next: homeostat train {safe_text(str(written[0]))}", err=True)


def _ask_gpu() -> tuple[str | None, str | None]:
    """Return the name or the memory of a GPU in another machine; nothing for this machine."""
    question = "GPU to plan for (a name such as h100, or its memory such as 24GB; empty: this one)"
    return typer.prompt(question, default="", show_default=False, value_proc=_gpu_of)


def _gpu_of(typed: str) -> tuple[str | None, str | None]:
    """Return what was typed as a name or a memory; raise BadParameter to have it asked again."""
    if not typed.strip():
        return None, None
    gpu, memory = parse_answer(typed)
    try:
        find_gpus(gpu, memory, 1)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    return gpu, memory


def _ask(
    task: Task | None, model: str | None, data: str | None, reward: str | None, name: str | None
) -> Answers:
    """Return the answers; on a terminal those that are missing are asked for."""
    given = {"--task": task, "--model": model, "--data": data}
    missing = [option for option, value in given.items() if value is None]
    if missing and not sys.stdin.isatty():
        raise HomeostatError(
            f"{', '.join(missing)}: needed where no one can be asked. Or copy an example: "
            "homeostat new --demo."
        )
    if task is None:
        task = typer.prompt("What to do", default=Task.SFT, type=Task)
    model = model or typer.prompt("Model (folder, .gguf file, or a name on the hub)")
    data = data or typer.prompt("Data (.jsonl, .json or .parquet file)")
    assert task is not None, "prompted for"
    assert model is not None, "prompted for"
    assert data is not None, "prompted for"
    if task is Task.RL and reward is None and sys.stdin.isatty() and missing:
        known = ", ".join(BUILT_IN_REWARDS)
        reward = typer.prompt(f"Reward ({known}, or file.py:function)", default="exact_match")
    if reward is not None and task is not Task.RL:
        raise ConfigError([Problem("--reward", f"{task} has no rewards. Leave it out.")])
    return Answers(task, model, data, reward, name)


def _make(answers: Answers, machine: _Machine, *, folder: Path) -> tuple[Draft, list[str]]:
    """Return the recipe and lines about how it was sized."""
    lacks = missing_for_training()
    is_here = Path(answers.model).exists() and Path(answers.data).exists()
    if lacks is not None or not is_here:
        facts = DataFacts()
        if lacks is None and Path(answers.data).exists():
            from homeostat.authoring.facts import read_data

            facts = read_data(answers.data)
        draft = make_draft(answers, facts, ModelFacts(), folder=folder)
        _apply_device(draft, machine)
        if machine.method in (Method.LORA, Method.QLORA):
            draft.set("lora.rank", 16)
        if machine.method is Method.QLORA:
            draft.set("model.quantization", "nf4")
        missing = [path for path in (answers.model, answers.data) if not Path(path).exists()]
        lost = f"{' and '.join(missing)} could not be found on this disk"
        why = str(lacks) if lacks is not None else lost
        return draft, [f"Sizes are defaults and were not estimated: {why}."]
    from homeostat.authoring.facts import read_data, read_model

    data, model = read_data(answers.data), read_model(answers.model)
    draft = make_draft(answers, data, model, folder=folder)
    _apply_device(draft, machine)
    return draft, _fit(draft, machine, folder=folder)


def _apply_device(draft: Draft, machine: _Machine) -> None:
    if machine.device is not DeviceName.AUTO:
        draft.set("trainer.device", machine.device.value)
    if machine.gpus is None or machine.gpus.count == 1:
        return
    draft.set("cluster.type", "torchrun")
    draft.set("cluster.processes", machine.gpus.count, "one trainer rank for each GPU")
    draft.set("trainer.backend.type", "fsdp", "every layer is split over the ranks")
    if "rewards" in draft.raw:
        why = "weights that are split over ranks cannot be shared with the engine"
        draft.set("engine.type", "native")
        draft.set("engine.own_process", True, why)


def _fit(draft: Draft, machine: _Machine, *, folder: Path) -> list[str]:
    from homeostat.authoring.fitting import (
        apply_fit,
        choose_fit,
        fit_lines,
        planner,
        read_inputs,
    )
    from homeostat.config.loading.beside import placed
    from homeostat.run.session.waiting import progress_of

    raw = placed(draft.raw, folder)
    here = [] if machine.gpus is None else ["trainer.device=cpu"]
    with progress_of("tokenising rows", SafeConsole(stderr=True)) as progress:
        preflight = read_inputs(build_config(raw, here, file=None), progress=progress)
    plan_of = planner(preflight, machine.gpus)
    is_here = machine.gpus is None
    fit = choose_fit(raw, plan_of, method=machine.method, may_offload=is_here)
    apply_fit(draft, fit)
    return fit_lines(fit)
