"""Lines of scripts of one's own: names and numbers without signs, steps that begin again."""

from __future__ import annotations

import pytest

from homeostat.health.diagnose import diagnose
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES
from homeostat.health.view import RunView

FORMS = (
    "epoch {epoch}/3 step {step}/{total} loss {loss}",
    "Epoch {epoch}/3, Step {step}/{total}, loss: {loss}",
    "Epoch:[{epoch}/3]({step}/{total}), loss: {loss}, aux_loss: 0.0000",
)


def view_of(lines: list[str]) -> RunView:
    return read_text("\n".join(lines))


def written(form: str, *, first: int = 1, anew: bool = True) -> list[str]:
    lines = []
    for number in range(12):
        epoch, step = number // 4, number % 4 if anew else number
        total = 4 if anew else 12
        loss = 2.0 - number / 10
        lines.append(form.format(epoch=epoch + first, step=step + 1, total=total, loss=loss))
    return lines


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("first", "anew"), [(1, True), (0, True), (1, False)])
def test_steps_are_counted_through_all_epochs(form: str, first: int, anew: bool) -> None:
    """A log that counts again in every epoch, from epoch 1 or 0 on, and one that does not."""
    view = view_of(written(form, first=first, anew=anew))
    series = view.series("train/loss")
    assert series.steps.tolist() == list(range(1, 13))
    assert view.total_steps == 12


def test_an_epochs_number_of_steps_is_not_the_runs() -> None:
    lines = written("Epoch: [{epoch}][ {step}/{total}]  loss: {loss}  lr: 0.1", first=0)
    view = view_of(lines)
    assert view.series("train/loss").steps.tolist() == list(range(1, 13))
    assert view.total_steps is None


def test_a_loss_that_is_not_a_number_is_seen_without_signs() -> None:
    lines = [
        f"epoch 1/3 step {step}/39 loss {'2.5' if step == 1 else 'nan'}" for step in range(1, 9)
    ]
    names = [finding.name for finding in diagnose(view_of(lines), RULES).findings]
    assert "nan-loss" in names


@pytest.mark.parametrize(
    "line",
    ["step 5 of the plan has a loss 3", "Saved at step 500 with loss 2.0 best", "batch 3 size 5"],
)
def test_sentences_are_no_rows(line: str) -> None:
    assert not view_of([line] * 5).metrics


def test_a_rate_of_few_units_of_its_last_decimal_does_not_end_at_zero() -> None:
    rates = [4, 4, 3, 2, 1, 0, 0, 0]
    lines = [
        f"Epoch:[1/1]({20 * n}/400), loss: 0.{690 - n}0, learning_rate: 0.0000000{rate}"
        for n, rate in enumerate(rates, start=1)
    ]
    view = view_of(lines)
    assert view.decimals["learning_rate"] == 8
    assert "LRN007" not in [finding.code for finding in diagnose(view, RULES).findings]
