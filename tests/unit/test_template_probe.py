"""What becomes of a chat template's own text, by the tokenizer and the model's own template."""

from __future__ import annotations

from pathlib import Path

from homeostat.clinic.bodies import CHAT_TEMPLATE, write_model
from homeostat.clinic.faults.rows import OTHER_TEMPLATE, TemplateSwapsRoles
from homeostat.config.model import ModelConfig
from homeostat.data.template_probe import probe_template
from homeostat.data.tokenizer import load_tokenizer


def probed(folder: Path, template: str | None) -> dict[str, object]:
    model = write_model(folder / "model")
    file = folder / "other.jinja"
    if template is not None:
        file.write_text(template)
    chosen = None if template is None else str(file)
    found = probe_template(load_tokenizer(ModelConfig(path=str(model), chat_template=chosen)))
    assert found is not None
    return found


def test_the_models_own_template_is_known_whole(tmp_path: Path) -> None:
    assert probed(tmp_path, None) == {"tokens": 4, "unknown": 0, "split": [], "alike": None}


def test_a_template_of_another_family_is_unknown_to_the_tokenizer(tmp_path: Path) -> None:
    found = probed(tmp_path, OTHER_TEMPLATE)
    assert found["tokens"] == 14
    # All but the end token.
    assert found["unknown"] == 13


def test_swapped_roles_are_not_alike_and_an_added_line_is(tmp_path: Path) -> None:
    swapped = probed(tmp_path, TemplateSwapsRoles.template)["alike"]
    assert isinstance(swapped, float)
    assert swapped < 0.6
    assert probed(tmp_path, "{{ 'abc' }}" + CHAT_TEMPLATE)["alike"] == 1.0


def test_markers_that_the_tokenizer_splits_are_named(tmp_path: Path) -> None:
    marked = "{{ '<|user|>' }}" + CHAT_TEMPLATE
    assert probed(tmp_path, marked)["split"] == ["<|user|>"]
