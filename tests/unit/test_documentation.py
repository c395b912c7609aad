"""The documentation as a site: every page is there, links lead somewhere, and words are found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from homeostat.cli.verbs import app
from homeostat.documentation.markdown import render_page
from homeostat.documentation.site import build_site, cached_site
from homeostat.errors import HomeostatError
from homeostat.shipped import shipped_folder

PAGE = """<!-- A remark for authors. -->
# Title *here*

Words with `code`, and a [link](other.md#part-two).

## Part two

| a | b |
|---|---|
| 1 | <b>2</b> |

## Part two
"""


TARGET = re.compile(r'(?:href|src)="([^"]+)"')
ANCHOR = re.compile(r' id="([^"]+)"')


def test_a_page_has_anchors_a_title_and_no_foreign_markup() -> None:
    page = render_page(PAGE, name="page")
    assert page.title == "Title here"
    assert page.headings == (("Part two", "part-two"), ("Part two", "part-two-1"))
    assert 'href="other.html#part-two"' in page.body
    assert "<td>&lt;b&gt;2" in page.body
    assert "remark" not in page.body
    assert [section.heading for section in page.sections] == ["Title here", "Part two"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide and the reference, without the pages of single rules, which are all alike."""
    docs = tmp_path_factory.mktemp("docs")
    for kind in ("guide", "reference"):
        (docs / kind).mkdir()
        for file in (shipped_folder("docs") / kind).glob("*.*"):
            (docs / kind / file.name).symlink_to(file)
    (docs / "examples").mkdir()
    for file in (shipped_folder("docs") / "examples").rglob("*.*"):
        place = docs / file.relative_to(shipped_folder("docs"))
        place.parent.mkdir(exist_ok=True)
        if file.is_file():
            place.write_bytes(file.read_bytes())
    target = docs / "site"
    assert build_site(docs, target) == len(list(docs.glob("**/*.md")))
    return target


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    pages = {file: file.read_text(encoding="utf-8") for file in site.rglob("*.html")}
    anchors = {file: set(ANCHOR.findall(text)) for file, text in pages.items()}
    broken = []
    for file, text in pages.items():
        for target in set(TARGET.findall(text)):
            path, _, anchor = target.partition("#")
            place = (file.parent / path).resolve() if path else file
            # Pages of single rules are left out here, and other places are not part of the site.
            if "://" in path or "rules/" in path or site not in place.parents:
                continue
            if not place.exists() or (anchor and anchor not in anchors[place]):
                broken.append(f"{file.name}: {target}")
    assert broken == []


def test_the_search_finds_keys_and_pages(site: Path) -> None:
    text = (site / "search_index.js").read_text(encoding="utf-8")
    rows = json.loads(text.removeprefix("window.SEARCH_INDEX = ").rstrip(";\n"))
    found = [url for url, _, heading, _ in rows if heading == "trainer.lr"]
    assert "reference/config.html#trainerlr" in found
    assert 'id="trainerlr"' in (site / "reference" / "config.html").read_text()
    assert all((site / url.partition("#")[0]).is_file() for url, *_ in rows)


def test_the_site_needs_no_network(site: Path) -> None:
    for file in [*site.rglob("*.html"), site / "site.css", site / "site.js"]:
        text = file.read_text(encoding="utf-8")
        assert not re.findall(r"(?:src|@import)[=( ]+[\"']?(https?://[^\"') ]+)", text), file


def test_the_site_is_built_again_when_a_page_changes(tmp_path: Path) -> None:
    docs, cache = tmp_path / "docs", tmp_path / "cache"
    (docs / "guide").mkdir(parents=True)
    (docs / "guide" / "one.md").write_text("# One\n\nfirst\n")
    first = cached_site(docs, cache)
    assert cached_site(docs, cache) == first
    (docs / "guide" / "one.md").write_text("# One\n\nsecond\n")
    second = cached_site(docs, cache)
    assert second != first
    assert not first.exists()
    assert "second" in (second / "guide" / "one.html").read_text()


def test_a_page_is_named_by_its_last_part(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(HomeostatError, match="Did you mean first_run"):
        CliRunner().invoke(app, ["docs", "firstrun"], catch_exceptions=False)
