"""MkDocs' hooks: files outside docs/ become pages of the site, so that links work as on GitHub.

README.md is the first page, index.md. A file of the repository at ``path`` is at
``repository/path`` in the site: Markdown as it is, Python as a page that shows it, a folder as a
page that lists it, any other file for download.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
FIRST, INDEX = "README.md", "index.md"
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(?=\))")
COMMENT = re.compile(r"^<!-- /?\w+ -->$", re.M)  # around what tests write
PAIR = re.compile(r"(?<=\d) / (?=\d)")  # time and memory: one line of a cell
CODE = re.compile(r"^```.*?^```", re.M | re.S)


def on_config(config: Any) -> Any:
    """Name headings as GitHub does."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages at the root, and all outside docs/ that a page links to."""
    own = (f"docs/{path.name}" for path in Path(config.docs_dir).glob("*.md"))
    documents = [FIRST, *PAGES, *own]
    linked = {target for document in documents for target in _targets(document)}
    files.append(File.generated(config, INDEX, abs_src_path=str(ROOT / FIRST)))
    outside = sorted(x for x in {*PAGES, *linked} - {FIRST} if not x.startswith("docs/"))
    added = {file.src_uri: file for target in outside for file in _files_of(target, config)}
    for file in added.values():
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to where the files are in the site."""
    here = page.file.src_uri
    in_repository = here.removeprefix("repository/") if _is_added(here) else f"docs/{here}"
    in_repository = FIRST if here == INDEX else in_repository

    def moved(match: re.Match[str]) -> str:
        target, anchor = match[2], match[3] or ""
        if not target or ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), target))
        if path == FIRST:
            path = INDEX
        elif path.startswith("docs/"):
            path = path.removeprefix("docs/")
        else:
            path = f"repository/{path}{_suffix(path)}"
        return f"{match[1]}{posixpath.relpath(path, posixpath.dirname(here) or '.')}{anchor}"

    if here.endswith(".py.md"):
        return markdown
    markdown = PAIR.sub("&nbsp;/&nbsp;", markdown)
    # blank lines: Python-Markdown takes a table behind a comment for a part of it
    return LINK.sub(moved, COMMENT.sub("", markdown))


def _targets(document: str) -> Iterator[str]:
    """Yield the paths that a document of the repository links to, from the root."""
    text = CODE.sub("", (ROOT / document).read_text(encoding="utf-8"))
    for match in LINK.finditer(text):
        if match[2] and ":" not in match[2]:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(document), match[2]))


def _files_of(target: str, config: Any) -> Iterator[File]:
    path, uri = ROOT / target, f"repository/{target}{_suffix(target)}"
    if path.is_dir():
        inside = sorted(x for x in path.iterdir() if x.is_file() and not x.name.startswith("."))
        links = [f"- [{each.name}]({each.name})" for each in inside]
        content = "\n".join([f"# {target}", "", *links])
        yield File.generated(config, uri, content=content)
        for each in inside:
            yield from _files_of(f"{target}/{each.name}", config)
    elif path.suffix == ".py" and path.exists():
        code = path.read_text(encoding="utf-8")
        yield File.generated(config, uri, content=f"# {target}\n\n````python\n{code}````\n")
    elif path.exists():  # of what is missing, MkDocs tells the page that links to it
        yield File.generated(config, uri, abs_src_path=str(path))


def _suffix(path: str) -> str:
    """Return what a page's name has more than its file's."""
    if (ROOT / path).is_dir():
        return "/index.md"
    return ".md" if path.endswith(".py") else ""


def _is_added(uri: str) -> bool:
    return uri.startswith("repository/")
