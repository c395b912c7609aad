"""Turn a page of Markdown into HTML, and into the sections that the search looks through."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markdown_it import MarkdownIt

_REMARK = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_LINK = re.compile(r"^([^:#?]*)\.md(#.*)?$")
# Long enough for the search to find words, short enough for an index of all pages.
_SECTION_CHARS = 1500


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page below one heading."""

    heading: str
    anchor: str
    text: str


@dataclass(frozen=True, slots=True)
class Page:
    """A rendered page: its title, its body, headings of the second level, and its sections."""

    title: str
    body: str
    headings: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]


def render_page(text: str, *, name: str) -> Page:
    """Render a page. Links to other pages (x.md) lead to x.html."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(_REMARK.sub("", text))
    anchors: dict[str, int] = {}
    headings: list[tuple[str, str, str]] = []
    for token, inline in pairwise(tokens):
        if token.type == "heading_open":
            words = _plain(inline)
            anchor = _slug(words, anchors)
            token.attrSet("id", anchor)
            headings.append((token.tag, words, anchor))
    for row, _, cell in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if row.type == "tr_open" and _is_key(cell):
            row.attrSet("id", _slug(_plain(cell), anchors))
    for token in tokens:
        if token.children:
            token.children = list(_linked(token.children))
    body = parser.renderer.render(tokens, parser.options, {})
    body = body.replace("<table>", '<div class="table"><table>').replace(
        "</table>", "</table></div>"
    )
    title = next((words for tag, words, _ in headings if tag == "h1"), name)
    inner = tuple((words, anchor) for tag, words, anchor in headings if tag == "h2")
    return Page(title, body, inner, tuple(_sections(tokens, title)))


def _linked(children: list[Any]) -> Iterator[Any]:
    """Yield the parts of a text; a link to the sources, which are no part of the site, is text."""
    leaves_docs = False
    for child in children:
        if child.type == "link_open":
            link = str(child.attrGet("href") or "")
            leaves_docs = link.startswith("../../")
            child.attrSet("href", _as_html(link))
        if not (leaves_docs and child.type in ("link_open", "link_close")):
            yield child


def _sections(tokens: list[Any], title: str) -> Iterator[Section]:
    """Yield the text below each heading, and each row of a table that is about a key."""
    heading, anchor, words = title, "", []
    row: Section | None = None
    for token, inner in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open":
            if words:
                yield Section(heading, anchor, " ".join(words)[:_SECTION_CHARS])
            heading, anchor, words = _plain(inner), str(token.attrGet("id")), []
        elif token.type == "tr_open" and token.attrGet("id"):
            row = Section("", str(token.attrGet("id")), "")
        elif token.type == "tr_close" and row is not None:
            yield row
            row = None
        elif token.type == "inline" and row is not None:
            name, text = row.heading or _plain(token), f"{row.text} {_plain(token)}"
            row = Section(name, row.anchor, text.strip())
        elif token.type == "inline" and _plain(token) != heading:
            words.append(_plain(token))
        elif token.type == "fence":
            words.append(" ".join(token.content.split()))
    if words:
        yield Section(heading, anchor, " ".join(words)[:_SECTION_CHARS])


def _is_key(cell: Any) -> bool:
    """Return whether a cell holds nothing but one piece of code, such as the name of a key."""
    return [one.type for one in cell.children or ()] == ["code_inline"]


def _plain(inline: Any) -> str:
    """Return the words of a piece of text without its markup."""
    parts = (one.content for one in inline.children or () if one.type in ("text", "code_inline"))
    return "".join(parts)


def _slug(words: str, seen: dict[str, int]) -> str:
    """Return an anchor as code hosts make it, each only once on a page."""
    slug = re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")
    number = seen.get(slug, 0)
    seen[slug] = number + 1
    return slug if number == 0 else f"{slug}-{number}"


def _as_html(link: str) -> str:
    found = _LINK.match(link)
    return link if found is None else f"{found.group(1)}.html{found.group(2) or ''}"
