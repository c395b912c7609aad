"""Copy recipes that come with homeostat, with the files that they name, to the user's folder."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from homeostat.config.loading.beside import input_paths
from homeostat.config.loading.yaml_file import read_yaml
from homeostat.errors import HomeostatError

# The two stages of the demo: a model that starts from random weights, and needs no download.
DEMO = ("tiny_sort_sft_cpu", "tiny_sort_grpo_cpu")


def example_names(recipes: Path) -> list[str]:
    """Return the names of all recipes."""
    return sorted(file.stem for file in recipes.glob("*.yaml"))


def copy_examples(recipes: Path, names: Sequence[str], target: Path) -> list[Path]:
    """Copy recipes and their files to a folder. Return the recipes. Nothing is overwritten."""
    files = [recipes / f"{name}.yaml" for name in names]
    for file in files:
        _require_known(recipes, file)
    wanted = [one for file in files for one in (file, *_needed(file))]
    places = {file: target / file.relative_to(recipes) for file in wanted}
    for file, place in places.items():
        if place.exists() and place.read_bytes() != file.read_bytes():
            raise HomeostatError(
                f"{place} exists already. Move it away, or change to a new folder."
            )
    try:
        for file, place in places.items():
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)
    except OSError as error:
        raise HomeostatError(f"{target}: cannot write it: {error.strerror or error}.") from None
    return [places[file] for file in files]


def _needed(recipe: Path) -> Iterator[Path]:
    """Yield the files that a recipe names and that come along with it."""
    raw, _ = read_yaml(recipe)
    for text in input_paths(raw):
        place = recipe.parent / text
        if place.is_dir():
            yield from (file for file in sorted(place.iterdir()) if file.is_file())
        elif place.is_file():
            yield place


def _require_known(recipes: Path, file: Path) -> None:
    if not file.is_file():
        names = example_names(recipes)
        near = difflib.get_close_matches(file.stem, names, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise HomeostatError(
            f"--example: there is no recipe {file.stem!r}.{hint} There are {', '.join(names)}."
        )
