"""The dashboard in a real Chromium: the list, a run, its completions, a comparison, live growth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.browser import Page, opened_browser
from tests.support.run_folders import write_run
from tests.unit.test_observe_completions import ADVANTAGES, GROUPS

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from tests.support.dashboard_server import served

from homeostat.observe.completions import write_completions

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dashboard")
    rewards, losses = list(np.linspace(0.1, 0.9, 300)), list(np.linspace(2.0, 1.0, 300))
    good = write_run(folder / "good", {"reward": rewards, "train/loss": losses})
    write_completions(good / "completions", 7, GROUPS, advantages=ADVANTAGES)
    broken = [*losses[:150], *[float("nan")] * 150]
    settings = {"trainer": {"lr": 1e-2}}
    write_run(folder / "ill", {"train/loss": broken}, settings=settings, finished=False)
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with served([runs]) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with opened_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


ROWS = "[...document.querySelectorAll('tr[data-run]')]"
CANVASES = "document.querySelectorAll('.plot canvas').length"


def show_list(page: Page, address: str) -> None:
    page.open(f"{address}/#/")
    page.run("location.reload()")
    page.wait("document.querySelectorAll('tr[data-run] .badge.bad').length === 1")


def test_from_the_list_to_a_run_its_completions_and_a_comparison(page: Page, address: str) -> None:
    page.size(1280, 900)
    show_list(page, address)
    page.wait("document.querySelectorAll('tr[data-run] .badge.good').length === 1")
    # A run: curves are drawn, and a range that is dragged is shown in all of them.
    page.click("good")
    page.wait(f"{CANVASES} === 2")
    page.drag(".u-over", start=0.2, end=0.6)
    page.click("steps ")
    page.wait("![...document.querySelectorAll('button')].some((one) => !one.hidden)")
    # Its completions, searched.
    page.click("Completions")
    page.wait("document.querySelectorAll('.completion').length === 4")
    page.run(
        "(() => { const box = document.querySelector('input[type=search]'); box.value = 'half';"
        "box.dispatchEvent(new Event('input')); })()"
    )
    page.wait("document.querySelectorAll('.completion').length === 1")
    # Two runs side by side.
    page.run("location.hash = '#/'")
    page.wait("document.querySelectorAll('tr[data-run] input').length === 2")
    page.run("document.querySelectorAll('tr[data-run] input').forEach((box) => box.click())")
    page.click("compare 2")
    page.wait("document.querySelector('.settings')?.innerText.includes('trainer.lr')")
    page.wait(f"{CANVASES} === 2")
    assert page.errors == []


def test_findings_have_their_evidence(page: Page, address: str) -> None:
    show_list(page, address)
    page.click("ill")
    page.click("Health")
    page.wait("document.querySelectorAll('.finding.bad').length > 0")
    assert "What to do" in page.text()


def test_a_log_without_metrics_opens_with_what_was_found(
    page: Page, address: str, runs: Path
) -> None:
    died = runs / "died"
    died.mkdir()
    log = (
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3/site-packages/deepspeed/runtime/config.py", line 9, in __init__\n'
        "AssertionError: bfloat16 and fp16 modes cannot be simultaneously enabled\n"
    )
    (died / "train.log").write_text(log)
    show_list(page, address)
    page.click("died")
    page.wait("document.body.innerText.includes('settings-exclusive')")
    page.click("Curves (0)")
    page.wait("document.body.innerText.includes('No metrics were logged.')")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(page: Page, address: str, width: int, theme: str) -> None:
    page.theme(theme)
    page.size(width, 900)
    show_list(page, address)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    page.click("good")
    page.wait(f"{CANVASES} === 2")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(14, 19, 26)" if theme == "dark" else "rgb(244, 246, 248)")


def test_a_run_that_grows_is_followed(page: Page, address: str, runs: Path) -> None:
    growing = write_run(runs / "growing", {"reward": [0.1, 0.2, 0.3]}, finished=False)
    show_list(page, address)
    page.wait(f"{ROWS}.some((row) => /growing/.test(row.innerText))")
    page.wait("document.getElementById('live').textContent === 'live'")
    with (growing / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 77, "time": 1.8e9, "reward": 0.7}) + "\n")
    page.wait(f"{ROWS}.some((row) => /\\b77 of/.test(row.innerText))")
