"""Make the folder that is shared on a hub: the exported model and its model card."""

from __future__ import annotations

from pathlib import Path

from homeostat.errors import OutputError
from homeostat.generation.choice import Choice, run_folder, saved_recipe
from homeostat.generation.exporting import ExportDtype, export_model
from homeostat.generation.model_card import Origin, model_card
from homeostat.observe.durable import not_written

CARD = "README.md"


def make_folder(
    choice: Choice,
    folder: Path,
    *,
    repo: str,
    dtype: ExportDtype = "auto",
    adapter_only: bool = False,
    license: str | None = None,
) -> list[str]:
    """Write a new folder with the model, its tokenizer and a card. Raises if it exists.

    Returns lines for people on what is not as it was trained.
    """
    notes = export_model(choice, folder, dtype=dtype, adapter_only=adapter_only)
    card = model_card(_origin(choice, is_adapter=adapter_only), repo=repo, license=license)
    try:
        (folder / CARD).write_text(card, encoding="utf-8")
    except OSError as error:
        raise OutputError(not_written(folder / CARD, error)) from None
    return notes


def _origin(choice: Choice, *, is_adapter: bool) -> Origin:
    found = choice.checkpoint or choice.exported
    if found is None:
        base = choice.model.path if choice.adapter is not None else None
        return Origin(base, is_adapter=is_adapter)
    run = run_folder(found)
    recipe = saved_recipe(run)
    # A model that began with random weights has no base.
    base = recipe.model.path if recipe.model.init == "pretrained" else None
    return Origin(base, run, found.step, is_adapter)
