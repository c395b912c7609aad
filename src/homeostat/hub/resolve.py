"""Turn the names in a recipe into paths on this disk, once, before anything opens a file.

    model.path: Qwen/Qwen2.5-0.5B-Instruct -> <cache>/models--Qwen--.../snapshots/<commit>
    data.train[].path: openai/gsm8k        -> <cache>/datasets--openai--.../snapshots/<commit>
    data.train[] without type              -> a source with the type and columns of its rows

Everything behind works with paths only. A path that exists takes precedence over a name. The
resolved recipe, and with it the commit, is saved in the run folder: a run that is resumed takes the
commit from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from homeostat.config.combinations.check import find_conflicts
from homeostat.config.data import DataConfig, Source, SourcePlugin
from homeostat.config.hub_names import RepositoryKind, cached_path, parse_hub_name
from homeostat.config.loading.resume import saved_config
from homeostat.config.model_rewards import ClassifierReward
from homeostat.config.rollout import CheckpointReference
from homeostat.config.run import RunConfig
from homeostat.errors import ConfigError, Problem
from homeostat.hub.choices import Need, dataset_files, model_files, one_file
from homeostat.hub.request import Choose, Request
from homeostat.hub.rows import recognised_source, with_split
from homeostat.observe.terminal import SafeConsole

Tell = Callable[[str], None]


def resolve_names(
    config: RunConfig,
    *,
    console: Console | None = None,
    need: Need = "weights",
    rows: bool = True,
    tell: Tell | None = None,
) -> RunConfig:
    """Return the recipe with paths for names, and types for sources without one.

    Downloads what is missing and shows it on `console`. `need` says how much of the models is
    opened, `rows` whether the data is. `tell` is given a line for each name that was resolved.
    """
    console = console or SafeConsole(stderr=True)

    def say(line: str) -> None:
        if tell is not None:
            tell(line)
        else:
            console.print(Text(line), soft_wrap=True)

    door = _Door(_saved(config), console, say)
    found = _with_models(config, door, need)
    if rows:
        found = found.model_copy(update={"data": _with_rows(found, door)})
    if found != config and (problems := find_conflicts(found)):
        raise ConfigError(problems)
    return found


def resolve_model(
    text: str, *, setting: str, revision: str | None = None, need: Need = "weights"
) -> str:
    """Return the folder or file of one model or adapter, downloaded if it is a name."""
    console = SafeConsole(stderr=True)
    door = _Door(None, console, lambda line: console.print(Text(line), soft_wrap=True))
    return door.model(text, setting, need=need, revision=revision)


@dataclass(frozen=True, slots=True)
class _Door:
    """Opens names. `saved` is the resolved recipe of the run folder, if the run began before."""

    saved: RunConfig | None
    console: Console
    tell: Tell

    def model(
        self, text: str, setting: str, *, need: Need, revision: str | None = None, was: Any = None
    ) -> str:
        """Return the path of a model. `was` is what the saved recipe has in its place."""

        def choose(name: str, file: str) -> Choose:
            return one_file(setting, name, file) if file else model_files(setting, need=need)

        return self.open(
            "model", text, setting=setting, revision=revision, was=was, part=need, choose=choose
        )

    def open(
        self,
        kind: RepositoryKind,
        text: str,
        *,
        setting: str,
        revision: str | None,
        was: Any,
        part: str,
        choose: Callable[[str, str], Choose],
    ) -> str:
        """Return the path that a name stands for; a path as it is."""
        if Path(text).exists():
            if revision is not None and cached_path(text) is None:
                place = f"{setting.rpartition('.')[0]}.revision"
                what = f"{text} exists on this disk, and what is there has no revisions."
                raise ConfigError([Problem(place, what, "Remove it, or move the folder away.")])
            return text
        held, named = cached_path(text), parse_hub_name(text)
        if held is not None:
            # The path of a cache that is not here: of a run that was copied, for example.
            kind, name, file, revision = held.kind, held.name, held.file, held.commit
        elif named is not None:
            name, file = named.name, named.file or ""
            revision = self._pinned(name, was) or revision
        else:
            return text
        request = Request(kind, name, revision, setting, file or part, choose(name, file))
        folder = self._fetch(request)
        self.tell(f"{setting}: {name} at commit {folder.name[:12]}" + (f", {file}" if file else ""))
        return str(folder / file) if file else str(folder)

    def _pinned(self, name: str, was: Any) -> str | None:
        """Return the commit that the run began with, if it began with the same name."""
        before = cached_path(was) if isinstance(was, str) else None
        return before.commit if before is not None and before.name == name else None

    def _fetch(self, request: Request) -> Path:
        # Imported where a name is used: a recipe of paths does not need the hub's client.
        from homeostat.hub.progress import download_of
        from homeostat.hub.snapshot import fetch

        with download_of(request.name, self.console) as show:
            return fetch(request, show=show, tell=self.tell)


def _saved(config: RunConfig) -> RunConfig | None:
    """Return the recipe in the run folder; None if the run is new or the file cannot be read."""
    file = config.run_dir / "config.json"
    try:
        return saved_config(file) if file.is_file() else None
    except ValueError:
        # Resuming reports it, with what to do.
        return None


def _with_models(config: RunConfig, door: _Door, need: Need) -> RunConfig:
    saved, model = door.saved, config.model
    before = saved.model if saved is not None and saved.model.revision == model.revision else None
    weights: Need = "tokenizer" if need == "weights" and model.init == "random" else need
    path = door.model(
        model.path,
        "model.path",
        need=weights,
        revision=model.revision,
        was=None if before is None else before.path,
    )
    update: dict[str, Any] = {"path": path}
    if model.tokenizer is not None and need != "config":
        was = None if saved is None else saved.model.tokenizer
        update["tokenizer"] = door.model(
            model.tokenizer, "model.tokenizer", need="tokenizer", was=was
        )
    config = config.model_copy(update={"model": _changed(model, update)})
    return _with_others(config, door) if need == "weights" else config


def _with_others(config: RunConfig, door: _Door) -> RunConfig:
    """Resolve the models beside the one that is trained."""
    saved = door.saved
    update: dict[str, Any] = {}
    for section in ("lora", "critic", "reference"):
        own = getattr(config, section)
        path = getattr(own, "path", None)
        is_here = section != "reference" or isinstance(own, CheckpointReference)
        if path is not None and is_here:
            was = getattr(getattr(saved, section, None), "path", None)
            new = door.model(path, f"{section}.path", need="weights", was=was)
            update[section] = _changed(own, {"path": new})
    if config.rewards is not None:
        given = enumerate(config.rewards.functions)
        functions = tuple(_with_classifier(one, index, door) for index, one in given)
        update["rewards"] = _changed(config.rewards, {"functions": functions})
    return _changed(config, update)


def _with_classifier(reward: Any, index: int, door: _Door) -> Any:
    if not isinstance(reward, ClassifierReward):
        return reward
    saved = door.saved.rewards if door.saved is not None else None
    before = saved.functions if saved is not None else ()
    was = getattr(before[index], "path", None) if index < len(before) else None
    setting = f"rewards.functions.{index}.path"
    return _changed(reward, {"path": door.model(reward.path, setting, need="weights", was=was)})


def _with_rows(config: RunConfig, door: _Door) -> DataConfig:
    data = config.data
    found = {}
    for part in ("train", "validation"):
        before = getattr(door.saved.data, part) if door.saved is not None else ()
        found[part] = tuple(
            _with_source(config, door, source, f"data.{part}.{index}", before[index : index + 1])
            if isinstance(source, Source) and not isinstance(source, SourcePlugin)
            else source
            for index, source in enumerate(getattr(data, part))
        )
    return _changed(data, found)


def _with_source(
    config: RunConfig, door: _Door, source: Source, place: str, before: tuple[Any, ...]
) -> Source:
    default = "train" if place.startswith("data.train") else "validation"
    setting = f"{place}.path"
    was = before[0] if before and getattr(before[0], "revision", None) == source.revision else None

    def choose(name: str, file: str) -> Choose:
        if file:
            return one_file(setting, name, file)
        how = {"config": source.config, "split": source.split, "default": default}
        return dataset_files(place, name, **how)

    part = f"{source.config or ''}/{source.split or default}"
    path = door.open(
        "dataset",
        source.path,
        setting=setting,
        revision=source.revision,
        was=getattr(was, "path", None),
        part=part,
        choose=choose,
    )
    source = _changed(source, {"path": path})
    source = with_split(source, default=default, place=place)
    return recognised_source(source, config, place=place, tell=door.tell)


def _changed(settings: Any, update: dict[str, Any]) -> Any:
    """Return the settings with other values, and the same object if none differs."""
    different = {name: new for name, new in update.items() if getattr(settings, name) != new}
    return settings.model_copy(update=different) if different else settings
