"""The dashboard in a real Chromium: runs change on disk, and names and values try its layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.browser import Page, opened_browser
from tests.support.run_folders import write_run
from tests.unit.test_observe_completions import make_group

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from tests.support.dashboard_server import served

from homeostat.observe.completions import write_completions

pytestmark = pytest.mark.slow

CANVASES = "document.querySelectorAll('.plot canvas').length"
LOSSES = [2.0 - step / 50 for step in range(50)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with opened_browser(tmp_path_factory.mktemp("browser")) as found:
        found.size(1280, 900)
        yield found


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "runs").mkdir()
    with served([tmp_path / "runs"]) as found:
        yield found


def show(page: Page, address: str) -> None:
    page.open("about:blank")
    page.open(f"{address}/#/")
    page.wait("document.querySelectorAll('tr[data-run]').length > 0")
    page.wait("document.getElementById('live').textContent === 'live'")


def test_a_metric_that_is_logged_later_gets_its_plot(
    page: Page, address: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "runs" / "grows", {"train/loss": LOSSES}, finished=False)
    show(page, address)
    page.click("grows")
    page.wait(f"{CANVASES} === 1")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 51, "train/loss": 1.0, "eval/loss": 1.5}) + "\n")
    page.wait(f"{CANVASES} === 2")
    assert "eval/loss" in page.text()


def test_a_run_that_is_deleted_is_said_to_be_gone(page: Page, address: str, tmp_path: Path) -> None:
    for name in ("stays", "goes"):
        write_run(tmp_path / "runs" / name, {"train/loss": LOSSES})
    show(page, address)
    page.click("goes")
    page.wait(f"{CANVASES} === 1")
    shutil.rmtree(tmp_path / "runs" / "goes")
    page.wait("document.body.innerText.includes('moved or deleted')")
    page.run("location.hash = '#/'")
    page.wait("document.querySelectorAll('tr[data-run]').length === 1")
    shutil.rmtree(tmp_path / "runs" / "stays")
    page.wait("document.body.innerText.includes('There are no runs')")


def test_a_slow_answer_does_not_replace_the_view_that_was_opened_since(
    page: Page, address: str, tmp_path: Path
) -> None:
    for name in ("slow", "quick"):
        write_run(tmp_path / "runs" / name, {"train/loss": LOSSES})
    show(page, address)
    links = {name: f"[...document.querySelectorAll('a')].find((a) => a.textContent === '{name}')"
             for name in ("slow", "quick")}  # fmt: skip
    slow = page.run(f"{links['slow']}.hash")
    quick = page.run(f"{links['quick']}.hash")
    id = slow.rsplit("/", 1)[1]
    page.run(
        "(() => { const ask = window.fetch; window.fetch = async (path, options) => {"
        f"if (path === '/api/runs/{id}') {{ await new Promise((go) => setTimeout(go, 1000));"
        "window.answered = true; } return ask(path, options); }; })()"
    )
    page.run(f"location.hash = '{slow}'")
    page.wait("document.body.innerText.includes('reading ...')")
    page.run(f"location.hash = '{quick}'")
    page.wait("window.answered")
    page.run("new Promise((go) => setTimeout(go, 500))")
    assert page.run("document.querySelector('h1').textContent") == "quick"


@pytest.mark.parametrize("width", [390, 1280])
def test_long_names_hide_nothing(page: Page, address: str, tmp_path: Path, width: int) -> None:
    name = "long_" + "x" * 200
    write_run(tmp_path / "runs" / name, {"train/loss": LOSSES}, settings={"seed": 1})
    write_run(tmp_path / "runs" / "short", {"train/loss": LOSSES})
    fits = "(one) => one.scrollWidth <= one.clientWidth"
    page.size(width, 900)
    show(page, address)
    page.wait("document.querySelectorAll('.badge.plain, .badge.good').length === 2")
    assert page.run(f"({fits})(document.querySelector('.scroll'))")
    page.run("document.querySelectorAll('tr[data-run] input').forEach((box) => box.click())")
    page.click("compare 2")
    page.wait(f"{CANVASES} === 1")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run(f"[...document.querySelectorAll('.settings th')].every({fits})")
    page.click("long_")
    page.wait("document.querySelector('.tabs') !== null")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    page.size(1280, 900)


def test_text_that_changes_the_order_of_others_is_shown_as_escapes(
    page: Page, address: str, tmp_path: Path
) -> None:
    write_run(tmp_path / "runs" / "name \u202egnp", {"train/loss": LOSSES})
    write_run(tmp_path / "runs" / "other", {"train/loss": LOSSES})
    show(page, address)
    assert r"name \u202egnp" in page.text()
    assert "\u202e" not in page.text()


def test_an_empty_completion_is_said_to_be_empty(page: Page, address: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "run", {"reward": [0.5, 0.6]})
    group = make_group(1, "2 + 2", [("", 0.0), ("4", 1.0)])
    write_completions(run / "completions", 1, [group], advantages=[[-1.0, 1.0]])
    show(page, address)
    page.click("run")
    page.click("Completions")
    page.wait("document.querySelectorAll('.completion').length === 2")
    assert page.run("document.querySelector('.completion .text').innerText") == "(empty)"


@pytest.mark.parametrize(
    ("ticks", "increment", "labels"),
    [
        ([1.0, 1.0002, 1.0004], 0.0002, ["1", "1.0002", "1.0004"]),
        ([123456790, 123456800], 10, ["123,456,790", "123,456,800"]),
        ([0, 2.5e-7, 5e-7], 2.5e-7, ["0", "2.5e-7", "5e-7"]),
        ([-2.5, 0, 2.5], 2.5, ["-2.5", "0", "2.5"]),
        ([1e12, 1.001e12], 1e9, ["1e12", "1.001e12"]),
    ],
)
def test_ticks_of_an_axis_are_told_apart(
    page: Page, address: str, ticks: list[float], increment: float, labels: list[str]
) -> None:
    page.open("about:blank")
    page.open(f"{address}/#/")
    page.wait("document.getElementById('live')?.textContent === 'live'")
    call = f"import('/static/dom.js').then((dom) => dom.tickLabels({ticks}, {increment}))"
    assert page.run(call) == labels
    assert page.run("import('/static/dom.js').then((dom) => dom.number(12345.6))") == "12,346"
