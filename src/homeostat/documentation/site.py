"""Build the documentation as a folder of HTML files that need no server and no network.

docs/**/*.md -> one page each, with the list of all pages beside it
             -> search_index.js, loaded when the search field is used
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path
from string import Template

from homeostat import __version__
from homeostat.documentation.contents import Group, contents
from homeostat.documentation.markdown import Page, render_page
from homeostat.errors import HomeostatError, OutputError
from homeostat.observe.durable import not_written

# Files of the docs that pages show or lead to.
_COPIED = (".svg", ".png", ".ipynb", ".yaml", ".jsonl")
_EXAMPLES = "examples"
_PARTS = ("site.css", "site.js", "page.html")
INDEX = "index.html"


def build_site(docs: Path, target: Path) -> int:
    """Write the site into a new folder and return the number of pages."""
    if target.exists():
        raise HomeostatError(f"{target} exists already. Name a new folder, or move it away.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}_", dir=target.parent) as hidden:
            folder = Path(hidden) / "site"
            num_pages = _write(docs, folder)
            os.rename(folder, target)
    except OSError as error:
        raise OutputError(not_written(target, error)) from None
    return num_pages


def cached_site(docs: Path, cache: Path) -> Path:
    """Return the site of these docs below `cache`; it is built if the docs have changed."""
    digest = hashlib.sha256(__version__.encode())
    parts = [Path(str(files("homeostat.documentation") / name)) for name in _PARTS]
    for file in [*sorted(docs.glob("**/*.md")), *parts]:
        digest.update(file.read_bytes())
    target = cache / f"docs_{digest.hexdigest()[:16]}"
    if not (target / INDEX).is_file():
        for old in cache.glob("docs_*"):
            shutil.rmtree(old, ignore_errors=True)
        build_site(docs, target)
    return target


def _write(docs: Path, folder: Path) -> int:
    pages = {
        file.relative_to(docs).with_suffix("").as_posix(): render_page(
            file.read_text(encoding="utf-8"), name=file.stem
        )
        for file in sorted(docs.glob("**/*.md"))
    }
    groups = list(contents(docs))
    template = Template((files("homeostat.documentation") / "page.html").read_text("utf-8"))
    for name, page in {**pages, "index": _index_page(groups, pages)}.items():
        file = folder / f"{name}.html"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_whole(name, page, groups, pages, template), encoding="utf-8")
    for file in docs.glob("**/*"):
        is_example = _EXAMPLES in file.relative_to(docs).parts and file.suffix == ".py"
        if file.suffix in _COPIED or is_example:
            target = folder / file.relative_to(docs)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    for part in _PARTS[:2]:
        text = (files("homeostat.documentation") / part).read_text("utf-8")
        (folder / part).write_text(text, encoding="utf-8")
    (folder / "search_index.js").write_text(_search_index(pages), encoding="utf-8")
    return len(pages)


def _whole(
    name: str, page: Page, groups: list[Group], pages: dict[str, Page], template: Template
) -> str:
    root = "../" * name.count("/")
    inner = "".join(
        f'<li><a href="#{anchor}">{html.escape(words)}</a></li>' for words, anchor in page.headings
    )
    return template.substitute(
        title=html.escape(page.title),
        root=root,
        version=__version__,
        menu=_menu(name, groups, pages, root),
        inner=f"<p>On this page</p><ul>{inner}</ul>" if len(page.headings) > 1 else "",
        body=page.body,
    )


def _menu(name: str, groups: list[Group], pages: dict[str, Page], root: str) -> str:
    parts = []
    for group in groups:
        items = []
        for page in group.pages:
            here = ' aria-current="page"' if page == name else ""
            title = html.escape(pages[page].title)
            items.append(f'<li><a href="{root}{page}.html"{here}>{title}</a></li>')
        parts.append(f"<p>{html.escape(group.title)}</p><ul>{''.join(items)}</ul>")
    return "".join(parts)


def _index_page(groups: list[Group], pages: dict[str, Page]) -> Page:
    """Return the first page: every group with its pages and their first sentences."""
    parts = [
        "<h1>homeostat</h1><p>LLM post-training that keeps itself healthy.</p>"
        "<pre><code>homeostat new\nhomeostat check recipe.yaml\nhomeostat train recipe.yaml"
        "</code></pre>"
    ]
    for group in groups:
        items = [
            f'<li><a href="{page}.html">{html.escape(pages[page].title)}</a></li>'
            for page in group.pages
        ]
        parts.append(f"<h2>{html.escape(group.title)}</h2><ul>{''.join(items)}</ul>")
    return Page("homeostat", "".join(parts), (), ())


def _search_index(pages: dict[str, Page]) -> str:
    """Return a script that holds the sections of all pages: pages of a file have no requests."""
    rows = [
        [f"{name}.html" + (f"#{section.anchor}" if section.anchor else ""), page.title,
         section.heading, section.text]
        for name, page in pages.items()
        for section in page.sections
    ]  # fmt: skip
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
    return f"window.SEARCH_INDEX = {text};\n"
