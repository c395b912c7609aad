"""Find the files of a model to use: every form in which training leaves one behind.

    a folder in Hugging Face format, a .gguf file
    the folder of an adapter (adapter_config.json) -> its base model, and the adapter
    the folder of a run, or one of its checkpoints -> the run's model, and the checkpoint's weights

A run that was interrupted has checkpoints but no export, so checkpoints are read as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from homeostat.config.data import DataConfig
from homeostat.config.fp8 import Fp8Config
from homeostat.config.int4 import Int4Config
from homeostat.config.kind import RunKind
from homeostat.config.loading.live import with_saved_edits
from homeostat.config.loading.resume import as_recipe, saved_config
from homeostat.config.model import LoraConfig, ModelConfig
from homeostat.config.run import RunConfig
from homeostat.config.trainer import TrainerConfig
from homeostat.errors import CheckpointError, ModelError
from homeostat.hub.resolve import resolve_model
from homeostat.models.adapter_files import (
    ADAPTER_CONFIG,
    adapter_settings,
    base_quantization,
    find_base,
    has_value_head,
)
from homeostat.models.hf import read_json
from homeostat.models.value_head import is_classifier
from homeostat.observe.run_dir import RunPaths
from homeostat.train.saving.checkpoint import CheckpointStore, Found

Low = TypeVar("Low", Fp8Config, Int4Config)


@dataclass(frozen=True, slots=True)
class Choice:
    """A model, the adapter on it, and the checkpoint whose trained weights replace the loaded ones.

    `data` and `seed` are those of the run that the model comes from, if it comes from one.
    `int4` is how that run rounded its weights at the step of the checkpoint, if it did; `fp8`: how
    it computed then, if in FP8.
    `scores`: it is a reward model, which gives a text a score and cannot write any.
    `exported` is its checkpoint that has the model in Hugging Face format, so that nothing needs to
    be replaced.
    """

    model: ModelConfig
    adapter: LoraConfig | None = None
    checkpoint: Found | None = None
    data: DataConfig | None = None
    seed: int = 0
    int4: Int4Config | None = None
    fp8: Fp8Config | None = None
    exported: Found | None = None
    scores: bool = False

    def describe(self) -> str:
        """Name the files for people."""
        found = self.checkpoint or self.exported
        if found is not None:
            return f"{found.path} (step {found.step})"
        if self.adapter is not None:
            return f"{self.adapter.path} on {self.model.path}"
        return self.model.path

    def require_writer(self) -> None:
        """Raise ModelError if the model cannot write texts."""
        if self.scores:
            raise ModelError(
                f"{self.describe()} is a reward model: it scores texts and cannot write any. "
                "homeostat export writes its classifier for transformers, as a folder."
            )

    def describe_step(self) -> str:
        """Name the model without its folder, for people elsewhere."""
        found = self.checkpoint or self.exported
        return "the model" if found is None else f"step {found.step}"

    @property
    def was_trained_on_chats(self) -> bool:
        """Return whether prompts go through the chat template; a run answers by its own rows."""
        if self.data is None:
            return True
        # Rows of messages are always chats; texts and prompts say so by `chat`.
        is_text = (source.type == "text" for source in self.data.train)
        chats = (getattr(source, "chat", True) for source in self.data.train)
        return not any(is_text) and all(chats)


def choose(
    path: Path,
    *,
    base: Path | None = None,
    step: str | None = None,
    revision: str | None = None,
) -> Choice:
    """Return what `path` stands for.

    `base` is the base model of an adapter, if it is not where adapter_config.json says. `step`
    selects the checkpoint of a run: a number, `best` or `latest`. `revision` is the branch, tag or
    commit of a model on the hub.
    """
    if path.exists():
        _refuse(revision, "--revision", f"{path} is on this disk, and has no revisions")
    path = _here(path, "MODEL", revision)
    if not path.exists():
        raise ModelError(
            f"{path.absolute()} does not exist. Name a model, an adapter or a run on this disk, or "
            "a model on the Hugging Face hub (owner/name)."
        )
    folder = path
    if _is_checkpoint(folder):
        step = step or str(int(folder.name.removeprefix("step_")))
        folder = folder.parent.parent
    if _is_run(folder):
        _refuse(base, "--base", "the folder of a run names its model itself")
        return _of_run(folder, step)
    _refuse(step, "--step", f"{folder} is not the folder of a run")
    if (folder / ADAPTER_CONFIG).is_file():
        return _of_adapter(folder, base)
    _refuse(base, "--base", f"{folder} is not the folder of an adapter")
    return Choice(ModelConfig(path=str(folder)), scores=folder.is_dir() and _is_scorer(folder))


def find_checkpoint(path: Path, *, step: str | None = None) -> tuple[Path, Found]:
    """Return the folder of a run, and its checkpoint; `path` may be that of a checkpoint."""
    folder = path
    if _is_checkpoint(folder):
        step = step or str(int(folder.name.removeprefix("step_")))
        folder = folder.parent.parent
    if not _is_run(folder):
        raise ModelError(f"{path} is not the folder of a run: it has no config.json.")
    store = CheckpointStore(RunPaths(folder).checkpoints, read_only=True)
    return folder, _checkpoint(store, step)


def _refuse(given: object, option: str, why: str) -> None:
    if given is not None:
        raise ModelError(f"{option} has no meaning here: {why}. Leave it out.")


def _is_scorer(folder: Path) -> bool:
    """Return whether a model in Hugging Face format is a sequence classifier."""
    file = folder / "config.json"
    return file.is_file() and is_classifier(read_json(file))


def _is_run(folder: Path) -> bool:
    # A model has a config.json, too.
    is_any = (folder / "checkpoints").is_dir() or (folder / "events.jsonl").is_file()
    return is_any and (folder / "config.json").is_file()


def _is_checkpoint(folder: Path) -> bool:
    return folder.name.startswith("step_") and _is_run(folder.parent.parent)


def _of_adapter(folder: Path, base: Path | None) -> Choice:
    settings = read_json(folder / ADAPTER_CONFIG, setting="adapter")
    found = base or find_base(folder, settings)
    revision = settings.get("revision") if base is None else None
    named = None if found is None else _here(Path(found), "--base", revision)
    if named is None or not named.exists():
        raise ModelError(
            f"{folder} is an adapter, and its base model {str(named)!r} is not on this disk. Name "
            "the base model's folder or .gguf file with --base."
        )
    # An adapter that was trained with another template has its own tokenizer.
    own = str(folder) if (folder / "tokenizer.json").is_file() else None
    place = {"path": str(named), "tokenizer": own, **base_quantization(folder)}
    try:
        model = ModelConfig.model_validate(place)
    except ValidationError:
        raise ModelError(f"{folder}: its base was quantised in an unknown format.") from None
    return Choice(model, adapter_settings(settings, folder), scores=has_value_head(settings))


def run_folder(found: Found) -> Path:
    """Return the folder of the run that a checkpoint belongs to."""
    return found.path.parent.parent


def saved_recipe(folder: Path) -> RunConfig:
    """Return the recipe of the run in a folder."""
    file = RunPaths(folder).config_json
    try:
        return saved_config(file)
    except ValueError as why:
        raise ModelError(f"{file}: not the config of a run of this version: {why}.") from None


def _of_run(folder: Path, step: str | None) -> Choice:
    run, store = saved_recipe(folder), CheckpointStore(RunPaths(folder).checkpoints, read_only=True)
    found = _checkpoint(store, step)
    trainer = _trainer_of(run, found)
    of_run: Any = {"data": run.data, "seed": run.seed}
    of_run |= {name: _in_force(getattr(trainer, name), found) for name in ("int4", "fp8")}
    of_run["scores"] = run.kind is RunKind.REWARD_MODEL
    exported = found.path / "hf"
    if (exported / "config.json").is_file():
        # The model that the run started from need not be there any more.
        own = {"path": str(exported), "init": "pretrained", "tokenizer": None}
        # An adapter is merged into it: quantised again, it would be rounded away.
        own |= {"chat_template": None, "quantization": None, "double_quantization": False}
        model = run.model.model_copy(update=own)
        return Choice(model, **of_run, exported=found)
    home = _home(folder, Path(run.runs_dir), run.name)
    model = run.model.model_copy(update=_placed(run.model, home))
    # The checkpoint holds the whole adapter: the files that it started from are not needed.
    lora = run.lora and run.lora.model_copy(update={"path": None})
    return Choice(model, lora, checkpoint=found, **of_run)


def _trainer_of(run: RunConfig, found: Found) -> TrainerConfig:
    """Return the trainer's settings when the checkpoint was saved; remedies may edit them."""
    place = str(found.state_file)
    return with_saved_edits(as_recipe(run), found.state, place=place).trainer


def _in_force(low: Low | None, found: Found) -> Low | None:
    """Return the settings of low precision if the checkpoint's step was computed under them."""
    return low if low is not None and found.step >= low.start_step else None


def _home(folder: Path, runs_dir: Path, name: str) -> Path:
    """Return the folder that the run was started in: paths of its recipe are relative to it."""
    below = (*runs_dir.parts, name)
    whole = folder.resolve().parts
    if runs_dir.is_absolute() or whole[-len(below) :] != below:
        return Path()
    return Path(*whole[: -len(below)])


def _placed(model: ModelConfig, home: Path) -> dict[str, str]:
    """Return the paths among the model's settings as seen from here."""
    values = {name: getattr(model, name) for name in ("path", "tokenizer", "chat_template")}
    return {
        name: str(_here(home / value, f"model.{name}"))
        for name, value in values.items()
        if value is not None
    }


def _here(path: Path, setting: str, revision: str | None = None) -> Path:
    """Return the path, or where a model on the hub is kept that it names."""
    if path.exists():
        return path
    return Path(resolve_model(str(path), setting=setting, revision=revision))


def _checkpoint(store: CheckpointStore, step: str | None) -> Found:
    best = store.best_step()
    if step is None and best is not None:
        return store.at_step(best, asked_by="--step ")
    if step in (None, "latest"):
        found = store.newest_valid()
        if found is None:
            raise CheckpointError(
                f"{store.folder.parent} is the folder of a run that has saved no whole checkpoint "
                "yet. Train on: it saves at its end, on Ctrl-C and every "
                "checkpoint.interval_steps steps."
            )
        return found
    if step == "best":
        if best is None:
            raise CheckpointError(f"{store.folder} has no best checkpoint: nothing was evaluated.")
        return store.at_step(best)
    if not step.isdecimal():
        raise CheckpointError(f"--step {step}: say a number, best or latest.")
    return store.at_step(int(step), asked_by="--step ")
