"""The documents link to files and headings that are there, and the site has all pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT

CODE = re.compile(r"^```.*?^```|(`+).+?\1", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.M)


def anchors(document: Path) -> set[str]:
    """Headings as GitHub names them: a heading that is there twice gets a number."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    found: set[str] = set()
    for heading in HEADING.findall(text):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
        number = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", each) is not None for each in found)
        found.add(f"{name}-{number}" if name in found else name)
    return found


def broken_links(document: Path) -> list[str]:
    text = CODE.sub("", document.read_text(encoding="utf-8"))
    broken = []
    for target, anchor in LINK.findall(text):
        if ":" in target:  # of the web
            continue
        path = document.parent / target if target else document
        there = path.exists() and ROOT in (path.resolve(), *path.resolve().parents)
        if not there or (anchor and (path.suffix != ".md" or anchor not in anchors(path))):
            broken.append(f"{target}#{anchor}" if anchor else target)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_links_to_is_there(document: Path) -> None:
    assert broken_links(document) == []


def test_the_site_has_every_page_of_docs() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", text, re.M)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    roots = {"CONTRIBUTING.md", "CHANGELOG.md"}  # index.md is README.md
    assert navigation[0] == "index.md"
    assert sorted(navigation) == sorted(
        pages | {f"repository/{name}" for name in roots} | {"index.md"}
    )
